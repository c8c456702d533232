"""Drives that fail, files that vanish, processes that are killed: who hears of it, and what is left behind."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mounts import image, mounted
from support.fake_device import FakeDevice, FakeFault, FakeRequest
from support.patience import SECONDS, wait_until

from zero_infinity.errors import EngineClosedError, TransferError
from zero_infinity.storage.io_engine import IOEngine
from zero_infinity.storage.io_types import Direction, Priority
from zero_infinity.storage.striped_files import FileDevice

READ, WRITE = Direction.READ, Direction.WRITE
DEMANDED, PREFETCH, WRITE_BACK = Priority.DEMANDED, Priority.PREFETCH, Priority.WRITE_BACK
PAGE = 4096
MIB = 1 << 20


# Errors of the drive


def test_an_error_in_the_middle_is_told_to_everyone_once_nothing_runs_any_more() -> None:
    gate = threading.Event()

    def latency(request: FakeRequest) -> float:
        if request.index != 2:
            gate.wait(SECONDS)
        return 0.0

    device = FakeDevice(latency=latency, faults=[FakeFault(errno.EIO, at_request=2)])
    engine = IOEngine(device, 3, PAGE)
    engine.reserve(64 * PAGE)
    memory = mmap.mmap(-1, 8 * PAGE)
    view = memoryview(memory)
    hit = engine.submit(WRITE, view, PAGE, WRITE_BACK)  # requests 0, 1 are held, 2 fails, the rest never starts
    queued = engine.submit(READ, memoryview(bytearray(PAGE)), 40 * PAGE, PREFETCH)
    behind = engine.submit(READ, memoryview(bytearray(PAGE)), PAGE, DEMANDED)
    heard: list[BaseException | None] = []
    for ticket in (hit, queued, behind):
        ticket.add_done_callback(heard.append)

    with pytest.raises(EngineClosedError, match=r"write of 4\.0 KiB at memory at 12288 failed"):
        queued.wait(SECONDS)
    assert not hit.done()  # two of its requests still use the memory
    gate.set()
    with pytest.raises(TransferError) as caught:
        hit.wait(SECONDS)
    with pytest.raises(TransferError):
        hit.wait(SECONDS)  # every time
    error = caught.value
    assert (error.errno, error.filename) == (errno.EIO, "memory at 12288")
    assert "Input/output error (EIO); the drive reported an error" in str(error)
    with pytest.raises(EngineClosedError) as later:
        behind.wait(SECONDS)
    assert later.value.__cause__ is error
    with pytest.raises(EngineClosedError, match=r"because of an earlier failure: .*EIO"):
        engine.submit(READ, memoryview(bytearray(PAGE)), 0, DEMANDED)
    with pytest.raises(EngineClosedError, match="EIO"):
        engine.reserve(PAGE)
    assert {type(each) for each in heard} == {TransferError, EngineClosedError}
    assert len(heard) == 3
    assert len(device.requests) == 3
    counters = engine.counters()
    assert (len(engine._workers.queue._unfinished), counters.write_requests) == (0, 2)
    engine.close()
    assert device.closed
    view.release()
    memory.close()  # the error that the engine keeps must not keep the memory


def test_what_was_fully_at_the_device_when_another_failed_still_succeeds() -> None:
    gate = threading.Event()

    def latency(request: FakeRequest) -> float:
        if request.offset == 0:
            gate.wait(SECONDS)
        return 0.0

    device = FakeDevice(latency=latency, faults=[FakeFault(errno.EIO, offsets=range(PAGE, 2 * PAGE))])
    engine = IOEngine(device, 2, PAGE)
    engine.reserve(4 * PAGE)
    good = engine.submit(WRITE, memoryview(b"g" * PAGE), 0, PREFETCH)
    wait_until(lambda: len(device.requests) == 1)
    bad = engine.submit(WRITE, memoryview(b"b" * PAGE), PAGE, PREFETCH)
    with pytest.raises(TransferError):
        bad.wait(SECONDS)
    gate.set()
    good.wait(SECONDS)
    assert device.contents()[:PAGE] == b"g" * PAGE
    engine.close()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EINVAL, "EINVAL.*may not support direct I/O"),
        (errno.ENOSPC, "ENOSPC.*drive is full"),
        (errno.EBADF, "EBADF.*closed the descriptor of the swap file"),
        (errno.ENXIO, r"No such device or address \(ENXIO\)"),
    ],
)
@pytest.mark.parametrize("direction", [READ, WRITE])
def test_an_errno_comes_with_a_hint(number: int, text: str, direction: Direction) -> None:
    engine = IOEngine(FakeDevice(faults=[FakeFault(number)]))
    engine.reserve(PAGE)
    with pytest.raises(TransferError, match=f"{direction.value} of 4.0 KiB at memory at 0 failed: .*{text}") as caught:
        engine.submit(direction, memoryview(bytearray(PAGE)), 0, PREFETCH).wait(SECONDS)
    assert caught.value.errno == number
    engine.close()


@pytest.mark.parametrize(("moved", "text"), [(0, "ended after 0 bytes"), (-1, "reports -1"), (9999, "reports 9999")])
def test_a_device_that_reports_a_senseless_count_is_not_believed(moved: int, text: str) -> None:
    class Liar(FakeDevice):
        def read(self, memory: memoryview, offset: int) -> int:
            return moved

    engine = IOEngine(Liar())
    engine.reserve(PAGE)
    with pytest.raises(TransferError, match=text):
        engine.submit(READ, memoryview(bytearray(PAGE)), 0, PREFETCH).wait(SECONDS)
    engine.close()


def test_a_bug_in_a_device_reaches_who_waits() -> None:
    class Buggy(FakeDevice):
        def read(self, memory: memoryview, offset: int) -> int:
            raise ZeroDivisionError("a bug")

    engine = IOEngine(Buggy())
    engine.reserve(PAGE)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        engine.submit(READ, memoryview(bytearray(PAGE)), 0, PREFETCH).wait(SECONDS)
    with pytest.raises(EngineClosedError, match="a bug"):
        engine.submit(READ, memoryview(bytearray(PAGE)), 0, PREFETCH)
    engine.close()


# Real files


@pytest.fixture
def striped(tmp_path: Path) -> tuple[FileDevice, IOEngine, Path]:
    """64 KiB over two directories in stripes of 8 KiB; the second directory's path."""
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    device = FileDevice([tmp_path / "good", tmp_path / "bad"], stripe_bytes=2 * PAGE)
    engine = IOEngine(device)
    engine.reserve(16 * PAGE)
    engine.submit(WRITE, memoryview(mmap.mmap(-1, 16 * PAGE)), 0, DEMANDED).wait(SECONDS)
    return device, engine, tmp_path / "bad"


