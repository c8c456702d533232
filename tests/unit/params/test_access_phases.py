"""Which accesses are inference, and where its cycles end."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_infinity.params.access_phases import AccessPhases


class Told:
    """A tier that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def follow(self, *, inference: bool) -> None:
        self.events.append("inference" if inference else "training")

    def end_cycle(self, *, same_order: bool) -> None:
        assert same_order
        self.events.append("end")


def told(calls: str, *, trains: bool) -> list[str]:
    """`g`: a forward with gradients, `n`: one without, `s`: a step."""
    host: Any = Told()
    device: Any = Told()
    phases, model = AccessPhases(host, device, trains=trains), nn.Identity()
    for call in calls:
        if call == "s":
            phases.train()
            continue
        with torch.set_grad_enabled(call == "g"):
            phases.on_call(model)
    assert host.events == device.events
    return host.events


def test_a_model_that_is_not_trained_is_always_inference() -> None:
    assert told("ngn", trains=False) == ["inference", "end", "end"]


def test_training_ends_its_cycles_itself() -> None:
    assert told("gsgsgg", trains=True) == []


def test_forwards_without_gradients_are_an_evaluation() -> None:
    assert told("gsnnngs", trains=True) == ["inference", "end", "end", "training"]
    assert told("gns", trains=True) == ["inference", "training"]
