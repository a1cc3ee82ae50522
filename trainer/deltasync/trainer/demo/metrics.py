"""How good scores are: AUC and log loss."""

import numpy as np
from numpy.typing import NDArray

from deltasync.core.errors import InvalidInput

Floats = NDArray[np.floating]


def auc(labels: Floats, scores: Floats) -> float:
    """Area under the ROC curve: the chance that a positive event scores above a negative one, ties counting half.

    Args:
        labels: [n], 0 or 1; both must occur.
        scores: [n], any monotone score.

    Raises:
        InvalidInput: all labels are the same.
    """
    positive = labels > 0.5
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        raise InvalidInput(f"AUC of {positives} positive and {negatives} negative events: both are needed")
    _, rank_of, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    wins = float(mean_rank[rank_of][positive].sum()) - positives * (positives + 1) / 2
    return wins / (positives * negatives)


def log_loss(labels: Floats, logits: Floats) -> float:
    """Mean binary cross entropy, in nats, of log odds [n] against labels [n]."""
    exact = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, exact) - labels * exact))
