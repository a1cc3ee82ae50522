"""Errors, events, clocks, threads and words: what everything else stands on."""
