"""Storage for saved activations of a model on an accelerator: on the device as far as there is room, else in blocks.

A tensor goes down on the stream of downloads while forward goes on, and comes back on the stream of uploads one tensor
ahead of its use in backward. The thread that computes waits for neither: what is still on its way down is used where it
is, and kernels wait for an upload by an event.

What stays on the device is the tensor itself. A change of it in place is found by its version, as torch finds it.
"""

from __future__ import annotations

import torch

from zero_infinity._torch import version_of
from zero_infinity.activations.activation_mover import ActivationMover
from zero_infinity.activations.activation_storage import ActivationBlocks, ActivationSlot
from zero_infinity.errors import again
from zero_infinity.policy.activation_stays import ActivationStays
from zero_infinity.storage.block import Block, BlockUse
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.tiers.compute_device import DeviceTransfer
from zero_infinity.tiers.link import Link

# Tensors that wait for their download keep device memory: forward waits when they are more than
# two and more than these bytes.
_MOST_WAITING = 2
_MOST_WAITING_BYTES = 64 << 20
_NAME = "the download of a saved tensor"


class DeviceActivationStorage:
    """Saved tensors of one model. All methods are for the threads that compute, one at a time."""

    def __init__(self, blocks: ActivationBlocks, link: Link, stays: ActivationStays, device: torch.device) -> None:
        self._blocks = blocks
        self._stays = stays
        self._device = device
        self._mover = ActivationMover()
        self._transfers = _Transfers(blocks.host_cache.store, link, self._mover)
        self._in_blocks: dict[_MovedSlot, None] = {}  # not taken yet, in the order of forward
        self._ahead: _MovedSlot | None = None  # the one that was brought back ahead of its use

    @property
    def held_bytes(self) -> int:
        return self._blocks.held_bytes

    @property
    def total_bytes(self) -> int:
        return self._blocks.total_bytes

    @property
    def room(self) -> int:
        return self._blocks.room

    def put(self, data: torch.Tensor, root: torch.Tensor) -> ActivationSlot | None:
        kept = _Saved(data, root)
        if self._stays.stays(data.nbytes):
            return _StayingSlot(kept, self._stays)
        self._wait_for_downloads(data.nbytes)
        block = self._blocks.accessed(data.nbytes)
        if block is None:
            return None
        computed = torch.accelerator.current_stream(self._device).record_event()
        use = self._blocks.host_cache.store.claim(block)
        slot = _MovedSlot(self, kept, block)
        self._in_blocks[slot] = None
        self._transfers.download(slot, use, computed)
        return slot

    def end_cycle(self) -> None:
        self._stays.end_step()
        self._blocks.end_cycle()

    def close(self) -> None:
        self._mover.close()

    # ------------------------------------------------------------------ for slots

    def take(self, slot: _MovedSlot) -> torch.Tensor:
        """Return a slot's bytes on the device, and bring the one before it back."""
        self._stays.used()
        self._bring(slot)
        self._leave(slot)
        upcoming = next(reversed(self._in_blocks), None)
        if upcoming is not None and self._ahead is None:
            self._ahead = upcoming
            self._bring(upcoming)
        with self._mover.changed:
            if not slot.has_arrived:
                with self._blocks.host_cache.compute_thread.waiting("a saved tensor"):
                    self._mover.wait_until(lambda: slot.has_arrived)
            taken = slot.arrived(self._device)
        self._blocks.give_back(slot.block)
        return taken

    def drop(self, slot: _MovedSlot) -> None:
        self._stays.used()
        self._leave(slot)
        with self._mover.changed:
            slot.forget()
        self._blocks.give_back(slot.block)

    # ------------------------------------------------------------------ inside

    def _bring(self, slot: _MovedSlot) -> None:
        """Start to upload a slot's bytes, unless they are on the device still, or again."""
        if slot.is_wanted:
            return
        # Also if it will not be read: what the policy decides must not depend on how far the download is.
        self._blocks.host_cache.access(slot.block)
        with self._mover.changed:
            slot.is_wanted = True
            if slot.has_arrived:
                return
        self._blocks.host_cache.store.hold_to_read(slot.block)
        self._transfers.upload(slot)

    def _leave(self, slot: _MovedSlot) -> None:
        self._in_blocks.pop(slot, None)
        if self._ahead is slot:
            self._ahead = None

    def _wait_for_downloads(self, num_bytes: int) -> None:
        transfers = self._transfers
        if transfers.has_room(num_bytes):
            return
        with self._blocks.host_cache.compute_thread.waiting(_NAME), self._mover.changed:
            self._mover.wait_until(lambda: transfers.has_room(num_bytes))


