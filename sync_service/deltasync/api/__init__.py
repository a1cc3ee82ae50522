"""The service's process, and its gRPC and HTTP sides. Internal."""
