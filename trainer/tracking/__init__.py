"""Learning which rows of a model change, for several consumers, from TorchRec's hooks, by stamps and cursors."""

from trainer.tracking.delta import Delta, DeltaRows, Token
from trainer.tracking.modes import TrackingMode
from trainer.tracking.options import TrackerOptions
from trainer.tracking.tracker import Tracker

__all__ = ["Delta", "DeltaRows", "Token", "Tracker", "TrackerOptions", "TrackingMode"]
