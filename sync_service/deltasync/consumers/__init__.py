"""Who follows a model: consumers, their replicas and their offsets."""
