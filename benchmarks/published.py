"""The benchmark `published`: the planner against steps of other systems that others have published. Nothing is fitted.

Owns the points and what is assumed where a publication does not say it. A ratio outside of 0.85 to 1.2 has its reason
by arithmetic beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console
from rich.table import Table

from zero_infinity.planner import hardware
from zero_infinity.planner.decoders import named
from zero_infinity.planner.hardware import Hardware, TierKind
from zero_infinity.planner.methods import with_adapters
from zero_infinity.planner.outcome import SimulatedStep
from zero_infinity.planner.plan import make_plan
from zero_infinity.planner.training_job import TrainingJob

_EPILOG = """\
example:
  python -m benchmarks published --json
"""
_GB = 1e9
_FROM, _TO = 0.85, 1.2


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    """What was measured, and our plan of it."""

    label: str
    measured: float
    unit: str
    planned: Callable[[], float]
    note: str  # what is assumed; why it differs, where it does


@dataclass(frozen=True, slots=True)
class PointResult:
    """One row of the table."""

    label: str
    measured: float
    planned: float
    unit: str
    note: str

    @property
    def ratio(self) -> float:
        return self.planned / self.measured

    @property
    def is_near(self) -> bool:
        return _FROM <= self.ratio <= _TO


def _without_drives(machine: Hardware, host_bytes: float, flops: float | None = None) -> Hardware:
    tiers = tuple(
        replace(tier, capacity=int(host_bytes)) if tier.kind is TierKind.HOST else tier
        for tier in machine.tiers
        if tier.kind is not TierKind.STORAGE
    )
    return replace(machine, tiers=tiers, flops=flops or machine.flops)


def _llama(batch: int, flops: float | None) -> float:
    """DeepSpeed ZeRO-3 with CPU offload: everything on the host, updates after backward."""
    machine = _without_drives(hardware.load("rtx4090"), 256 * _GB, flops)
    job = TrainingJob(batch=batch, early_update=False)
    return make_plan(named("llama3-8b", 1024).with_chunked_loss(), machine, job).outcome.seconds


def _quantised_upload() -> float:
    """NF4 weights copied to a card of 4 GB, once forward and once backward."""
    machine = _without_drives(hardware.load("rtx4090"), 32 * _GB)
    device = next(tier for tier in machine.tiers if tier.kind is TierKind.DEVICE)
    tiers = tuple(replace(tier, capacity=int(4 * _GB)) if tier is device else tier for tier in machine.tiers)
    model = named("llama3-8b", 512).with_chunked_loss()
    blocks = replace(model, operators=tuple(operator for operator in model.operators if operator.block >= 0))
    shape = with_adapters(blocks, 16, parameter_bytes=2, quantised="nf4")
    job = TrainingJob(batch=1, interval=0, device_memory=int(0.5 * _GB))
    return _uploaded(make_plan(shape, replace(machine, tiers=tiers), job).outcome) / _GB


def _uploaded(outcome: SimulatedStep) -> float:
    return next(traffic.num_bytes for traffic in outcome.traffic if traffic.link.endswith("to device"))


def _qwen(*, whole_step: bool) -> float:
    machine = _without_drives(hardware.load("rtx-pro-6000"), 256 * _GB)
    job = TrainingJob(batch=1, accumulation=2, early_update=False, parameters_on="GPU")
    outcome = make_plan(named("qwen3-4b", 2048), machine, job).outcome
    return outcome.seconds if whole_step else outcome.forward_seconds + outcome.backward_seconds


def _experts(tokens: int) -> float:
    machine = _without_drives(hardware.load("dgx-h200"), 2000 * _GB)
    job = TrainingJob(batch=1, parameters_on="GPU")
    return make_plan(named("qwen3-30b-a3b", tokens), machine, job).outcome.seconds


_SLOPE = (
    "measured: 5.79 s + 0.390 s a sequence. 8 x 8.03e9 x 1,024 operations in 0.390 s are 169 TFLOP/s, the whole peak "
    "of the data sheet; the profile has 55% of it"
)
_PEAK = "the same with the card's peak, 165 TFLOP/s; assumes a loss in chunks, as logits would take 42 GB"
POINTS = (
    *(
        PublishedPoint(f"RTX 4090, Llama 8B offloaded, batch {batch}, {label}", seconds, "s", plan, note)
        for batch, seconds in ((8, 8.967), (16, 11.934), (32, 18.299))
        for label, plan, note in (
            ("the profile's rate", partial(_llama, batch, None), _SLOPE),
            ("at the peak", partial(_llama, batch, 165e12), _PEAK),
        )
    ),
    PublishedPoint(
        "RTX 3050, 8B in NF4 with LoRA: bytes copied", 6.864, "GB", _quantised_upload,
        "blocks only; forward and backward. Its time cannot be said: no data sheet has what this card achieves",
    ),
    PublishedPoint(
        "RTX PRO 6000, Qwen3 4B: a step", 5.63, "s", partial(_qwen, whole_step=True),
        "of it 4.06 s after backward: 30 bytes a parameter at 150 GB/s are 0.8 s, they take five times that",
    ),
    PublishedPoint(
        "RTX PRO 6000, Qwen3 4B: forward and backward", 1.57, "s", partial(_qwen, whole_step=False),
        "8 x 4.02e9 x 4,096 operations in 1.57 s are 84 TFLOP/s, 17% of the peak: one sequence at a time",
    ),
    *(
        PublishedPoint(
            f"8 H200, 30B-A3B offloaded, {tokens // 1024}K tokens", seconds, "s",
            partial(_experts, tokens),
            "assumes parameters on the devices and tokens of one device; the step without offload takes "
            f"{without} s of it, which experts of 768 columns explain: the profile's rate is of large products",
        )
        for tokens, seconds, without in ((8192, 3.96, 1.75), (16384, 5.73, 5.17))
    ),
)  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "published", help="the planner against published steps of other systems", epilog=_EPILOG
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    results = [PointResult(p.label, p.measured, p.planned(), p.unit, p.note) for p in POINTS]
    if args.json:
        rows = [{"label": r.label, "measured": r.measured, "planned": r.planned, "ratio": r.ratio} for r in results]
        print(json.dumps(rows, indent=1))
        return 0
    table = Table("point", "published", "planned", "ratio", "assumed, and why it differs", show_lines=True)
    for result in results:
        ratio = f"{result.ratio:.2f}" + ("" if result.is_near else " (off)")
        table.add_row(
            result.label,
            f"{result.measured:.2f} {result.unit}",
            f"{result.planned:.2f} {result.unit}",
            ratio,
            result.note,
        )
    Console().print(table)
    print(f"{sum(result.is_near for result in results)} of {len(results)} within {_FROM} to {_TO}")
    return 0
