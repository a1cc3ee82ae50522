"""Between the messages of `protos/` and what they mean. What comes from outside is checked here. Internal."""
