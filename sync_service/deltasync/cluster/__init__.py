"""Ownership of models among the processes of a cluster. Internal."""
