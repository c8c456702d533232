"""What `plan` says beyond one plan: the best settings, the change of machine that helps most, a run's time and cost."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from zero_infinity.byte_sizes import format_seconds
from zero_infinity.cli.number_options import above_zero, integer
from zero_infinity.planner.advice import Choice, RunCost, best_settings, better_machines, cost_of
from zero_infinity.planner.hardware import Hardware
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.plan import Plan
from zero_infinity.planner.training_job import TrainingJob

_MAX_TOKENS = 1e18
_MAX_PRICE = 1e9
_MAX_SEQUENCES = 10**6
_MOST_SHOWN = 5
_KILOWATT_HOUR = 3.6e6


@dataclass(frozen=True, slots=True)
class Answers:
    """What was asked for; empty or None where it was not."""

    settings: list[Choice]
    machines: list[Choice]
    cost: RunCost | None
    tokens: float | None


def add_options(parser: argparse.ArgumentParser) -> None:
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--recommend", action="store_true",
        help="try batch, accumulation and recomputation, and say which change of the machine would help most",
    )  # fmt: skip
    answers.add_argument(
        "--max-sequences", type=partial(integer, most=_MAX_SEQUENCES), default=64, metavar="N",
        help="of a device in one step, for --recommend (default 64)",
    )  # fmt: skip
    answers.add_argument(
        "--tokens", type=partial(above_zero, most=_MAX_TOKENS), metavar="N", help="how long is the training on N tokens"
    )
    answers.add_argument(
        "--price", type=partial(above_zero, most=_MAX_PRICE), metavar="P",
        help="of a node and hour, for the cost of --tokens (default: the profile's, if it has one)",
    )  # fmt: skip


def answers(args: argparse.Namespace, plan: Plan, model: ModelShape, hardware: Hardware, job: TrainingJob) -> Answers:
    """Find what was asked for."""
    settings = best_settings(model, hardware, job, max_sequences=args.max_sequences) if args.recommend else []
    machines = better_machines(model, hardware, job) if args.recommend else []
    cost = cost_of(plan, args.tokens, args.price) if args.tokens is not None else None
    return Answers(settings, machines, cost, args.tokens)


def as_json(found: Answers) -> dict[str, Any]:
    """Only what was asked for."""
    content: dict[str, Any] = {}
    for name, choices in (("recommended", found.settings), ("better_machines", found.machines)):
        if choices:
            content[name] = [{"choice": c.label, "tokens_per_second": c.tokens_per_second} for c in choices]
    if found.cost is not None:
        content["training"] = {
            "tokens": found.tokens,
            "seconds": found.cost.seconds,
            "money": found.cost.money,
            "joules": found.cost.joules,
        }
    return content


def show(console: Console, plan: Plan, found: Answers) -> None:
    """Print it below the plan."""
    for title, choices in (
        ("settings, the fastest first", found.settings),
        ("one change of the machine", found.machines),
    ):
        if not choices:
            continue
        table = Table("", "tokens/s", "against this plan", "bottleneck", title=title, title_justify="left")
        for choice in choices[:_MOST_SHOWN]:
            gain = choice.tokens_per_second / plan.outcome.tokens_per_second
            bottleneck = choice.plan.outcome.bottleneck
            table.add_row(choice.label, f"{choice.tokens_per_second:,.1f}", f"{gain:.2f} x", bottleneck)
        console.print(table)
    if found.cost is not None and found.tokens is not None:
        console.print(f"{found.tokens:,.0f} tokens: {_cost(found.cost)}")


def _cost(cost: RunCost) -> str:
    parts = [format_seconds(cost.seconds)]
    parts.append("no price in the profile: --price" if cost.money is None else f"{cost.money:,.2f} at its price")
    if cost.joules is not None:
        parts.append(f"{cost.joules / _KILOWATT_HOUR:,.1f} kWh")
    return ", ".join(parts)
