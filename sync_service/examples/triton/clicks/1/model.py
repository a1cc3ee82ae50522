"""A model for Triton's Python backend over a mirror: the dot product of a user's and an item's row."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from deltasync.client import DeltasyncError, SharedReader, SharedReading, TornTarget


class TritonPythonModel:
    """One instance, in a process of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Attach to the mirror."""
        parameters = {
            name: each["string_value"] for name, each in json.loads(args["model_config"])["parameters"].items()
        }
        self._users, self._items = parameters["tables"].split()
        directory = {"directory": parameters["directory"]} if "directory" in parameters else {}
        self._attach = partial(SharedReader, parameters["mirror"], **directory)
        self._reader = self._attach()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests, all from one version."""
        try:
            if self._reader.is_removed:
                self._reader = self._attach()
            try:
                return self._answers(requests)
            except TornTarget:  # It took longer than the mirror's limit, perhaps because the machine was busy.
                return self._answers(requests)
        except DeltasyncError as error:
            refused = pb_utils.TritonError(str(error), pb_utils.TritonError.UNAVAILABLE)
            return [pb_utils.InferenceResponse(error=refused) for _ in requests]

    def _answers(self, requests: Sequence[Any]) -> list[Any]:
        with self._reader.reading() as now:
            return [self._answer(now, request) for request in requests]

    def _answer(self, now: SharedReading, request: Any) -> Any:
        users, items = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("USER", "ITEM"))
        if users.shape != items.shape:
            text = f"USER has {len(users)} ids and ITEM {len(items)}, expected the same number"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))
        # Missing raw ids have rows of zeros.
        user_rows, _ = now.keyed[self._users].lookup(users)
        item_rows, _ = now.keyed[self._items].lookup(items)
        score = np.multiply(user_rows, item_rows).sum(axis=1)
        version = np.array([now.version], np.uint64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SCORE", score), pb_utils.Tensor("VERSION", version)])

    def finalize(self) -> None:
        """Detach from the mirror."""
        del self._reader
