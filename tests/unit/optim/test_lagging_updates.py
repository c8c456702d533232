"""An update waits for the next use of its unit where no update runs in backward, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.engine import TrainingEngine


def trained(num_steps: int, update: str) -> tuple[nn.Module, TrainingEngine, list[torch.Tensor]]:
    """A model after these steps, and the values in its blocks before the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model, optimizer = zi.prepare(model, optimizer, zi.Config(memory="8MiB", update=update))
    engine, before = engine_of(model), []
    for _ in range(num_steps):
        model(torch.ones(2, 64)).square().mean().backward()
        before = values(engine)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.0  # of the next step: the last one's is used
    return model, engine, before


def values(engine: TrainingEngine) -> list[torch.Tensor]:
    engine.parameter_store.update_worker.drain()
    return [unit.the_block().present_buffer().tensor().clone() for unit in engine.units]


def changed(engine: TrainingEngine, before: list[torch.Tensor]) -> list[bool]:
    return [not torch.equal(new, old) for new, old in zip(values(engine), before, strict=True)]


def test_a_unit_is_updated_before_its_next_use_and_not_sooner() -> None:
    model, engine, before = trained(2, "after_backward")
    assert changed(engine, before) == [False, False, False]
    model[1](torch.ones(2, 64))
    assert changed(engine, before) == [False, True, False]
    engine.settle()
    assert changed(engine, before) == [True, True, True]


@pytest.mark.parametrize(("num_steps", "update"), [(1, "after_backward"), (2, "auto")])
def test_a_step_that_keeps_its_gradients_or_whose_like_update_in_backward_does_not_wait(
    num_steps: int, update: str
) -> None:
    _, engine, before = trained(num_steps, update)
    assert changed(engine, before) == [True, True, True]
