"""A real memory limit for a child process: a control group (v1 or v2) of its own."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import ConfigError

_ROOT = Path("/sys/fs/cgroup")
_MEMORY_FILES = {1: ("limit_in_bytes", "max_usage_in_bytes", "memsw.limit_in_bytes"), 2: ("max", "peak", "swap.max")}
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Processes in it get no more memory than its limit, page cache included, and no swap."""

    path: Path
    version: int

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command, to be run in the group from its first moment."""
        # Shell: what enters the group must be the process itself, before it loads anything.
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    @property
    def peak_bytes(self) -> int | None:
        file = self.path / f"memory.{_MEMORY_FILES[self.version][1]}"
        return int(file.read_text()) if file.exists() else None

    @property
    def num_kills(self) -> int:
        """How often the kernel has killed for want of memory."""
        file = self.path / ("memory.oom_control" if self.version == 1 else "memory.events")
        return int(dict(line.split() for line in file.read_text().splitlines()).get("oom_kill", 0))


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[ControlGroup]:
    """A group with this limit, gone afterwards."""
    parent, version = _own_group()
    group = ControlGroup(parent / f"zero-infinity-{uuid.uuid4().hex[:12]}", version)
    limit_file, _, swap_file = (group.path / f"memory.{name}" for name in _MEMORY_FILES[version])
    try:
        group.path.mkdir()
        limit_file.write_text(str(limit))
        if swap_file.exists():
            swap_file.write_text(str(limit if version == 1 else 0))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.path.rmdir()
        raise ConfigError(
            f"a limit of {format_bytes(limit)} cannot be set: {error.strerror} ({error.filename})\n"
            "  fix:   run as root, or where control groups are delegated (systemd-run --user --scope -p Delegate=yes)"
        ) from None
    try:
        yield group
    finally:
        # A process that was killed leaves its group a moment later.
        deadline = time.monotonic() + _END_SECONDS
        while group.path.exists() and time.monotonic() < deadline:
            try:
                group.path.rmdir()
            except OSError:
                time.sleep(0.05)


def _own_group() -> tuple[Path, int]:
    """This process's group, under which others can be made, and the version of the hierarchy."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        raise ConfigError("this system has no control groups, so no limit can be set") from None
    groups = dict(line.split(":", 2)[1:] for line in lines)
    if "memory" in groups:
        own = _ROOT / "memory" / groups["memory"].lstrip("/")
        return (own if own.exists() else _ROOT / "memory"), 1
    return _ROOT / groups.get("", "/").lstrip("/"), 2
