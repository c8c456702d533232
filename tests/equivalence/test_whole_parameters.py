"""Optimizers that must see whole parameters (Muon, Adafactor, LAMB and others): the bits of plain PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.compare import (
    FITS_RAM,
    HALF,
    MINIMAL,
    Run,
    Setting,
    compare,
    copied,
    minimal_memory,
    run_plain,
    run_prepared,
    training,
)
from support.device import cpu_only
from support.models import ConvNet, images, mean_square, mlp, vectors
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import zero_infinity as zi
from zero_infinity.tiers.update_worker import UpdateWorker

batch = vectors()
five_steps = training(batch, mean_square)


def make() -> nn.Module:
    return mlp(depth=2)


def muon_and_adamw(model: nn.Module) -> Optimizer:
    matrices, others = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return zi.combine_optimizers(torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2))


def adafactor(model: nn.Module) -> Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


class Normalised(torch.optim.SGD):
    """Divides by the norm of the whole gradient, as LARS and LAMB do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm())
        super().step(closure)


class Factored(Optimizer):
    """Keeps one value per row."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                rows = self.state[p].setdefault("rows", torch.zeros(p.shape[0], device=p.device))
                rows.add_(p.grad.square().reshape(p.shape[0], -1).mean(1))
                p.sub_(group["lr"] * p.grad / (rows.sqrt().mean() + 1))


class Summed(torch.optim.SGD):
    """Divides by a sum, whose last bit depends on the number of threads."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(p.grad.sum().abs() + 1)
        super().step(closure)


class Bytes(Optimizer):
    """Keeps a momentum of 8 bits with a scale for each block of 64, and a number."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                blocks = nn.functional.pad(p.grad.reshape(-1), (0, -p.numel() % 64)).view(-1, 64)
                if state:
                    blocks = blocks + 0.9 * state["bytes"].float() * state["scales"][:, None]
                state["scales"] = blocks.abs().amax(1) / 127 + 1e-12
                state["bytes"] = (blocks / state["scales"][:, None]).round().to(torch.int8)
                state["largest"] = float(state["scales"].max())
                p.sub_(group["lr"] * blocks.view(-1)[: p.numel()].view(p.shape))


class Exchanges(Optimizer):
    """Keeps the last two gradients, and exchanges the tensors that hold them."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["last"] = [torch.zeros_like(p), torch.ones_like(p)]
                state["last"].reverse()
                state["last"][0].copy_(p.grad)
                p.sub_(group["lr"] * (state["last"][0] - 0.5 * state["last"][1]) / p.grad.norm())


