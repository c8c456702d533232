"""Reading and writing whole blocks with the calls that the engine makes on the thread that fetches and evicts."""

from __future__ import annotations

import torch

from zero_infinity.storage.block import Block
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.io_types import Priority


def read_block(store: BlockStore, block: Block) -> torch.Tensor:
    """Fetch, wait until nobody is going to change it, and lease."""
    store.fetch(block, Priority.DEMANDED)
    store.wait(block)
    return store.lease(block)


def write_block(store: BlockStore, block: Block, data: torch.Tensor) -> None:
    """Replace the whole content, after the workers that hold the block."""
    store.fetch(block, Priority.DEMANDED)
    with store.changing(block) as memory:
        memory.copy_(data)
    store.mark_dirty(block)


def flush_blocks(store: BlockStore, *blocks: Block) -> None:
    """Write dirty blocks home and wait until they are there."""
    for block in blocks:
        store.write_back(block)
    store.settle()
