"""ZeRO under tensor parallelism: two ranks of a tensor-parallel group by two that share the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_same
from support.multirank import assert_close
from support.ranks import run_ranks, try_ranks
from support.tensor_parallel import CHECKPOINT_BYTES, DEPTH, Job, Result, look, train, wrong_group

RAM: dict[str, Any] = {"memory": "2MiB"}
RECOMPUTED: dict[str, Any] = {**RAM, "checkpoint_activations": True}
# The configurations of ZeRO-R: what is split of states and of activations, and where these are kept.
ZERO_R = {
    "C1": Job({**RECOMPUTED, "stage": 1, "offload_activations": "arena"}),
    "C2": Job({**RECOMPUTED, "stage": 1, "offload_activations": "arena"}, partitioned=True),
    "C3": Job({**RECOMPUTED, "stage": 2, "offload_activations": "arena"}),
    "C4": Job({**RECOMPUTED, "stage": 2, "offload_activations": "arena"}, partitioned=True),
    "C5": Job({**RECOMPUTED, "stage": 2, "offload_activations": True}, partitioned=True),
}


def parts(result: Result) -> list[Any]:
    return [result.losses, result.weights, result.states]


def check(jobs: list[Job], *, exact: bool = True) -> list[list[Result]]:
    """Run them: by job the results of the ranks, which are the same bits as plain PyTorch's."""
    by_rank = run_ranks(4, train, jobs)
    for rank, pairs in enumerate(by_rank):
        for job, (prepared, plain) in zip(jobs, pairs, strict=True):
            same = assert_same if exact else assert_close
            same(f"{job}, rank {rank}", parts(plain), parts(prepared))
    return [[pairs[number][0] for pairs in by_rank] for number in range(len(jobs))]


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((2, 1), marks=pytest.mark.long)])
def test_every_stage(stages: tuple[int, ...], tmp_path: Path) -> None:
    nvme: dict[str, Any] = {"memory": "448KiB", "nvme": tmp_path}
    homes = [RAM, nvme, RAM, nvme]
    results = check([Job({"stage": stage, **homes[stage]}) for stage in stages])
    # Two ranks of a tensor-parallel group have other values in the layers that are split, and the same in the rest.
    one, other = (result.weights for result in results[-1][:2])
    assert torch.equal(one["first.weight"], other["first.weight"])
    assert not torch.equal(one["blocks.0.up.weight"], other["blocks.0.up.weight"])


def test_partial_gradients(tmp_path: Path) -> None:
    """Norms and outer layers on parts of the sequence: their gradients are sums over the mesh."""
    nvme: dict[str, Any] = {"memory": "448KiB", "nvme": tmp_path}
    check(
        [
            Job({"stage": 1, **RAM}, sequence=True),
            Job({"stage": 3, **nvme, "checkpoint_activations": True}, sequence=True),
        ]
    )


def test_the_norm_is_that_of_whole_gradients() -> None:
    check([Job({"stage": stage, **RAM}, max_norm=0.01) for stage in (0, 2)], exact=False)


@pytest.mark.parametrize(
    "names", [("C1", "C4", "C5"), pytest.param(("C2", "C3"), marks=pytest.mark.long)], ids="-".join
)
def test_zero_r_configurations(names: tuple[str, ...]) -> None:
    chosen = {name: ZERO_R[name] for name in names}
    results = dict(zip(chosen, check(list(chosen.values())), strict=True))
    for name, job in chosen.items():
        held = {result.stats.activation_bytes for result in results[name] if result.stats is not None}
        assert held == {DEPTH * CHECKPOINT_BYTES // (2 if job.partitioned else 1)}, name
        sent = {result.stats.sent_bytes.get("activations", 0) for result in results[name] if result.stats is not None}
        assert sent == {3 * DEPTH * CHECKPOINT_BYTES // 2 if job.partitioned else 0}, name


def test_partitioned_activations_on_drives(tmp_path: Path) -> None:
    settings = {"memory": "448KiB", "nvme": tmp_path, "checkpoint_activations": True, "offload_activations": True}
    (results,) = check([Job({"stage": 3, **settings}, partitioned=True)])
    for result in results:
        assert result.stats is not None
        assert result.stats.activation_bytes == DEPTH * CHECKPOINT_BYTES // 2
        assert result.stats.memory_peak <= result.stats.memory_budget


@pytest.mark.parametrize("offload", [False, True])
def test_replicas_that_differ_are_found_out(offload: bool) -> None:
    job = Job({**RECOMPUTED, "offload_activations": offload}, partitioned=True, differing=True)
    for outcome in try_ranks(4, train, [job]):
        assert outcome.error is not None
        assert outcome.error.startswith("DivergenceError: ranks 1 and 0 of activation_group have different inputs")
        assert "leave it out" in outcome.error


def test_groups_that_make_no_sense() -> None:
    for outcome in try_ranks(2, wrong_group):
        assert outcome.result == [
            "UsageError: 'blocks.0.up.weight' is split over ranks [0, 1] (tensor parallel), which are also "
            'data-parallel ranks\n  fix:   group=mesh["dp"]: the ranks that have the same parameters',
            "UsageError: activation_group= splits the inputs of recomputed blocks, but no block is recomputed\n"
            "  fix:   checkpoint_activations=True in zi.Config",
            "UsageError: parameter 'blocks.0.up.weight' is a DTensor of torch.float32 and cannot be computed in "
            "torch.bfloat16\n  fix:   convert the model before parallelize_module, and leave param_dtype and "
            "compute_dtype out",
        ]


def test_split_parameters_outside_of_forward() -> None:
    """Looked at, changed, saved, copied and loaded, as plain ones are."""
    for found in run_ranks(2, look):
        assert_same("what is seen", found["plain"], found["prepared"])
