"""Counts what moves between memory and the drives, by kind of block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from zero_infinity.storage.block import Block
from zero_infinity.storage.block_io import BlockIO
from zero_infinity.storage.io_types import Direction


@contextmanager
def drive_bytes() -> Iterator[Counter[str]]:
    """The bytes read and written inside, of "record", "gradient" and "parameters"."""
    moved: Counter[str] = Counter()
    submit = BlockIO.submit

    def count(io: BlockIO, block: Block, direction: Direction, *args: Any) -> Any:
        last = block.name.rsplit(" ", 1)[-1]
        moved[last if last in ("record", "gradient") else "parameters"] += block.stored_bytes
        return submit(io, block, direction, *args)

    with mock.patch.object(BlockIO, "submit", count):
        yield moved
