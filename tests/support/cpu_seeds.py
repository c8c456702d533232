"""Makes `torch.manual_seed` cheap on a machine that has no accelerator.

Torch keeps the seed for each kind of device that might be used later, with a formatted stack trace of the call: some
milliseconds under pytest, a thousand times in some files, and memory that grows.
"""

from __future__ import annotations

import torch


def seed_the_cpu_only() -> None:
    """Seeds are no longer kept for kinds of devices that are not there."""
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _ignore  # type: ignore[attr-defined]


def _ignore(_: int) -> None:
    pass
