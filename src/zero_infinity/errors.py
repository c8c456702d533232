"""Every exception that this package raises on purpose.

    ZeroInfinityError
    ├── ConfigError            a setting that cannot be meant (also a ValueError)
    ├── CapacityError          something does not fit in a byte budget (also a MemoryError)
    ├── StorageError           a disk or a file refused (also an OSError: errno and filename are set)
    │   ├── SwapSpaceError     swap space could not be created or reserved
    │   ├── TransferError      a read or a write failed, with path, offset and length
    │   └── CorruptionError    a block came back with other bytes than were written
    ├── CheckpointError        a checkpoint cannot be read, or is not one of this model's (also a ValueError)
    ├── EngineClosedError      the I/O engine was closed, or failed earlier
    ├── RankError              ranks cannot go on together (also a RuntimeError)
    │   ├── DivergenceError    ranks want different things: who wants what
    │   ├── LostRankError      a rank is gone, or did not answer in time
    │   └── StuckThreadError   an exchange with other ranks does not end
    ├── UsageError             a call that the engine cannot honour, with what to do instead (also a RuntimeError)
    └── TornStepError          a step was interrupted half-way; some parameters are updated and some are not

A message names the thing, both numbers with their units, and the setting that mends it.
"""

from __future__ import annotations

import copy


class ZeroInfinityError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigError(ZeroInfinityError, ValueError):
    """A setting that cannot be meant."""


class CapacityError(ZeroInfinityError, MemoryError):
    """Something does not fit in a byte budget."""


class StorageError(ZeroInfinityError, OSError):
    """A disk or a file refused."""

    def __str__(self) -> str:
        # OSError's own text would put the errno before the message and the path, which it names already, after it.
        return self.strerror or super().__str__()


class SwapSpaceError(StorageError):
    """Swap space could not be created or reserved."""


class TransferError(StorageError):
    """A read or a write failed."""


class CorruptionError(StorageError):
    """A block came back with other bytes than were written."""


class CheckpointError(ZeroInfinityError, ValueError):
    """A checkpoint, or a file of weights, cannot be read, or is not one of this model's."""


class EngineClosedError(ZeroInfinityError, RuntimeError):
    """The I/O engine was closed, or failed earlier."""


class RankError(ZeroInfinityError, RuntimeError):
    """Ranks cannot go on together."""

    failed_rank: int | None = None  # the one that failed and said why, where it is another one


class DivergenceError(RankError):
    """Ranks want different things."""

    wanted: tuple[int, ...] = ()  # what, by rank


class LostRankError(RankError):
    """A rank is gone, or did not answer in time."""


class StuckThreadError(RankError):
    """An exchange with other ranks does not end: the memory that it may write to cannot be given back."""


class UsageError(ZeroInfinityError, RuntimeError):
    """A call that the engine cannot honour, with what to do instead."""


class TornStepError(UsageError):
    """A step was interrupted half-way: some parameters are updated and some are not."""


def again(error: BaseException) -> BaseException:
    """An error to raise in the place of one that is kept: raising the kept one would give it frames, which hold all
    that they refer to for as long as it is kept."""
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 - an exception class of somebody else's that cannot be copied
        return EngineClosedError(repr(error))
