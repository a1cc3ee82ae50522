"""Errors, events, clocks, threads and words: the base of everything else."""
