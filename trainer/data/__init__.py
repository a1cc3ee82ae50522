"""Streams of click events, their features and the batches a rank trains on."""
