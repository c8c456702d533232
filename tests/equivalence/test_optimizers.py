"""Every element-wise optimizer of torch, its options, schedulers and states: bit-identical, or refused with the reason.

Those that need whole parameters are in `test_whole_parameters.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import (
    FITS_RAM,
    HALF,
    MINIMAL,
    MakeOptimizer,
    Run,
    Setting,
    adamw,
    compare,
    copied,
    run_plain,
    run_prepared,
    same_bits,
    training,
)
from support.models import ConvNet, images, mean_square, mlp, vectors
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import zero_infinity as zi

make = functools.partial(mlp, depth=2)
batch = vectors()
five_steps = training(batch, mean_square)


def of(kind: type[Optimizer], **options: Any) -> MakeOptimizer:
    return lambda model: kind(model.parameters(), **options)


OPTIMIZERS = {
    "adam": of(torch.optim.Adam, lr=1e-2),
    "adam-weight_decay": of(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "adam-decoupled": of(torch.optim.Adam, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "adam-fused": of(torch.optim.Adam, lr=1e-2, fused=True),
    "adam-foreach": of(torch.optim.Adam, lr=1e-2, foreach=True),
    "adam-maximize": of(torch.optim.Adam, lr=1e-2, maximize=True),
    "adamw": of(torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2),
    "adamw-fused": of(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw-fused-amsgrad": of(torch.optim.AdamW, lr=1e-2, fused=True, amsgrad=True),
    "adamw-foreach": of(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw-amsgrad": of(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "adamw-maximize": of(torch.optim.AdamW, lr=1e-2, maximize=True, fused=True),
    "sgd": of(torch.optim.SGD, lr=1e-2),
    "sgd-fused": of(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "sgd-foreach": of(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=True),
    "sgd-momentum": of(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "sgd-dampening": of(torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd-nesterov": of(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd-maximize": of(torch.optim.SGD, lr=1e-2, maximize=True),
    "adagrad": of(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1, lr_decay=0.01),
    "adagrad-zero": of(torch.optim.Adagrad, lr=1e-2),
    "adagrad-fused": of(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.5, fused=True),
    "rmsprop": of(torch.optim.RMSprop, lr=1e-3),
    "rmsprop-momentum": of(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "rmsprop-centered": of(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True, weight_decay=0.1),
    "adamax": of(torch.optim.Adamax, lr=1e-2),
    "nadam": of(torch.optim.NAdam, lr=1e-2),
    "nadam-decoupled": of(torch.optim.NAdam, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": of(torch.optim.RAdam, lr=1e-2),
    "asgd": of(torch.optim.ASGD, lr=1e-2, t0=2),
    "rprop": of(torch.optim.Rprop, lr=1e-2),
    "adadelta": of(torch.optim.Adadelta, lr=1.0),
    "adamw-tensor-lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2)),
    "adamw-fused-tensor-lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True),
}


@pytest.mark.half
@pytest.mark.parametrize("setting", [FITS_RAM, MINIMAL], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_are_bit_identical(name: str, setting: Setting, tmp_path: Path) -> None:
    if name == "sgd" and setting is MINIMAL:
        # Nothing but parameters and gradients: the minimum is about all of it, so blocks hardly move.
        setting = HALF
    compare(functools.partial(mlp, depth=3), five_steps, OPTIMIZERS[name], setting, tmp_path)


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adagrad", "adamw-fused"])
def test_states_keep_the_layout_of_their_parameters(name: str, tmp_path: Path) -> None:
    compare(
        lambda: ConvNet().to(memory_format=torch.channels_last),
        training(images(), mean_square, num_steps=3),
        OPTIMIZERS[name],
        MINIMAL,
        tmp_path,
    )


@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "adamw-foreach", "sgd-momentum", "nadam"])
def test_several_threads(name: str, tmp_path: Path) -> None:
    """Kernels split a parameter over threads where it suits them, and chunks elsewhere: the same bits all the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make = lambda: nn.Sequential(nn.Linear(301, 301), nn.GELU(), nn.Linear(301, 301))
        script = training(vectors(301, 16), mean_square, num_steps=4)
        compare(make, script, OPTIMIZERS[name], HALF, tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------- parameter groups


def decay_and_no_decay(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2
    )


def mixed_options(model: nn.Module) -> Optimizer:
    """The two parameters of one unit keep different states."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.Adam(
        [
            {"params": matrices, "amsgrad": True, "betas": (0.7, 0.9)},
            {"params": vectors[:1], "maximize": True, "eps": 1e-5},
            {"params": vectors[1:], "fused": True},
        ],
        lr=1e-2,
    )


def momentum_for_some(model: nn.Module) -> Optimizer:
    """The parameters of one unit: one with a state and one without."""
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": others, "momentum": 0.9}], lr=1e-2)


def backwards(model: nn.Module) -> Optimizer:
    """Groups and parameters in another order than the model's."""
    parameters = list(model.parameters())[::-1]
    return torch.optim.AdamW([{"params": parameters[1::2]}, {"params": parameters[::2], "lr": 1e-3}], lr=1e-2)


def only_some(model: nn.Module) -> Optimizer:
    """The optimizer does not get all parameters: the others stay as they are."""
    return torch.optim.AdamW(list(model.parameters())[2:4], lr=1e-2)


def by_name(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=1e-2)


@pytest.mark.parametrize("setting", [FITS_RAM, MINIMAL], ids=str)
@pytest.mark.parametrize(
    "groups", [decay_and_no_decay, mixed_options, momentum_for_some, backwards, only_some, by_name]
)
def test_parameter_groups(groups: MakeOptimizer, setting: Setting, tmp_path: Path) -> None:
    compare(make, five_steps, groups, setting, tmp_path)


def test_hyperparameters_changed_between_steps(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(5):
            for group in run.optimizer.param_groups:
                group["lr"] = 1e-2 / (number + 1)
                group["weight_decay"] = 0.1 * number
                group["betas"] = (0.5 + 0.05 * number, 0.9)
            run.step(mean_square(run.model, batch(number)))

    compare(make, script, adamw, MINIMAL, tmp_path)


# ---------------------------------------------------------------------- schedulers

MakeScheduler = Callable[[Optimizer], Any]

SCHEDULERS: dict[str, MakeScheduler] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.7**epoch),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=6),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=3),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.3, threshold=0.9),
    "warm_up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
    ),
}


