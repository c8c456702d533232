"""Device memory that is reused while kernels still read it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from support.device import DEVICE, EXTENSION, WHY_NOT

from zero_infinity.comm.proposals import Chosen
from zero_infinity.policy.partition import Span
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.tiers.compute_device import memory_to_compute_into
from zero_infinity.tiers.torch_accelerator import TorchAccelerator
from zero_infinity.tiers.unit_gather import UnitGather

if EXTENSION is None:
    pytest.skip(str(WHY_NOT), allow_module_level=True)

SIZE = 4096


@pytest.fixture(autouse=True)
def _slow_kernels() -> Iterator[None]:
    """A kernel takes 20 ms; copies take nothing, and overtake it unless they wait."""
    EXTENSION.set_delays(kernel_seconds=0.02)
    yield
    torch.accelerator.synchronize(DEVICE)
    EXTENSION.set_delays(probability=0.1, max_seconds=2e-4)


def pinned(value: int, num_bytes: int = SIZE) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8).pin_memory()


def read_slowly(device: TorchAccelerator, value: int) -> tuple[object, torch.Tensor]:
    """Memory with a copy in it, and the result of a kernel that has not read it yet."""
    memory = device.allocate(SIZE)
    device.upload(pinned(value), memory.tensor()).order()
    memory.used()
    return memory, memory.tensor() + 0


def test_an_upload_into_reused_memory_waits_for_its_readers() -> None:
    device = TorchAccelerator(DEVICE, 2 * SIZE)
    memory, read = read_slowly(device, 1)
    address = memory.tensor().data_ptr()
    memory.release()
    again = device.allocate(SIZE)
    assert again.tensor().data_ptr() == address
    device.upload(pinned(2), again.tensor())
    torch.accelerator.synchronize(DEVICE)
    assert read.eq(1).all()


def test_memory_that_goes_back_to_torch_waits_for_its_readers() -> None:
    device = TorchAccelerator(DEVICE, 2 * SIZE)
    memory, read = read_slowly(device, 1)
    memory.release()
    device.allocate(2 * SIZE)  # does not fit beside the free one
    torch.accelerator.synchronize(DEVICE)
    assert read.eq(1).all()


def test_memory_of_a_tensor_that_outlives_its_release_waits_for_its_readers() -> None:
    device = TorchAccelerator(DEVICE, 2 * SIZE)
    memory = device.allocate(SIZE)
    device.upload(pinned(1), memory.tensor()).order()
    memory.used()
    kept = memory.tensor()
    memory.release()
    device.upload(pinned(2), device.allocate(SIZE).tensor())
    read = kept + 0
    del kept
    torch.accelerator.synchronize(DEVICE)
    assert read.eq(1).all()


def test_memory_of_a_model_that_is_gone_is_kept_for_its_last_kernels() -> None:
    device = TorchAccelerator(DEVICE, 2 * SIZE)
    memory, read = read_slowly(device, 1)
    del memory  # with the cache, which nobody has emptied
    torch.accelerator.synchronize(DEVICE)
    assert read.eq(1).all()


@dataclass(frozen=True)
class Shard:
    """A rank's part of a unit that lives on the device."""

    block: Block
    dtype: torch.dtype = torch.uint8
    spans: tuple[Span, ...] = (Span(0, SIZE), Span(SIZE, 2 * SIZE))
    stored: Span = field(default_factory=lambda: Span(0, SIZE))
    is_updated_early: bool = False

    def the_block(self) -> Block:
        return self.block


def test_what_another_rank_asks_for_is_sent_after_its_update() -> None:
    sent: list[torch.Tensor] = []
    channel = mock.Mock(rank=0, send_parts=lambda _, __, part: sent.append(part.clone()))
    store = BlockStore(BufferPool(1 << 20))
    block = store.create_on_device("unit", SIZE, DEVICE)
    gather = UnitGather(store, channel)
    gather.register(0, "unit", [Shard(block)])
    torch.accelerator.synchronize(DEVICE)
    with torch.Stream(DEVICE):
        block.the_device_bytes().add_(7)
    gather._take_part(Chosen(0, frozenset({1}), is_common=False))
    assert sent[0].eq(7).all()
    store.close()


def test_memory_that_is_given_back_to_the_device_waits_for_its_readers() -> None:
    device = TorchAccelerator(DEVICE, 2 * SIZE)
    memory, read = read_slowly(device, 1)
    memory.release()
    device.memory.give_back()
    torch.accelerator.synchronize(DEVICE)
    assert read.eq(1).all()


def test_a_device_is_closed_after_its_last_readers() -> None:
    device = TorchAccelerator(DEVICE, 2 * SIZE)
    memory, read = read_slowly(device, 1)
    memory.release()
    device.close()
    del device, memory
    gc.collect()
    torch.accelerator.synchronize(DEVICE)
    assert read.eq(1).all()


def test_computing_into_new_memory_waits_for_its_earlier_upload() -> None:
    device = TorchAccelerator(DEVICE, 2 * SIZE)
    EXTENSION.set_delays(bytes_per_second=200e3)  # 20 ms
    memory = device.allocate(SIZE)
    device.upload(pinned(1), memory.tensor())
    memory.release()  # it was never used
    again = memory_to_compute_into(device)(SIZE)
    again.used()
    again.tensor().fill_(2)
    torch.accelerator.synchronize(DEVICE)
    assert again.tensor().eq(2).all()


def test_a_copy_on_the_device_waits_until_its_source_is_written() -> None:
    device = TorchAccelerator(DEVICE, 4 * SIZE)
    source = torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    for _ in range(4):
        source.add_(7)  # later than a kernel of a stream that does not wait
    target = device.allocate(SIZE)
    transfer = device.copy(source, target.tensor(), device.computed())
    with torch.Stream(DEVICE):
        transfer.order()
        assert target.tensor().eq(28).all()


def test_what_lives_on_the_device_is_not_for_copies() -> None:
    device = TorchAccelerator(DEVICE, 4 * SIZE)
    device.set_aside(3 * SIZE)
    assert device.budget == SIZE


def test_an_unpinned_source_may_change_at_once_and_is_converted() -> None:
    device = TorchAccelerator(DEVICE, 1 << 20)
    target = torch.empty(200_000, dtype=torch.bfloat16, device=DEVICE)
    source = (torch.arange(200_000) // 1000).float()
    expected = source.bfloat16()
    EXTENSION.set_delays(bytes_per_second=20e6)
    transfer = device.upload(source, target)
    source.zero_()
    transfer.wait()
    assert torch.equal(target.cpu(), expected)
    assert EXTENSION.counts(DEVICE.index)["unpinned"] == 0
