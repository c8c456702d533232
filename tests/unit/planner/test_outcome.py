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


def test_a_step_with_more_passes_goes_on_as_it_did() -> None:
    def step(passes: int) -> SimulatedStep:
        return SimulatedStep(
            seconds=1.0 + passes,
            forward_seconds=passes / 4,
            backward_seconds=1.0,
            compute_seconds=passes / 2,
            engine_seconds=0.0,
            waits={"a": 0.5 * passes},
            traffic=(LinkTraffic("NVMe", 10 * passes, 0.125 * passes),),
            read_bytes=7 * passes,
            written_bytes=5,
            peak_bytes={"RAM": 10},
            flops=8.0 * passes,
            tokens=6.0 * passes,
            num_ranks=1,
        )

    assert step(4).extended(step(3), 12) == step(16)
