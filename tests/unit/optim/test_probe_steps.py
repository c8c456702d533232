from __future__ import annotations

import torch
from torch import nn

from zero_infinity.optim.probe_steps import PROBE_STEPS, PlainSteps, draw, first_line


def test_steps_change_neither_the_optimizer_nor_the_first_values() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    start = torch.ones(2)
    steps = PlainSteps(optimizer, optimizer.param_groups[0], [start])
    steps.step([torch.ones(2)])
    steps.group["lr"] = 0.0
    assert steps.values[0].tolist() == [0.5, 0.5]
    assert list(steps.states) == steps.values
    assert (start.tolist(), parameter.tolist()) == ([1, 1], [1, 1, 1])
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_what_is_drawn_is_always_the_same() -> None:
    one, other = draw([(2, 3), ()], torch.float64), draw([(2, 3), ()], torch.float64)
    assert [t.shape for t in one[0]] == [(2, 3), ()]
    assert len(one[1]) == PROBE_STEPS
    assert all(torch.equal(a, b) for a, b in zip([*one[0], *one[1][-1]], [*other[0], *other[1][-1]], strict=True))


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
