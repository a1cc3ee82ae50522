"""What of a row is sent."""

from deltasync.core.numbered import Numbered


class Mode(Numbered):
    """What is sent of a row: its values, or only that it has changed, and by how much."""

    EMBEDDINGS = "embeddings", 1
    IDS = "ids", 2
