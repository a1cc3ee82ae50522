"""Consumers of a model, their replicas and their offsets. Internal."""
