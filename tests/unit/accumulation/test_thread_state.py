from __future__ import annotations

import threading
from typing import Any

import torch

from zero_infinity.accumulation.thread_state import ThreadState


def seen() -> dict[str, Any]:
    x = torch.ones(2, 2, requires_grad=True, device="cpu")
    product = x * x
    return {
        "grad": torch.is_grad_enabled(),
        "autocast": (torch.mm(x, x).dtype, torch.is_autocast_enabled("cpu")),
        "device": torch.empty(1).device.type,
        "saved": None if product.grad_fn is None else product.grad_fn._saved_self.shape,
    }


def in_a_thread(state: ThreadState) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def run() -> None:
        with state.here():
            found.update(seen())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


def test_another_thread_goes_on_as_this_one() -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t.sum(), lambda t: t),
    ):
        here, there = seen(), in_a_thread(ThreadState())
    assert here == there
    assert there == {
        "grad": True,
        "autocast": (torch.bfloat16, True),
        "device": "meta",
        "saved": torch.Size([]),
    }


def test_without_gradients() -> None:
    with torch.no_grad():
        state = ThreadState()
    assert in_a_thread(state)["grad"] is False
    assert torch.is_grad_enabled()
