"""The benchmark `overlap`: its runs and its table. It trains on the test device, which tests/device tests."""

from __future__ import annotations

import argparse

from benchmarks.overlap import command
from benchmarks.overlap.run import Run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["overlap"])


def test_ablations_differ_in_one_setting_from_their_base() -> None:
    runs = {name: (run, ranks) for name, run, ranks in command.runs(arguments())}
    base, ranks = runs["half of the parameters on the device"]
    assert (base.device_share, base.transfer_share, base.prefetch, ranks) == (0.5, 0.8, True, 1)
    without, _ = runs["half, without fetching ahead"]
    assert without.prefetch is False
    slower, _ = runs["half, kernels x4"]
    # The same link: four times the kernels, a quarter of their time.
    assert slower.kernel_seconds * slower.transfer_share == base.kernel_seconds * base.transfer_share
    (spread, _), (owner, _) = (runs[f"half, 2 ranks, {partition}"] for partition in ("spread", "owner"))
    assert (spread.partition, owner.partition) == ("spread", "owner")


def test_table() -> None:
    run = Run(2, 64, 0.02, 0.5, 3, 0.8)
    result = command.Result("half", run, 1, 1.08, 1.0, 16e6, 3 << 20, 2 << 20, True)
    lines = command.table([result, command.Result("wrong", run, 1, 2.0, 1.0, 16e6, 0, 0, False)]).splitlines()
    assert "1.080" in lines[1]
    assert "plain PyTorch's" in lines[1]
    assert "DIFFERENT" in lines[2]
