"""Targets of replicas: NumPy arrays, torch modules, tables by raw id, Redis."""
