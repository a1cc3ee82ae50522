"""Consumers with a policy: what their replicas hold, and the releases that bring them nearer to the model."""
