"""Stores and engines over scripted devices, closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.block_bench import BlockBench
from support.io_bench import IOBench


@pytest.fixture
def bench() -> Iterator[Callable[..., BlockBench]]:
    """Makes block stores."""
    made: list[BlockBench] = []

    def make(*args: object, **options: object) -> BlockBench:
        made.append(BlockBench(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.gate.set()
        each.store.close()


@pytest.fixture
def make() -> Iterator[Callable[..., IOBench]]:
    """Makes I/O engines."""
    made: list[IOBench] = []

    def build(**options: object) -> IOBench:
        made.append(IOBench(**options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for bench in made:
        bench.gate.set()
        bench.engine.close()
