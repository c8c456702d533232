"""Every test here: one thread for torch, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zero_infinity.policy import chunk_size, homes


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of a few KiB are moved like large ones, and their records are cut into several chunks."""
    monkeypatch.setattr(homes, "_SMALL_BYTES", 0)
    monkeypatch.setattr(chunk_size, "MIN_CHUNK_BYTES", 4096)
