from __future__ import annotations

from zero_infinity.cli.bench_compute import measure_compute


def test_every_figure_is_measured() -> None:
    figures = measure_compute()
    sides = [side for side, _ in figures.matmul_flops]
    assert sides == sorted(sides)
    assert all(rate > 1e6 for _, rate in figures.matmul_flops)
    assert figures.attention_flops > 1e6
    assert figures.saved_rate > 1e6
