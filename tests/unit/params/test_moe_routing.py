"""Which containers are chains, and which are chosen from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.rank_scripts import Chain, Expert, MixtureModel
from torch import nn

from zero_infinity.params.find_parameters import find_parameters
from zero_infinity.params.moe_routing import RoutingWatch
from zero_infinity.params.unit import make_unit

WIDTH = 24


def watch(model: nn.Module) -> RoutingWatch:
    owners = {}
    for number, (module, name, parameters) in enumerate(find_parameters(model)):
        unit = make_unit(
            name,
            parameters,
            dtype=torch.float32,
            compute_dtype=torch.float32,
            device=torch.device("cpu"),
            number=number,
        )
        owners[module] = unit.parameters
    found = RoutingWatch(model, owners)
    found.start()
    return found


def rows(num_rows: int = 6) -> torch.Tensor:
    return torch.randn(num_rows, WIDTH)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 3) for name in "abc"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads["b"](self.trunk(x))


class Plain(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Deep(Chain):
    """Much happens between two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            for _ in range(300):
                x = x * 1.01
            x = torch.cat([layer(x)[:3], x[3:]])
        return x


class Branches(Chain):
    """All get the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.layers[0].up.weight.mean()
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object], list[str]]] = {
    "plain chain": (Plain, lambda m: m(rows()), []),
    "residual chain": (Chain, lambda m: m(rows()), []),
    "deep chain": (Deep, lambda m: m(rows()), []),
    "branches": (Branches, lambda m: m(rows()), ["layers"]),
    "heads": (Heads, lambda m: m(rows()), ["heads"]),
    "experts": (
        MixtureModel,
        lambda m: m(rows(), torch.arange(6)),
        ["layers.0.experts", "layers.1.experts", "layers.2.experts"],
    ),
    "one expert each": (
        MixtureModel,
        lambda m: m(rows(), torch.zeros(6, dtype=torch.int64)),
        ["layers.0.experts", "layers.1.experts", "layers.2.experts"],
    ),
    "not called": (Chain, lambda _: None, []),
    "without gradients": (Chain, lambda m: torch.no_grad()(m)(rows()), []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_chosen_from(name: str) -> None:
    make, run, expected = CASES[name]
    model = make()
    watched = watch(model)
    for _ in range(2):
        run(model)
    assert [container.name for container in watched.end([])] == expected


def test_another_ranks_chain_is_a_chain() -> None:
    model = Chain(depth=2)
    model.left_out = 1
    watched = watch(model)
    model(rows())
    other = watch(model)
    model.left_out = None
    model(rows())
    assert watched.evidence() != other.evidence()
    assert watched.end([other.evidence()]) == []


def test_watching_ends() -> None:
    model = MixtureModel()
    watched = watch(model)
    watched.end([])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_siblings_of_several_classes_or_without_parameters_are_nobodys_choice() -> None:
    model = nn.Module()
    model.mixed = nn.ModuleList([Expert(4), nn.Linear(4, 4)])
    model.empty = nn.ModuleList([nn.Tanh(), nn.Tanh()])
    model.single = nn.ModuleList([nn.Linear(4, 4)])
    assert watch(model).containers == []
