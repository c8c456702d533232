"""The order in which workers use one block.

Owns the unfinished uses of a block and the rules of their order. It knows nothing of memory, I/O or threads: the store
calls it under its lock.

Rules:
- A use takes its place when it is requested, not when it starts.
- Uses that change the block run one at a time, in the order of their requests, across all stays of the block.
- Uses that read the block may overlap each other, but not a change.
- The end of a content (EXPIRE) has a place in the same order: what earlier uses write is discarded, what later uses
  write is kept.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator

from zero_infinity.storage.block_stay import BlockStay


class UseKind(enum.Enum):
    CHANGE = "change"
    READ = "read"
    EXPIRE = "expire"  # the content is discarded


class BlockUse:
    """One use of a block, from its request to its end."""

    __slots__ = ("claimed", "kind", "stay")

    def __init__(self, kind: UseKind, stay: BlockStay | None, *, claimed: bool = False) -> None:
        self.kind = kind
        self.stay = stay  # the stay that it keeps in memory; none for EXPIRE
        self.claimed = claimed  # belongs to one caller, which holds this object; else to the next worker of its kind


class BlockUses:
    """The unfinished uses of one block, in the order of their requests."""

    def __init__(self) -> None:
        self._uses: deque[BlockUse] = deque()

    def __len__(self) -> int:
        return len(self._uses)

    def __iter__(self) -> Iterator[BlockUse]:
        return iter(self._uses)

    def begin(self, kind: UseKind, stay: BlockStay, *, claimed: bool = False) -> BlockUse:
        """Request a use, which keeps `stay` in memory until it ends."""
        use = BlockUse(kind, stay, claimed=claimed)
        self._uses.append(use)
        stay.num_uses += 1
        return use

    def end(self, use: BlockUse) -> None:
        # Not always the first: reads overlap, and a worker that gives up has not waited for its place.
        self._uses.remove(use)
        if use.stay is not None:
            use.stay.num_uses -= 1

    def expire(self) -> None:
        """The content ends here: after all uses requested before, and before all requested later."""
        self._uses.append(BlockUse(UseKind.EXPIRE, None))

    def pop_expired(self) -> bool:
        """Remove every EXPIRE that has no use before it; True if there was one: the content is to be dropped."""
        expired = False
        while self._uses and self._uses[0].kind is UseKind.EXPIRE:
            self._uses.popleft()
            expired = True
        return expired

    def next_of(self, kind: UseKind) -> BlockUse | None:
        """The first use of this kind that is not claimed."""
        return next((use for use in self._uses if use.kind is kind and not use.claimed), None)

    def has_changes(self, stay: BlockStay | None = None) -> bool:
        """True if a worker will change the block (during `stay`, if one is given)."""
        return any(use.kind is UseKind.CHANGE and (stay is None or use.stay is stay) for use in self._uses)

    def is_due(self, use: BlockUse) -> bool:
        """True if every use that has to come before `use` has ended."""
        if use.kind is UseKind.CHANGE:
            return self._uses[0] is use
        for earlier in self._uses:
            if earlier is use:
                break
            if earlier.kind is not UseKind.READ:
                return False
        return True

    def move(self, source: BlockStay, target: BlockStay) -> None:
        """Let every use that keeps `source` keep `target` instead."""
        for use in self._uses:
            if use.stay is source:
                use.stay = target
        target.num_uses += source.num_uses
        source.num_uses = 0
