"""The look-up runs over made-up /proc and /sys trees, one for each arrangement of cgroups met in practice."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_infinity.machine import host_memory

GIB = 1024**3
V1_UNLIMITED = "9223372036854771712"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 16 GiB of which 12 are available, and no cgroups."""
    put(tmp_path / "proc/meminfo", f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable:   {12 * GIB // 1024} kB")
    return tmp_path


def mount(root: Path, own: str, line: str) -> None:
    put(root / "proc/self/cgroup", own)
    put(root / "proc/self/mountinfo", line)


def test_without_cgroups(root: Path) -> None:
    memory = host_memory(root)
    assert (memory.physical, memory.limit, memory.available, memory.total) == (16 * GIB, None, 12 * GIB, 16 * GIB)


def test_v2_limit_of_an_ancestor_binds(root: Path) -> None:
    mount(root, "0::/slice/service", V2_MOUNT.format(root="/"))
    cgroup = root / "sys/fs/cgroup/slice"
    put(cgroup / "memory.max", 4 * GIB)
    put(cgroup / "memory.current", 3 * GIB)
    put(cgroup / "memory.stat", f"anon 1\ninactive_file {GIB}\nactive_file 5")
    put(cgroup / "service/memory.max", "max")
    memory = host_memory(root)
    assert (memory.limit, memory.total) == (4 * GIB, 4 * GIB)
    assert memory.available == 2 * GIB  # the page cache that is inactive counts as free


def test_v2_high_is_a_limit_too(root: Path) -> None:
    mount(root, "0::/", V2_MOUNT.format(root="/"))
    put(root / "sys/fs/cgroup/memory.max", 8 * GIB)
    put(root / "sys/fs/cgroup/memory.high", 6 * GIB)
    assert host_memory(root).limit == 6 * GIB


def test_v1_limit(root: Path) -> None:
    mount(root, "4:memory:/job/1\n0::/", V1_MOUNT.format(root="/"))
    cgroup = root / "sys/fs/cgroup/memory/job/1"
    put(cgroup / "memory.limit_in_bytes", 2 * GIB)
    put(cgroup / "memory.usage_in_bytes", GIB)
    put(cgroup / "memory.stat", "inactive_file 7\ntotal_inactive_file 0")
    put(cgroup.parent / "memory.limit_in_bytes", V1_UNLIMITED)
    memory = host_memory(root)
    assert (memory.limit, memory.available) == (2 * GIB, GIB)


def test_v1_without_a_limit(root: Path) -> None:
    mount(root, "4:cpu,memory:/", V1_MOUNT.format(root="/"))
    put(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", V1_UNLIMITED)
    memory = host_memory(root)
    assert (memory.limit, memory.available) == (None, 12 * GIB)


def test_container_that_sees_only_its_part_of_the_tree(root: Path) -> None:
    mount(root, "4:memory:/docker/abc", V1_MOUNT.format(root="/docker/abc"))
    put(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", 3 * GIB)
    assert host_memory(root).limit == 3 * GIB


@pytest.mark.parametrize("own", ["0::/elsewhere", "0::/docker/../sibling"])
def test_own_path_outside_of_the_mount_means_its_top(root: Path, own: str) -> None:
    mount(root, own, V2_MOUNT.format(root="/docker"))
    put(root / "sys/fs/cgroup/memory.max", 3 * GIB)
    assert host_memory(root).limit == 3 * GIB


def test_mount_point_with_a_space(root: Path) -> None:
    mount(root, "0::/", "30 23 0:26 / /sys/fs/c\\040group rw - cgroup2 cgroup2 rw")
    put(root / "sys/fs/c group/memory.max", 3 * GIB)
    assert host_memory(root).limit == 3 * GIB


def test_usage_above_the_limit_leaves_nothing(root: Path) -> None:
    mount(root, "0::/", V2_MOUNT.format(root="/"))
    put(root / "sys/fs/cgroup/memory.max", GIB)
    put(root / "sys/fs/cgroup/memory.current", 2 * GIB)
    assert host_memory(root).available == 0


def test_a_limit_above_the_machine_is_none(root: Path) -> None:
    mount(root, "0::/", V2_MOUNT.format(root="/"))
    put(root / "sys/fs/cgroup/memory.max", 64 * GIB)
    assert host_memory(root).limit is None


def test_unreadable_lines_are_passed_over(root: Path) -> None:
    mount(root, "nonsense", "too short - x\n\n31 23 0:28 / /sys tmpfs - tmpfs tmpfs rw")
    assert host_memory(root).available == 12 * GIB


def test_without_proc_the_kernel_is_asked(tmp_path: Path) -> None:
    memory = host_memory(tmp_path)
    assert memory.physical == memory.available > 0


def test_this_machine() -> None:
    memory = host_memory()
    assert 0 < memory.available <= memory.total <= memory.physical
