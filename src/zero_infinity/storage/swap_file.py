"""A swap file: one unnamed file in one directory, with its space reserved.

Owns the file descriptor, the reservation and the choice between direct and buffered I/O. It does not know about
striping over directories, nor what the bytes mean.

Linux facts that decide the code:

- A file opened with O_TMPFILE never has a name: it cannot collide with another run's file, nobody can open it by path,
  and the kernel frees it with the last descriptor, also after kill -9. File systems without it (NFS, FAT) return
  EOPNOTSUPP, old kernels EISDIR; there a file is created in a new 0700 directory, and both names are removed at once.
- O_DIRECT keeps gigabytes of swap out of the page cache and saves a copy. File systems without it return EINVAL: most
  when the flag is set, some only at the first transfer, so one page is written and read back. The flag is set by fcntl
  after the open, because a failing open(O_CREAT | O_DIRECT) leaves the file behind.
- fallocate(2) allocates the blocks before anything is written, so a full disk is an error here and not in the middle of
  a step. glibc's posix_fallocate (os.posix_fallocate) emulates it where it is missing: it writes a byte into every
  block, which is EINVAL on an O_DIRECT descriptor (seen on ext2) and a slow full write elsewhere. So fallocate is
  called directly.
- fallocate that runs out of space may keep what it allocated so far (ext4), so the file is truncated again.
- POSIX_FADV_DONTNEED drops clean pages and starts write-out of dirty ones: a later call finds them clean.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import warnings
import weakref

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import SwapSpaceError
from zero_infinity.policy.alignment import ALIGNMENT

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS)


class SwapFile:
    """A private file in `directory`, freed when it is closed or when the process ends, however it ends."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)
        self.size = 0  # bytes reserved
        self._reserves = True
        try:
            self.descriptor, self.direct = _open(self.directory)
        except OSError as error:
            raise _refusal(self.directory, error) from error
        # The descriptor must not leak without an explicit close (a failed start, a test). Not at exit: the kernel then
        # closes it, and a worker may be in the middle of a transfer.
        self.close = weakref.finalize(self, os.close, self.descriptor)
        self.close.atexit = False
        if not self.direct:
            warnings.warn(
                f"nvme={self.directory!r}: this file system has no direct I/O (O_DIRECT), so swap goes through the "
                f"page cache: slower, and counted as cache. A local ext4, XFS or btrfs directory avoids it",
                RuntimeWarning,
                stacklevel=3,
            )

    def free_bytes(self) -> int:
        """Free bytes of the file system for an unprivileged user."""
        status = os.fstatvfs(self.descriptor)
        return status.f_bavail * status.f_frsize

    def grow(self, size: int) -> None:
        """Grow to `size` with all space reserved, or raise `SwapSpaceError` and keep the old size."""
        free = self.free_bytes()
        try:
            if not self._reserves or not fallocate(self.descriptor, self.size, size - self.size):
                self._grow_unreserved(size, free)
        except OSError as error:
            self.cut(self.size)
            fix = "free some space there, or give a directory on a larger drive"
            if error.errno == errno.EFBIG:
                fix = "raise the limit of the size of files (ulimit -f), or use a file system with larger files"
            message = (
                f"nvme={self.directory!r}: {format_bytes(size - self.size)} of swap space is needed, "
                f"{format_bytes(free)} is free ({error.strerror})\n  fix:   {fix}"
            )
            raise SwapSpaceError(error.errno, message, self.directory) from error
        self.size = size

    def cut(self, size: int) -> None:
        """Shrink to `size`."""
        os.ftruncate(self.descriptor, size)
        self.size = size

    def read(self, memory: memoryview, offset: int) -> int:
        return self._uncached(offset, os.preadv(self.descriptor, (memory,), offset))

    def write(self, memory: memoryview, offset: int) -> int:
        return self._uncached(offset, os.pwritev(self.descriptor, (memory,), offset))

    def _uncached(self, offset: int, num_bytes: int) -> int:
        """Drop what was transferred from the page cache, where it went there."""
        if not self.direct:
            os.posix_fadvise(self.descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        return num_bytes

    def _grow_unreserved(self, size: int, free: int) -> None:
        """Without fallocate: a sparse file, if there is enough free space now."""
        # File systems that report no blocks at all (ramfs, some network ones) do not report free space either.
        if size - self.size > free and os.fstatvfs(self.descriptor).f_blocks:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._reserves:
            self._reserves = False
            warnings.warn(  # before anything changes: a warning filter may turn it into an error
                f"nvme={self.directory!r}: this file system cannot reserve space (fallocate): if something else fills "
                f"it, training stops with 'No space left on device'. A local ext4, XFS or btrfs directory avoids it",
                RuntimeWarning,
                stacklevel=4,
            )
        os.ftruncate(self.descriptor, size)


def _open(directory: str) -> tuple[int, bool]:
    """The descriptor of a new file, and whether it does direct I/O."""
    descriptor = _open_unnamed(directory)
    try:
        return descriptor, _enable_direct(descriptor)
    except OSError:
        os.close(descriptor)
        raise


def _open_unnamed(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    private = tempfile.mkdtemp(prefix="zero-infinity-", dir=directory)
    path = os.path.join(private, "swap")
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    finally:
        _remove_empty(private)
    return descriptor


def _remove_empty(directory: str) -> None:
    """Remove the directory. NFS keeps an open file under a new name (.nfs...), so there the directory stays."""
    try:
        os.rmdir(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise


def _enable_direct(descriptor: int) -> bool:
    """Set O_DIRECT and test it with one page; False, with the flag cleared, if the file system does not support it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with mmap.mmap(-1, ALIGNMENT) as page:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwritev(descriptor, (page,), 0)
            os.preadv(descriptor, (page,), 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
            return False
        finally:
            os.ftruncate(descriptor, 0)
    return True


def fallocate(descriptor: int, offset: int, num_bytes: int) -> bool:
    """Reserve the range; False if the file system cannot."""
    while _libc.fallocate(descriptor, 0, offset, num_bytes) != 0:
        number = ctypes.get_errno()
        if number in _NO_FALLOCATE:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def _refusal(directory: str, error: OSError) -> SwapSpaceError:
    """The error for a directory in which no swap file can be created."""
    setting = f"nvme={directory!r}"
    match error.errno:
        case errno.ENOENT:
            message = f"{setting} does not exist\n  fix:   mkdir -p {directory}, or give another directory"
        case errno.ENOTDIR if os.path.exists(directory):
            message = f"{setting} is a file\n  fix:   give a directory"
        case errno.ENOTDIR:
            message = f"{setting} leads through a file\n  fix:   give a directory"
        case errno.EROFS:
            message = f"{setting} is on a read-only file system\n  fix:   give a directory that can be written"
        case errno.EACCES | errno.EPERM:
            message = (
                f"{setting} may not be written by user {os.geteuid()}\n  fix:   chown it, or give another directory"
            )
        case errno.ENOSPC | errno.EDQUOT:
            message = f"{setting} is full ({error.strerror})\n  fix:   free some space there, or give another directory"
        case _:
            message = f"no swap file can be made in {setting}: {error.strerror}\n  fix:   give another directory"
    return SwapSpaceError(error.errno, message, directory)
