"""The engine never holds more than its budget, needs no more for a deeper model, and gives everything back."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mounts import mounted
from support.compare import (
    HALF,
    MINIMAL,
    Budget,
    MakeModel,
    Run,
    Setting,
    adamw,
    assert_identical,
    budget_bytes,
    minimal_memory,
    run_plain,
    run_prepared,
    same_bits,
    sgd,
    training,
)
from support.faulty import break_device
from support.forkserver import run_alone
from support.models import CASES, mlp, vectors
from support.patience import wait_until
from support.resources import all_given_back, watch_pools
from support.steady import train_and_count
from torch import nn

import zero_infinity as zi
from zero_infinity import api
from zero_infinity.api import engine_of
from zero_infinity.engine_parts import EngineParts
from zero_infinity.optim.gradient_flow import GradientFlow

MIB = 1 << 20


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 0.5).square().mean()


# ---------------------------------------------------------------------- within the budget, at every moment


@pytest.mark.half
@pytest.mark.parametrize(
    "changes",
    [{}, {"update": "after_backward", "max_grad_norm": 0.1}, {"param_dtype": "bfloat16", "compute_dtype": "float32"}],
    ids=["auto", "clipped", "bfloat16"],
)
@pytest.mark.parametrize("setting", [HALF, MINIMAL], ids=str)
@pytest.mark.parametrize("name", ["mlp", "conv", "tied", "lstm", "gpt2"])
def test_what_is_held_is_within_the_budget_at_every_change(
    name: str,
    setting: Setting,
    changes: dict[str, Any],
    tmp_path: Path,
    small_blocks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES[name]
    memory = budget_bytes(case.make, adamw, setting)
    if "param_dtype" in changes:
        memory *= 2  # copies to compute with, and master weights
    outstanding = watch_outstanding(monkeypatch)
    watch = watch_pools(monkeypatch)
    config = zi.Config(memory=memory, nvme=tmp_path, **changes)
    outcome = run_prepared(case.make, training(case.batch, case.loss, num_steps=4), adamw, config)

    assert not watch.violations, watch.violations[:3]
    assert not outstanding
    assert watch.num_changes > 100, "nothing was watched"
    assert watch.peak_mapped_bytes <= memory, "more was mapped than the budget, whatever the accounting says"
    assert outcome.stats is not None
    assert watch.peaks["memory"] == outcome.stats.memory_peak
    assert outcome.stats.bytes_read > 0
    wait_until(lambda: gc.collect() >= 0 and watch.mapped_bytes == 0)  # the model is gone


def watch_outstanding(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What went wrong with the room for gradients that wait for the worker, whenever it changes."""
    violations: list[str] = []

    def write(gradients: GradientFlow, value: int) -> None:
        gradients.__dict__["watched_bytes"] = value
        if not 0 <= value <= gradients._reserve:
            violations.append(f"{value:,} bytes of gradients wait, {gradients._reserve:,} are set aside")

    watched = property(lambda gradients: gradients.__dict__["watched_bytes"], write)
    monkeypatch.setattr(GradientFlow, "_outstanding_bytes", watched, raising=False)
    return violations


def test_states_of_sixteen_times_the_budget_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings that everyone has: chunks of 256 KiB, layers of 1 MiB of states and more."""

    def make() -> nn.Module:
        return mlp(width=256, depth=24)

    script = training(vectors(256), mean_square, num_steps=3)
    memory = minimal_memory(make, adamw)
    watch = watch_pools(monkeypatch)
    prepared = run_prepared(make, script, adamw, zi.Config(memory=memory, nvme=tmp_path))
    assert prepared.stats is not None
    assert prepared.stats.state_bytes >= 16 * memory
    assert not watch.violations
    assert_identical(run_plain(make, script, adamw), prepared)


@pytest.mark.parametrize("budget", [Budget.MINIMAL, Budget.HALF], ids=lambda budget: budget.value)
def test_four_times_the_layers_take_the_same_memory(budget: Budget, tmp_path: Path, small_blocks: None) -> None:
    def make(depth: int) -> MakeModel:
        return lambda: mlp(width=64, depth=depth)

    memory = budget_bytes(make(12), adamw, Setting(budget))
    script = training(vectors(64), mean_square, num_steps=4)
    peaks = []
    for depth in (12, 48):
        outcome = run_prepared(make(depth), script, adamw, zi.Config(memory=memory, nvme=tmp_path))
        assert outcome.stats is not None
        peaks.append(outcome.stats.memory_peak)
    assert peaks[0] == peaks[1]


# ---------------------------------------------------------------------- steady state


@pytest.mark.parametrize("accelerated", [False, True], ids=["cpu", "accelerator"])
def test_two_hundred_steps_leave_nothing_behind(accelerated: bool, tmp_path: Path) -> None:
    """In a process of its own: what other tests have left there would be counted, too."""
    run_alone(train_and_count, accelerated, tmp_path)


# ---------------------------------------------------------------------- the end


@pytest.mark.parametrize("accelerated", [False, True], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("used", ["prepared", "mid-step", "trained"])
def test_an_engine_ends_with_its_model(used: str, accelerated: bool, tmp_path: Path, small_blocks: None) -> None:
    with all_given_back():
        model = mlp()
        accelerator = zi.EmulatedAccelerator(64 << 10) if accelerated else None
        model, optimizer = zi.prepare(
            model, adamw(model), zi.Config(memory="128KiB", nvme=tmp_path), device=accelerator
        )
        pool = weakref.ref(engine_of(model).store.pool)
        if used != "prepared":
            mean_square(model, vectors()(0)).backward()
        if used == "trained":
            optimizer.step()
        del model, optimizer, accelerator
        wait_until(lambda: gc.collect() >= 0 and pool() is None)
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_outlives_its_engine_keeps_its_memory_and_no_more(tmp_path: Path, small_blocks: None) -> None:
    with all_given_back():
        model = mlp()
        model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="128KiB", nvme=tmp_path))
        with zi.gathered(model[0].weight):
            expected = model[0].weight.detach().clone()
        kept = model[0].weight.detach()
        del model, optimizer
        gc.collect()
        assert same_bits(kept, expected)
        del kept


# ---------------------------------------------------------------------- prepare fails


class Unmanaged(torch.optim.SGD):
    """An optimizer over parameters that are not the model's."""

    def __init__(self, _: object) -> None:
        super().__init__([nn.Parameter(torch.ones(3))], lr=0.1)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


