from __future__ import annotations

import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.prepared import Prepared

import zero_infinity as zi
from zero_infinity.checkpoint import rank_state
from zero_infinity.checkpoint.verify import OpenCheckpoint

CPU = torch.device("cpu")


def draw() -> list[Any]:
    return [torch.rand(1).item(), random.random(), np.random.rand()]


def test_random_states_and_extra(prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer, _ = prepared
    folder = zi.save(tmp_path, model, optimizer, extra={"a": (1, 2)})
    expected = draw()
    with ExitStack() as stack:
        checkpoint = OpenCheckpoint(folder, stack)
        states, extra = rank_state.read(checkpoint, 0)
        assert extra == {"a": (1, 2)}
        assert states is not None
        rank_state.restore_random(states, CPU)
        assert draw() == expected
        assert rank_state.read(checkpoint, 3) == (None, {"a": (1, 2)})  # a rank that did not save
    with pytest.raises(zi.CheckpointError, match="the random states of the checkpoint are damaged"):
        rank_state.restore_random({"torch": 3}, CPU)


def test_objects_give_and_get_their_state() -> None:
    class Counter:
        value = 3

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    counter = Counter()
    assert json.loads(rank_state.to_bytes({"c": counter}, CPU))["extra"] == {"c": {"value": 3}}
    rank_state.restore_objects({"c": {"value": 5}}, {"c": counter})
    assert counter.value == 5
    with pytest.raises(zi.CheckpointError, match="has no extra 'd'; it has 'c'"):
        rank_state.check_objects({"c": 1}, {"d": counter}, Path("/x"))
    with pytest.raises(zi.UsageError, match="extra has the key 3, not a str"):
        rank_state.to_bytes({3: 1}, CPU)  # type: ignore[dict-item]
