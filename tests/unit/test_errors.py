"""Errors read well, also after they have been raised again."""

from __future__ import annotations

import errno
import pickle

import pytest

import zero_infinity as zi
from zero_infinity.errors import CorruptionError, StorageError, SwapSpaceError, TransferError, again

KINDS = [StorageError, SwapSpaceError, TransferError, CorruptionError]


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_error_reads_as_its_message_alone(kind: type[StorageError]) -> None:
    error = kind(errno.EIO, "read of 4.0 MiB at /mnt/nvme+0 failed: Input/output error (EIO)", "/mnt/nvme+0")
    for one in (error, again(error), pickle.loads(pickle.dumps(error))):
        assert str(one) == "read of 4.0 MiB at /mnt/nvme+0 failed: Input/output error (EIO)"
        assert isinstance(one, kind)
        assert isinstance(one, zi.ZeroInfinityError)
        assert isinstance(one, OSError)
        assert (one.errno, one.filename) == (errno.EIO, "/mnt/nvme+0")


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_error_without_a_number(kind: type[StorageError]) -> None:
    assert str(kind("block 'a' came back changed")) == "block 'a' came back changed"
    assert str(kind()) == ""
