"""Tensors that autograd has saved, kept as blocks of the store until backward wants them.

A saved tensor's bytes are copied into a block, which the policy may push out to NVMe and fetches back ahead of
backward: packing is one access, unpacking another, in an order that repeats every step. For that, blocks are used
again: there is a pool for each size, and of its free blocks the first is taken, whichever order they came back in.

- What is copied is the whole storage, once for each version of it: views of it, and several operations that have saved
  it, share the block.
- Unpacking copies the bytes into torch's memory and gives the block back. A graph that is retained holds that tensor.
- A graph that dies without a backward gives its blocks back when the next tensor comes, or at the step.
- What is small, and what there is no room for beside what one operation needs, stays in torch's memory.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from collections import deque

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from zero_infinity.errors import CapacityError
from zero_infinity.interrupts import held
from zero_infinity.runtime.residency import Residency
from zero_infinity.store.block import Block, Home
from zero_infinity.store.extents import round_up

# A storage of fewer bytes is not worth a request.
_SMALL_BYTES = 64 * 1024
# Dead storages that may be remembered beyond as many as are alive.
_DEAD_STORAGES = 64


class _Kept:
    """The bytes of one storage: in a block, or (unpacked) in memory."""

    __slots__ = ("__weakref__", "block", "device", "memory")

    def __init__(self, block: Block, device: torch.device) -> None:
        self.block: Block | None = block
        self.device = device
        self.memory: torch.Tensor | None = None


class _KeptRef(weakref.ref[_Kept]):
    """Tells when nobody will unpack a block any more."""

    __slots__ = ("block",)

    block: Block


class SavedView:
    """What autograd holds in the place of a saved tensor."""

    __slots__ = ("_activations", "_dtype", "_kept", "_offset", "_size", "_stride")

    def __init__(self, activations: Activations, kept: _Kept, tensor: torch.Tensor) -> None:
        self._activations = activations
        self._kept = kept
        self._dtype = tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def restore(self) -> torch.Tensor:
        """The tensor that was saved."""
        with held(), torch.no_grad():
            memory = self._activations.unpack(self._kept)
            return memory.view(self._dtype).as_strided(self._size, self._stride, self._offset)


class Activations:
    """Blocks for saved tensors, under a residency's policy and budget.

    `limit`: with a home on NVMe the largest block that fits beside what one operation needs; else, since nothing leaves
    memory then, the bytes that all of them may take.
    """

    def __init__(self, residency: Residency, home: Home, limit: int) -> None:
        self._residency = residency
        self._home = home
        self._limit = limit
        self._lock = threading.RLock()
        self._free: dict[int, list[tuple[int, Block]]] = {}  # heaps, by size
        self._alive: dict[int, _KeptRef] = {}  # by key of their block
        self._dead: deque[weakref.ref[_Kept]] = deque()
        self._known: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], weakref.ref[_Kept]]] = {}
        self._forget_dead_at = _DEAD_STORAGES
        self._used: set[int] = set()  # keys of the blocks that this cycle has used
        self.held_bytes = 0  # in blocks, now
        self.block_bytes = 0  # of all blocks

    def pack(self, tensor: torch.Tensor) -> SavedView | None:
        """Keep what is saved in a block; None when it had better stay where it is."""
        if not _is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < _SMALL_BYTES or storage.nbytes() % tensor.itemsize:
            return None
        with held(), self._lock, torch.no_grad():
            self._collect()
            key = (storage._cdata, tensor._version)
            known = self._known.get(key)
            kept = known[1]() if known is not None and known[0]() is storage else None
            if kept is None:
                kept = self._keep(storage, tensor.device)
                if kept is None:
                    return None
                self._remember(key, storage, kept)
            return SavedView(self, kept, tensor)

    def unpack(self, kept: _Kept) -> torch.Tensor:
        """The bytes that were kept, in memory of torch's."""
        with self._lock:
            if kept.memory is None and kept.block is not None:
                block = kept.block
                self._residency.access(block)
                self._residency.wait(block)
                memory = torch.empty(block.num_bytes, dtype=torch.uint8, device=kept.device)
                memory.copy_(self._residency.store.lease(block))
                kept.memory, kept.block = memory, None
                self._alive.pop(block.key, None)
                self._give_back(block)
                self._collect()
        if kept.memory is None:
            raise RuntimeError("a saved tensor has neither a block nor memory")
        return kept.memory

    def end_cycle(self) -> None:
        """A step is over: drop free blocks that it did not use, lest new sizes in each step pile up."""
        with self._lock:
            self._collect()
            idle = [b for heap in self._free.values() for key, b in heap if key not in self._used]
            if idle:
                expected = set(self._residency.policy.order)
                for block in idle:
                    if block.key not in expected:
                        heap = self._free[block.num_bytes]
                        heap.remove((block.key, block))
                        heapq.heapify(heap)
                        self.block_bytes -= block.num_bytes
                        self._residency.remove(block)
            self._used.clear()

    # ------------------------------------------------------------------ blocks

    def _keep(self, storage: torch.UntypedStorage, device: torch.device) -> _Kept | None:
        block = self._take(storage.nbytes())
        if block is None:
            return None
        store = self._residency.store
        try:
            self._residency.access(block)
        except CapacityError:
            self._give_back(block)
            return None
        self._residency.wait(block)
        with self._residency.pinned(block), store.changing(block) as memory:
            memory.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
        store.mark_dirty(block)
        kept = _Kept(block, device)
        alive = _KeptRef(kept, self._dead.append)
        alive.block = block
        self._alive[block.key] = alive
        return kept

    def _take(self, num_bytes: int) -> Block | None:
        size = round_up(num_bytes)
        if self._home is Home.RAM and self.held_bytes + size > self._limit:
            return None
        if self._home is Home.NVME and size > self._limit:
            return None
        free = self._free.setdefault(num_bytes, [])
        if free:
            _, block = heapq.heappop(free)
        else:
            block = self._residency.store.create("a saved tensor", num_bytes, self._home)
            self._residency.add(block)
            self.block_bytes += num_bytes
        self._used.add(block.key)
        self.held_bytes += size
        return block

    def _give_back(self, block: Block) -> None:
        self._residency.expire(block)
        heapq.heappush(self._free[block.num_bytes], (block.key, block))
        self.held_bytes -= round_up(block.num_bytes)

    def _collect(self) -> None:
        """Give back the blocks that no graph refers to any more."""
        while self._dead:
            dead = self._dead.popleft()
            if isinstance(dead, _KeptRef) and self._alive.get(dead.block.key) is dead:
                del self._alive[dead.block.key]
                self._give_back(dead.block)

    def _remember(self, key: tuple[int, int], storage: torch.UntypedStorage, kept: _Kept) -> None:
        if len(self._known) >= self._forget_dead_at:
            self._known = {k: known for k, known in self._known.items() if known[0]() and known[1]()}
            self._forget_dead_at = 2 * len(self._known) + _DEAD_STORAGES
        self._known[key] = (weakref.ref(storage), weakref.ref(kept))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor over memory of its own, and nothing more."""
    if type(tensor) is not torch.Tensor or isinstance(tensor, nn.Parameter) or is_functorch_wrapped_tensor(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return not tensor.is_inference() and tensor.device.type != "meta"
