from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.prepared import Prepared
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.checkpoint.rank_parts import contents_of
from zero_infinity.checkpoint.tensor_matching import MatchProblems, match
from zero_infinity.checkpoint.verify import OpenCheckpoint


def test_all_problems_are_told_at_once() -> None:
    problems = MatchProblems()
    problems.raise_if_any("fine", "none")
    problems.add("odd", [])
    problems.raise_if_any("fine", "none")
    problems.add("names", [f"n{number:02}" for number in range(14)])
    problems.add("others", ["x"])
    with pytest.raises(
        zi.CheckpointError, match=r"bad\n  names \(14\): n00; .* and 2 more\n  others \(1\): x\n  fix:   do"
    ):
        problems.raise_if_any("bad", "do")


def test_sources_are_found_by_any_name(prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer, _ = prepared
    folder = zi.save(tmp_path, model, optimizer)
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    other, _ = zi.prepare(made, torch.optim.AdamW(made.parameters()), zi.Config(memory="8MiB"))
    with ExitStack() as stack:
        checkpoint = OpenCheckpoint(folder, stack)
        contents = contents_of(other, engine_of(other))
        found, problems = match(contents, checkpoint, None, strict=True)
        assert found.sources["model", "2.weight"] is found.sources["model", "0.weight"]
        assert problems.found["different shapes"] == [
            "2.weight [4, 4], in the model [5, 4]",
            "2.bias [4], in the model [5]",
        ]