def test_one_of_two_directories_losing_its_file_is_named(striped: tuple[FileDevice, IOEngine, Path]) -> None:
    device, engine, bad = striped
    os.ftruncate(device.descriptors[1], 0)
    memory = memoryview(mmap.mmap(-1, 16 * PAGE))
    engine.submit(READ, memory[: 2 * PAGE], 4 * PAGE, DEMANDED).wait(SECONDS)  # the other one still reads
    with pytest.raises(TransferError, match=rf"read of 8.0 KiB at {bad}/\(swap file\) at \d+ failed: it ended"):
        engine.submit(READ, memory, 0, DEMANDED).wait(SECONDS)
    engine.close()


def test_one_of_two_directories_refusing_writes_is_named(striped: tuple[FileDevice, IOEngine, Path]) -> None:
    device, engine, bad = striped
    full = os.open("/dev/full", os.O_RDWR)  # every write to it: no space left on device
    os.dup2(full, device.descriptors[1], inheritable=False)
    os.close(full)
    with pytest.raises(TransferError, match=r"ENOSPC.*the drive is full") as caught:
        engine.submit(WRITE, memoryview(mmap.mmap(-1, 16 * PAGE)), 0, DEMANDED).wait(SECONDS)
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value.filename).startswith(f"{bad}/")
    engine.close()


