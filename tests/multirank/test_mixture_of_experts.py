"""Experts in a loop, of which each rank calls others: nothing has to be said about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_scripts
from support.ranks import run_ranks

NUM_RANKS = 2


def settings_at(home: str, directory: Path) -> list[dict[str, Any]]:
    nvme = [{"stage": stage, "memory": "2MiB", "nvme": directory} for stage in range(4)]
    ram = [{"stage": stage, "memory": "8MiB"} for stage in range(4)]
    return {"nvme": nvme[1::2], "ram": ram[::2], "both": nvme + ram}[home]


@pytest.mark.parametrize(
    ("kind", "home"),
    [
        ("apart", "nvme"),
        ("later", "ram"),
        *(pytest.param(kind, "both", marks=pytest.mark.long) for kind in ("apart", "later")),
    ],
)
def test_each_rank_calls_experts_of_its_own(kind: str, home: str, tmp_path: Path) -> None:
    """From the first step on, or only when the order is learnt already."""
    expected = rank_scripts.plain_mixture(NUM_RANKS, kind)
    by_setting = run_ranks(NUM_RANKS, rank_scripts.train_mixtures, NUM_RANKS, settings_at(home, tmp_path), kind)
    first = by_setting[0][0]["weights"]
    for results in by_setting:
        for found in results:
            for name, value in expected["weights"].items():
                torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=5e-6)
                assert torch.equal(found["weights"][name], first[name])  # between ranks, stages and homes
