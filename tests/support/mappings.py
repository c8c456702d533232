"""What /proc/self says about the memory mappings of this process."""

from __future__ import annotations

import re
from pathlib import Path


def mapped_of(address: int, num_bytes: int) -> int:
    """How many bytes of the range are mapped in this process."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        total += max(0, min(end, address + num_bytes) - max(start, address))
    return total


def smaps_at(address: int) -> dict[str, str]:
    """What the kernel says about the mapping that holds `address`."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(header[1], 16) <= address < int(header[2], 16)
        elif inside:
            key, _, value = line.partition(":")
            found[key] = value
    return found
