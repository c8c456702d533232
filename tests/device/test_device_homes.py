"""Units that live in device memory, beside others in RAM and on NVMe: exact, and nothing of them moves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import (
    FITS_RAM,
    MINIMAL,
    Run,
    Setting,
    adamw,
    assert_same,
    compare,
    copied,
    let_engines_end,
    sgd,
    training,
)
from support.device import DEVICE, EXTENSION, WHY_NOT, moved, on_device
from support.homes import living_on_device
from support.models import CASES, mean_square, mlp, vectors
from torch import nn

import zero_infinity as zi
from zero_infinity.policy.homes import Home

if EXTENSION is None:
    pytest.skip(str(WHY_NOT), allow_module_level=True)

batch = vectors()


def everywhere(_: int) -> bool:
    return True


def every_second(number: int) -> bool:
    return number % 2 == 0


def every_third(number: int) -> bool:
    return number % 3 == 1


def net() -> nn.Module:
    """Without random numbers, on the device."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 32)]
    return moved(nn.Sequential(*layers))


def data(number: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(number)).to(DEVICE)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        model(data(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def homes(model: nn.Module) -> set[Home]:
    return {unit.the_block().home for unit in zi.api.engine_of(model).units}


def assert_like(plain: nn.Module, model: nn.Module) -> None:
    for name, value in weights(plain).items():
        assert torch.equal(value, weights(model)[name]), name


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("at_home", [everywhere, every_second])
@pytest.mark.parametrize("setting", [FITS_RAM, MINIMAL], ids=str)
@pytest.mark.parametrize("case", ["llama", "tied"])
def test_training(case: str, setting: Setting, at_home: Callable[[int], bool], tmp_path: Path) -> None:
    if at_home is everywhere and setting is MINIMAL:
        pytest.skip("nothing is left to move")
    chosen = CASES[case]
    compare(chosen.make, training(chosen.batch, chosen.loss), adamw, setting, tmp_path, at_home=at_home)


@pytest.mark.parametrize("at_home", [everywhere, every_second])
@pytest.mark.parametrize("update", ["auto", "after_backward"])
def test_accumulation_and_what_users_do_with_gradients(
    at_home: Callable[[int], bool], update: str, tmp_path: Path
) -> None:
    """no_sync, zero_grad in both ways, gradients set by hand, edits of parameters, a skipped layer."""

    def script(run: Run) -> None:
        parameters = list(run.model.parameters())
        for number in range(7):
            for part in range(2):
                mean_square(run.model, on_device(batch(2 * number + part))).backward()
            if number == 1:
                run.optimizer.zero_grad()
                continue
            if number == 3:
                with zi.gathered(parameters[:4]), torch.no_grad():
                    for parameter in parameters[:4]:
                        parameter.mul_(1.5)
            if number == 4:
                run.optimizer.zero_grad()
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, 0.25)
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=number != 5)
            if number == 5:
                run.optimizer.step()  # with zeros
                run.optimizer.zero_grad()
            run.log([parameter.detach() for parameter in parameters])

    config = {"update": update, "gradient_accumulation_steps": 2}
    compare(mlp, script, adamw, FITS_RAM, tmp_path, at_home=at_home, **config)


@pytest.mark.parametrize("at_home", [everywhere, every_second, lambda _: False])
@pytest.mark.parametrize("num_backwards", [1, 2])
def test_clipping(at_home: Callable[[int], bool], num_backwards: int) -> None:
    plain, model = net(), net()
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    config = zi.Config(
        memory="8MiB", device_memory="4MiB", max_grad_norm=0.01, gradient_accumulation_steps=num_backwards
    )
    with living_on_device(at_home):
        model, optimizer = zi.prepare(model, optimizer, config)
    for number in range(4):
        for part in range(num_backwards):
            for one in (plain, model):
                one(data(2 * number + part)).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(norm.cpu(), optimizer.grad_norm.cpu())
    assert_like(plain, model)


def test_gradients_are_shown_and_may_be_changed() -> None:
    plain, model = net(), net()
    plain_optimizer, optimizer = sgd(plain), sgd(model)
    with living_on_device(every_second):
        model, optimizer = zi.prepare(
            model, optimizer, zi.Config(memory="8MiB", device_memory="4MiB", update="after_backward")
        )
    for one in (plain, model):
        one(data(0)).square().mean().backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.grad.clamp_(-1e-4, 1e-4)
    with zi.gathered(model.parameters()):
        for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
            mine.grad.clamp_(-1e-4, 1e-4)
            assert torch.equal(mine.grad, expected.grad)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    assert torch.equal(norm.cpu(), zi.clip_grad_norm_(model.parameters(), 1e-3).cpu())
    plain_optimizer.step()
    optimizer.step()
    assert_like(plain, model)


