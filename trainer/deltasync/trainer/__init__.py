"""The TorchRec side: tracking, publishing, the click model and the torchrun entry."""
