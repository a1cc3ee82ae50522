"""Status of a service: lag, metrics, readiness and overview. Internal."""
