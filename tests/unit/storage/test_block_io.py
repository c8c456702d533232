"""Extents, transfers, their errors and checksums."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.block_bench import PAGE, BlockBench, filled, in_thread, numbered, room
from support.blocks import flush_blocks, read_block, write_block
from support.fake_device import FakeFault
from support.patience import SECONDS, wait_until

from zero_infinity.errors import CorruptionError, TransferError
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Residence
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.io_engine import IOEngine
from zero_infinity.storage.io_types import Direction
from zero_infinity.storage.striped_files import FileDevice


def test_reserved_space_is_used_first(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    b.store.reserve(3 * PAGE)
    assert b.engine.capacity == 3 * PAGE
    for name in "abc":
        b.block(name, 1)
    assert b.engine.capacity == 3 * PAGE


@pytest.mark.parametrize("direction", list(Direction))
def test_an_io_error_reaches_the_thread_that_waits(bench: Callable[..., BlockBench], direction: Direction) -> None:
    fault = FakeFault(errno.EIO, direction=direction, offsets=range(PAGE, 2 * PAGE))
    b = bench(2, faults=(fault,))
    b.block("a", 1)
    block, other = b.block("b"), b.block("c")
    write_block(b.store, block, filled(1))
    b.store.evict(block)
    b.store.fetch(other)
    message = f"{direction.value} of 4.0 KiB at memory at 4096 failed"
    if direction is Direction.READ:
        wait_until(lambda: not block.stays)
        b.store.fetch(block)
    with pytest.raises(TransferError, match=message) as caught:
        b.store.wait(block) if direction is Direction.READ else b.store.settle()
    assert caught.value.errno == errno.EIO
    assert "memory at 4096" in str(caught.value.filename)
    for call in (b.store.fetch, b.store.wait, b.store.lease, b.store.write_back, lambda _: b.store.settle()):
        with pytest.raises(TransferError, match="memory at 4096"):
            call(other)
    with pytest.raises(TransferError, match="memory at 4096"):
        b.store.create("d", PAGE, Home.NVME)
    b.store.drop(other)  # giving things back goes on


def test_the_error_is_the_one_of_the_transfer_that_failed(bench: Callable[..., BlockBench]) -> None:
    """Those that were given up because of it hear first, and only that the engine has stopped."""
    b = bench(8, faults=(FakeFault(errno.ENOSPC, direction=Direction.WRITE),))
    made = [b.store.create(str(index), PAGE, Home.NVME) for index in range(6)]
    for block in made:
        write_block(b.store, block, filled(1))
    b.gate.clear()
    for block in made:
        b.store.evict(block)
    b.gate.set()
    with pytest.raises(TransferError) as caught:
        b.store.settle()
    assert caught.value.errno == errno.ENOSPC


def test_a_flipped_bit_is_found(bench: Callable[..., BlockBench]) -> None:
    b = bench(2, verify=True)
    b.block("a", 1)
    block = b.block("layers.3.weight", 2)
    assert read_block(b.store, block)[0] == 2
    b.store.evict(block)
    b.device._data[PAGE + 77] ^= 16
    with pytest.raises(CorruptionError, match=r"'layers.3.weight' \(4.0 KiB\) came back changed from memory at 4096"):
        read_block(b.store, block)


def test_a_flipped_bit_in_a_file_is_found(tmp_path: Path) -> None:
    device = FileDevice(tmp_path)
    store = BlockStore(BufferPool(4 * PAGE), IOEngine(device), verify=True)
    other, block = (store.create(name, 2 * PAGE - 5, Home.NVME) for name in ("other", "it"))
    for each in (other, block):
        write_block(store, each, torch.arange(2 * PAGE - 5).to(torch.uint8))
        flush_blocks(store, each)
        store.evict(each)
    with Path(f"/proc/self/fd/{device.descriptors[0]}").open("r+b", buffering=0) as file:
        file.seek(2 * PAGE + 100)
        byte = file.read(1)
        file.seek(2 * PAGE + 100)
        file.write(bytes([byte[0] ^ 1]))
        os.fsync(file.fileno())
    assert read_block(store, other)[1] == 1
    store.evict(other)
    with pytest.raises(CorruptionError) as caught:
        read_block(store, block)
    message = str(caught.value)
    assert "'it'" in message
    assert f"{tmp_path}/(swap file) at {2 * PAGE}" in message
    store.close()


def test_bytes_past_the_end_of_a_block_are_not_verified(bench: Callable[..., BlockBench]) -> None:
    b = bench(2, verify=True)
    block = b.store.create("a", 100, Home.NVME)
    write_block(b.store, block, filled(1, 100))
    b.store.evict(block)
    wait_until(lambda: not block.stays)
    b.device._data[100] ^= 1
    assert read_block(b.store, block).tolist() == [1] * 100


@pytest.mark.parametrize("span", [(0, 1), (5, 9000), (4096, 8192), (4095, 8193), (12000, 3 * PAGE), (0, 3 * PAGE)])
def test_a_look_finds_the_content_in_memory_and_at_home_and_moves_nothing(
    bench: Callable[..., BlockBench], span: tuple[int, int]
) -> None:
    made = bench(3)
    block = made.store.create("looked at", 3 * PAGE, Home.NVME)
    content = numbered(made.store, block)
    memory = room(5 * PAGE)
    assert bytes(made.store.peek(block, *span, memory)) == content[span[0] : span[1]]
    assert block.residence is Residence.PRESENT
    assert block.dirty
    made.store.evict(block)
    wait_until(lambda: not block.stays)
    other = made.fetched("other", 7, pages=3)  # all the memory that there is
    reads = made.directions().count(Direction.READ)
    assert bytes(made.store.peek(block, *span, memory)) == content[span[0] : span[1]]
    assert made.directions().count(Direction.READ) == reads + 1
    assert not block.stays
    assert other.residence is Residence.PRESENT


def test_a_look_at_what_is_on_its_way(bench: Callable[..., BlockBench]) -> None:
    made = bench(2)
    block = made.store.create("moving", PAGE, Home.NVME)
    content = numbered(made.store, block, first=3)
    made.gate.clear()
    made.store.evict(block)  # it is being written: what is in memory counts
    assert bytes(made.store.peek(block, 10, 20, room(3 * PAGE))) == content[10:20]
    made.gate.set()
    wait_until(lambda: not block.stays)
    made.gate.clear()
    made.store.fetch(block)  # it is being read: what is at home counts
    thread, found = in_thread(lambda: bytes(made.store.peek(block, 10, 20, room(3 * PAGE))))
    made.gate.set()
    thread.join(SECONDS)
    assert found == [content[10:20]]
