"""The cores near a device, from trees as the kernel shows them; and threads that are kept there."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zero_infinity.storage import numa

ADDRESS = "0000:3b:00.0"


def tree(root: Path, node: str | None, *cores: str) -> Path:
    """A machine with a PCI device on `node`, and one memory node for each list of cores."""
    if node is not None:
        device = root / "bus" / "pci" / "devices" / ADDRESS
        device.mkdir(parents=True)
        (device / "numa_node").write_text(node + "\n")
    for number, text in enumerate(cores):
        folder = root / "devices" / "system" / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("node", "cores", "near"),
    [
        ("1", ("0-3,8-11", "4-7,12-15"), {4, 5, 6, 7, 12, 13, 14, 15}),
        ("0", ("0,2", "1,3"), {0, 2}),
        ("0", ("0-7",), None),  # one node
        ("-1", ("0-3", "4-7"), None),  # the firmware does not say
        ("1", ("0-3", ""), None),  # a node of memory only
        ("2", ("0-3", "4-7"), None),  # no such node
        ("x", ("0-3", "4-7"), None),
        (None, ("0-3", "4-7"), None),
        (None, (), None),
    ],
)
def test_cores_of_a_device(node: str | None, cores: tuple[str, ...], near: set[int] | None, tmp_path: Path) -> None:
    assert numa.cores_of(ADDRESS, tree(tmp_path, node, *cores)) == near


def test_the_address_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_bus_id=0x3B, pci_device_id=0, pci_domain_id=0)
    module = SimpleNamespace(get_device_properties=lambda _: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(numa, "_SYSFS", tree(tmp_path, "1", "0", "1"))
    assert numa.cores_near(torch.device("cuda", 0)) == {1}
    del properties.pci_bus_id
    assert numa.cores_near(torch.device("cuda", 0)) is None


def test_threads_are_kept_where_they_may_run() -> None:
    mine = os.sched_getaffinity(0)
    core = min(mine)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert thread.native_id is not None
    try:
        numa.keep_near([thread.native_id], None)
        numa.keep_near([thread.native_id], frozenset({100_000}))  # not allowed here
        assert os.sched_getaffinity(thread.native_id) == mine
        numa.keep_near([thread.native_id], frozenset({core, 100_000}))
        assert os.sched_getaffinity(thread.native_id) == {core}
    finally:
        done.set()
        thread.join()
    with numa.running_near(frozenset({core})):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == mine