def scheduled(make_scheduler: MakeScheduler) -> Callable[[Run], None]:
    """A script that makes its scheduler from the optimizer that it is given."""
    return lambda run: _train_with(run, make_scheduler(run.optimizer))


def _train_with(run: Run, scheduler: Any) -> None:
    for number in range(5):
        loss = mean_square(run.model, batch(number))
        run.step(loss)
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.item())
        else:
            scheduler.step()
        run.log([group["lr"] for group in run.optimizer.param_groups], scheduler.get_last_lr())


@pytest.mark.half
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "adamw-tensor-lr"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_made_after_prepare(name: str, optimizer: str, tmp_path: Path) -> None:
    compare(make, scheduled(SCHEDULERS[name]), OPTIMIZERS[optimizer], MINIMAL, tmp_path)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_made_before_prepare(name: str, tmp_path: Path) -> None:
    schedulers: list[Any] = []

    def optimizer(model: nn.Module) -> Optimizer:
        made = adamw(model)
        schedulers.append(SCHEDULERS[name](made))
        return made

    compare(make, lambda run: _train_with(run, schedulers[-1]), optimizer, MINIMAL, tmp_path)


def test_the_scheduler_steps_before_the_optimizer_has_read_the_lr(tmp_path: Path) -> None:
    """step() returns before the update ran; the scheduler's change belongs to the next one."""

    def script(run: Run) -> None:
        scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.1)
        for number in range(5):
            loss = mean_square(run.model, batch(number))
            loss.backward()
            run.optimizer.step()
            scheduler.step()
            run.optimizer.zero_grad()
            run.log(loss)

    compare(make, script, OPTIMIZERS["adamw-tensor-lr"], MINIMAL, tmp_path)


# ---------------------------------------------------------------------- states


