"""Receives and seals the cuts of a run's ranks. Internal."""
