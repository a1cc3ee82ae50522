"""Taking cuts from the ranks of a run. Internal."""
