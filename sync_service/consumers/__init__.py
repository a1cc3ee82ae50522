"""Consumers: who subscribes, what each has acknowledged, and how far behind it is."""
