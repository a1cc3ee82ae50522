"""The log, which outlives the process. Internal."""
