"""Checkpoints of models and their views, in a local folder and in object storage. Internal."""