def trained_in(precision: dict[str, Any], at_home: Callable[[int], bool]) -> tuple[nn.Module, list[torch.Tensor]]:
    model = net()
    with living_on_device(at_home):
        model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="8MiB", device_memory="4MiB", **precision))
    losses = []
    for number in range(5):
        loss = model(data(number)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, [loss.cpu() for loss in losses]  # not before: the host runs ahead


@pytest.mark.parametrize(
    "precision",
    [
        {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"},
        {"compute_dtype": "bfloat16"},
        {"param_dtype": "bfloat16", "compute_dtype": "float32"},
        {"compute_dtype": "float16"},
        {"param_dtype": "float16", "compute_dtype": "float16", "max_grad_norm": 0.5},
    ],
    ids=str,
)
def test_16_bits_with_master_weights_are_as_on_the_host(precision: dict[str, Any]) -> None:
    """Where a unit lives changes no bit: master weights are float32, whose update is the same on both."""
    expected, expected_losses = trained_in(precision, lambda _: False)
    for at_home in (everywhere, every_second):
        model, losses = trained_in(precision, at_home)
        assert_same("losses", expected_losses, losses)
        assert_same("weights", weights(expected), weights(model))


def test_copies_of_what_lives_there_where_the_host_runs_ahead() -> None:
    """A copy in 16 bits is made after the update of the unit, however late that runs."""
    expected, expected_losses = trained_in({"compute_dtype": "bfloat16"}, everywhere)
    EXTENSION.set_delays(kernel_seconds=1e-3)
    try:
        model, losses = trained_in({"compute_dtype": "bfloat16"}, everywhere)
    finally:
        torch.accelerator.synchronize(DEVICE)
        EXTENSION.set_delays(probability=0.1, max_seconds=2e-4)
    assert_same("losses", expected_losses, losses)
    assert_same("weights", weights(expected), weights(model))


# ---------------------------------------------------------------------- checkpoints and states


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_save_load_and_export(dtype: str | None, tmp_path: Path) -> None:
    """A checkpoint of one set of homes continues in another."""
    config = zi.Config(memory="8MiB", device_memory="4MiB", param_dtype=dtype)
    reference = net()
    with living_on_device(lambda _: False):
        reference, optimizer = zi.prepare(reference, adamw(reference), config)
    train(reference, optimizer, range(6))
    for number, (before, after) in enumerate(((every_second, every_third), (everywhere, lambda _: False))):
        model = net()
        with living_on_device(before):
            model, optimizer = zi.prepare(model, adamw(model), config)
        train(model, optimizer, range(3))
        saved = weights(model)
        state = copied(optimizer.state_dict())
        path = tmp_path / str(number)
        zi.save(path, model, optimizer, background=number == 1)
        train(model, optimizer, range(3, 6))
        assert_same("a save changes nothing", weights(reference), weights(model))
        zi.synchronize(model)
        other = net()
        with living_on_device(after):
            other, optimizer = zi.prepare(other, adamw(other), config)
        train(other, optimizer, range(1))
        zi.load(path, other, optimizer)
        assert_same("loaded weights", saved, weights(other))
        assert_same("loaded states", state, optimizer.state_dict())
        train(other, optimizer, range(3, 6))
        assert_same("continued", weights(reference), weights(other))
        zi.export(tmp_path / f"exported{number}", other)
        fresh = net()
        with living_on_device(before):
            fresh, _ = zi.prepare(fresh, adamw(fresh), config)
        zi.load_pretrained(fresh, tmp_path / f"exported{number}")
        assert_same("exported", weights(other), weights(fresh))


def test_a_save_waits_for_updates_on_a_stream_of_the_users(tmp_path: Path) -> None:
    model, other = net(), net()
    config = zi.Config(memory="8MiB", device_memory="4MiB")
    with living_on_device(everywhere):
        model, optimizer = zi.prepare(model, adamw(model), config)
        other, its_optimizer = zi.prepare(other, adamw(other), config)
    with torch.Stream(DEVICE):
        train(model, optimizer, range(1))
        torch.accelerator.synchronize(DEVICE)
        EXTENSION.set_delays(kernel_seconds=2e-3)
        train(model, optimizer, range(1, 2))
        zi.save(tmp_path, model, optimizer)
        EXTENSION.set_delays(probability=0.1, max_seconds=2e-4)
        expected = weights(model)
    zi.load(tmp_path, other, its_optimizer)
    assert_same("saved", expected, weights(other))


@pytest.mark.parametrize("at_home", [everywhere, every_second])
def test_optimizer_states_both_ways(at_home: Callable[[int], bool]) -> None:
    plain, model = net(), net()
    plain_optimizer = adamw(plain)
    train(plain, plain_optimizer, range(2))
    model.load_state_dict(plain.state_dict())
    with living_on_device(at_home):
        model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="8MiB", device_memory="4MiB"))
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    train(plain, plain_optimizer, range(2, 4))
    train(model, optimizer, range(2, 4))
    assert_like(plain, model)
    other = net()
    other.load_state_dict({name: value.to(DEVICE) for name, value in weights(model).items()})
    other_optimizer = adamw(other)
    other_optimizer.load_state_dict(optimizer.state_dict())
    train(plain, plain_optimizer, range(4, 6))
    train(other, other_optimizer, range(4, 6))
    assert_like(plain, other)


