"""What outlives the process: the log, and tables mapped from files. Internal."""
