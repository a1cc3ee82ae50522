"""Errors, events, clocks, threads and wording, used by everything else."""
