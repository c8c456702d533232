"""The thread that makes copies of units."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from support.patience import SECONDS
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of


class LateAccelerator(zi.EmulatedAccelerator):
    """Whose copies begin when a test says so, and take a while."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_uploads = 0
        self.may_begin = threading.Event()

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        assert self.may_begin.wait(SECONDS)
        time.sleep(0.05)
        self.num_uploads += 1
        return super().upload(source, target)


def test_synchronize_waits_for_copies_that_were_asked_for() -> None:
    accelerator = LateAccelerator(1 << 20)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    config = zi.Config(memory="4MiB", nvme=None)
    model, _ = zi.prepare(model, torch.optim.SGD(model.parameters()), config, device=accelerator)
    engine = engine_of(model)
    cache = engine.cache
    assert cache is not None
    for group in cache._groups.values():
        cache._tier.access(group)
    assert accelerator.num_uploads == 0  # on their way
    accelerator.may_begin.set()
    zi.synchronize(model)
    assert accelerator.num_uploads == 4
