"""What of a row is sent."""

from enum import Enum


class Mode(Enum):
    """What is sent of a row: its values, or only that it has changed, and by how much."""

    EMBEDDINGS = "embeddings"
    IDS = "ids"
