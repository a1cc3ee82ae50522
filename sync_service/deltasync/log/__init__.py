"""What outlives the process: the log. Internal."""