def test_a_disk_that_fills_up_where_space_cannot_be_reserved_is_an_error_at_the_write(tmp_path: Path) -> None:
    with image(tmp_path, "ext2", 16 * MIB) as path:
        device = FileDevice(path)
        engine = IOEngine(device)
        with pytest.warns(RuntimeWarning, match="cannot reserve"):
            engine.reserve(8 * MIB)
        greedy = os.open(path / "greedy", os.O_CREAT | os.O_WRONLY)
        with contextlib.suppress(OSError):
            while True:
                os.write(greedy, bytes(64 << 10))
        os.close(greedy)
        with pytest.raises(TransferError, match=r"ENOSPC.*the drive is full.*free some space"):
            engine.submit(WRITE, memoryview(mmap.mmap(-1, 8 * MIB)), 0, DEMANDED).wait(SECONDS)
        engine.close()


# Processes

_HOLDER = """
import mmap, sys, threading
from zero_infinity.storage.io_types import Direction, Priority
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.storage.io_engine import IOEngine
engine = IOEngine(FileDevice(sys.argv[1]))
engine.reserve(8 << 20)
memory = mmap.mmap(-1, 8 << 20)
engine.submit(Direction.WRITE, memoryview(memory), 0, Priority.DEMANDED).wait()
print("ready", flush=True)
while True:
    engine.submit(Direction.WRITE, memoryview(memory), 0, Priority.DEMANDED).wait()
"""

_CHECKER = """
import mmap, os, sys
from zero_infinity.storage.io_types import Direction, Priority
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.storage.io_engine import IOEngine
engine = IOEngine(FileDevice(sys.argv[1]), request_bytes=64 << 10)
engine.reserve(1 << 20)
memory, back = mmap.mmap(-1, 1 << 20), mmap.mmap(-1, 1 << 20)
for _ in range(50):
    memory[:] = os.urandom(1 << 20)
    engine.submit(Direction.WRITE, memoryview(memory), 0, Priority.WRITE_BACK)
    engine.submit(Direction.READ, memoryview(back), 0, Priority.DEMANDED).wait()
    if memory[:] != back[:]:
        sys.exit("met another run's bytes")
engine.close()
"""


def start(program: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, str(directory)], stdout=subprocess.PIPE, text=True)


def test_kill_9_leaves_nothing_and_frees_the_space(tmp_path: Path) -> None:
    with image(tmp_path, "ext4", 24 * MIB) as path:
        before = sorted(os.listdir(path))
        free = os.statvfs(path).f_bfree
        with start(_HOLDER, path) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert sorted(os.listdir(path)) == before
            held = os.statvfs(path)
            assert (free - held.f_bfree) * held.f_frsize >= 8 * MIB
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert sorted(os.listdir(path)) == before
        wait_until(lambda: os.statvfs(path).f_bfree == free)


def test_two_runs_in_one_directory_never_meet(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("not ours")
    with start(_CHECKER, tmp_path) as first, start(_CHECKER, tmp_path) as second:
        assert first.wait(SECONDS) == 0
        assert second.wait(SECONDS) == 0
    assert os.listdir(tmp_path) == ["precious"]
    assert (tmp_path / "precious").read_text() == "not ours"


@pytest.mark.filterwarnings("ignore:.*no direct I/O")
def test_a_process_that_ends_with_transfers_queued_just_ends(tmp_path: Path) -> None:
    program = _HOLDER[: _HOLDER.index("while True")] + (
        "for _ in range(100): engine.submit(Direction.WRITE, memoryview(memory), 0, Priority.WRITE_BACK)\n"
    )
    with mounted(tmp_path / "t", "-t", "tmpfs", "-o", "size=16m", "tmpfs") as path, start(program, path) as process:
        assert process.wait(SECONDS) == 0
        assert os.listdir(path) == []