@pytest.mark.parametrize("kind", ["adamw", "adamw-fused", "sgd-momentum", "adagrad", "rprop", "asgd"])
@pytest.mark.parametrize("setting", [FITS_RAM, MINIMAL], ids=str)
def test_an_optimizer_that_was_used_before(kind: str, setting: Setting, tmp_path: Path) -> None:
    def used(model: nn.Module) -> Optimizer:
        optimizer = OPTIMIZERS[kind](model)
        for number in range(2):
            mean_square(model, batch(100 + number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    compare(lambda: mlp(depth=2).eval(), five_steps, used, setting, tmp_path)


@pytest.mark.parametrize("kind", ["adamw", "sgd-momentum", "adagrad", "nadam", "sgd"])
def test_loading_ones_own_state_dict_goes_back(kind: str, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        kept: dict[str, Any] = {}
        for number in range(6):
            if number == 2:
                kept = copied(run.optimizer.state_dict())
            if number == 4:
                run.optimizer.load_state_dict(kept)
            run.step(mean_square(run.model, batch(number)))

    compare(make, script, OPTIMIZERS[kind], HALF, tmp_path)


def test_a_scheduler_goes_on_after_load_state_dict(tmp_path: Path) -> None:
    """Resuming: the groups that the scheduler changes are still those that the update reads."""

    def script(run: Run) -> None:
        scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        five_steps(run)
        run.optimizer.load_state_dict(copied(run.optimizer.state_dict()))
        for number in range(3):
            run.step(mean_square(run.model, batch(number)))
            scheduler.step()
            run.log([group["lr"] for group in run.optimizer.param_groups])

    compare(make, script, adamw, HALF, tmp_path)


@pytest.mark.parametrize("kind", ["adamw", "adamw-fused", "sgd-momentum"])
def test_a_state_dict_of_either_loads_in_the_other(kind: str, tmp_path: Path) -> None:
    config = zi.Config(memory="1MiB", nvme=tmp_path)
    plain = run_plain(make, five_steps, OPTIMIZERS[kind])
    prepared = run_prepared(make, five_steps, OPTIMIZERS[kind], config)

    def go_on(run: Run) -> None:
        outcome = plain if run.prepared else prepared
        run.optimizer.load_state_dict(copied(outcome.optimizer))
        for name, parameter in run.model.named_parameters():
            with torch.no_grad(), zi.gathered(parameter):
                parameter.copy_(outcome.weights[name])
        five_steps(run)

    compare(make, go_on, OPTIMIZERS[kind], HALF, tmp_path)


def test_state_dict_before_the_first_step_is_empty(tmp_path: Path) -> None:
    compare(make, lambda run: run.log(run.optimizer.state_dict()), adamw, FITS_RAM, tmp_path)


def test_a_state_of_another_optimizer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    donor = run_plain(make, five_steps, OPTIMIZERS["adagrad"]).optimizer

    def script(run: Run) -> None:
        five_steps(run)
        if run.prepared:
            with pytest.raises(zi.UsageError, match="another optimizer"):
                run.optimizer.load_state_dict(copied(donor))
        five_steps(run)

    compare(make, script, adamw, HALF, tmp_path)


def test_the_streamed_optimizer_looks_like_the_plain_one(tmp_path: Path) -> None:
    model = make()
    plain = adamw(model)
    model, optimizer = zi.prepare(model, plain, zi.Config(memory="1MiB", nvme=tmp_path))
    assert isinstance(optimizer, Optimizer)
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.defaults == plain.defaults
    assert "AdamW" in repr(optimizer)


def test_step_hooks_run_once_a_step(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        calls: list[str] = []
        run.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        run.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        five_steps(run)
        run.log(calls)

    compare(make, script, adamw, HALF, tmp_path)


# ---------------------------------------------------------------------- what is refused


def prepared(make_optimizer: MakeOptimizer, directory: Path) -> Optimizer:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    return zi.prepare(model, make_optimizer(model), zi.Config(memory="1MiB", nvme=directory))[1]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.LBFGS, "closure"),
        (torch.optim.SparseAdam, "rows that a batch has touched"),
    ],
)
def test_what_needs_more_than_updates_is_refused(kind: type[Optimizer], reason: str, tmp_path: Path) -> None:
    with pytest.raises(zi.UsageError, match=reason) as refusal:
        prepared(of(kind, lr=1e-2), tmp_path)
    assert kind.__name__ in str(refusal.value)
    assert "fix:" in str(refusal.value)


class SignMomentum(Optimizer):
    """Lion: a user's own element-wise optimizer."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                    state["count"] = 0
                state["count"] += 1
                p.sub_(group["lr"] * state["average"].lerp(p.grad, 0.1).sign())
                state["average"].lerp_(p.grad, 1 - group["beta"])


@pytest.mark.parametrize("setting", [FITS_RAM, MINIMAL], ids=str)
def test_a_users_own_element_wise_optimizer(setting: Setting, tmp_path: Path) -> None:
    compare(make, five_steps, of(SignMomentum, lr=1e-3), setting, tmp_path)


@pytest.mark.parametrize("setting", [FITS_RAM, MINIMAL], ids=str)
def test_a_closure_is_evaluated_once(setting: Setting, tmp_path: Path) -> None:
    """With gradients enabled, whatever the caller's mode is, and its result is returned."""

    def script(run: Run) -> None:
        for number in range(4):
            calls = []

            def closure(number: int = number, calls: list[int] = calls) -> torch.Tensor:
                calls.append(number)
                run.optimizer.zero_grad()
                loss = mean_square(run.model, batch(number))
                loss.backward()
                return loss

            with torch.no_grad():
                run.log(run.optimizer.step(closure))
            assert calls == [number]

    compare(make, script, adamw, setting, tmp_path)


def test_adding_a_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zi.UsageError, match="before zi.prepare"):
        prepared(adamw, tmp_path).add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_a_parameter_of_no_module_is_refused(tmp_path: Path) -> None:
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(zi.UsageError, match=r"model\.parameters\(\)"):
        prepared(lambda model: torch.optim.AdamW([*model.parameters(), stranger]), tmp_path)


def test_preparing_twice_is_refused(tmp_path: Path) -> None:
    model = make()
    config = zi.Config(memory="1MiB", nvme=tmp_path)
    model, optimizer = zi.prepare(model, adamw(model), config)
    with pytest.raises(zi.UsageError, match="prepared already"):
        zi.prepare(model, adamw(model), config)
    other = make()
    with pytest.raises(zi.UsageError, match="zi.prepare"):
        zi.prepare(other, optimizer, config)


def test_same_bits_sees_one_bit() -> None:
    values = torch.ones(5)
    assert same_bits(values, values.clone())
    assert not same_bits(values, torch.nextafter(values, torch.tensor(2.0)))
