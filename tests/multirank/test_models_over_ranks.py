"""Every model, world size, stage and home: the bits of a plain run that sums in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.multirank import LEAST, Job, check, steps


def homes(directory: Path) -> dict[str, dict[str, Any]]:
    return {"ram": {"memory": "8MiB"}, "nvme": {"memory": LEAST, "nvme": directory}}


# Each world size at half of the stages and homes in every run of the suite, and at the other half in `make test-all`.
EVEN, ODD = (
    tuple((s, home) for n, home in enumerate(("ram", "nvme")) for s in range(4) if (s + n) % 2 == k) for k in (0, 1)
)


@pytest.mark.parametrize(
    ("num_ranks", "cells"),
    [
        (2, EVEN),
        (3, ODD),
        (4, EVEN[-2:]),
        *(
            pytest.param(n, cells, marks=pytest.mark.long)
            for n, cells in ((2, ODD), (3, EVEN), (4, ODD), (4, EVEN[:-2]))
        ),
    ],
)
def test_every_stage_and_home_of_the_mlp(num_ranks: int, cells: Sequence[tuple[int, str]], tmp_path: Path) -> None:
    where = homes(tmp_path)
    check([Job(steps, settings={"stage": stage, **where[home]}) for stage, home in cells], num_ranks)


# Every size, stage and home for each model, without the whole product.
PAIRS = {
    1: [(3, "nvme")],
    2: [(0, "ram"), (3, "nvme")],
    3: [(1, "nvme"), (2, "ram")],
    4: [(2, "nvme"), (3, "ram")],
}


@pytest.mark.parametrize(
    ("model", "num_ranks"),
    [
        ("mlp", 1),
        pytest.param("gpt2", 1, marks=pytest.mark.long),
        pytest.param("gpt2", 2, marks=pytest.mark.long),
        ("gpt2", 3),
        ("llama", 2),
        ("mixtral", 3),
        ("conv", 2),
        ("t5", 2),
        *(pytest.param(model, 4, marks=pytest.mark.long) for model in ("gpt2", "llama", "t5", "mixtral", "conv")),
        *(pytest.param("llama", n, marks=pytest.mark.long) for n in (1, 3)),
        *(pytest.param("mixtral", n, marks=pytest.mark.long) for n in (1, 2)),
        *(pytest.param("conv", n, marks=pytest.mark.long) for n in (1, 3)),
        *(pytest.param("t5", n, marks=pytest.mark.long) for n in (1, 3)),
    ],
)
def test_models(model: str, num_ranks: int, tmp_path: Path) -> None:
    where = homes(tmp_path)
    check([Job(steps, model, settings={"stage": stage, **where[home]}) for stage, home in PAIRS[num_ranks]], num_ranks)
