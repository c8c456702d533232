"""Models, world sizes, stages and budgets that nobody thought of."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.multirank import LEAST, Job, Layer, accumulate, check, steps

LAYERS = st.builds(
    Layer, st.integers(1, 70), bias=st.booleans(), norm=st.booleans(), frozen=st.booleans(), repeated=st.booleans()
)


@given(
    layers=st.lists(LAYERS, min_size=1, max_size=4),
    num_ranks=st.sampled_from([2, 3]),
    stages=st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True),
    memory=st.sampled_from([LEAST, "1MiB", None]),
    partition=st.sampled_from(["spread", "owner"]),
    update=st.sampled_from(["auto", "after_backward"]),
)
@settings(max_examples=4)
def test_any_small_model(
    layers: list[Layer], num_ranks: int, stages: list[int], memory: str | None, partition: str, update: str
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        where: dict[str, Any] = {"memory": memory or "2MiB", "nvme": directory if memory else None}
        every = [{"stage": stage, "partition": partition, "update": update, **where} for stage in stages]
        check([Job(steps, tuple(layers), settings=s) for s in every], num_ranks, moves=False)


@pytest.mark.long
@given(layers=st.lists(LAYERS, min_size=1, max_size=3), stage=st.sampled_from([2, 3]))
@settings(max_examples=4)
def test_any_small_model_accumulates(layers: list[Layer], stage: int) -> None:
    where = {"stage": stage, "memory": "2MiB", "gradient_accumulation_steps": 2}
    check([Job(accumulate, tuple(layers), settings=where)], 2, moves=False)
