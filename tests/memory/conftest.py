"""Every test here: one thread for torch, and nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from zero_infinity.policy import memory_budget


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # modules live for ever: the collections below need not look at them
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of a few KiB are moved like large ones, and their records are cut into several chunks."""
    monkeypatch.setattr(memory_budget, "_SMALL_BYTES", 0)
    monkeypatch.setattr(memory_budget, "_MIN_CHUNK_BYTES", 4096)
