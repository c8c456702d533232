"""Measure the memory of this machine, or of the container that the process runs in.

Owns the look-up in /proc and in the cgroup file systems. It does not know what the number is used for, and does not
import torch.

Facts about Linux behind the code:

- In a container /proc/meminfo still shows the whole machine. Only the cgroup knows the limit, and the kernel kills
  processes that exceed it. So the smaller of the two counts.
- Limits of all ancestors apply, and `memory.max` of the leaf is often "max". So every level from the process's own
  cgroup up to the mount point is read.
- In cgroup v1 each controller has its own mount, and "no limit" is a number close to 2**63. In v2 there is one mount,
  "no limit" is the word "max", and the root has no such file. Hybrid systems have both; the memory controller is in
  exactly one of them.
- /proc/self/cgroup gives the path as seen from the cgroup namespace, but a bind-mounted hierarchy (Docker without a
  private namespace) shows only part of the tree: the "root" field in mountinfo says which.
- Usage includes the page cache. Its inactive part is freed without swapping, so it counts as available.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory at one moment."""

    physical: int  # RAM of the machine
    limit: int | None  # the lowest cgroup limit, or None; at most `physical`
    available: int  # what can be allocated now without swapping or reaching the limit

    @property
    def total(self) -> int:
        """The machine's RAM, or the container's limit if that is less."""
        return self.physical if self.limit is None else self.limit


@dataclass(frozen=True, slots=True)
class _Controller:
    """File and key names of one version of the cgroup memory controller."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str  # key in memory.stat, over the whole subtree


_V1 = _Controller(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
# Above memory.high nothing is killed, but every allocation is throttled severely: treated as a limit.
_V2 = _Controller(("memory.max", "memory.high"), "memory.current", "inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Measure now. `root` is the directory that holds proc/ and sys/; tests pass a fake one."""
    physical, available = _meminfo(root)
    limit: int | None = None
    for level_limit, level_available in _cgroup_levels(root):
        if level_limit < physical:  # excludes "no limit" of v1 and limits above the RAM
            limit = level_limit if limit is None else min(limit, level_limit)
            available = min(available, level_available)
    return HostMemory(physical, limit, max(available, 0))


def _meminfo(root: Path) -> tuple[int, int]:
    """Return total and available bytes of RAM."""
    text = _read(root / "proc/meminfo")
    kibibytes = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if "MemTotal" not in kibibytes:  # not Linux, or /proc is hidden
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    total = kibibytes["MemTotal"] * 1024
    return total, min(total, kibibytes.get("MemAvailable", kibibytes.get("MemFree", 0)) * 1024)


def _cgroup_levels(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and available bytes of every cgroup level that has a limit, from the process's own up."""
    for controller, mount_point, directory in _memory_hierarchies(root):
        for level in (directory, *directory.parents):
            limits = [int(text) for name in controller.limits if (text := _read(level / name).strip()).isdigit()]
            if limits:
                yield min(limits), min(limits) - _busy_bytes(level, controller)
            if level == mount_point:
                break


def _busy_bytes(level: Path, controller: _Controller) -> int:
    """Return the bytes charged to a cgroup that cannot be freed at once."""
    usage = _read(level / controller.usage).strip()
    reclaimable = re.search(rf"^{controller.reclaimable} (\d+)$", _read(level / "memory.stat"), re.MULTILINE)
    return (int(usage) if usage.isdigit() else 0) - (int(reclaimable[1]) if reclaimable else 0)


def _memory_hierarchies(root: Path) -> Iterator[tuple[_Controller, Path, Path]]:
    """Yield each mounted hierarchy that may hold the memory controller: its mount point and the process's directory."""
    paths = _own_cgroups(root)
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup" and "memory" in kind[2].split(","):
            controller, path = _V1, paths.get("memory")
        elif kind[0] == "cgroup2":
            controller, path = _V2, paths.get("")
        else:
            continue
        if path is not None:
            mount_point = root / _unescape(fields[4]).lstrip("/")
            yield controller, mount_point, mount_point / _below(path, _unescape(fields[3]))


def _own_cgroups(root: Path) -> dict[str, str]:
    """Return the process's path for each controller; the key of the v2 hierarchy is ""."""
    paths: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _below(path: str, mounted_root: str) -> PurePosixPath:
    """Return `path` relative to the mounted part of the tree, or the top if it lies outside."""
    try:
        relative = PurePosixPath(path).relative_to(mounted_root)
    except ValueError:
        return PurePosixPath()
    # The kernel shows a cgroup outside of the namespace as /../sibling: there is nothing to walk there.
    return PurePosixPath() if ".." in relative.parts else relative


def _unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo (a space is \\040)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _read(path: Path) -> str:
    """Return the file's text, or "" if it is missing or unreadable: every source here is optional."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
