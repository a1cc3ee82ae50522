"""What can go wrong: one function for each kind of fault, and the table of them (`kinds.KINDS`)."""
