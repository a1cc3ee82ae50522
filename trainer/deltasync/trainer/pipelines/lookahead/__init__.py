"""Doing the part of a batch's forward that needs nothing but the batch, while others are still being trained."""
