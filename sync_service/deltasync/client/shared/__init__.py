"""Tables in shared memory: one process writes them, and all others on the host read them."""
