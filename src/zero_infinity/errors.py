"""Every exception that this package raises on purpose.

    ZeroInfinityError
    ├── ConfigError            invalid setting (also a ValueError)
    ├── CapacityError          something does not fit in a byte budget (also a MemoryError)
    ├── StorageError           a drive or a file failed (also an OSError: errno and filename are set)
    │   ├── SwapSpaceError     swap space could not be created or reserved
    │   ├── TransferError      a read or a write failed, with path, offset and length
    │   └── CorruptionError    a block was read back with other bytes than were written
    ├── CheckpointError        a checkpoint cannot be read, or does not fit the model (also a ValueError)
    ├── EngineClosedError      the I/O engine was closed, or failed earlier (also a RuntimeError)
    ├── RankError              ranks cannot continue together (also a RuntimeError)
    │   ├── DivergenceError    ranks diverged: mismatched collectives
    │   ├── LostRankError      a rank is gone, or did not answer in time
    │   └── StuckThreadError   an exchange with other ranks does not end
    └── UsageError             a call that the engine cannot honour (also a RuntimeError)
        └── TornStepError      a step was interrupted half-way: only some parameters are updated

A message names the parameter, path or rank, both numbers with units, and what to do: a `fix:` line, the accepted values
or a suggestion.
"""

from __future__ import annotations

import copy


class ZeroInfinityError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigError(ZeroInfinityError, ValueError):
    """A setting or a command-line argument is invalid. Also a `ValueError`."""


class CapacityError(ZeroInfinityError, MemoryError):
    """Something does not fit in a byte budget. Also a `MemoryError`; the message names the budget that is enough."""


class StorageError(ZeroInfinityError, OSError):
    """A drive or a file failed. Also an `OSError`: `errno` and `filename` are set."""

    def __str__(self) -> str:
        # OSError's own text would put the errno before the message and the path, which it names already, after it.
        return self.strerror or super().__str__()


class SwapSpaceError(StorageError):
    """Swap space could not be created or reserved."""


class TransferError(StorageError):
    """A read or a write failed. The message has the path, offset and length."""


class CorruptionError(StorageError):
    """A block was read back with other bytes than were written; found with `Config(verify=True)`."""


class CheckpointError(ZeroInfinityError, ValueError):
    """A checkpoint or a file of weights cannot be read, or does not fit the model. Also a `ValueError`."""


class EngineClosedError(ZeroInfinityError, RuntimeError):
    """The I/O engine was closed, or failed earlier. Also a `RuntimeError`."""


class RankError(ZeroInfinityError, RuntimeError):
    """Ranks cannot continue together. Also a `RuntimeError`."""

    failed_rank: int | None = None  # set if another rank failed and reported why


class DivergenceError(RankError):
    """Ranks diverged: mismatched collectives. The message says what each rank wants."""


class LostRankError(RankError):
    """A rank is gone, or did not answer in time."""


class StuckThreadError(RankError):
    """An exchange with other ranks does not end, so the memory that it may write to cannot be freed."""


class UsageError(ZeroInfinityError, RuntimeError):
    """A call that the engine cannot honour. Also a `RuntimeError`; the message says what to do instead."""


class TornStepError(UsageError):
    """A step was interrupted half-way: only some parameters are updated. Reload a checkpoint."""


def again(error: BaseException) -> BaseException:
    """Return a copy to raise in place of a stored error.

    Raising the stored one would attach frames to it, which keep everything they refer to alive as long as it is stored.
    """
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 - a foreign exception class that cannot be copied
        return EngineClosedError(repr(error))
