"""What a training file and a config can ask for, over several ranks: the bits of a plain run in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.matrix import thinned
from support.multirank import (
    LEAST,
    MAX_NORM,
    Job,
    Order,
    accumulate,
    accumulate_without_sync,
    check,
    clip_by_call,
    clip_by_config,
    look_and_edit,
    schedule,
    steps,
    unfreeze,
    zero_kinds,
)


def settings(stage: int, directory: Path, *, nvme: bool) -> dict[str, Any]:
    return {"stage": stage, **({"memory": LEAST, "nvme": directory} if nvme else {"memory": "4MiB"})}


def every_stage(directory: Path, stages: Sequence[int] = range(4), **changes: Any) -> list[dict[str, Any]]:
    """Stages in RAM and on NVMe by turns."""
    return [{**settings(stage, directory, nvme=stage % 2 == 1), **changes} for stage in stages]


# Two stages in every run of the suite, one in RAM and one on NVMe, and the other two in `make test-all`.
OUTER_FIRST = pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.long)])
INNER_FIRST = pytest.mark.parametrize("stages", [(1, 2), pytest.param((0, 3), marks=pytest.mark.long)])


@OUTER_FIRST
@pytest.mark.parametrize(("script", "num_backwards"), [(accumulate, 2), (accumulate_without_sync, 1)])
def test_accumulation(script: Any, num_backwards: int, stages: Sequence[int], tmp_path: Path) -> None:
    """Stages 0 and 1 keep a rank's whole gradient and sum once; stages 2 and 3 sum at every backward."""
    every = every_stage(tmp_path, stages, gradient_accumulation_steps=num_backwards)
    check([Job(script, settings=s) for s in every if s["stage"] < 2], 2, Order.BACKWARDS)
    check([Job(script, settings=s) for s in every if s["stage"] >= 2], 2, Order.RANKS)


@INNER_FIRST
def test_clipping_by_config(stages: Sequence[int], tmp_path: Path) -> None:
    """The norm over ranks is put together from parts: not in the order of torch's."""
    every = every_stage(tmp_path, stages, max_grad_norm=MAX_NORM)
    check([Job(clip_by_config, settings=s) for s in every], 3, exact=False)


@OUTER_FIRST
def test_clipping_by_call(stages: Sequence[int], tmp_path: Path) -> None:
    check([Job(clip_by_call, settings=s) for s in every_stage(tmp_path, stages, update="after_backward")], 2)


@INNER_FIRST
def test_values_and_gradients_are_seen_and_changed(stages: Sequence[int], tmp_path: Path) -> None:
    check([Job(look_and_edit, settings=s) for s in every_stage(tmp_path, stages, update="after_backward")], 2)


@pytest.mark.parametrize(("optimizer", "num_ranks"), thinned(["adamw", "sgd", "adagrad"], [2, 3]))
def test_optimizers(optimizer: str, num_ranks: int, tmp_path: Path) -> None:
    stages = every_stage(tmp_path)[num_ranks % 2 :: 2]
    check([Job(steps, optimizer=optimizer, settings=s) for s in stages], num_ranks)


@OUTER_FIRST
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parameters_smaller_than_the_world(num_ranks: int, stages: Sequence[int], tmp_path: Path) -> None:
    check([Job(steps, "odds", settings=s) for s in every_stage(tmp_path, stages)], num_ranks)


@INNER_FIRST
@pytest.mark.parametrize("script", [steps, unfreeze, zero_kinds])
def test_frozen_and_unused_parameters(script: Any, stages: Sequence[int], tmp_path: Path) -> None:
    check([Job(script, "partial", settings=s) for s in every_stage(tmp_path, stages)], 2)


@pytest.mark.parametrize("model", ["reentrant", "recomputed"])
def test_checkpointing(model: str, tmp_path: Path) -> None:
    check([Job(steps, model, settings=s) for s in every_stage(tmp_path)[::-2]], 2)


def test_schedulers(tmp_path: Path) -> None:
    check([Job(schedule, settings=s) for s in every_stage(tmp_path)[1::2]], 2)


@pytest.mark.parametrize("model", ["mlp", pytest.param("t5", marks=pytest.mark.long)])
def test_a_layer_with_one_owner(model: str, tmp_path: Path) -> None:
    check(
        [
            Job(steps, model, settings=s)
            for s in every_stage(tmp_path, partition="owner")[1 : 4 if model == "mlp" else 2]
        ],
        3,
    )


def test_update_after_backward_and_verified(tmp_path: Path) -> None:
    check([Job(steps, settings=s) for s in every_stage(tmp_path, update="after_backward", verify=True)[1::2]], 2)


@OUTER_FIRST
@pytest.mark.parametrize("computed", ["bfloat16", "float32"])
def test_16_bit_parameters_with_masters(computed: str, stages: Sequence[int], tmp_path: Path) -> None:
    every = every_stage(tmp_path, stages, param_dtype="bfloat16", compute_dtype=computed)
    check([Job(steps, settings=s) for s in every], 2, joined=False)


@INNER_FIRST
def test_16_bit_gradients_between_ranks(stages: Sequence[int], tmp_path: Path) -> None:
    """Each rank's gradient is rounded once, and summed in float32."""
    jobs = [Job(steps, settings=s) for s in every_stage(tmp_path, stages, reduce_dtype="bfloat16")]
    check(jobs, 3, joined=False)


def test_unequal_budgets(tmp_path: Path) -> None:
    """Each rank has its own; what all have to decide alike is decided by the smallest."""
    every = [{"stage": s, "memory": ["300KiB", "8MiB"], "nvme": tmp_path} for s in (3, 2)]
    check([Job(steps, "gpt2", settings=s) for s in every], 2, moves=False)
