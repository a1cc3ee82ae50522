"""The service process and its gRPC and HTTP servers. Internal."""
