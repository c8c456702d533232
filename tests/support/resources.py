"""What an engine takes from the process and must give back: threads, file descriptors, mapped memory."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from support.patience import wait_until
from zero_infinity.storage import arena, buffer_pool
from zero_infinity.storage.buffer_pool import BufferPool


@dataclass(frozen=True, slots=True)
class Resources:
    """What the process has now."""

    threads: frozenset[str]
    descriptors: frozenset[str]  # number and target
    num_regions: int  # mapped
    resident_bytes: int

    def __str__(self) -> str:
        return (
            f"{len(self.threads)} threads, {len(self.descriptors)} descriptors, {self.num_regions} regions, "
            f"{self.resident_bytes:,} bytes resident"
        )


def resources() -> Resources:
    gc.collect()
    threads = frozenset(f"{thread.name} {thread.ident}" for thread in threading.enumerate())
    with open("/proc/self/maps") as maps:
        num_regions = sum(1 for _ in maps)
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Resources(threads, open_descriptors(), num_regions, resident)


def open_descriptors() -> frozenset[str]:
    """Number and target of each."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # the one that listed the directory
            continue
    return frozenset(found)


@contextmanager
def all_given_back() -> Iterator[None]:
    """Check that no thread and no descriptor is left over."""
    before = resources()
    yield
    # A worker that is in the middle of an update ends it first, and the engine with it.
    wait_until(lambda: resources().threads <= before.threads)
    after = resources()
    assert after.threads <= before.threads
    assert after.descriptors <= before.descriptors


# ---------------------------------------------------------------------- every change of what a pool holds


class Watch:
    """The bytes that pools held, checked at every change."""

    def __init__(self) -> None:
        self.num_changes = 0
        self.peaks: dict[str, int] = {}
        self.violations: list[str] = []
        self.mapped_bytes = 0  # by all pools together, as told to the kernel
        self.peak_mapped_bytes = 0

    def look(self, pool: BufferPool) -> None:
        self.num_changes += 1
        arena = getattr(pool, "_arena", None)
        mapped = arena.mapped_bytes if arena is not None else 0
        charged = pool.__dict__.get("watched_charged_bytes", 0)
        held = pool.__dict__.get("watched_held_bytes", 0)
        self.peaks[pool.name] = max(self.peaks.get(pool.name, 0), held)
        if held > pool.budget or mapped + charged > pool.budget:
            # Kept, not raised: it may happen on a worker, in the middle of something.
            self.violations.append(f"{pool.name}: {held=:,} {mapped=:,} {charged=:,} of {pool.budget:,}")


def watch_pools(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watch every change in the accounting of every pool, and every mapping and unmapping."""
    watch = Watch()

    def watched(name: str) -> property:
        key = f"watched{name}"

        def write(pool: BufferPool, value: int) -> None:
            pool.__dict__[key] = value
            watch.look(pool)

        return property(lambda pool: pool.__dict__[key], write)

    for name in ("_held_bytes", "_charged_bytes"):
        monkeypatch.setattr(BufferPool, name, watched(name), raising=False)
    _watch_kernel(monkeypatch, watch)
    return watch


def _watch_kernel(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    real_map, real_unmap = arena.map_pages, arena.unmap_pages
    lock = threading.Lock()

    def count(num_bytes: int) -> None:
        with lock:
            watch.mapped_bytes += num_bytes
            watch.peak_mapped_bytes = max(watch.peak_mapped_bytes, watch.mapped_bytes)

    def map_pages(num_bytes: int) -> int:
        address = real_map(num_bytes)
        count(num_bytes)
        return address

    def unmap_pages(address: int, num_bytes: int) -> None:
        real_unmap(address, num_bytes)
        count(-num_bytes)

    monkeypatch.setattr(arena, "map_pages", map_pages)
    for module in (arena, buffer_pool):
        monkeypatch.setattr(module, "unmap_pages", unmap_pages)
