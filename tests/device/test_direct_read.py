"""Parameters that are read from NVMe into device memory past the host: the same bits, and no byte through host memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.compare import HALF, MINIMAL, Setting, adamw, compare, sgd, training
from support.device import DEVICE, EXTENSION, WHY_NOT
from support.matrix import thinned
from support.models import CASES
from support.patience import SECONDS
from torch import nn

import zero_infinity as zi
from device import lag
from zero_infinity.policy.homes import Home
from zero_infinity.policy.partition import Span
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.io_engine import IOEngine
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.tiers import direct_read
from zero_infinity.tiers.compute_thread import ComputeThread
from zero_infinity.tiers.copier import Copier, DeviceCopy
from zero_infinity.tiers.torch_accelerator import TorchAccelerator
from zero_infinity.tiers.update_worker import UpdateWorker

if EXTENSION is None:
    pytest.skip(str(WHY_NOT), allow_module_level=True)

PAGE = 4096
WHOLE = Span(0, PAGE)


@pytest.fixture(params=range(2))
def delays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Long delays, drawn from a seed."""
    EXTENSION.set_delays(seed=request.param, probability=0.3, max_seconds=3e-4)
    yield
    torch.accelerator.synchronize(DEVICE)
    EXTENSION.set_delays(probability=0.1, max_seconds=2e-4)


def test_it_works_on_the_test_device(tmp_path: Path) -> None:
    EXTENSION.set_delays(kernel_seconds=0.02)
    assert direct_read.why_not(DEVICE, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    EXTENSION.set_delays(probability=0.1, max_seconds=2e-4)


def test_bytes_that_do_not_arrive_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag.GdsFile, "load_storage", lambda *_: None)
    assert direct_read.why_not(DEVICE, tmp_path) == "the bytes read differ from those written"


def test_a_driver_that_fails_is_a_reason_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("not supported\nhere")

    monkeypatch.setattr(lag.GdsFile, "save_storage", fails)
    assert direct_read.why_not(DEVICE, tmp_path) == "not supported"
    assert direct_read.find_direct_reader(DEVICE, [tmp_path]) is None


@pytest.mark.parametrize(("case", "setting"), thinned(["mlp", "llama", "tied"], [HALF, MINIMAL]))
def test_training_with_direct_reads(case: str, setting: Setting, delays: None, tmp_path: Path) -> None:
    chosen = CASES[case]
    EXTENSION.reset_counts(DEVICE.index)
    compare(chosen.make, training(chosen.batch, chosen.loss), adamw, setting, tmp_path)
    assert EXTENSION.counts(DEVICE.index)["from_files"] > 0


@dataclass(frozen=True)
class Source:
    """A unit of one page."""

    block: Block
    name: str = "unit"
    number: int = 0
    compute_dtype: torch.dtype = torch.uint8
    dtype: torch.dtype = torch.uint8
    num_elements: int = PAGE
    spans: tuple[Span, ...] = (WHOLE,)
    stored: Span = WHOLE
    is_stored_in_parts: bool = False

    def the_block(self) -> Block:
        return self.block