FAILURES: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any], type[Exception]]] = {
    "budget too small": (adamw, {"memory": 8192}, zi.CapacityError),
    "no nvme and too small": (adamw, {"memory": "64KiB", "nvme": None}, zi.CapacityError),
    "unsupported optimizer": (lbfgs, {}, zi.UsageError),
    "foreign parameters": (Unmanaged, {}, zi.UsageError),
    "narrow optim_dtype": (adamw, {"optim_dtype": "float16"}, zi.ConfigError),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_prepare_that_fails_leaves_a_plain_model(failure: str, tmp_path: Path, small_blocks: None) -> None:
    optimizer, changes, kind = FAILURES[failure]
    _check_failed_prepare(optimizer, zi.Config(**{"memory": "128KiB", "nvme": tmp_path, **changes}), kind)


@pytest.mark.filterwarnings("ignore:.*direct I/O:RuntimeWarning")
def test_a_full_disk_leaves_a_plain_model(tmp_path: Path, small_blocks: None) -> None:
    """The swap space is reserved after threads and files were made."""
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=64k", "tmpfs") as directory:
        _check_failed_prepare(adamw, zi.Config(memory="128KiB", nvme=directory), zi.SwapSpaceError)


def test_too_small_an_accelerator_leaves_a_plain_model(tmp_path: Path, small_blocks: None) -> None:
    accelerator = zi.EmulatedAccelerator(4096)
    config = zi.Config(memory="128KiB", nvme=tmp_path)
    _check_failed_prepare(adamw, config, zi.CapacityError, device=accelerator)


def _check_failed_prepare(
    make_optimizer: Callable[[nn.Module], Any], config: zi.Config, kind: type[Exception], **options: Any
) -> None:
    make = CASES["gpt2"].make
    torch.manual_seed(0)
    model = make()
    before = {name: (p, p.detach().clone(), p.data_ptr()) for name, p in model.named_parameters()}
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with all_given_back():
        optimizer = make_optimizer(model)
        with pytest.raises(kind):
            zi.prepare(model, optimizer, config, **options)

    for name, parameter in model.named_parameters():
        same, value, address = before[name]
        assert parameter is same
        assert type(parameter) is nn.Parameter
        assert parameter.data_ptr() == address
        assert same_bits(parameter, value)
        assert not parameter.__dict__, f"{name}: {parameter.__dict__}"
    for name, module in model.named_modules():
        hooks = {k: v for k, v in module.__dict__.items() if k.endswith("_hooks")}
        assert hooks == {k: attributes[name][k] for k in hooks}
        assert not any(hooks.values()), f"hooks are left on {name}"
    _check_trains_as_plain(model, make)


def _check_trains_as_plain(model: nn.Module, make: MakeModel) -> None:
    case = CASES["gpt2"]
    script = training(case.batch, case.loss, num_steps=2)
    run = Run(model, sgd(model), prepared=False)
    torch.manual_seed(1)
    script(run)
    expected = run_plain(make, script, sgd)
    for (name, value), found in zip(expected.weights.items(), model.parameters(), strict=False):
        assert same_bits(value, found), name
    assert all(same_bits(a, b) for a, b in zip(expected.logged, run.logged, strict=True))


def test_prepare_works_after_it_has_failed(tmp_path: Path, small_blocks: None) -> None:
    case = CASES["mlp"]
    script = training(case.batch, case.loss)
    torch.manual_seed(0)
    model = case.make()
    for failing in itertools.repeat(zi.Config(memory=8192, nvme=tmp_path), 2):
        with pytest.raises(zi.CapacityError):
            zi.prepare(model, adamw(model), failing)
    memory = minimal_memory(case.make, adamw)
    outcome = run_prepared(lambda: model, script, adamw, zi.Config(memory=memory, nvme=tmp_path))
    assert_identical(run_plain(case.make, script, adamw), outcome)


def test_an_error_of_the_drive_in_prepare_gives_the_model_back(tmp_path: Path, small_blocks: None) -> None:
    """Parameters that had moved already come back, or else half of the model would be NaN."""
    model = mlp(depth=20)
    before = [p.detach().clone() for p in model.parameters()]
    with all_given_back():
        parts = EngineParts(make_device=break_device(lambda request: request.index == 0))
        config = zi.Config(memory=minimal_memory(mlp, adamw), nvme=tmp_path)
        with pytest.raises(zi.TransferError):
            api.prepare_with(parts, model, adamw(model), config)
    assert all(same_bits(a, b) for a, b in zip(before, model.parameters(), strict=True))
