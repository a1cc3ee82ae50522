"""The parts of a service, and their assembly. Internal."""
