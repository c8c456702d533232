"""Trains a model twice, plain and prepared, and compares every bit.

A test gives a *script*: what a user's training file does with a model and an optimizer. It runs once in plain PyTorch and
once prepared, from the same seeds. Everything that it logs, every weight and buffer and the optimizer's `state_dict()`
at the end must be the same bits; the first difference is a `Divergence` that names it.
"""

from __future__ import annotations

import enum
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree

import zero_infinity as zi
from support.device import IS_CPU, moved, on_device
from support.homes import AtHome, living_on_device
from support.patience import SECONDS
from zero_infinity import model_layout as layout_module
from zero_infinity.params import offloaded_param
from zero_infinity.policy import memory_budget
from zero_infinity.policy.unit_sizes import UnitSize

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]
Prepared = tuple[nn.Module, Optimizer]

# Settings that change how much memory is needed at least.
_ASKED_WITH = ("checkpoint_activations", "checkpoint_modules", "offload_activations")


class Divergence(AssertionError):
    """The prepared run differs from the plain one."""


class Budget(enum.Enum):
    """The memory budget relative to the model's states: parameters, gradients and optimizer states."""

    FITS = "fits"  # four times the states
    HALF = "half"
    MINIMAL = "minimal"  # the least that prepare accepts


@dataclass(frozen=True, slots=True)
class Setting:
    """The memory budget, and whether there is NVMe."""

    budget: Budget
    nvme: bool = True

    def __str__(self) -> str:
        return f"{self.budget.value}-{'nvme' if self.nvme else 'ram'}"

    @property
    def moves(self) -> bool:
        """True if blocks must move between tiers."""
        return self.budget is not Budget.FITS


FITS_RAM = Setting(Budget.FITS, nvme=False)
FITS = Setting(Budget.FITS)
HALF = Setting(Budget.HALF)
MINIMAL = Setting(Budget.MINIMAL)
SETTINGS = (FITS_RAM, FITS, HALF, MINIMAL)


@dataclass(slots=True)
class Run:
    """One of the two trainings, as its script sees it."""

    model: nn.Module
    optimizer: Optimizer
    prepared: bool
    logged: list[Any] = field(default_factory=list)

    def log(self, *values: Any) -> None:
        """Remember copies of these values: they have to be the same in both runs."""
        self.logged.extend(copied(value) for value in values)

    def step(self, loss: torch.Tensor) -> None:
        """The usual end of an iteration."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.log(loss)


Script = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that is compared after a run."""

    logged: list[Any]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    stats: zi.Stats | None = None


# ---------------------------------------------------------------------- the comparison


def compare(
    make: MakeModel,
    script: Script,
    optimizer: MakeOptimizer,
    setting: Setting,
    directory: Path | Sequence[Path],
    *,
    seed: int = 0,
    at_home: AtHome | None = None,
    **config: Any,
) -> zi.Stats:
    """Run the script plain and prepared, and raise `Divergence` unless both agree in every bit. Returns the engine's stats.

    `at_home`: the numbers of the units that live on the device. By default none where blocks must move; where all fits
    in RAM, all of them; with NVMe beside it, `device_memory` is not given.
    """
    plain = run_plain(make, script, optimizer, seed=seed)
    if not IS_CPU and (setting.moves or at_home is not None):
        config.setdefault("device_memory", least_device_memory(make))
        at_home = at_home or _nowhere
    elif not IS_CPU and not setting.nvme:
        config.setdefault("device_memory", "1GiB")
    with living_on_device(at_home) if at_home is not None else nullcontext():
        memory = budget_bytes(make, optimizer, setting, **{k: v for k, v in config.items() if k in _ASKED_WITH})
        settings = zi.Config(memory=memory, nvme=directory if setting.nvme else None, **config)
        prepared = run_prepared(make, script, optimizer, settings, seed=seed)
    assert_identical(plain, prepared)
    assert prepared.stats is not None
    if setting.moves and at_home in (None, _nowhere):
        assert prepared.stats.bytes_read > 0, "nothing moved: the budget is not tight"
    return prepared.stats


def _nowhere(_: int) -> bool:
    return False


