"""Learning which rows change, from TorchRec's hooks, by stamps and cursors."""
