"""Rows by raw id: in the process, and in the hashes of a Redis server."""
