"""Compiled loops over rows. They take and fill arrays, and know nothing of tables, messages or files."""
