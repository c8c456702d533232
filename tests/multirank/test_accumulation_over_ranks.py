"""`zi.accumulate` on two ranks gives the bits of its own loop of backwards, in every stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import rank_scripts
from support.ranks import run_ranks

NUM_RANKS = 2


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("t5", marks=pytest.mark.long)])
def test_every_stage(kind: str, tmp_path: Path) -> None:
    settings = [{"stage": stage, "memory": "4MiB", "nvme": tmp_path} for stage in range(4)]
    for by_setting in run_ranks(NUM_RANKS, rank_scripts.accumulate_layer_major, NUM_RANKS, settings, kind):
        for loop, layers in by_setting:
            assert all(torch.equal(a, b) for a, b in zip(loop, layers, strict=True))
