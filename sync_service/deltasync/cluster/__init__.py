"""Which process of the service owns which model."""
