"""Offloads tensors saved by autograd until backward needs them.

- The unit of copying is a *root* (the tensor that others are views of), once per version: its views, and several
  operations that save it, share the copy. Not the storage: tensors that share a storage without being views of each
  other (`unsafe_chunk`, in recurrent cells) have separate versions.
- Where the copy goes is decided by an `ActivationStorage`: blocks of the store, or an arena.
- Of tensors that are replicated over ranks (`Replicas`) each rank keeps its part; unpacking all-gathers the parts.
- Unpacking takes the bytes to memory of torch's allocator and frees their storage. A retained graph holds that tensor.
- The storage of a graph that dies without a backward is freed when the next tensor is packed, or at the step.
- Small tensors, and those that do not fit next to what one operation needs, stay in torch's memory.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zero_infinity._torch import is_func_tensor, root_of, storage_id, version_of
from zero_infinity.activations.activation_arena import ActivationArena
from zero_infinity.activations.activation_storage import ActivationBlocks, ActivationSlot, ActivationStorage
from zero_infinity.activations.replicas import Replicas
from zero_infinity.byte_sizes import format_bytes
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.config import Config, ConfigWarning
from zero_infinity.disable_modes import ordinary_tensors
from zero_infinity.interrupts import held
from zero_infinity.policy.homes import Home
from zero_infinity.policy.memory_budget import MemoryDivision
from zero_infinity.policy.partition import Span
from zero_infinity.tiers.host_cache import HostCache, SpareBytes

# Smaller tensors are not worth a request.
_SMALL_BYTES = 64 * 1024
# Dead roots to remember in addition to as many as are alive.
_DEAD_ROOTS = 64

_Key = tuple[int, int, int, Span]  # storage, root, version, the root's byte range in the storage


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Kept:
    """The bytes of one root: stored (all, or this rank's part), or unpacked in memory."""

    slot: ActivationSlot | None
    num_bytes: int
    device: torch.device
    replicas: Replicas | None  # the ranks that have the other parts
    memory: torch.Tensor | None = None


class _KeptRef(weakref.ref[_Kept]):
    """Reports that a slot will not be unpacked any more."""

    __slots__ = ("slot",)

    slot: ActivationSlot


@dataclass(frozen=True, eq=False, slots=True)
class _CopySlot:
    """Bytes in torch's memory."""

    copy: torch.Tensor

    def take(self) -> torch.Tensor:
        return self.copy

    def drop(self) -> None:
        """Nothing to free."""


class SavedView:
    """Replaces a saved tensor in autograd's graph."""

    __slots__ = ("_activations", "_dtype", "_kept", "_offset", "_size", "_stride")

    def __init__(self, activations: ActivationOffload, kept: _Kept, tensor: torch.Tensor, offset: int) -> None:
        self._activations = activations
        self._kept = kept
        self._dtype = tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), offset

    def restore(self) -> torch.Tensor:
        """Return the tensor that was saved."""
        with held(), ordinary_tensors(), torch.no_grad():
            memory = self._activations.unpack(self._kept)
            return memory.view(self._dtype).as_strided(self._size, self._stride, self._offset)


