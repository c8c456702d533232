"""`zero-infinity plan`: memory per tier, bandwidth and step time of a job, computed by `planner`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_infinity.byte_sizes import format_bytes, format_count, format_rate, format_seconds
from zero_infinity.cli import plan_answers, plan_arguments, plan_methods, plan_page, plan_sweep
from zero_infinity.errors import CapacityError, ConfigError
from zero_infinity.planner import hardware as profiles
from zero_infinity.planner.outcome import SimulatedStep
from zero_infinity.planner.plan import BandwidthNeed, Plan, alternatives, make_plan, works
from zero_infinity.planner.warnings import bandwidth_note, warnings_of

_EPILOG = """\
examples:
  zero-infinity plan --model gpt3-13b --hardware rtx4090 --batch 4
  zero-infinity plan --model config.json --hardware laptop --memory 8GiB --seq 512
  zero-infinity plan --model zi-1t --hardware dgx2 --nodes 4 --batch 5 --json
"""
_STEP_FIGURES = (
    *("seconds", "forward_seconds", "backward_seconds", "compute_seconds", "engine_seconds", "wait_seconds"),
    *("tokens_per_second", "flops_per_second", "bottleneck", "read_bytes", "written_bytes", "peak_bytes"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Predict the bytes on every tier, the bandwidth needed and available, and the step time."
    parser.epilog = _EPILOG
    plan_arguments.add_options(parser)
    plan_answers.add_options(parser)
    plan_sweep.add_options(parser)
    plan_page.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    plan_methods.take_deepspeed(args)
    if args.page is not None:
        return plan_page.write(args)
    if args.sweep:
        return plan_sweep.show(args)
    for option in ("csv", "picture"):
        if getattr(args, option) is not None:
            raise ConfigError(f"--{option} is of a sweep\n  fix:   --sweep batch=1,2,4 beside it")
    if args.hardware is None:
        raise ConfigError("on which machine?\n  fix:   --hardware rtx4090, or the path of a profile")
    hardware = plan_arguments.hardware_of(args)
    job = plan_arguments.job_of(args, hardware)
    model = plan_arguments.model_of(args, hardware)
    plan_arguments.check_drive(args)
    model = plan_arguments.calibrated_model(args, model, hardware, job)
    try:
        plan = make_plan(model, hardware, job)
    except CapacityError as error:
        with_seq = partial(plan_arguments.model_of, args, hardware) if args.seq is not None else None
        found = alternatives(model, hardware, job, with_seq=with_seq)
        if args.nvme == "none" and works(model, profiles.load(args.hardware), job):
            found.append("--nvme DIR: the drives of this hardware")
        tried = "".join(f"\n  works: {change}" for change in found) or "\n  works: nothing that was tried"
        raise CapacityError(f"{error}{tried}") from None
    answers = plan_answers.answers(args, plan, model, hardware, job)
    settings = plan.settings
    if args.nvme not in (None, "none") and "nvme" in settings:
        settings["nvme"] = args.nvme
    if args.json:
        content = as_json(plan, model.num_weights or model.num_parameters, settings)
        print(json.dumps({**content, **plan_answers.as_json(answers)}, indent=2))
    else:
        console = Console()
        _print(console, plan, model.name, model.num_weights or model.num_parameters, settings)
        plan_answers.show(console, plan, answers)
    return 0


def _print(console: Console, plan: Plan, name: str, num_parameters: int, settings: dict[str, str | int]) -> None:
    inputs, outcome = plan.inputs, plan.outcome
    ranks = f"{inputs.job.num_nodes} x {inputs.num_devices}"
    console.print(
        f"[bold]{escape(name)}[/]: {format_count(num_parameters)} parameters on {ranks} of {inputs.hardware.name}"
    )
    console.print(_memory_table(plan))
    console.print(_bandwidth_table(plan.needs))
    note = bandwidth_note(plan)
    if note is not None:
        console.print(note, style="dim")
    console.print(table_of(_step_rows(plan), "step"))
    for warning in warnings_of(plan):
        console.print(f"[bold yellow]warning:[/] {escape(warning)}")
    text = ", ".join(
        f"{key}={json.dumps(value) if isinstance(value, str) else value}" for key, value in settings.items()
    )
    console.print(f"zi.Config({escape(text)})", soft_wrap=True)
    if outcome.wait_seconds:
        worst = sorted(outcome.waits.items(), key=lambda item: -item[1])[:3]
        console.print("longest waits: " + ", ".join(f"{escape(n)} {format_seconds(s)}" for n, s in worst), style="dim")


def table_of(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """A table of labels and values."""
    table = Table(show_header=False, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _memory_table(plan: Plan) -> Table:
    table = Table("tier", "holds", "bytes", "of", title="memory per device or node", title_justify="left")
    for use in plan.tiers:
        kinds = list(use.uses.items()) or [("nothing", 0)]
        for number, (kind, num_bytes) in enumerate(kinds):
            last = number == len(kinds) - 1
            table.add_row(
                use.tier.name if number == 0 else "",
                kind,
                format_bytes(num_bytes),
                f"{format_bytes(use.num_bytes)} of {format_bytes(use.tier.capacity)}" if last else "",
                end_section=last,
            )
    return table


def _bandwidth_table(needs: tuple[BandwidthNeed, ...]) -> Table:
    table = Table("data", "needed", "for", "available", "", "overlap", title="bandwidth", title_justify="left")
    for need in needs:
        per = "in total" if need.aggregate else "per device"
        has = "not used" if math.isinf(need.has) else format_rate(need.has)
        verdict = "[green]enough[/]" if need.is_enough else "[yellow]too low[/]"
        overlap = "overlapped" if need.overlapped else "exposed"
        needed = f"{format_rate(need.needed)} {per}"
        table.add_row(str(need.data), needed, f"{need.target:.0%} efficiency", has, verdict, overlap)
    return table


def _step_rows(plan: Plan) -> list[tuple[str, str]]:
    outcome = plan.outcome
    life, between = plan.drive_life_seconds, plan.time_range
    rows = [
        ("time", format_seconds(outcome.seconds)),
        ("between", f"{format_seconds(between.low)} and {format_seconds(between.high)}"),
        ("rests on", between.basis.value),
        ("computing", f"{format_seconds(outcome.compute_seconds)}, {outcome.compute_seconds / outcome.seconds:.0%}"),
        ("exposed wait", f"{format_seconds(outcome.wait_seconds)}, {outcome.wait_seconds / outcome.seconds:.0%}"),
        ("tokens/s", f"{outcome.tokens_per_second:,.1f}"),
        ("per device", f"{outcome.flops_per_second / 1e12:,.2f} TFLOP/s"),
        ("bottleneck", outcome.bottleneck),
        ("storage read", f"{format_bytes(outcome.read_bytes * plan.inputs.num_devices)} per node"),
        ("storage written", f"{format_bytes(plan.written_per_node)} per node"),
        ("drives last", "-" if life is None else f"{format_seconds(life)} of training"),
        ("largest model", f"{format_count(plan.largest_model)} parameters (states only)"),
    ]
    if outcome.engine_seconds:
        share = outcome.engine_seconds / outcome.seconds
        rows.insert(
            4, ("moving bytes", f"{format_seconds(outcome.engine_seconds)} of the cores that compute, {share:.0%}")
        )
    return rows


def as_json(plan: Plan, num_parameters: int, settings: dict[str, str | int]) -> dict[str, Any]:
    outcome, inputs = plan.outcome, plan.inputs
    return {
        "model": inputs.model.name,
        "num_parameters": num_parameters,
        "hardware": inputs.hardware.name,
        "num_nodes": inputs.job.num_nodes,
        "devices_per_node": inputs.num_devices,
        "homes": {kind: getattr(inputs.homes, kind).name for kind in ("parameters", "optimizer", "checkpoints")},
        "tiers": [
            {"name": use.tier.name, "kind": use.tier.kind, "capacity": use.tier.capacity, "bytes": use.uses}
            for use in plan.tiers
        ],
        "bandwidth": [
            {
                "data": need.data,
                "target_efficiency": need.target,
                "needed_bytes_per_second": need.needed,
                "has_bytes_per_second": None if math.isinf(need.has) else need.has,
                "enough": need.is_enough,
                "overlapped": need.overlapped,
            }
            for need in plan.needs
        ],
        "step": outcome_json(outcome),
        "seconds_range": [plan.time_range.low, plan.time_range.high],
        "rests_on": plan.time_range.basis.value,
        "written_per_node": plan.written_per_node,
        "drive_life_seconds": plan.drive_life_seconds,
        "largest_model": plan.largest_model,
        "warnings": warnings_of(plan),
        "config": settings,
    }


def outcome_json(outcome: SimulatedStep) -> dict[str, Any]:
    links = {t.link: {"bytes": t.num_bytes, "busy_seconds": t.busy_seconds} for t in outcome.traffic}
    return {**{name: getattr(outcome, name) for name in _STEP_FIGURES}, "links": links}
