"""What of a torch module holds which table, and how rows get there."""
