"""Ranks that go different ways through one model: what DDP with find_unused_parameters promises, at every stage."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scenarios import CELLS, LOOKS, UNUSED, cells_of, check_table, short_cells_of


@pytest.mark.parametrize(("num_ranks", "part"), [(1, 0), (2, 0), (2, 1), (3, 0)])
def test_ranks_that_use_different_layers(num_ranks: int, part: int, tmp_path: Path) -> None:
    every = UNUSED if num_ranks != 2 else UNUSED[part::2]
    table = [(s, *cell) for s in every for cell in short_cells_of(UNUSED.index(s), num_ranks)]
    check_table(table, num_ranks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_more_cells(num_ranks: int, part: int, tmp_path: Path) -> None:
    table = [(s, *c) for number, s in enumerate(UNUSED) for c in cells_of(number, num_ranks) if number % 3 == part]
    check_table(table, num_ranks, tmp_path)


def test_gradients_that_only_some_ranks_have_are_seen_by_all(tmp_path: Path) -> None:
    check_table([(scenario, *cell) for scenario in LOOKS for cell in CELLS[:4]], 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "home"), CELLS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_stage_and_home(num_ranks: int, stage: int, home: str, tmp_path: Path) -> None:
    check_table([(scenario, stage, home) for scenario in UNUSED], num_ranks, tmp_path)
