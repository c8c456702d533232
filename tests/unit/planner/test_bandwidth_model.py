from __future__ import annotations

import pytest

from zero_infinity.planner import bandwidth_model as e


@pytest.mark.parametrize(
    ("batch", "bandwidth", "percent"),
    [(1, 12, 14.9), (1, 48, 41.3), (1, 70, 50.6), (1, 192, 73.7), (2, 70, 67.2), (16, 1, 19.0)],
)
def test_figure_3a(batch: int, bandwidth: int, percent: float) -> None:
    assert round(100 * e.efficiency(e.parameter_intensity(batch, 1024), bandwidth * 1e9), 1) == percent


@pytest.mark.parametrize(("batch", "bandwidth", "percent"), [(1, 280, 50.6), (2, 1230, 90.0), (2, 1500, 91.6)])
def test_figure_3b(batch: int, bandwidth: int, percent: float) -> None:
    assert round(100 * e.efficiency(e.optimizer_intensity(batch, 1024), bandwidth * 1e9), 1) == percent


@pytest.mark.parametrize(
    ("kilo", "bandwidth", "percent"),
    [(2, 1, 41.3), (4, 1, 58.4), (8, 1, 73.7), (16, 1, 84.9), (32, 1, 91.8), (64, 1, 95.7), (2, 2, 58.4), (8, 3, 89.4)],
)
def test_figure_3c(kilo: int, bandwidth: int, percent: float) -> None:
    assert round(100 * e.efficiency(e.checkpoint_intensity(kilo * 1024), bandwidth * 1e9), 1) == percent


@pytest.mark.parametrize("target", [0.1, 0.5, 0.9])
def test_required_bandwidth_gives_the_target(target: float) -> None:
    needed = e.required_bandwidth(1000.0, target, peak=5e12)
    assert e.efficiency(1000.0, needed, peak=5e12) == pytest.approx(target)


def test_requirements_of_a_v100() -> None:
    parameters, optimizer, activations = e.requirements(1, 1024, 2048, 1, e.V100_PEAK)
    assert parameters.bytes_per_second == pytest.approx(68.4e9, rel=0.01)
    assert (optimizer.aggregate, parameters.aggregate) == (True, False)
    assert (parameters.data.can_overlap, optimizer.data.can_overlap) == (True, False)
    assert 1e9 < activations.bytes_per_second < 2e9


def test_all_links_against_the_owner_s() -> None:
    assert e.owner_bandwidth(12e9, 70e9) == 12e9
    assert [e.partitioned_bandwidth(n, 3e9, 70e9) for n in (1, 16, 64)] == [3e9, 48e9, 70e9]
