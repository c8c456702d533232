"""Answers from many plans: the best settings for a job, and which change of the machine would help most. Pure.

Owns what is tried. Every answer is a plan that works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zero_infinity.errors import CapacityError, ConfigError
from zero_infinity.planner.hardware import Hardware, HardwareTier
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.plan import Plan, make_plan
from zero_infinity.planner.training_job import TrainingJob

_HOUR = 3600.0
# Sequences a device and step: tokens in a step beyond these are a question of the training, not of the machine.
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_ACCUMULATIONS = (1, 4, 16)
_INTERVALS = (1, 0)


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings, and what they give."""

    label: str
    plan: Plan

    @property
    def tokens_per_second(self) -> float:
        return self.plan.outcome.tokens_per_second


@dataclass(frozen=True, slots=True)
class RunCost:
    """What it takes to train on so many tokens."""

    seconds: float
    money: float | None  # in the currency of the profile's price
    joules: float | None


def best_settings(model: ModelShape, hardware: Hardware, job: TrainingJob, *, max_sequences: int) -> list[Choice]:
    """Batch, accumulation and recomputation by tokens a second, the fastest first.

    `max_sequences`: of a device in one step. Larger steps are always faster for each token, and train differently.
    """
    found: list[Choice] = []
    for interval in _INTERVALS if model.num_blocks else (0,):
        for accumulation in _ACCUMULATIONS:
            best: Choice | None = None
            # The largest batch that fits; half of it may still be faster, because copies have more room.
            for batch in [b for b in reversed(_BATCHES) if b * accumulation <= max_sequences]:
                choice = _try(model, hardware, replace(job, batch=batch, accumulation=accumulation, interval=interval))
                if choice is None:
                    continue
                if best is not None and choice.tokens_per_second <= best.tokens_per_second:
                    break
                best = choice
            if best is not None:
                found.append(best)
    return sorted(found, key=lambda choice: -choice.tokens_per_second)


def _try(model: ModelShape, hardware: Hardware, job: TrainingJob) -> Choice | None:
    recompute = "recompute" if job.interval else "keep activations"
    try:
        plan = make_plan(model, hardware, job)
    except (CapacityError, ConfigError):
        return None
    return Choice(f"batch {job.batch:g}, accumulation {job.accumulation}, {recompute}", plan)


def better_machines(model: ModelShape, hardware: Hardware, job: TrainingJob) -> list[Choice]:
    """The same job on machines with one thing changed, the fastest first."""
    found: list[Choice] = []
    for label, machine, changed in _changes(hardware, job):
        try:
            found.append(Choice(label, make_plan(model, machine, changed)))
        except (CapacityError, ConfigError):
            continue
    return sorted(found, key=lambda choice: -choice.tokens_per_second)


def _changes(hardware: Hardware, job: TrainingJob) -> Iterator[tuple[str, Hardware, TrainingJob]]:
    host = hardware.host
    more = replace(host, capacity=2 * host.capacity)
    yield f"twice the {host.name}", _with(hardware, host.name, more), replace(job, memory=None)
    for drive in hardware.storage:
        two = replace(
            drive, read=2 * drive.read, write=2 * drive.write, one_device=2 * drive.one_device,
            capacity=2 * drive.capacity, endurance=None if drive.endurance is None else 2 * drive.endurance,
        )  # fmt: skip
        yield f"a second {drive.name}", _with(hardware, drive.name, two), job
    if hardware.device is not None:
        num = 2 * (job.devices_per_node or hardware.devices_per_node)
        yield f"{num} devices", hardware.with_devices(num), replace(job, devices_per_node=num)
        device = hardware.device
        yield (
            f"twice the memory of {device.name}",
            _with(hardware, device.name, replace(device, capacity=2 * device.capacity)),
            replace(job, device_memory=None),
        )


def _with(hardware: Hardware, name: str, tier: HardwareTier) -> Hardware:
    return replace(hardware, tiers=tuple(tier if t.name == name else t for t in hardware.tiers))


def cost_of(plan: Plan, num_tokens: float, price_per_hour: float | None) -> RunCost:
    """Time, money and energy of training on so many tokens. `price_per_hour`: of a node, else the profile's."""
    inputs = plan.inputs
    seconds = num_tokens / plan.outcome.tokens_per_second
    nodes = inputs.job.num_nodes
    price = price_per_hour if price_per_hour is not None else inputs.hardware.price_per_hour
    watts = inputs.hardware.watts
    return RunCost(
        seconds,
        None if price is None else price * nodes * seconds / _HOUR,
        None if watts is None else watts * nodes * seconds,
    )
