"""Compiled loops over rows: arrays in, arrays out. They know nothing of tables, of messages or of files."""
