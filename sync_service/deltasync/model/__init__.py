"""What replicas can be fed from: a model, and what all feeds have in common. Internal."""
