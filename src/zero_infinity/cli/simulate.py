"""`zero-infinity simulate`: one training step on a virtual clock, with a trace on request."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_infinity.byte_sizes import format_bytes, format_count, format_seconds
from zero_infinity.cli import plan_arguments, plan_methods
from zero_infinity.cli.plan import outcome_json, table_of
from zero_infinity.errors import ConfigError
from zero_infinity.planner.outcome import SimulatedStep
from zero_infinity.planner.plan_inputs import PlanInputs, prepare
from zero_infinity.planner.simulator import simulate
from zero_infinity.trace import Trace

_EPILOG = """\
examples:
  zero-infinity simulate --model gpt3-13b --hardware rtx4090 --batch 4 --trace step.json
  zero-infinity simulate --model zi-100t --hardware dgx2 --nodes 96 --batch 2

View the trace with zero-infinity report step.json -o step.html, or in ui.perfetto.dev.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Simulate one steady training step: the engine's own cache policy over links of given speed."
    parser.epilog = _EPILOG
    plan_arguments.add_options(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write two steps as Chrome trace JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    plan_methods.take_deepspeed(args)
    hardware = plan_arguments.hardware_of(args)
    job = plan_arguments.job_of(args, hardware)
    model = plan_arguments.model_of(args, hardware)
    plan_arguments.check_drive(args)
    if args.trace is not None and not args.trace.absolute().parent.is_dir():
        raise ConfigError(f"--trace {args.trace}: the directory does not exist")
    started = time.perf_counter()
    inputs = prepare(model, hardware, job)
    trace = _make_trace(inputs, model.name) if args.trace is not None else None
    outcome = simulate(inputs, trace)
    seconds = time.perf_counter() - started
    if trace is not None:
        try:
            trace.write(args.trace)
        except OSError as error:
            raise ConfigError(f"--trace {args.trace}: cannot be written: {error.strerror}") from None
    if args.json:
        print(json.dumps({"model": model.name, "num_ranks": inputs.num_ranks, **outcome_json(outcome)}, indent=2))
    else:
        _print(Console(), inputs, outcome, f"{model.name}: {format_count(model.num_parameters)} parameters", seconds)
    return 0


def _make_trace(inputs: PlanInputs, name: str) -> Trace:
    budgets = {inputs.hardware.host.name: inputs.host.memory}
    if inputs.device_cache is not None and inputs.hardware.device is not None:
        budgets[inputs.hardware.device.name] = inputs.device_cache
    part = "" if inputs.scale == 1 else f", one of {inputs.scale:.3g} slices of its blocks"
    return Trace(f"{name} on {_devices(inputs)} of {inputs.hardware.name}, two steps, simulated{part}", budgets)


def _print(console: Console, inputs: PlanInputs, outcome: SimulatedStep, title: str, seconds: float) -> None:
    console.print(f"[bold]{escape(title)}[/] on {_devices(inputs)} of {escape(inputs.hardware.name)}")
    table = Table("link", "bytes per rank", "busy", "of the step")
    for traffic in outcome.traffic:
        if traffic.busy_seconds:
            busy = f"{traffic.busy_seconds / outcome.seconds:.0%}"
            table.add_row(traffic.link, format_bytes(traffic.num_bytes), format_seconds(traffic.busy_seconds), busy)
    console.print(table)
    rows = [
        ("step", format_seconds(outcome.seconds)),
        ("forward, backward", f"{format_seconds(outcome.forward_seconds)}, {format_seconds(outcome.backward_seconds)}"),
        ("exposed wait", f"{format_seconds(outcome.wait_seconds)}, {outcome.wait_seconds / outcome.seconds:.1%}"),
        ("tokens/s", f"{outcome.tokens_per_second:,.1f}"),
        ("per device", f"{outcome.flops_per_second / 1e12:,.2f} TFLOP/s"),
        ("bottleneck", outcome.bottleneck),
        *((f"held: {tier}", f"{format_bytes(peak)} per rank at most") for tier, peak in outcome.peak_bytes.items()),
        ("simulated in", format_seconds(seconds)),
    ]
    console.print(table_of(rows))


def _devices(inputs: PlanInputs) -> str:
    return "1 device" if inputs.num_ranks == 1 else f"{inputs.num_ranks:,} devices"
