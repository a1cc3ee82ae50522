"""What the service answers: gRPC and HTTP."""
