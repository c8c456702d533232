"""A model that was built on the meta device, then prepared: the values of plain `to_empty` and `reset_parameters`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models import CASES
from torch import nn

import zero_infinity as zi


class Own(nn.Module):
    """A module with a parameter and a buffer of its own, which it can initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(16))
        self.register_buffer("shift", torch.empty(16))
        self.inner = nn.Linear(16, 16)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)
        self.shift.fill_(0.5)
        nn.init.constant_(self.inner.bias, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.gain + self.shift


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x[None], x[None], x[None])[0][0]


class Whole(nn.Module):
    """A model that initialises itself as a whole, as torchtitan's do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(16))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def init_weights(self) -> None:
        nn.init.ones_(self.scale)
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x * self.scale


def reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            break


def materialized(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")
    if make is tied:  # to_empty makes two parameters of a tied one
        model[2].weight = model[0].weight  # type: ignore[index]
    if hasattr(model, "init_weights"):
        model.init_weights()
    else:
        model.apply(reset)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)),
    "batch norm": lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)),
    "own": lambda: nn.Sequential(nn.Linear(16, 16), Own()),
    "attention": Attended,
    "whole": Whole,
    "tied": tied,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(4):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        (model(x) - 0.5).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.half
@pytest.mark.parametrize("home", ["ram", "nvme"])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_initialised_and_trains_as_in_plain_pytorch(name: str, home: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = materialized(MODELS[name])
    after = torch.get_rng_state()
    torch.manual_seed(1)
    with torch.device("meta"):
        model = MODELS[name]()
    parameters = list(model.parameters())
    config = zi.Config(memory="1MiB", nvme=tmp_path if home == "nvme" else None)
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    for (key, value), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, expected), key
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    train(model, optimizer)
    for (key, value), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, expected), key


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_models(name: str, tmp_path: Path) -> None:
    """Their buffers (positions, rotary frequencies) are set by `init_weights`, too."""
    case = CASES[name]
    torch.manual_seed(1)
    expected = case.make()
    with torch.device("meta"):
        model = case.make()
    torch.manual_seed(1)
    model, _ = zi.prepare(model, torch.optim.SGD(model.parameters()), zi.Config(memory="8MiB", nvme=tmp_path))
    for key, value in expected.named_buffers():
        assert torch.equal(model.get_buffer(key), value), key
    with zi.gathered(model):
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert {p.std().item() > 0 for n, p in model.named_parameters() if "weight" in n and p.ndim > 1} == {True}
    model.load_state_dict(expected.state_dict())
    losses = [case.loss(either.eval(), case.batch(0)) for either in (model, expected)]  # no dropout
    assert torch.equal(*losses)


def test_a_layer_larger_than_memory_is_initialised_in_tiles(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = materialized(lambda: nn.Sequential(nn.Linear(256, 1024, bias=False)))
    torch.manual_seed(1)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 1024, bias=False))
    config = zi.Config(memory="900KiB", nvme=tmp_path)
    model, _ = zi.prepare(model, torch.optim.SGD(model.parameters()), config)
    assert torch.equal(model.state_dict()["0.weight"].cpu(), plain[0].weight.cpu())


class Without(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))


def test_a_module_that_cannot_initialise_itself_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Without())
    with pytest.raises(
        zi.UsageError, match=r"1 \(Without\) is on the meta device and cannot initialise itself\n  fix:"
    ):
        zi.prepare(model, torch.optim.SGD(model.parameters()), zi.Config(memory="1MiB"))
    assert model[0].weight.is_meta


class Forgetful(Whole):
    def init_weights(self) -> None:
        nn.init.ones_(self.scale)


def test_what_stays_without_a_value_is_named() -> None:
    with torch.device("meta"):
        model = Forgetful()
    with pytest.raises(zi.UsageError, match=r"layers.0.weight, layers.0.bias, .* and 2 more came from the meta device"):
        zi.prepare(model, torch.optim.SGD(model.parameters()), zi.Config(memory="1MiB"))
