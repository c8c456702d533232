"""States and parameters in bfloat16, rounded stochastically: the same bits wherever they are, as a loop by hand has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_same, assert_sound, copied
from support.device import DEVICE, cpu_only
from support.drive_bytes import drive_bytes
from support.least import least_accepted
from support.models import Case, mean_square, mlp, vectors
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.optim.stochastic_rounding import NUM_ROUNDINGS, round_into, rounding_key

pytestmark = cpu_only("units that are rounded live on the host")
CASE = Case(lambda: mlp(width=64, depth=2).eval(), vectors(64), mean_square)
SETTINGS = {
    "states": {"optim_dtype": "bfloat16"},
    "no-master": {"param_dtype": "bfloat16", "compute_dtype": "float32", "master": "none"},
    "neither": {"param_dtype": "bfloat16", "compute_dtype": "float32", "master": "none", "optim_dtype": "bfloat16"},
    "master": {"param_dtype": "bfloat16", "compute_dtype": "float32", "master": "float32", "optim_dtype": "bfloat16"},
}


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def muon(model: nn.Module) -> Optimizer:
    matrices, others = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return zi.combine_optimizers(torch.optim.Muon(matrices, lr=1e-2), torch.optim.SGD(others, lr=1e-2, momentum=0.9))


OPTIMIZERS = {"adamw": adamw, "muon": muon}


class ByHand:
    """Plain PyTorch in float32; after each step, what is kept in bfloat16 is rounded."""

    def __init__(self, make: Any, settings: dict[str, Any], seed: int = 0) -> None:
        torch.manual_seed(0)
        self.model = CASE.make()
        self.seed, self.number = seed, 0
        self.rounds_states = "optim_dtype" in settings
        self.rounds_values = settings.get("master") == "none"
        self.masters = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.stores_16 = "param_dtype" in settings
        if self.rounds_values:
            self.masters = {name: value.bfloat16().float() for name, value in self.masters.items()}
        self.optimizer = make(self.model)
        self.show()

    @torch.no_grad()
    def show(self) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(self.masters[name].bfloat16() if self.stores_16 else self.masters[name])

    def step(self, batch: Any) -> torch.Tensor:
        loss = CASE.loss(self.model, batch)
        loss.backward()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.masters[name])
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, p in self.model.named_parameters():
            if self.rounds_values:
                self.round(p.data, name, "values")
            for key, state in self.optimizer.state[p].items():
                if self.rounds_states and isinstance(state, torch.Tensor) and state.dim():
                    self.round(state, name, key)
            self.masters[name] = p.detach().clone()
        self.number += 1
        self.show()
        return loss.detach()

    def round(self, value: torch.Tensor, name: str, slot: str) -> None:
        flat = value.view(-1)
        kept = torch.empty(len(flat), dtype=torch.bfloat16)
        round_into(kept, flat, rounding_key(self.seed, name, slot, self.number))
        flat.copy_(kept)


def prepared(make: Any, settings: dict[str, Any], home: Path | None, **changes: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = CASE.make()

    def prepare(memory: int) -> tuple[nn.Module, Optimizer]:
        config = zi.Config(memory=memory, nvme=home, tile_above="1GiB", **settings, **changes)
        return zi.prepare(model, make(model), config)

    return prepare(least_accepted(prepare) if home is not None else 64 << 20)


def train(model: nn.Module, optimizer: Optimizer, first: int, stop: int) -> list[torch.Tensor]:
    losses = []
    for number in range(first, stop):
        loss = CASE.loss(model, CASE.batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: copied(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_bits_of_a_loop_by_hand(name: str, kind: str, tmp_path: Path) -> None:
    """In RAM, and on NVMe with the least memory."""
    make, settings = OPTIMIZERS[kind], SETTINGS[name]
    reference = ByHand(make, settings)
    losses = [reference.step(CASE.batch(number)) for number in range(4)]
    for home in (None, tmp_path):
        model, optimizer = prepared(make, settings, home)
        assert_same("losses", losses, train(model, optimizer, 0, 4))
        assert_same("weights", {n: p.detach() for n, p in reference.model.named_parameters()}, values_of(model))
        assert_sound(model)
        if home is not None:
            assert zi.stats(model).bytes_read > 0
        states = optimizer.state_dict()["state"]
        for number, state in reference.optimizer.state_dict()["state"].items():
            assert states[number].pop(NUM_ROUNDINGS) == 4
            for key, value in state.items():
                found = states[number][key]
                narrow = settings.get("optim_dtype") and isinstance(value, torch.Tensor) and value.dim()
                assert_same(key, value.bfloat16() if narrow else value, found)


def test_clipping_and_accumulation_round_the_same_once_a_step(tmp_path: Path) -> None:
    outcomes = []
    for home, update in ((None, "auto"), (tmp_path, "auto"), (None, "after_backward")):
        model, optimizer = prepared(adamw, SETTINGS["neither"], home, update=update, gradient_accumulation_steps=2)
        for number in range(3):
            for part in range(2):
                mean_square(model, CASE.batch(2 * number + part)).backward()
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append((values_of(model), copied(optimizer.state_dict()["state"])))
    for other in outcomes[1:]:
        assert_same("outcome", outcomes[0], other)
    assert outcomes[0][1][0][NUM_ROUNDINGS] == 3


def test_the_seed_changes_the_bits() -> None:
    found = []
    for seed in (0, 0, 1):
        model, optimizer = prepared(adamw, SETTINGS["no-master"], None, rounding_seed=seed)
        train(model, optimizer, 0, 3)
        found.append(values_of(model))
    assert_same("weights", found[0], found[1])
    assert any(not torch.equal(found[0][name], found[2][name]) for name in found[0])


@pytest.mark.parametrize("way", ["zi.save", "state_dict"])
@pytest.mark.parametrize("name", ["neither", "states"])
def test_resuming_goes_on_with_the_same_bits(name: str, way: str, tmp_path: Path) -> None:
    model, optimizer = prepared(adamw, SETTINGS[name], tmp_path)
    train(model, optimizer, 0, 3)
    if way == "zi.save":
        zi.save(tmp_path / "saved", model, optimizer)  # type: ignore[arg-type]
    weights, states = copied(model.state_dict()), copied(optimizer.state_dict())
    expected = train(model, optimizer, 3, 6)

    again, resumed = prepared(adamw, SETTINGS[name], None)
    if way == "zi.save":
        zi.load(tmp_path / "saved", again, resumed)  # type: ignore[arg-type]
    else:
        again.load_state_dict(weights)
        resumed.load_state_dict(states)
    assert_same("losses", expected, train(again, resumed, 3, 6))
    assert_same("weights", values_of(model), values_of(again))
    assert_same("states", copied(optimizer.state_dict()), copied(resumed.state_dict()))


def test_small_updates_add_up_without_a_master() -> None:
    """Each is 1/16 of what bfloat16 has there: to the nearest, all would be lost. In tiles it is the same."""
    found = []
    for tile_above in (None, "32KiB"):
        torch.manual_seed(0)
        model = nn.Linear(128, 126, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        settings = {**SETTINGS["no-master"], "tile_above": tile_above}
        config = zi.Config(memory="8MiB", **settings)
        model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**-11), config)
        for _ in range(32):
            model(-torch.ones(1, 128, device=DEVICE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.state_dict()["state"] == {0: {NUM_ROUNDINGS: 32}}
        found.append(model.weight.detach().clone())
    mean = found[0].double().mean().item() - 1
    spread = 2.0**-7 * (32 / 16) ** 0.5 / (128 * 126) ** 0.5  # of the mean of sums of 32 draws, at most
    assert abs(mean - 32 * 2.0**-11) < 5 * spread
    assert_same("in tiles", *found)


def test_bfloat16_halves_what_moves(tmp_path: Path) -> None:
    """Of two states of AdamW and a master: bytes on the drive a step, where everything moves."""
    moved = {}
    stored = {"param_dtype": "bfloat16", "compute_dtype": "float32"}
    for name, settings in {"float32": {}, "float32 master": stored, **SETTINGS}.items():
        torch.manual_seed(0)
        model = mlp(width=256, depth=2).eval()
        config = zi.Config(memory="1536KiB", nvme=tmp_path, **settings)
        model, optimizer = zi.prepare(model, adamw(model), config)
        with drive_bytes() as counted:
            for number in range(4):
                mean_square(model, vectors(256)(number)).backward()
                optimizer.step()
                optimizer.zero_grad()
            zi.synchronize(model)
        moved[name] = counted["record"]
    print(moved)
    # What fits in memory from one step to the next does not move.
    assert 0 < moved["states"] < 0.55 * moved["float32"]
    assert 0 < moved["neither"] < 0.4 * moved["float32 master"]
    assert 0 < moved["no-master"] < 0.7 * moved["float32 master"]
    assert 0 < moved["master"] < 0.7 * moved["float32 master"]
