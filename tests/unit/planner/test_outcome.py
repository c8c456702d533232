from __future__ import annotations

from zero_infinity.planner.outcome import LinkTraffic, SimulatedStep


def test_rates_and_the_bottleneck() -> None:
    step = SimulatedStep(
        seconds=2.0,
        forward_seconds=0.5,
        backward_seconds=1.5,
        compute_seconds=1.0,
        engine_seconds=0.0,
        waits={"a": 0.25, "b": 0.5},
        traffic=(LinkTraffic("compute", 0, 1.0), LinkTraffic("NVMe", 100, 1.5)),
        read_bytes=60,
        written_bytes=40,
        peak_bytes={"RAM": 10},
        flops=8.0,
        tokens=6.0,
        num_ranks=1,
    )
    assert step.wait_seconds == 0.75
    assert step.flops_per_second == 4.0
    assert step.tokens_per_second == 3.0
    assert step.bottleneck == "NVMe"
