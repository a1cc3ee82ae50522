"""Learning which rows of a model change, for several consumers, from TorchRec's hooks, by stamps and cursors."""

from deltasync.trainer.tracking.delta import Delta
from deltasync.trainer.tracking.shards import evict_on_cpu
from deltasync.trainer.tracking.tracked_model import TrackerOptions, TrackingMode
from deltasync.trainer.tracking.tracker import Tracker

__all__ = ["Delta", "Tracker", "TrackerOptions", "TrackingMode", "evict_on_cpu"]
