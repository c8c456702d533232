"""What ranks send and hold, against the formulas of the ZeRO paper (sections 5 and 7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.rank_scripts import count
from support.ranks import run_ranks

DEPTH = 12
LAYER = (96 * 96, 96)  # elements of a weight and of a bias
GRAIN = 64
PAGE = 4096


def padded(num_ranks: int) -> int:
    """Elements of a layer: each parameter starts at a multiple of 64, and each rank's part is one."""
    used = sum(-(-size // GRAIN) * GRAIN for size in LAYER)
    return -(-used // (GRAIN * num_ranks)) * GRAIN * num_ranks


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))])
def test_what_is_sent_in_a_step(num_ranks: int, tmp_path: Path) -> None:
    """2 Psi elements for stages 0 to 2, 3 Psi for stage 3, of which each rank sends (N-1)/N."""
    where = {"memory": "420KiB", "nvme": tmp_path}
    by_rank = run_ranks(num_ranks, count, num_ranks, DEPTH, [{"stage": stage, **where} for stage in range(4)])
    psi, most = DEPTH * sum(LAYER), DEPTH * padded(num_ranks)
    assert psi <= most < 1.03 * psi
    for counted in by_rank:
        for stage, found in enumerate(counted):
            sent = found["sent"]
            part = 4 * (num_ranks - 1) / num_ranks
            assert sent["gradient sum"] == most * part
            gathered = sent.get("gradient gather", 0) + sent.get("parameter gather", 0)
            assert sum(sent.values()) == sent["gradient sum"] + gathered
            if stage < 3:
                assert gathered == most * part
                continue
            # A layer that is still there when backward begins is not gathered again.
            room = found["stats"].copy_bytes
            assert room < 4 * 3 * padded(num_ranks)
            assert 2 * most * part - room * (num_ranks - 1) / num_ranks <= gathered <= 2 * most * part


@pytest.mark.parametrize(
    ("num_ranks", "settings", "sizes"),
    [
        (2, {}, (4, 4, 8)),
        pytest.param(4, {}, (4, 4, 8), marks=pytest.mark.long),
        (3, {"param_dtype": "bfloat16"}, (2, 4, 12)),
    ],
)
def test_what_a_rank_holds(num_ranks: int, settings: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    """Stage 1 divides optimizer states, stage 2 gradients too, stage 3 parameters too; gradients are kept in float32."""
    parameter, gradient, optimizer = sizes
    every = [{"stage": s, "memory": "8MiB", "compute_dtype": "float32", **settings} for s in range(4)]
    by_rank = run_ranks(num_ranks, count, num_ranks, DEPTH, every)
    psi, most = DEPTH * sum(LAYER), DEPTH * padded(num_ranks)
    for counted in by_rank:
        for stage, found in enumerate(counted):
            stats = found["stats"]
            parts = [num_ranks if stage >= divided else 1 for divided in (3, 2, 1)]
            for held, size, part in (
                (stats.parameter_bytes, parameter, parts[0]),
                (stats.gradient_bytes, gradient, parts[1]),
                (stats.optimizer_bytes, optimizer, parts[2]),
            ):
                # The last rank's part has all of the padding.
                spare = size * (most - psi)
                assert size * psi / part - spare <= held <= size * most / part + DEPTH * PAGE, (stage, held)


def test_buckets_do_not_grow_with_the_model(tmp_path: Path) -> None:
    found = {}
    for depth in (4, 32):
        (small,), (other,) = run_ranks(2, count, 2, depth, [{"stage": 2, "memory": "1MiB", "nvme": tmp_path}])
        assert small["buckets"] <= small["stats"].bucket_bytes
        found[depth] = (small["stats"].bucket_bytes, small["buckets"], other["stats"].bucket_bytes)
    assert found[4] == found[32]
    assert found[4][0] > 0
