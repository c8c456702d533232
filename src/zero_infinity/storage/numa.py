"""Which cores are near a device on a machine of several memory nodes (NUMA), and keeping our own threads there.

A transfer between a device and memory of another node crosses the link between the processors. So the threads that move
bytes run on the cores of the device's node, and host memory is pinned from there: the kernel takes pages from the node
of the core that touches them first. Nothing happens where the machine has one node, or does not tell.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

Cores = frozenset[int]
_SYSFS = Path("/sys")


def cores_near(device: torch.device) -> Cores | None:
    """Return the cores of a device's node; None if there is only one node, or nobody knows."""
    address = _pci_address(device)
    return None if address is None else cores_of(address, _SYSFS)


def cores_of(pci_address: str, sysfs: Path) -> Cores | None:
    """Return the cores of the node that a PCI device ("0000:3b:00.0") is attached to, as `sysfs` has it."""
    nodes = sysfs / "devices" / "system" / "node"
    try:
        node = int((sysfs / "bus" / "pci" / "devices" / pci_address / "numa_node").read_text(encoding="ascii"))
        if node < 0 or len(list(nodes.glob("node[0-9]*"))) < 2:
            return None
        return _parse_cores((nodes / f"node{node}" / "cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):  # another kernel, a container that hides it
        return None


def keep_near(thread_ids: Iterable[int], cores: Cores | None) -> None:
    """Let these threads run on these cores only, as far as they may run there at all."""
    for thread in thread_ids:
        allowed = os.sched_getaffinity(thread) & (cores or frozenset())
        if allowed:
            os.sched_setaffinity(thread, allowed)


@contextmanager
def running_near(cores: Cores | None) -> Iterator[None]:
    """Inside, the calling thread runs on these cores."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    keep_near([0], cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _pci_address(device: torch.device) -> str | None:
    module = torch.get_device_module(device)
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    bus, slot = getattr(properties, "pci_bus_id", None), getattr(properties, "pci_device_id", None)
    if bus is None or slot is None:
        return None
    return f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{slot:02x}.0"


def _parse_cores(text: str) -> Cores | None:
    """Parse a list of cores as the kernel writes it: "0-3,8,10-11"."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores) or None
