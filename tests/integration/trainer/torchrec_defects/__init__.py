"""What TorchRec's tracker does wrong, row by row, done right by ours. Played by ranks, see `ranks.py`."""
