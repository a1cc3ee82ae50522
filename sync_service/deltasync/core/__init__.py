"""What rows, tables, positions, policies and errors are. NumPy only: no file, no socket, no thread.

Internal: `deltasync.client` exports what users need of it.
"""
