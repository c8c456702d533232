"""Tensors that autograd has saved, kept elsewhere until backward wants them.

- What is copied is a *root* (the tensor that others are views of), once for each version of it: views of it, and
  several operations that have saved it, share the copy. Not the storage: tensors that share one without being views of
  each other (`unsafe_chunk`, in recurrent cells) have versions of their own.
- Where it goes is a shelf's business: blocks of the store, or an arena.
- Of what ranks hold replicas of (`Replicas`) each keeps its part, and unpacking puts the parts together.
- Unpacking copies the bytes into torch's memory and gives their room back. A graph that is retained holds that tensor.
- A graph that dies without a backward gives its room back when the next tensor comes, or at the step.
- What is small, and what there is no room for beside what one operation needs, stays in torch's memory.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque

import torch
from torch import nn

from zero_infinity._torch import is_func_tensor, root_of, storage_id, version_of
from zero_infinity.activations.activation_storage import ActivationSlot, ActivationStorage
from zero_infinity.activations.replicas import Replicas
from zero_infinity.config import ConfigWarning
from zero_infinity.disable_modes import ordinary_tensors
from zero_infinity.interrupts import held
from zero_infinity.policy.partition import Span
from zero_infinity.units import format_bytes

# A tensor of fewer bytes is not worth a request.
_SMALL_BYTES = 64 * 1024
# Dead roots that may be remembered beyond as many as are alive.
_DEAD_ROOTS = 64

_Key = tuple[int, int, int, Span]  # storage, root, version, which bytes of the storage are the root's


class _Kept:
    """The bytes of one root: on a shelf (all, or this rank's part), or unpacked in memory."""

    __slots__ = ("__weakref__", "device", "memory", "num_bytes", "replicas", "slot")

    def __init__(self, slot: ActivationSlot, num_bytes: int, device: torch.device, replicas: Replicas | None) -> None:
        self.slot: ActivationSlot | None = slot
        self.num_bytes = num_bytes
        self.device = device
        self.replicas = replicas  # that have the other parts
        self.memory: torch.Tensor | None = None


class _KeptRef(weakref.ref[_Kept]):
    """Tells when nobody will unpack a slot any more."""

    __slots__ = ("slot",)

    slot: ActivationSlot


class SavedView:
    """What autograd holds in the place of a saved tensor."""

    __slots__ = ("_activations", "_dtype", "_kept", "_offset", "_size", "_stride")

    def __init__(self, activations: ActivationOffload, kept: _Kept, tensor: torch.Tensor, offset: int) -> None:
        self._activations = activations
        self._kept = kept
        self._dtype = tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), offset

    def restore(self) -> torch.Tensor:
        """The tensor that was saved."""
        with held(), ordinary_tensors(), torch.no_grad():
            memory = self._activations.unpack(self._kept)
            return memory.view(self._dtype).as_strided(self._size, self._stride, self._offset)


class ActivationOffload:
    """Saved tensors on a shelf. `replicas`: the ranks that have the same inputs of recomputed blocks."""

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
        """Keep what is saved; None when it had better stay where it is. `is_input`: of a recomputed block."""
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
            # The storage tells whether the root is still the same one: torch's tensors do not bear weak references.
            storage = root.untyped_storage()
            key = (storage_id(storage), id(root), version_of(tensor), whole)
            known = self._known.get(key)
            kept = known[1]() if known is not None and known[0]() is storage else None
            if kept is None:
                kept = self._keep(_bytes_of(root, whole), self._replicas if is_input else None)
                if kept is None:
                    return None
                self._remember(key, storage, kept)
            return SavedView(self, kept, tensor, (mine.start - whole.start) // tensor.itemsize)

    def unpack(self, kept: _Kept) -> torch.Tensor:
        """The bytes that were kept, in memory of torch's."""
        with self._lock:
            if kept.memory is None and kept.slot is not None:
                slot, replicas = kept.slot, kept.replicas
                memory = torch.empty(kept.num_bytes, dtype=torch.uint8, device=kept.device)
                if replicas is None:
                    slot.take(memory)
                else:
                    part = replicas.part(kept.num_bytes)
                    slot.take(memory[part.start : part.stop])
                    replicas.gather(memory)
                kept.memory, kept.slot = memory, None
                self._alive.pop(slot, None)
                self._collect()
        if kept.memory is None:
            raise RuntimeError("a saved tensor has neither a slot nor memory")
        return kept.memory

    def end_cycle(self) -> None:
        """A step is over."""
        with self._lock:
            self._collect()
            self.storage.end_cycle()

    def _keep(self, data: torch.Tensor, replicas: Replicas | None) -> _Kept | None:
        num_bytes = data.nbytes
        if replicas is not None:
            replicas.check_same(data)
            part = replicas.part(num_bytes)
            data = data[part.start : part.stop]
        slot = self.storage.put(data)
        if slot is None:
            self._warn_of_room(data.nbytes)
            if replicas is None:
                return None
            # Other ranks have let go of this part: it stays in torch's memory, and only it.
            slot = _InMemory(data.clone())
        kept = _Kept(slot, num_bytes, data.device, replicas)
        alive = _KeptRef(kept, self._dead.append)
        alive.slot = slot
        self._alive[slot] = alive
        return kept

    def _collect(self) -> None:
        """Give back the room of what no graph refers to any more."""
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
                f"which has {format_bytes(self.storage.room)} left for it beside what one operation needs\n"
                "  fix:   more memory=, or nvme= where there is none; said once",
                ConfigWarning,
                stacklevel=2,
            )


class _InMemory:
    """What there was no room for."""

    __slots__ = ("_data",)

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def take(self, into: torch.Tensor) -> None:
        into.copy_(self._data)

    def drop(self) -> None:
        """The memory goes with the object."""


def _extent(tensor: torch.Tensor) -> Span:
    """From its first byte to its last one, in its storage."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return Span(start, start)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(start, start + (last + 1) * tensor.itemsize)


def _bytes_of(root: torch.Tensor, extent: Span) -> torch.Tensor:
    storage = root.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=root.device).set_(storage)[extent.start : extent.stop]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor over memory of its own, and nothing more."""
    if type(tensor) is not torch.Tensor or isinstance(tensor, nn.Parameter) or is_func_tensor(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return not tensor.is_inference() and tensor.device.type != "meta"