class ActivationOffload:
    """Offloads saved tensors. `replicas`: the ranks that have the same inputs of recomputed blocks."""

    def __init__(self, storage: ActivationStorage, replicas: Replicas | None = None) -> None:
        self.storage = storage
        self._replicas = replicas
        self._lock = threading.RLock()
        self._alive: dict[ActivationSlot, _KeptRef] = {}
        self._dead: deque[weakref.ref[_Kept]] = deque()
        self._known: dict[_Key, tuple[weakref.ref[torch.UntypedStorage], weakref.ref[_Kept]]] = {}
        self._forget_dead_at = _DEAD_ROOTS
        self._has_warned = False

    def pack(self, tensor: torch.Tensor, *, is_input: bool) -> SavedView | None:
        """Store a saved tensor; None if it should stay in place. `is_input`: it is an input of a recomputed block."""
        if not _is_plain(tensor):
            return None
        root = root_of(tensor)
        whole, mine = _extent(root), _extent(tensor)
        if len(whole) < _SMALL_BYTES or mine.overlap(whole.start, whole.stop) != mine:
            return None
        if len(whole) % tensor.itemsize or (mine.start - whole.start) % tensor.itemsize:
            return None
        with held(), self._lock, ordinary_tensors(), torch.no_grad():
            self._collect()
            # The storage identifies the root: torch's tensors do not support weak references.
            storage = root.untyped_storage()
            key = (storage_id(storage), id(root), version_of(tensor), whole)
            known = self._known.get(key)
            kept = known[1]() if known is not None and known[0]() is storage else None
            if kept is None:
                kept = self._keep(_bytes_of(root, whole), root, self._replicas if is_input else None)
                if kept is None:
                    return None
                self._remember(key, storage, kept)
            return SavedView(self, kept, tensor, (mine.start - whole.start) // tensor.itemsize)

    def unpack(self, kept: _Kept) -> torch.Tensor:
        """Return the stored bytes, in memory of torch's allocator."""
        with self._lock:
            if kept.memory is None and kept.slot is not None:
                slot, replicas = kept.slot, kept.replicas
                kept.memory, kept.slot = slot.take(), None
                if replicas is not None:
                    whole = torch.empty(kept.num_bytes, dtype=torch.uint8, device=kept.device)
                    part = replicas.part(kept.num_bytes)
                    whole[part.start : part.stop].copy_(kept.memory)
                    replicas.gather(whole)
                    kept.memory = whole
                self._alive.pop(slot, None)
                self._collect()
        if kept.memory is None:
            raise RuntimeError("a saved tensor has neither a slot nor memory")
        return kept.memory

    def end_cycle(self) -> None:
        """End a step."""
        with self._lock:
            self._collect()
            self.storage.end_cycle()

    def _keep(self, data: torch.Tensor, root: torch.Tensor, replicas: Replicas | None) -> _Kept | None:
        num_bytes = data.nbytes
        if replicas is not None:
            replicas.check_same(data)
            part = replicas.part(num_bytes)
            data = data[part.start : part.stop]
        slot = self.storage.put(data, root)
        if slot is None:
            self._warn_of_room(data.nbytes)
            if replicas is None:
                return None
            # Other ranks have dropped this part: keep only it, in torch's memory.
            slot = _CopySlot(data.clone())
        kept = _Kept(slot, num_bytes, data.device, replicas)
        alive = _KeptRef(kept, self._dead.append)
        alive.slot = slot
        self._alive[slot] = alive
        return kept

    def _collect(self) -> None:
        """Free the storage of tensors that no graph refers to any more."""
        while self._dead:
            dead = self._dead.popleft()
            if isinstance(dead, _KeptRef) and self._alive.get(dead.slot) is dead:
                del self._alive[dead.slot]
                dead.slot.drop()

    def _remember(self, key: _Key, storage: torch.UntypedStorage, kept: _Kept) -> None:
        if len(self._known) >= self._forget_dead_at:
            alive = (item for item in self._known.items() if item[1][0]() is not None and item[1][1]() is not None)
            self._known = dict(alive)
            self._forget_dead_at = 2 * len(self._known) + _DEAD_ROOTS
        self._known[key] = (weakref.ref(storage), weakref.ref(kept))

    def _warn_of_room(self, num_bytes: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"offload_activations: a saved tensor of {format_bytes(num_bytes)} stays outside of the memory budget, "
                f"which has {format_bytes(self.storage.room)} left for it next to what one operation needs\n"
                "  fix:   more memory=, or set nvme= if it is not set; reported once",
                ConfigWarning,
                stacklevel=2,
            )


def make_activation_offload(
    config: Config,
    host_cache: HostCache,
    device: torch.device,
    division: MemoryDivision,
    spare: SpareBytes,
    replicas: RankGroup | None,
    storage_on: Callable[[ActivationBlocks], ActivationStorage],
) -> ActivationOffload | None:
    """Return None if torch alone keeps saved tensors. `replicas`: the ranks that compute the same activations.

    `storage_on` makes the storage over blocks of the host.
    """
    offload = config.offload_activations
    if replicas is None and not offload:
        return None
    storage: ActivationStorage = ActivationArena(device)
    if offload in (True, "all"):
        home = Home.NVME if config.nvme else Home.RAM
        beside = SpareBytes(division.cache - division.least)
        storage = storage_on(ActivationBlocks(host_cache, home, beside if config.nvme else spare))
    if replicas is None:
        return ActivationOffload(storage)
    return ActivationOffload(storage, Replicas(replicas.channel("activations", device)))


def _extent(tensor: torch.Tensor) -> Span:
    """Return the byte range of a tensor in its storage."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return Span(start, start)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(start, start + (last + 1) * tensor.itemsize)


def _bytes_of(root: torch.Tensor, extent: Span) -> torch.Tensor:
    storage = root.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=root.device).set_(storage)[extent.start : extent.stop]


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if it is an ordinary strided tensor: no subclass, parameter, meta or inference tensor."""
    if type(tensor) is not torch.Tensor or isinstance(tensor, nn.Parameter) or is_func_tensor(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return not tensor.is_inference() and tensor.device.type != "meta"
