"""How much memory this machine, or the container that we run in, has.

Owns the look-up in /proc and in the cgroup file systems. It does not know what the number is used for, and it
imports no torch.

Facts about Linux that decide the code:

- In a container /proc/meminfo still shows the whole machine; only the cgroup knows the limit, and the kernel
  kills what goes past it. So the smaller of the two is the memory that there is.
- A limit set on any ancestor binds too, and `memory.max` of the leaf often says "max". So every level from our
  own cgroup up to the mount point is read.
- In cgroup v1 each controller has its own mount and "no limit" is a number close to 2**63. In v2 there is one
  mount, "no limit" is the word "max", and the root has no such file at all. Hybrid systems have both; the memory
  controller is in exactly one of them.
- /proc/self/cgroup gives the path as seen from the cgroup namespace, while a bind-mounted hierarchy (Docker
  without a private namespace) shows only a part of the tree: mountinfo's "root" field says which.
- Usage counts the page cache. What is inactive there is given back without swapping, hence counts as available.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory, as of one moment."""

    physical: int  # RAM of the machine
    limit: int | None  # the tightest cgroup limit, or None; never more than `physical`
    available: int  # what can be allocated now without swapping and without meeting the limit

    @property
    def total(self) -> int:
        """What there is for us: the machine's RAM, or the container's limit where that is less."""
        return self.physical if self.limit is None else self.limit


@dataclass(frozen=True, slots=True)
class _Controller:
    """The names under which one version of the cgroup memory controller keeps its numbers."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str  # key in memory.stat, over the whole subtree


_V1 = _Controller(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
# Past memory.high nothing is killed, but every allocation is throttled to a crawl: a limit for our purposes.
_V2 = _Controller(("memory.max", "memory.high"), "memory.current", "inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Measure now. `root` is where proc/ and sys/ are looked for: tests give a made-up tree."""
    physical, available = _meminfo(root)
    limit: int | None = None
    for level_limit, level_available in _cgroup_levels(root):
        if level_limit < physical:  # "no limit" in v1, or a limit that the machine cannot reach
            limit = level_limit if limit is None else min(limit, level_limit)
            available = min(available, level_available)
    return HostMemory(physical, limit, max(available, 0))


def _meminfo(root: Path) -> tuple[int, int]:
    """Total and available bytes of RAM."""
    text = _read(root / "proc/meminfo")
    kibibytes = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if "MemTotal" not in kibibytes:  # not Linux, or /proc is hidden
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    total = kibibytes["MemTotal"] * 1024
    return total, min(total, kibibytes.get("MemAvailable", kibibytes.get("MemFree", 0)) * 1024)


def _cgroup_levels(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and available bytes of every cgroup level that has a limit, from our own up."""
    for controller, mount_point, directory in _memory_hierarchies(root):
        for level in (directory, *directory.parents):
            limits = [int(text) for name in controller.limits if (text := _read(level / name).strip()).isdigit()]
            if limits:
                yield min(limits), min(limits) - _busy_bytes(level, controller)
            if level == mount_point:
                break


def _busy_bytes(level: Path, controller: _Controller) -> int:
    """Bytes charged to a cgroup that cannot be given back at once."""
    usage = _read(level / controller.usage).strip()
    reclaimable = re.search(rf"^{controller.reclaimable} (\d+)$", _read(level / "memory.stat"), re.MULTILINE)
    return (int(usage) if usage.isdigit() else 0) - (int(reclaimable[1]) if reclaimable else 0)


def _memory_hierarchies(root: Path) -> Iterator[tuple[_Controller, Path, Path]]:
    """For each mounted hierarchy that may hold the memory controller: mount point and our directory in it."""
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
    """Our path per controller; the key of the v2 hierarchy is ""."""
    paths: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _below(path: str, mounted_root: str) -> PurePosixPath:
    """`path` relative to the part of the tree that is mounted; the top where it lies outside."""
    try:
        relative = PurePosixPath(path).relative_to(mounted_root)
    except ValueError:
        return PurePosixPath()
    # A path like /../sibling is how the kernel shows a cgroup outside of our namespace: nothing to walk there.
    return PurePosixPath() if ".." in relative.parts else relative


def _unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo (a space is \\040)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _read(path: Path) -> str:
    """The file's text, or "" where it does not exist or may not be read: every source here is optional."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
