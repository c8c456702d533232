"""Random models: a pool of layers, some of them tied or frozen, and a list of instructions that use them.

Every operation keeps the shape (rows, width), so that any program is a model. A program is plain data with a readable
`repr`: what hypothesis prints can be pasted into a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

NUM_WORDS = 16


class Wide(nn.Module):
    """A unit that is larger than the others, and a container that owns a parameter beside its children's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.gate = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))) * self.gate


class Channels(nn.Module):
    """A convolution over the features of a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, width // 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x[:, None]).mean(1)


class Words(nn.Embedding):
    """Looks up a word that depends on the values, as routers and quantisers do."""

    def __init__(self, width: int) -> None:
        super().__init__(NUM_WORDS, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x.detach().sum(1) * 7).long().remainder(NUM_WORDS))


class Cell(nn.LSTMCell):
    """One step of an LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "matrix": lambda width: nn.Linear(width, width, bias=False),
    "norm": nn.LayerNorm,
    "wide": Wide,
    "channels": Channels,
    "words": Words,
    "cell": Cell,
}
SQUARE = ("linear", "matrix")

Use = Callable[[nn.Module, torch.Tensor], torch.Tensor]
# Ways to use any layer, and ways to use the weight of a square one.
USES: dict[str, Use] = {
    "call": lambda layer, x: layer(x),
    "twice": lambda layer, x: layer(layer(x).tanh()),
    "constant": lambda layer, x: x + layer(x).detach(),
    "checkpoint": lambda layer, x: _recomputed(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: _recomputed(layer, x, use_reentrant=True),
    "only if": lambda layer, x: layer(x) if x.detach().sum() > 0 else x * 0.5,
    "function": lambda layer, x: F.linear(x, _weight(layer)),
    "transposed": lambda layer, x: x @ _weight(layer),
    "detached": lambda layer, x: F.linear(x, _weight(layer).detach()),
    "scaled": lambda layer, x: x * _weight(layer).mean(0),
}
FOR_SQUARE = ("function", "transposed", "detached", "scaled")


def _recomputed(layer: nn.Module, x: torch.Tensor, *, use_reentrant: bool) -> torch.Tensor:
    def part(x: torch.Tensor) -> torch.Tensor:
        return layer(x) + x  # has a gradient, whatever the layer is

    result: torch.Tensor = checkpoint(part, x, use_reentrant=use_reentrant) if torch.is_grad_enabled() else part(x)
    return result


def _weight(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight


@dataclass(frozen=True)
class Program:
    """What a random model is made of. Indices are into `layers`."""

    width: int
    layers: tuple[str, ...]
    uses: tuple[tuple[str, int], ...]
    ties: tuple[tuple[int, int], ...]  # the weight of the first becomes that of the second
    frozen: tuple[tuple[int, bool], ...]  # whole (True) or only its first parameter
    penalties: tuple[int, ...]  # layers whose weights are in the loss by themselves

    @property
    def may_be_refused(self) -> bool:
        """Whether a step can do what the one before did not, so that an early update may turn out to be too early."""
        return any(use == "only if" for use, _ in self.uses)


class Model(nn.Module):
    """Runs a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.gain = nn.Parameter(torch.ones(program.width))
        self.layers = nn.ModuleList(LAYERS[kind](program.width) for kind in program.layers)
        for target, source in program.ties:
            self.layers[target].weight = self.layers[source].weight
        for index, whole in program.frozen:
            for parameter in list(self.layers[index].parameters())[: None if whole else 1]:
                parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain  # so that every loss has a gradient
        for use, index in self.program.uses:
            x = USES[use](self.layers[index], x).tanh() + 0.1 * x
        return x


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(model, Model)
    loss = (model(x) - 0.5).square().mean()
    for index in model.program.penalties:
        for parameter in model.layers[index].parameters():
            loss = loss + 1e-3 * parameter.square().sum()
    return loss


@st.composite
def programs(draw: st.DrawFn) -> Program:
    kinds = tuple(draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6)))
    indices = st.integers(0, len(kinds) - 1)
    squares = [index for index, kind in enumerate(kinds) if kind in SQUARE]

    def use() -> st.SearchStrategy[tuple[str, int]]:
        anyhow = st.tuples(st.sampled_from([name for name in USES if name not in FOR_SQUARE]), indices)
        if not squares:
            return anyhow
        return anyhow | st.tuples(st.sampled_from(FOR_SQUARE), st.sampled_from(squares))

    pairs = [(a, b) for a in squares for b in squares if a != b]
    return Program(
        width=draw(st.sampled_from([16, 20, 32, 52])),
        layers=kinds,
        uses=tuple(draw(st.lists(use(), min_size=1, max_size=8))),
        ties=tuple(draw(st.lists(st.sampled_from(pairs), max_size=2)) if pairs else ()),
        frozen=tuple(draw(st.lists(st.tuples(indices, st.booleans()), max_size=2))),
        penalties=tuple(draw(st.lists(indices, max_size=2, unique=True))),
    )