def test_a_model_built_by_init_moves_there(tmp_path: Path) -> None:
    config = zi.Config(memory="400KiB", device_memory="4MiB", nvme=tmp_path)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))

    plain = moved(build())
    with zi.init(config):
        model = build()
    with living_on_device(every_second):
        model, optimizer = zi.prepare(model, adamw(model), config, device=DEVICE)
    assert Home.DEVICE in homes(model)
    train(model, optimizer, range(4))
    train(plain, adamw(plain), range(4))
    assert_like(plain, model)


# ---------------------------------------------------------------------- what moves


def counts_of_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    batches = [data(number) for number in range(6)]
    for number, one in enumerate(batches):
        if number == 5:
            zi.synchronize(model)
            torch.accelerator.synchronize(DEVICE)
            EXTENSION.reset_counts(DEVICE.index)
        model(one).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    waits = sum(EXTENSION.host_waits_by_thread().values())
    zi.synchronize(model)
    torch.accelerator.synchronize(DEVICE)
    return {**EXTENSION.counts(DEVICE.index), "host_waits": waits}


@pytest.mark.parametrize("config", [{}, {"max_grad_norm": 0.1}, {"gradient_accumulation_steps": 1}], ids=str)
def test_nothing_moves_and_nobody_waits_if_all_lives_on_the_device(config: dict[str, Any]) -> None:
    let_engines_end()  # an engine that closes waits for the device
    model = net()
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="8MiB", device_memory="4MiB", **config))
    assert homes(model) == {Home.DEVICE}
    found = counts_of_a_step(model, optimizer)
    assert found["uploaded"] == found["downloaded"] == found["unpinned"] == found["host_waits"] == 0


@given(st.integers(12 << 10, 200 << 10))
@settings(max_examples=8, deadline=None)
def test_only_units_on_the_host_move_at_any_device_memory(device_memory: int) -> None:
    """With parameters resident: once up, and gradients once down. Streamed: as often as they are used."""
    plain, model = net(), net()
    plain_optimizer = adamw(plain)
    try:
        model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="8MiB", device_memory=device_memory))
    except zi.CapacityError:
        return
    units = zi.api.engine_of(model).units
    on_host = [unit for unit in units if unit.the_block().home is not Home.DEVICE]
    stats = zi.stats(model)
    found = counts_of_a_step(model, optimizer)
    stored = sum(unit.num_elements * unit.dtype.itemsize for unit in on_host)
    gradients = sum(p.num_elements * unit.dtype.itemsize for unit in on_host for p in unit.parameters)
    assert stored <= found["uploaded"] <= 2 * stored
    assert found["downloaded"] == gradients
    assert found["unpinned"] == 0
    assert (stats.device_state_bytes == 0) == (len(on_host) == len(units))
    assert stats.device_state_bytes + stats.ram_state_bytes + stats.nvme_state_bytes == stats.state_bytes
    train(plain, plain_optimizer, range(6))
    assert_like(plain, model)


def test_clipping_waits_once_if_some_live_on_the_host() -> None:
    let_engines_end()  # an engine that closes waits for the device
    model = net()
    with living_on_device(every_second):
        model, optimizer = zi.prepare(
            model, adamw(model), zi.Config(memory="8MiB", device_memory="4MiB", max_grad_norm=0.1)
        )
    ours: dict[int, int] = {}
    for number in range(5):
        one = data(number)
        zi.synchronize(model)
        torch.accelerator.synchronize(DEVICE)
        EXTENSION.reset_counts(DEVICE.index)
        model(one).square().mean().backward()
        in_backward = sum(EXTENSION.host_waits_by_thread().get(ident, 0) for ident in computing_threads())
        optimizer.step()
        ours = {ident: EXTENSION.host_waits_by_thread().get(ident, 0) for ident in computing_threads()}
        optimizer.zero_grad()
        assert in_backward == 0
    assert sum(ours.values()) == 1


def computing_threads() -> set[int]:
    """Those that launch kernels: all but the engine's."""
    import threading

    engine = {thread.ident for thread in threading.enumerate() if thread.name.startswith("zero-infinity")}
    return set(EXTENSION.host_waits_by_thread()) - engine


# ---------------------------------------------------------------------- bad input


def test_a_device_that_has_less_than_device_memory_says_so() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    EXTENSION.set_limit(DEVICE.index, 40 << 20)
    try:
        with pytest.raises(zi.CapacityError, match=r"ran out of memory where .* device_memory is 1\.0 GiB"):
            zi.prepare(model, adamw(model), zi.Config(memory="200MiB", device_memory="1GiB"), device=DEVICE)
    finally:
        EXTENSION.set_limit(DEVICE.index, 4 << 30)
    model(torch.zeros(1, 1024))  # still a plain model
