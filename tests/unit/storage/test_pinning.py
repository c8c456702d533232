"""Pinning of host memory through the accelerator's runtime."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zero_infinity.errors import CapacityError
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.pages import PAGE_BYTES
from zero_infinity.storage.pinning import accelerator_pinning


class FakeRuntime:
    """The two calls of the CUDA runtime that register host memory."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.error = 0

    def cudaHostRegister(self, address: int, num_bytes: int, _: int) -> int:
        if not self.error:
            self.registered[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    # A device that does not tell its address, so nobody knows the cores near it.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    return runtime


def test_a_device_without_a_call_for_it_has_no_pinning() -> None:
    assert accelerator_pinning(torch.device("xpu")) is None


def test_a_pool_registers_its_memory_with_the_accelerator(runtime: FakeRuntime) -> None:
    pool = BufferPool(4 * PAGE_BYTES, pinning=accelerator_pinning(torch.device("cuda")))
    buffer = pool.take(PAGE_BYTES)
    assert any(start <= buffer.address < start + size for start, size in runtime.registered.items())
    pool.close()
    assert runtime.registered == {}


def test_memory_that_the_accelerator_refuses_to_pin_is_an_error(runtime: FakeRuntime) -> None:
    runtime.error = 2
    pool = BufferPool(4 * PAGE_BYTES, pinning=accelerator_pinning(torch.device("cuda")))
    with pytest.raises(CapacityError, match=r"refused to pin 4,096 bytes.*error 2\)\n  fix:"):
        pool.take(PAGE_BYTES)
    assert (pool.held_bytes, pool.mapped_bytes) == (0, 0)
    pool.close()


def test_a_pool_is_not_pinned_by_default(runtime: FakeRuntime) -> None:
    pool = BufferPool(4 * PAGE_BYTES)
    pool.take(PAGE_BYTES)
    assert runtime.registered == {}
    pool.close()
