"""The service's state put together. Internal."""
