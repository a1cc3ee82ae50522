"""What operators ask: lag and metrics. Internal."""
