"""The demo: the whole path on loopback, with real processes."""