def run_plain(make: MakeModel, script: Script, optimizer: MakeOptimizer, *, seed: int = 0) -> Outcome:
    torch.manual_seed(seed)
    run = Run(*_made(make, optimizer), prepared=False)
    torch.manual_seed(seed + 1)
    script(run)
    return _outcome(run)


def run_prepared(
    make: MakeModel, script: Script, optimizer: MakeOptimizer, config: zi.Config, *, seed: int = 0
) -> Outcome:
    torch.manual_seed(seed)
    model, streamed = zi.prepare(*_made(make, optimizer), config)
    run = Run(model, streamed, prepared=True)
    torch.manual_seed(seed + 1)
    script(run)
    outcome = _outcome(run, zi.stats(model))
    assert_sound(model)
    return outcome


def assert_sound(model: nn.Module) -> None:
    """Check what must hold between steps: memory within the budget, every managed parameter offloaded."""
    stats = zi.stats(model)
    assert stats.memory_peak <= stats.memory_budget
    assert stats.memory_held <= stats.memory_budget
    unsharded = [
        name for name, p in model.named_parameters() if offloaded_param.managed(p) is not None and not is_offloaded(p)
    ]
    assert not unsharded, f"left unsharded: {unsharded}"


def is_offloaded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, offloaded_param.OffloadedParameter)


def assert_identical(plain: Outcome, prepared: Outcome) -> None:
    """Raise `Divergence` at the first difference."""
    assert_same("number of logged values", len(plain.logged), len(prepared.logged))
    for number, (expected, found) in enumerate(zip(plain.logged, prepared.logged, strict=True)):
        assert_same(f"logged value {number}", _on_cpu(expected), _on_cpu(found))
    assert_same("weights", plain.weights, prepared.weights)
    assert_same("buffers", plain.buffers, prepared.buffers)
    # The states of a prepared model are in host memory, wherever it computes, but for parameters trained in place.
    assert_same("optimizer.state_dict()", _on_cpu(plain.optimizer), _on_cpu(prepared.optimizer))


def assert_same(what: str, expected: Any, found: Any) -> None:
    """Raise `Divergence` at the first difference between nested values."""
    if isinstance(expected, torch.Tensor):
        _same_tensor(what, expected, found)
    elif isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or expected.keys() != found.keys():
            raise Divergence(f"{what}: keys {list(expected)} became {list(found)}")
        for key in expected:
            assert_same(f"{what}[{key!r}]", expected[key], found[key])
    elif isinstance(expected, list | tuple):
        if type(expected) is not type(found) or len(expected) != len(found):
            raise Divergence(f"{what}: {expected} became {found}")
        for number, pair in enumerate(zip(expected, found, strict=True)):
            assert_same(f"{what}[{number}]", *pair)
    elif expected != found and not (expected != expected and found != found):
        raise Divergence(f"{what}: {expected!r} became {found!r}")


def _same_tensor(what: str, expected: torch.Tensor, found: Any) -> None:
    if not isinstance(found, torch.Tensor):
        raise Divergence(f"{what}: a tensor became {found!r}")
    kinds = [(t.shape, t.dtype, t.requires_grad, t.device) for t in (expected, found)]
    if kinds[0] != kinds[1]:
        raise Divergence(f"{what}: {kinds[0]} became {kinds[1]}")
    if not same_bits(expected, found):
        different = (expected != found).sum().item()
        raise Divergence(f"{what}: {different} of {expected.numel()} elements differ: {expected} became {found}")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Like torch.equal, but a NaN is equal to itself, and the tensors may be on different devices."""
    a, b = a.cpu(), b.cpu()
    return torch.equal(a, b) or (
        a.dtype.is_floating_point
        and a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def _on_cpu(values: Any) -> Any:
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), values)


def copied(value: Any) -> Any:
    """A copy of nested values that shares nothing with the model. Offloaded parameters are read by it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad and value.is_floating_point())
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    return value


def _outcome(run: Run, stats: zi.Stats | None = None) -> Outcome:
    model = run.model
    return Outcome(
        run.logged,
        # One at a time: all of them together may not fit.
        {name: copied(p) for name, p in model.named_parameters(remove_duplicate=False)},
        {name: copied(b) for name, b in model.named_buffers(remove_duplicate=False)},
        copied(run.optimizer.state_dict()),
        stats,
    )


