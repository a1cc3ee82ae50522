"""What TorchRec's tracker does wrong, row by row of `README.md`, done right by ours. Played by ranks."""
