"""`zero-infinity doctor`: checks whether this machine is ready for training, with a remedy for each problem.

Owns the checks and their remedies. Each check looks at one thing, takes about a second at most and changes nothing: a
file that is written as a test is gone when it is closed. The link of each accelerator is measured briefly
(`device_links`); drives are measured by `zero-infinity bench`.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import importlib.metadata
import json
import mmap
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_infinity.byte_sizes import format_bytes, format_count, format_rate
from zero_infinity.machine import host_memory
from zero_infinity.policy.alignment import ALIGNMENT

if TYPE_CHECKING:  # it imports torch
    from zero_infinity.cli.device_links import LinkRates

Status = Literal["ok", "warn", "fail"]

MIN_TORCH = (2, 9)
LOW_SPACE = 10 * 1024**3  # the states of about 650M parameters
LOW_MEMORY = 2 * 1024**3  # torch and transformers alone take a quarter of it
STATE_BYTES_PER_PARAM = 16  # fp32 master, momentum, variance (12) and 16-bit parameter and gradient (4)
MATMUL_SIZE = 192  # 14 MFLOP: up to 0.05 s where a CPU does 16-bit arithmetic element by element
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}
REMOTE_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "overlay"}
STATUS_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
LINK_BYTES = 64 << 20  # of one copy over an accelerator's link: 3 ms at 25 GB/s
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

EPILOG = """\
examples:
  zero-infinity doctor /mnt/nvme
  zero-infinity doctor --json | python -m json.tool
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One row: what was checked, what was found, and the remedy if it is not ok."""

    name: str
    value: str
    status: Status = "ok"
    remedy: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check whether this machine and the drive of DIR are ready for training. Exit code 1 if not."
    parser.epilog = EPILOG
    text = "directory for swap space, as in nvme= (default: .)"
    parser.add_argument("directory", metavar="DIR", nargs="?", type=Path, default=Path(), help=text)
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    checks = list(examine(arguments.directory))
    if arguments.json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        Console().print(_table(checks))
    return 1 if any(check.status == "fail" for check in checks) else 0


def examine(directory: Path) -> Iterator[Check]:
    """Every check, in the order of the table."""
    yield _check_kernel()
    yield Check("Python", platform.python_version())
    yield from _check_torch(directory)
    yield _check_transformers()
    yield from _check_memory()
    yield _check_memlock()
    yield _check_huge_pages(HUGE_PAGES)
    yield from _check_directory(directory)


def _table(checks: list[Check]) -> Table:
    table = Table("check", "found", "", "remedy", title="zero-infinity doctor", title_justify="left")
    for check in checks:
        style = STATUS_STYLES[check.status]
        table.add_row(check.name, escape(check.value), f"[{style}]{check.status}[/]", escape(check.remedy))
    return table


def _check_kernel() -> Check:
    value = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform != "linux":
        return Check("kernel", value, "fail", "use Linux: direct I/O and huge pages need it")
    return Check("kernel", value)


def _check_torch(directory: Path) -> Iterator[Check]:
    """torch, and what only torch knows: accelerators, threads and the speed of 16-bit arithmetic."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        yield Check("torch", f"not importable: {error}", "fail", "pip install torch")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = version < MIN_TORCH
    wanted = ".".join(map(str, MIN_TORCH))
    yield Check("torch", torch.__version__, "fail" if old else "ok", f"pip install 'torch>={wanted}'" if old else "")
    yield from _check_accelerators(directory)
    yield _check_threads(len(os.sched_getaffinity(0)), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"))
    yield _check_half_precision(torch)


def _check_accelerators(directory: Path) -> Iterator[Check]:
    """Each accelerator and its link; only one row without any."""
    from zero_infinity.cli import device_links as links
    from zero_infinity.storage.numa import cores_near
    from zero_infinity.tiers import direct_read

    devices = links.accelerators()
    if not devices:
        yield Check("accelerator", "none: computes on the CPU")
        return
    yield Check("accelerator", ", ".join(map(str, devices)))
    for device in devices:
        try:
            facts = links.facts_of(device)
            rates = links.link_rates(device, links.copy_size(device, LINK_BYTES))
        except RuntimeError as error:  # out of memory, or the driver fails
            yield Check(str(device), str(error).splitlines()[0], "fail", "stop what else uses it; check its driver")
            continue
        memory = f"{format_bytes(facts.free_bytes)} free of {format_bytes(facts.total_bytes)}"
        yield Check(str(device), f"{facts.name}, {memory}")
        yield Check(f"{device} link", _link_text(rates))
        near = cores_near(device)
        yield Check(f"{device} NUMA node", "one, or unknown" if near is None else f"cores {_ranges(near)}")
    yield Check("peer access", links.peer_access(devices))
    problem = direct_read.why_not(devices[0], directory)
    yield Check("GPUDirect Storage", "works" if problem is None else f"no: {problem}")


def _ranges(cores: Iterable[int]) -> str:
    """Write cores as the kernel does: "0-3,8"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


def _link_text(rates: LinkRates) -> str:
    up = f"up {format_rate(rates.up_pinned)} pinned, {format_rate(rates.up_unpinned)} unpinned"
    return f"{up}; down {format_rate(rates.down_pinned)} pinned, {format_rate(rates.down_unpinned)} unpinned"


def _check_threads(num_cores: int, num_threads: int, setting: str | None) -> Check:
    value = f"{num_cores} cores, {num_threads} torch threads, OMP_NUM_THREADS={setting or 'unset'}"
    if num_threads > num_cores:
        return Check("threads", value, "warn", f"export OMP_NUM_THREADS={num_cores}: there are more threads than cores")
    if setting is not None and 2 * num_threads <= num_cores:
        remedy = f"export OMP_NUM_THREADS={num_cores} (divided by the ranks): cores are idle; torchrun sets it to 1"
        return Check("threads", value, "warn", remedy)
    return Check("threads", value)


def _check_half_precision(torch: ModuleType) -> Check:
    single, brain, half = (_gigaflops(torch, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    value = f"float32 {single:,.1f}, bfloat16 {brain:,.1f}, float16 {half:,.1f} GFLOP/s"
    if brain < single / 2:
        remedy = 'compute_dtype="float32" on the CPU; param_dtype="bfloat16" still halves storage and traffic'
        return Check("CPU matmul", value, "warn", remedy)
    return Check("CPU matmul", value)


def _gigaflops(torch: ModuleType, dtype: object) -> float:
    """Speed of a matmul in `dtype`: the best run within 0.02 s."""
    matrix = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype)
    torch.mm(matrix, matrix)  # the first call sets up threads and kernels: 10 ms and more
    times: list[float] = []
    while sum(times) < 0.02:
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - start)
    return 2 * float(MATMUL_SIZE**3) / min(times) / 1e9


def _check_transformers() -> Check:
    try:
        # From the metadata: importing it takes seconds.
        return Check("transformers", importlib.metadata.version("transformers"))
    except importlib.metadata.PackageNotFoundError:
        return Check("transformers", "not installed", "warn", "pip install transformers, to train its models")


def _check_memory() -> Iterator[Check]:
    memory = host_memory()
    low = memory.available < LOW_MEMORY
    value = f"{format_bytes(memory.available)} available of {format_bytes(memory.total)}"
    yield Check("memory", value, "warn" if low else "ok", "stop other programs" if low else "")
    yield Check("cgroup limit", "none" if memory.limit is None else format_bytes(memory.limit))


def _check_memlock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", "unlimited")
    return Check("locked memory", f"at most {format_bytes(soft)} (swap buffers are not locked, so this is fine)")


def _check_huge_pages(setting: Path) -> Check:
    try:
        words = setting.read_text(encoding="ascii").split()
    except OSError:
        return Check("huge pages", "not in this kernel", "warn", "none; transfers take more CPU time")
    active = next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    if active in ("always", "madvise"):
        return Check("huge pages", active)
    return Check("huge pages", active, "warn", f"echo madvise > {setting} (as root): transfers take less CPU time")


def _check_directory(directory: Path) -> Iterator[Check]:
    """The directory and its file system; only the reason if it cannot be used."""
    path = directory.expanduser().absolute()
    if not path.is_dir():
        remedy = "give a directory" if path.exists() else f"mkdir -p {path}, or mount the drive there"
        yield Check("directory", f"{path} is not a directory", "fail", remedy)
        return
    yield Check("directory", str(path))
    yield _check_file_system(path)
    yield _check_space(path)
    yield _check_direct_io(path)


def _check_file_system(path: Path) -> Check:
    kind = _file_system_type(path)
    if kind in MEMORY_FILE_SYSTEMS:
        return Check("file system", kind, "warn", "use a directory on a drive: this one is in memory")
    if kind in REMOTE_FILE_SYSTEMS:
        return Check("file system", kind, "warn", "use a local drive (ext4, xfs): it is faster")
    return Check("file system", kind)


def _file_system_type(path: Path) -> str:
    """Type of the mount that contains `path`: the last one listed of the longest matching mount points."""
    resolved, best, kind = path.resolve(), -1, "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        _, mount_point, this_kind, *_ = line.split(" ")
        mount_path = Path(mount_point.replace("\\040", " "))  # a space in it is escaped
        if resolved.is_relative_to(mount_path) and len(mount_path.parts) >= best:
            best, kind = len(mount_path.parts), this_kind
    return kind


def _check_space(path: Path) -> Check:
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    value = f"{format_bytes(free)}: the states of about {format_count(free // STATE_BYTES_PER_PARAM)} parameters"
    low = free < LOW_SPACE
    return Check("free space", value, "warn" if low else "ok", "free some space, or use another drive" if low else "")


def _check_direct_io(path: Path) -> Check:
    """Write and read back one aligned block with O_DIRECT, in a file without a name."""
    pattern = os.urandom(ALIGNMENT)
    try:
        with tempfile.TemporaryFile(dir=path) as file, mmap.mmap(-1, ALIGNMENT) as block:  # mmap: page-aligned
            descriptor = file.fileno()
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
            block[:] = pattern
            written = os.pwritev(descriptor, [block], 0)
            block[:] = bytes(ALIGNMENT)
            read = os.preadv(descriptor, [block], 0)
            same = (written, read) == (ALIGNMENT, ALIGNMENT) and block[:] == pattern
    except OSError as error:
        return _direct_io_failure(path, error)
    if same:
        return Check("direct I/O", "works")
    return Check("direct I/O", "the bytes read differ from those written", "fail", "use another drive; check this one")


def _direct_io_failure(path: Path, error: OSError) -> Check:
    if error.errno == errno.EINVAL:  # the file system does not support O_DIRECT
        remedy = "use ext4, xfs or btrfs: here swap goes through the page cache, with one more copy"
        return Check("direct I/O", "not supported by this file system", "warn", remedy)
    remedies = {
        errno.EACCES: f"make {path} writable for this user",
        errno.EROFS: "the file system is mounted read-only: use another, or remount it",
        errno.ENOSPC: "free some space, or use another drive",
    }
    remedy = remedies.get(error.errno or 0, "use another drive")
    return Check("direct I/O", f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})", "fail", remedy)
