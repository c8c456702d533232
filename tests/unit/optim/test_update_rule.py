"""The user's own optimizer on pieces of parameters."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity.optim.update_rule import UpdateRule, hyperparameters_of, split_state


def of(kind: type[Optimizer], **options: Any) -> Optimizer:
    return kind([nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Rprop])
def test_pieces_are_updated_as_the_whole_is(kind: type[Optimizer]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(640, generator=generator)
    gradients = [torch.randn(640, generator=generator) for _ in range(4)]
    whole = nn.Parameter(start.clone())
    plain = kind([whole], lr=0.01)
    rule = UpdateRule(of(kind, lr=0.01))
    pieces = list(start.clone().split([64, 512, 64]))
    states: list[dict[str, Any]] = [{} for _ in pieces]
    for gradient in gradients:
        whole.grad = gradient.clone()
        plain.step()
        for number, part in enumerate(gradient.split([64, 512, 64])):
            tensors, scalars = split_state(states[number], pieces[number].shape)
            settings = hyperparameters_of(plain.param_groups[0])
            states[number] = rule.apply(pieces[number], part.clone(), tensors, scalars, settings)
    assert torch.equal(torch.cat(pieces), whole)


def test_hyperparameters_are_kept_apart_from_later_changes() -> None:
    group = {"params": [], "lr": torch.tensor(0.1), "betas": (0.9, 0.99)}
    kept = hyperparameters_of(group)
    group["lr"].fill_(5.0)
    group["betas"] = (0.0, 0.0)
    assert kept["lr"].item() == pytest.approx(0.1)
    assert kept["betas"] == (0.9, 0.99)
    assert "params" not in kept


def test_an_update_waits_for_a_compiler_in_another_thread() -> None:
    """Its flag holds for all threads, and makes optimizers count steps in float32."""
    from torch._dynamo import convert_frame

    optimizer = of(torch.optim.AdamW, lr=0.1)
    rule, settings = UpdateRule(optimizer), hyperparameters_of(optimizer.param_groups[0])
    compiling = threading.Event()

    def update() -> torch.Tensor:
        values, gradient = torch.linspace(-1, 1, 4096), torch.linspace(3, -2, 4096)
        state: dict[str, Any] = {}
        for _ in range(5):
            tensors, scalars = split_state(state, values.shape)
            state = rule.apply(values, gradient.clone(), tensors, scalars, settings)
        return values

    def compile_something() -> None:
        with convert_frame.compile_lock, torch.compiler._compile_session_context():
            compiling.set()
            time.sleep(0.3)

    expected = update()
    with torch.compiler._compile_session_context():
        assert not torch.equal(update(), expected), "torch has mended it: nobody need wait any more"
    thread = threading.Thread(target=compile_something)
    thread.start()
    compiling.wait()
    assert torch.equal(update(), expected)
    thread.join()