class _Saved:
    """Bytes on the device, of a tensor that must not change."""

    __slots__ = ("_root", "_version", "data")

    def __init__(self, data: torch.Tensor, root: torch.Tensor) -> None:
        self.data = data
        self._root = root.detach()  # has the same version counter, and no graph
        self._version = version_of(root)

    @property
    def has_changed(self) -> bool:
        return version_of(self._root) != self._version

    def error(self) -> RuntimeError:
        return RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(self._root.shape)} is at version {version_of(self._root)}; expected version "
            f"{self._version} instead"
        )


class _StayingSlot:
    """A saved tensor that is not moved."""

    def __init__(self, kept: _Saved, stays: ActivationStays) -> None:
        self._kept = kept
        self._stays = stays

    def take(self) -> torch.Tensor:
        self.drop()
        if self._kept.has_changed:
            raise self._kept.error()
        return self._kept.data

    def drop(self) -> None:
        self._stays.used()
        self._stays.left(self._kept.data.nbytes)


class _MovedSlot:
    """A saved tensor that goes to a block. Under the mover's lock, once it was submitted."""

    def __init__(self, storage: DeviceActivationStorage, kept: _Saved, block: Block) -> None:
        self._storage = storage
        self.block = block
        self.here: _Saved | None = kept  # until it is downloaded
        self.uploaded: tuple[torch.Tensor, DeviceTransfer] | None = None
        self.error: BaseException | None = None
        self.is_wanted = False  # on the device: then it stays there, if it still is

    def take(self) -> torch.Tensor:
        return self._storage.take(self)

    def drop(self) -> None:
        self._storage.drop(self)

    @property
    def has_arrived(self) -> bool:
        """True if the bytes are on the device, or will never be."""
        return self.here is not None or self.uploaded is not None or self.error is not None

    def arrived(self, device: torch.device) -> torch.Tensor:
        """Return the bytes, for what this thread launches from now on."""
        here, uploaded = self.here, self.uploaded
        self.forget()
        if here is not None:
            if here.has_changed:
                raise here.error()
            return here.data
        if uploaded is None:
            raise again(self.error) if self.error is not None else RuntimeError("a saved tensor was not brought back")
        memory, transfer = uploaded
        transfer.order()
        memory.record_stream(torch.accelerator.current_stream(device))  # it belongs to the stream of uploads
        return memory

    def forget(self) -> None:
        self.here = self.uploaded = None


class _Transfers:
    """What the mover's thread does."""

    def __init__(self, store: BlockStore, link: Link, mover: ActivationMover) -> None:
        self._store = store
        self._link = link
        self._mover = mover
        self._waiting: dict[_MovedSlot, int] = {}  # bytes that are not downloaded yet

    def has_room(self, num_bytes: int) -> bool:
        """True if one more download may wait."""
        waiting = list(self._waiting.values())
        return len(waiting) < _MOST_WAITING or sum(waiting) + num_bytes <= _MOST_WAITING_BYTES

    def download(self, slot: _MovedSlot, use: BlockUse, computed: torch.Event) -> None:
        self._waiting[slot] = slot.block.num_bytes
        self._mover.submit(lambda: self._download(slot, use, computed))

    def upload(self, slot: _MovedSlot) -> None:
        self._mover.submit(lambda: self._upload(slot))

    def _download(self, slot: _MovedSlot, use: BlockUse, computed: torch.Event) -> None:
        try:
            with self._store.changing_claimed(slot.block, use) as memory:
                kept = slot.here
                if kept is not None and not slot.is_wanted:
                    self._link.download(kept.data, memory, computed)
                    if kept.has_changed:  # perhaps before it was copied
                        slot.error = kept.error()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that takes it
            slot.error = error.with_traceback(None)
        finally:
            with self._mover.changed:
                if not slot.is_wanted:
                    slot.here = None
                del self._waiting[slot]

    def _upload(self, slot: _MovedSlot) -> None:
        try:
            with self._store.reading(slot.block) as memory:
                if slot.error is None:
                    uploaded = self._link.upload(memory)
                    with self._mover.changed:
                        slot.uploaded = uploaded
                        self._mover.changed.notify_all()
                    uploaded[1].wait()  # until then the device reads the block
        except BaseException as error:  # noqa: BLE001 - raised by the thread that takes it
            slot.error = error.with_traceback(None)
