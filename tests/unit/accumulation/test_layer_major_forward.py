from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from zero_infinity._torch import own_call
from zero_infinity.accumulation.cut_graph import CannotCutError
from zero_infinity.accumulation.layer_major_forward import MicroBatch, Turns, pausing
from zero_infinity.accumulation.random_states import random_state

CPU = torch.device("cpu")


class Forwards:
    """Stands for the engine's stack of forwards: none is in progress."""

    def exchange(self, entries: list[object]) -> list[object]:
        return []

    def go_on_here(self) -> None:
        pass


class Block(nn.Module):
    def __init__(self, name: str, said: list[str]) -> None:
        super().__init__()
        self.name, self.said = name, said
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.said.append(f"{self.name}{int(x[0])}")
        if self.name == "fails":
            raise ValueError(self.name)
        return x.mul_(1) if self.name == "in place" else x * self.weight


def run(names: list[str], num_micro_batches: int = 2) -> tuple[list[str], list[MicroBatch]]:
    said: list[str] = []
    stack: list[nn.Module] = [Block(name, said) for name in names]

    def forward(number: int) -> torch.Tensor:
        x = torch.full((2,), float(number), requires_grad=True) * 1
        for block in stack:
            x = block(x)
        said.append(f"end{number}")
        return x.sum()

    def start(number: int) -> MicroBatch:
        return MicroBatch(lambda: forward(number), Forwards(), random_state(CPU))  # type: ignore[arg-type]

    turns = Turns()
    micro_batches = [start(number) for number in range(num_micro_batches)]
    with pausing([stack], turns):
        try:
            turns.run(micro_batches, lambda micro_batch: said.append("ended"))
        finally:
            assert all(own_call(block) is not None for block in stack)
    assert all(own_call(block) is None for block in stack)
    return said, micro_batches


def test_every_micro_batch_goes_through_a_block_before_the_next() -> None:
    said, micro_batches = run(["a", "b"])
    assert said == ["a0", "a1", "b0", "b1", "end0", "ended", "end1", "ended"]
    assert [micro_batch.places for micro_batch in micro_batches] == [[0, 1, ~1]] * 2
    assert micro_batches[1].take_loss().item() == 2
    with pytest.raises(RuntimeError):
        micro_batches[1].take_loss()


@pytest.mark.parametrize(("name", "kind"), [("fails", ValueError), ("in place", CannotCutError)])
def test_an_error_ends_all(name: str, kind: type[Exception]) -> None:
    with nullcontext(), pytest.raises(kind):
        run(["a", name])
