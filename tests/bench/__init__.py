"""Benchmarks: ratios in one run, median of several rounds."""
