"""Rows, tables, positions, policies and their rules. NumPy only: no files, sockets or threads.

Internal: `deltasync.client` exports the public parts.
"""