class Reassigns(torch.optim.SGD):
    """Gives a parameter a new tensor instead of changing it in place."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.detach() - group["lr"] * p.grad / p.grad.norm()


def of(kind: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind(model.parameters(), lr=1e-2)


OPTIMIZERS = {
    "muon-adamw": muon_and_adamw,
    "adafactor": adafactor,
    "normalised": of(Normalised),
    "summed": of(Summed),
    "factored": of(Factored),
    "bytes": of(Bytes),
    "exchanges": of(Exchanges),
    "reassigns": of(Reassigns),
}


@pytest.mark.half
@pytest.mark.parametrize("setting", [FITS_RAM, MINIMAL], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_are_bit_identical(name: str, setting: Setting, tmp_path: Path) -> None:
    setting = (
        HALF if name in ("normalised", "summed", "reassigns") and setting is MINIMAL else setting
    )  # no states: hardly anything moves
    compare(make, five_steps, OPTIMIZERS[name], setting, tmp_path)


@pytest.mark.parametrize("name", ["adafactor", "exchanges"])
def test_a_state_has_the_layout_that_the_optimizer_gave_it(name: str, tmp_path: Path) -> None:
    compare(
        lambda: ConvNet().to(memory_format=torch.channels_last),
        training(images(), mean_square, num_steps=3),
        OPTIMIZERS[name],
        MINIMAL,
        tmp_path,
    )


@pytest.mark.parametrize("name", ["muon-adamw", "adafactor"])
def test_accumulation_clipping_and_gradients_that_wait(name: str, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            for part in range(2):
                (mean_square(run.model, batch(2 * number + part)) / 2).backward()
            norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5) if not run.prepared else None
            run.optimizer.step()
            run.log(run.optimizer.grad_norm if norm is None else norm)
            run.optimizer.zero_grad()

    compare(make, script, OPTIMIZERS[name], MINIMAL, tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.5)


def test_a_scheduler_of_either_optimizer(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        schedule = lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        for number in range(4):
            run.step(mean_square(run.model, batch(number)))
            schedule.step()
            run.log([group["lr"] for group in run.optimizer.param_groups])

    compare(make, script, muon_and_adamw, HALF, tmp_path)


@cpu_only("the test device has threads of its own")
@pytest.mark.parametrize("name", ["muon-adamw", "adafactor", "summed"])
def test_several_threads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over a whole parameter depend on how many threads share them: as many as in plain PyTorch.

    The worker, which has one core for other updates, runs them all.
    """
    monkeypatch.setattr(UpdateWorker, "help", lambda _: None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wide = lambda: nn.Sequential(nn.Linear(301, 301), nn.GELU(), nn.Linear(301, 301))
        compare(wide, training(vectors(301, 16), mean_square, num_steps=4), OPTIMIZERS[name], HALF, tmp_path)
    finally:
        torch.set_num_threads(before)


def test_16_bit_parameters_are_updated_by_their_masters(tmp_path: Path) -> None:
    """The same in RAM and on NVMe, and near to float32."""
    make_model = lambda: mlp(depth=1)
    outcomes = [
        run_prepared(
            make_model,
            five_steps,
            muon_and_adamw,
            zi.Config(memory=memory, nvme=nvme, param_dtype="bfloat16", compute_dtype="float32"),
        )
        for memory, nvme in (("8MiB", None), (minimal_memory(make_model, muon_and_adamw) + (24 << 10), tmp_path))
    ]
    plain = run_plain(make_model, five_steps, muon_and_adamw)
    for name, weight in outcomes[0].weights.items():
        assert torch.equal(weight, outcomes[1].weights[name])
        torch.testing.assert_close(weight.float(), plain.weights[name], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["muon-adamw", "adafactor", "bytes"])
def test_a_state_dict_of_either_loads_in_the_other(name: str, tmp_path: Path) -> None:
    plain = run_plain(make, five_steps, OPTIMIZERS[name])
    prepared = run_prepared(make, five_steps, OPTIMIZERS[name], zi.Config(memory="1MiB", nvme=tmp_path))

    def go_on(run: Run) -> None:
        outcome = plain if run.prepared else prepared
        run.optimizer.load_state_dict(copied(outcome.optimizer))
        for key, parameter in run.model.named_parameters():
            with torch.no_grad(), zi.gathered(parameter):
                parameter.copy_(outcome.weights[key])
        five_steps(run)

    compare(make, go_on, OPTIMIZERS[name], HALF, tmp_path)


@pytest.mark.parametrize("name", ["muon-adamw", "adafactor", "bytes", "exchanges"])
def test_a_checkpoint_goes_on_exactly(name: str, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        if run.prepared:
            five_steps(run)
            zi.save(tmp_path / "saved", run.model, run.optimizer)  # type: ignore[arg-type]
            model = make()
            config = zi.Config(memory="8MiB")  # in RAM now
            run.model, run.optimizer = zi.prepare(model, OPTIMIZERS[name](model), config)
            zi.load(tmp_path / "saved", run.model, run.optimizer)
        else:
            five_steps(run)
        five_steps(run)

    compare(make, script, OPTIMIZERS[name], MINIMAL, tmp_path)


# ---------------------------------------------------------------------- how often, and how much memory


@contextmanager
def counted() -> Iterator[list[torch.Size]]:
    """The shapes that are orthogonalised inside."""
    from torch.optim import _muon

    shapes: list[torch.Size] = []
    plain = _muon._zeropower_via_newtonschulz

    def count(gradient: torch.Tensor, *args: Any) -> torch.Tensor:
        shapes.append(gradient.shape)
        return plain(gradient, *args)

    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", count):
        yield shapes


def test_each_matrix_is_orthogonalised_once_a_step(tmp_path: Path) -> None:
    model = make()
    config = zi.Config(memory="1MiB", nvme=tmp_path, gradient_accumulation_steps=3)
    model, optimizer = zi.prepare(model, muon_and_adamw(model), config)
    matrices = [p.shape for p in model.parameters() if p.dim() == 2]
    with counted() as shapes:
        for number in range(4):
            for part in range(3):
                mean_square(model, batch(3 * number + part)).backward()
            optimizer.step()
            optimizer.zero_grad()
        zi.synchronize(model)
    assert sorted(shapes) == sorted(4 * matrices)


@cpu_only("memory on a device is another budget")
def test_the_least_memory_is_said_beforehand(tmp_path: Path) -> None:
    """It grows with the largest parameter, and is enough."""
    wide = lambda: nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    script = training(vectors(64, 4), mean_square, num_steps=3)
    with pytest.raises(zi.CapacityError, match="states of a whole parameter of '0'") as refused:
        run_prepared(wide, script, adafactor, zi.Config(memory="150KiB", nvme=tmp_path))
    said = re.search(r"memory='?\"?([\d.]+[KM]iB)", str(refused.value))
    assert said is not None, str(refused.value)
    run_prepared(wide, script, adafactor, zi.Config(memory=said.group(1), nvme=tmp_path))


def test_a_large_matrix_is_not_cut_into_tiles(tmp_path: Path) -> None:
    wide = lambda: nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
    adamw = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = zi.Config(memory="360KiB", nvme=tmp_path, tile_above="16KiB")
    model = wide()
    zi.prepare(model, adamw(model), config)  # in tiles
    model = wide()
    with pytest.raises(zi.CapacityError, match="a whole parameter"):
        zi.prepare(model, muon_and_adamw(model), config)