# ---------------------------------------------------------------------- budgets


Asked = tuple[Sequence[UnitSize], Sequence[tuple[str, int]]]


class _Captured(Exception):
    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self.asked = asked


def asked_of_place(make: MakeModel, optimizer: MakeOptimizer, **config: Any) -> Asked:
    """What `prepare` asks `place` to find room for."""

    def capture(sizes: Sequence[UnitSize], _: int, together: Sequence[tuple[str, int]], **__: Any) -> None:
        raise _Captured((sizes, together))

    with mock.patch.object(layout_module, "place", capture):
        try:
            zi.prepare(*_made(make, optimizer), zi.Config(memory="1GiB", **config))
        except _Captured as captured:
            return captured.asked
    raise AssertionError("prepare did not ask for a placement")


def minimal_memory(make: MakeModel, optimizer: MakeOptimizer, *, nvme: bool = True) -> int:
    """The smallest `memory` that prepare accepts."""
    return least_budget(asked_of_place(make, optimizer), nvme=nvme)


def budget_bytes(make: MakeModel, optimizer: MakeOptimizer, setting: Setting, **config: Any) -> int:
    """The memory of a setting, for this model."""
    asked = asked_of_place(make, optimizer, **config)
    states = sum(map(_state_bytes, asked[0]))
    minimal = least_budget(asked, nvme=setting.nvme)
    # Blocks are whole pages, so that the states of a tiny model take more than their bytes.
    wanted = {Budget.FITS: 4 * states, Budget.HALF: states // 2, Budget.MINIMAL: 0}[setting.budget]
    return max(wanted, minimal)


def least_device_memory(make: MakeModel) -> int:
    """Device memory in which only a few layers fit."""
    by_module = [sum(p.nbytes for p in module.parameters(recurse=False)) for module in make().modules()]
    return 3 * max(by_module) + (64 << 10)


def _state_bytes(size: UnitSize) -> int:
    return size.parameters + size.record + size.gradients


def least_budget(asked: Asked, *, nvme: bool) -> int:
    def accepted(memory: int) -> bool:
        try:
            memory_budget.place(asked[0], memory, asked[1], nvme=nvme)
        except zi.CapacityError:
            return False
        return True

    refused, enough = 0, 1
    while not accepted(enough):
        refused, enough = enough, 2 * enough
    while enough - refused > 1:
        middle = (refused + enough) // 2
        if accepted(middle):
            enough = middle
        else:
            refused = middle
    return enough


def _made(make: MakeModel, optimizer: MakeOptimizer) -> Prepared:
    model = moved(make())
    return model, optimizer(model)


# ---------------------------------------------------------------------- what tests say often


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def training(batch: Callable[[int], Any], loss: Callable[[nn.Module, Any], torch.Tensor], num_steps: int = 5) -> Script:
    """The ordinary loop: forward, backward, step, zero_grad. Random numbers (dropout) are the same in both runs."""

    def script(run: Run) -> None:
        for number in range(num_steps):
            data = on_device(batch(number))
            torch.manual_seed(1000 + number)
            run.step(loss(run.model, data))

    return script


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


# ---------------------------------------------------------------------- nothing is left behind


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("zero-infinity")}


@contextmanager
def nothing_left() -> Iterator[None]:
    """Afterwards, no thread is alive of an engine that was made inside."""
    before = engine_threads()
    yield
    wait_for_end(before)


def let_engines_end() -> None:
    """Give engines of earlier tests, which may be closing, a moment to end: they wait for their device."""
    patience = time.monotonic() + 1.0
    while gc.collect() >= 0 and engine_threads() and time.monotonic() < patience:
        time.sleep(0.01)


def wait_for_end(before: set[threading.Thread]) -> None:
    """Wait until no thread is alive of an engine that was made since `before`."""
    patience = time.monotonic() + SECONDS
    # Engines close on a thread of their own, and a worker holds the model until its update is done: then collect again.
    while gc.collect() >= 0 and (left := engine_threads() - before) and time.monotonic() < patience:
        time.sleep(0.01)
    assert not left, f"threads are left: {sorted(thread.name for thread in left)}"
