"""Three tiers: an accelerator (emulated) with memory of its own above host memory and NVMe."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import (
    Outcome,
    Run,
    Script,
    adamw,
    assert_identical,
    assert_sound,
    copied,
    run_plain,
    same_bits,
    sgd,
    training,
)
from support.device import cpu_only
from support.least import least_accepted
from support.matrix import thinned
from support.models import CASES, Case, gpt2, mean_square, mlp, of_labels, tokens, vectors
from support.resources import watch_pools
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_infinity as zi
from zero_infinity import engine_builder
from zero_infinity.params import offloaded_param
from zero_infinity.params.unit import Unit
from zero_infinity.tiers.device_cache import DeviceCache

pytestmark = cpu_only("the accelerator is emulated on the CPU")
FAST = {"bytes_per_second": 1e12, "latency_seconds": 0.0}


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward, by either kind of checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(depth=1) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def checkpointed_gpt2() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


MODELS = {name: CASES[name] for name in ("mlp", "gpt2", "t5", "lstm", "conv", "attention")} | {
    "reentrant": Case(lambda: Checkpointed(reentrant=True), vectors(), mean_square),
    "not reentrant": Case(lambda: Checkpointed(reentrant=False), vectors(), mean_square),
    "checkpointed gpt2": Case(checkpointed_gpt2, tokens(), of_labels),
}


@functools.cache
def parameter_bytes(make: Callable[[], nn.Module]) -> int:
    return sum(p.nbytes for p in make().parameters())


def device_bytes(make: Callable[[], nn.Module], share: str) -> int:
    whole, least = parameter_bytes(make), least_device_bytes(make)
    return {"fits": 4 * whole + (1 << 20), "half": max(whole // 2, least), "minimal": least}[share]


@functools.cache
def least_device_bytes(make: Callable[[], nn.Module]) -> int:
    model = make()  # prepare is stopped before it does anything to it

    def prepare(memory: int) -> None:
        config = zi.Config(memory="64MiB", tile_above="1GiB")
        zi.prepare(model, sgd(model), config, device=zi.EmulatedAccelerator(memory))

    return least_accepted(prepare, most=2 * parameter_bytes(make))


@functools.cache
def least_host_bytes(make: Callable[[], nn.Module]) -> int:
    model = make()
    with tempfile.TemporaryDirectory() as directory:

        def prepare(memory: int) -> None:
            config = zi.Config(memory=memory, nvme=directory, tile_above="1GiB")
            zi.prepare(model, adamw(model), config, device=zi.EmulatedAccelerator(64 << 20))

        return least_accepted(prepare, most=2 * parameter_bytes(make) + (64 << 10))


def host_config(make: Callable[[], nn.Module], directory: Path, home: str, **changes: Any) -> zi.Config:
    """RAM with room for everything, or NVMe with the least host memory."""
    if home == "ram":
        return zi.Config(memory="64MiB", **changes)
    return zi.Config(memory=least_host_bytes(make), nvme=directory, **changes)


def run_accelerated(
    make: Callable[[], nn.Module], script: Script, config: zi.Config, accelerator: zi.EmulatedAccelerator
) -> Outcome:
    torch.manual_seed(0)
    model = make()
    model, optimizer = zi.prepare(model, adamw(model), config, device=accelerator)
    run = Run(model, optimizer, prepared=True)
    torch.manual_seed(1)
    script(run)
    outcome = Outcome(
        run.logged,
        {name: copied(p) for name, p in model.named_parameters(remove_duplicate=False)},
        {name: copied(b) for name, b in model.named_buffers(remove_duplicate=False)},
        copied(optimizer.state_dict()),
        zi.stats(model),
    )
    assert_sound(model)
    return outcome


HOMES = ["ram-fits", "nvme-half", "ram-minimal", "nvme-fits", "ram-half", "nvme-minimal"]


@pytest.mark.parametrize(("name", "where"), thinned([*MODELS], HOMES))
def test_training_is_bit_identical_and_within_both_budgets(
    name: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, share = where.split("-")
    case = MODELS[name]
    script = training(case.batch, case.loss, num_steps=4)
    memory = device_bytes(case.make, share)
    config = host_config(case.make, tmp_path, home)
    watch = watch_pools(monkeypatch)
    accelerator = zi.EmulatedAccelerator(memory, **FAST)
    prepared = run_accelerated(case.make, script, config, accelerator)
    assert_identical(run_plain(case.make, script, adamw), prepared)

    assert not watch.violations, watch.violations[:3]
    assert 0 < watch.peaks["compute copies"] <= memory
    assert accelerator.bytes_uploaded >= 4 * parameter_bytes(case.make) * 0.9
    assert accelerator.bytes_downloaded > 0
    if home == "nvme":
        assert prepared.stats is not None
        assert prepared.stats.bytes_read > 0


@pytest.mark.parametrize(
    "changes",
    [{"update": "after_backward", "max_grad_norm": 0.1}, {"gradient_accumulation_steps": 2}],
    ids=["clipped", "accumulated"],
)
def test_clipping_and_accumulation(changes: dict[str, Any], tmp_path: Path) -> None:
    case = MODELS["gpt2"]

    def script(run: Run) -> None:
        for number in range(4):
            torch.manual_seed(1000 + number)
            case.loss(run.model, case.batch(number)).backward()
            if "max_grad_norm" in changes and not run.prepared:
                run.log(nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
            if "max_grad_norm" in changes or number % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()
            if "max_grad_norm" in changes and run.prepared:
                run.log(run.optimizer.grad_norm)

    config = host_config(case.make, tmp_path, "nvme", **changes)
    accelerator = zi.EmulatedAccelerator(device_bytes(case.make, "minimal"), **FAST)
    assert_identical(run_plain(case.make, script, adamw), run_accelerated(case.make, script, config, accelerator))


@pytest.mark.parametrize("share", ["fits", "minimal"])
@pytest.mark.parametrize("home", ["ram", "nvme"])
def test_edits_are_kept(home: str, share: str, tmp_path: Path) -> None:
    case = MODELS["mlp"]

    def script(run: Run) -> None:
        for number in range(5):
            torch.manual_seed(1000 + number)
            run.step(case.loss(run.model, case.batch(number)))
            weight, bias = run.model[3].weight, run.model[3].bias
            if number == 1:
                with zi.gathered(weight), torch.no_grad():
                    weight.mul_(1.5)
                with zi.gathered(bias):
                    bias.detach().numpy()[3] = 0.5
            elif number == 2:
                weight.data.mul_(0.5)
                with torch.no_grad():
                    bias.copy_(torch.ones(32))
            elif number == 3:
                weight.data = torch.eye(32)
                run.model.load_state_dict({**run.model.state_dict(), "0.bias": torch.full((32,), 0.25)})
            run.log(weight.detach(), bias.detach())

    accelerator = zi.EmulatedAccelerator(device_bytes(case.make, share), **FAST)
    config = host_config(case.make, tmp_path, home)
    assert_identical(run_plain(case.make, script, adamw), run_accelerated(case.make, script, config, accelerator))


@pytest.mark.parametrize("how", ["device_memory", "accelerator"])
def test_too_little_device_memory_is_an_error_of_prepare(how: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(64, 64), nn.Linear(8, 8))
    before = [p.detach().clone() for p in model.parameters()]
    limit = 8192
    accelerator = zi.EmulatedAccelerator(limit if how == "accelerator" else 1 << 20)
    device_memory = limit if how == "device_memory" else None
    config = zi.Config(memory="1MiB", nvme=tmp_path, device_memory=device_memory, tile_above="1GiB")
    with pytest.raises(
        zi.CapacityError, match=r"'1' needs 20\.0 KiB of device memory.*8\.0 KiB\n  fix:   device_memory"
    ):
        zi.prepare(model, sgd(model), config, device=accelerator)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(same_bits(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_device_memory_in_the_config_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MODELS["mlp"]
    watch = watch_pools(monkeypatch)
    accelerator = zi.EmulatedAccelerator(1 << 20, **FAST)
    config = zi.Config(memory="1MiB", nvme=tmp_path, device_memory=24 << 10)
    run_accelerated(case.make, training(case.batch, case.loss), config, accelerator)
    assert 0 < watch.peaks["compute copies"] <= 24 << 10


def test_what_fits_is_uploaded_once_a_step(tmp_path: Path) -> None:
    """Every update changes every parameter; backward finds the copies that forward made."""
    case = MODELS["mlp"]
    torch.manual_seed(0)
    model = case.make()
    accelerator = zi.EmulatedAccelerator(1 << 20, **FAST)
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="1MiB"), device=accelerator)
    script = training(case.batch, case.loss, num_steps=1)
    counts = []
    for _ in range(6):  # the order is known after two
        script(Run(model, optimizer, prepared=True))
        zi.synchronize(model)  # what is uploaded ahead for the next step may be late on a busy machine
        counts.append((accelerator.bytes_uploaded, accelerator.bytes_downloaded))
    uploads, downloads = (
        [b - a for a, b in zip(column, column[1:], strict=False)] for column in zip(*counts, strict=True)
    )
    whole = parameter_bytes(case.make)
    assert set(downloads) == {whole}  # the gradients
    assert all(whole <= upload <= 1.05 * whole for upload in uploads[3:])  # parameters start at multiples of 64


# ---------------------------------------------------------------------- overlap


class _Look(torch.autograd.Function):
    """Calls back when it computes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Callable[[str], None]) -> torch.Tensor:
        ctx.look = look
        look("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.look("backward")
        return gradients[0], None


class Layer(nn.Module):
    def __init__(self, width: int, look: Callable[[str], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Look.apply(self.linear(x), self.look)


def asked_for_in_time(tmp_path: Path) -> float:
    """Of the layers that come next while one computes, the part whose copy is there or on its way."""
    depth, width = 12, 128
    found: list[bool] = []

    def look(index: int, phase: str) -> None:
        # In backward the layer's own weight is what comes next; the first layer's is not read there.
        following = index + 1 if phase == "forward" else index
        if following < depth and (phase, index) != ("backward", 0):
            cache = zi.api.engine_of(model).cache
            assert isinstance(cache, DeviceCache)
            found.append(cache._mover.copy_of(cache._groups[unit(following)], unit(following)) is not None)

    layers = [Layer(width, functools.partial(look, index)) for index in range(depth)]
    one = 4 * (width * width + width)
    accelerator = zi.EmulatedAccelerator(5 * (one + 4096), bytes_per_second=1e12)
    config = zi.Config(memory="8MiB", nvme=tmp_path)
    model, optimizer = zi.prepare(nn.Sequential(*layers), sgd(nn.Sequential(*layers)), config, device=accelerator)

    def unit(index: int) -> Unit:
        known = offloaded_param.managed(layers[index].linear.weight)
        assert known is not None
        return known.unit

    script = training(vectors(width, 2), mean_square, num_steps=1)
    for _ in range(4):  # the order is learnt
        script(Run(model, optimizer, prepared=True))
    found.clear()
    script(Run(model, optimizer, prepared=True))
    assert len(found) == 2 * depth - 2
    return sum(found) / len(found)


def test_what_comes_next_is_on_its_way_while_a_layer_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_for_in_time(tmp_path) == 1.0
    monkeypatch.setattr(engine_builder, "copy_lookahead", lambda _, *, on_device: 0)
    assert asked_for_in_time(tmp_path) < 0.8, "without looking ahead only what was kept is there"