class SlowWrites(FileDevice):
    """Writes that take as long as a test wants."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.may_write = threading.Event()
        self.may_write.set()

    def write(self, memory: memoryview, offset: int) -> int:
        assert self.may_write.wait(SECONDS)
        return super().write(memory, offset)


@dataclass
class Bench:
    """One block on a drive, and the thread that copies it."""

    drive: SlowWrites
    store: BlockStore
    copier: Copier
    block: Block

    def write(self, value: int) -> None:
        """Change the block, which then leaves memory."""
        self.store.fetch(self.block)
        self.store.wait(self.block)
        self.store.lease(self.block).fill_(value)
        self.store.mark_dirty(self.block)
        self.store.pool.collect()
        self.store.evict(self.block)

    def copy(self) -> DeviceCopy:
        copy = DeviceCopy(Source(self.block), is_direct=True)
        self.copier.submit(0, "unit", [copy])
        return copy


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    drive = SlowWrites(tmp_path)
    store = BlockStore(BufferPool(16 * PAGE), IOEngine(drive))
    device = TorchAccelerator(DEVICE, 2 * PAGE)
    reader = direct_read.find_direct_reader(DEVICE, [tmp_path])
    assert reader is not None
    worker = UpdateWorker(store)
    copier = Copier(store, device, None, ComputeThread(worker, None), lane="direct", direct=reader)
    made = Bench(drive, store, copier, store.create("unit", PAGE, Home.NVME))
    made.write(1)
    store.settle()
    yield made
    drive.may_write.set()
    worker.close()
    copier.close()
    store.close()


def values(copy: DeviceCopy) -> list[int]:
    copy.wait()
    return copy.use().cpu().unique().tolist()


def test_a_read_waits_for_the_write_before_it(bench: Bench) -> None:
    bench.drive.may_write.clear()
    bench.write(2)
    copy = bench.copy()
    assert not copy._ready.wait(0.2)
    bench.drive.may_write.set()
    assert values(copy) == [2]


def test_a_copy_that_was_dropped_is_not_read(bench: Bench) -> None:
    bench.drive.may_write.clear()
    bench.write(2)
    copy = bench.copy()
    bench.copier.drop(copy)
    copy.wait()
    assert copy.memory is None


def test_a_read_into_reused_memory_waits_for_its_readers(bench: Bench) -> None:
    first = bench.copy()
    first.wait()
    read = first.use()
    stream = torch.accelerator.current_stream(DEVICE)
    gate = EXTENSION.close_gate(DEVICE.index, stream.stream_id)
    address, seen = read.data_ptr(), read + 0
    del read
    bench.copier.drop(first)
    bench.write(2)
    second = bench.copy()
    assert not second._ready.wait(0.2)
    gate.open()
    assert values(second) == [2]
    assert second.use().data_ptr() == address
    assert seen.cpu().unique().tolist() == [1]


def test_host_memory_is_not_used(bench: Bench) -> None:
    EXTENSION.reset_counts(DEVICE.index)
    copy = bench.copy()
    copy.wait()
    assert (bench.store.pool.held_bytes, bench.store.engine.counters().bytes_read) == (0, 0)
    counts = EXTENSION.counts(DEVICE.index)
    assert (counts["from_files"], counts["uploaded"]) == (PAGE, 0)
    assert bench.copier.direct.bytes_read == PAGE


def test_reads_that_are_verified_go_through_the_host(tmp_path: Path) -> None:
    store = BlockStore(BufferPool(16 * PAGE), IOEngine(FileDevice(tmp_path)), verify=True)
    assert not store.file_ranges(store.create("unit", PAGE, Home.NVME))
    store.close()


def test_what_a_step_reads_directly_is_not_read_by_the_host(tmp_path: Path) -> None:
    """With a host budget that keeps nothing, forward and backward read parameters directly, the update through RAM."""

    def train(config: zi.Config) -> tuple[int, int, list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
        model, optimizer = zi.prepare(model, sgd(model), config)
        losses = []
        for number in range(6):
            if number == 5:
                zi.synchronize(model)
                EXTENSION.reset_counts(DEVICE.index)
                before = zi.stats(model).bytes_read
            batch = torch.randn(4, 128, generator=torch.Generator().manual_seed(number)).to(DEVICE)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        zi.synchronize(model)
        read = zi.stats(model).bytes_read - before
        found = EXTENSION.counts(DEVICE.index)
        zi.api.close(model)
        return read, found["from_files"], losses

    read, directly, losses = train(zi.Config(memory="256KiB", device_memory="192KiB", nvme=tmp_path))
    through_host, none, same = train(zi.Config(memory="256KiB", device_memory="192KiB", nvme=tmp_path, verify=True))
    assert none == 0 < directly
    assert read < through_host
    assert losses == same
