"""Convert and check the messages of `protos/`. Internal."""
