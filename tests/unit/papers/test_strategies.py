from __future__ import annotations

import pytest

from zero_infinity.papers.infinity_equations import Strategy, largest_model
from zero_infinity.planner.hardware import load


def test_each_strategy_fits_more_than_the_one_before() -> None:
    sizes = [largest_model(strategy, load("dgx2")) for strategy in Strategy]
    assert sizes == sorted(sizes)


def test_bounds_on_one_dgx2() -> None:
    billions = {s: largest_model(s, load("dgx2")) / 1e9 for s in Strategy}
    assert billions[Strategy.DATA_PARALLEL] == pytest.approx(32 / 20)
    assert billions[Strategy.ZERO_OFFLOAD] == pytest.approx(16)
    assert billions[Strategy.ZERO_3] == pytest.approx(16 * 32 / 20)
    assert 1000 < billions[Strategy.INFINITY_NVME] < 2000


def test_split_strategies_grow_with_the_nodes() -> None:
    dgx2 = load("dgx2")
    assert largest_model(Strategy.INFINITY_NVME, dgx2, 32) == pytest.approx(
        32 * largest_model(Strategy.INFINITY_NVME, dgx2)
    )
    assert largest_model(Strategy.DATA_PARALLEL, dgx2, 32) == largest_model(Strategy.DATA_PARALLEL, dgx2)


def test_placements_are_named() -> None:
    assert all(all(places) for places in (strategy.placement for strategy in Strategy))
