"""`python -m tests.bench pipelines`: the training pipelines beside TorchRec's."""
