"""`deltasync bench pipelines`: the training pipelines beside TorchRec's."""
