"""Ranks: joining them, what they agree on, and a model sharded over them."""
