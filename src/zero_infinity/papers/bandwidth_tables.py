"""The talk's tables on bandwidth: what is needed, and what a cluster has before and after partitioning.

Printed in the slides of the SC'21 talk on ZeRO-Infinity and in a course's slides about it. Two profiles of a DGX-2 are
about: the paper's and the talk's.
"""

from __future__ import annotations

from zero_infinity.papers.exhibit import Cell, Exhibit, Plot, PlotKind
from zero_infinity.planner.bandwidth_model import (
    checkpoint_intensity,
    optimizer_intensity,
    owner_bandwidth,
    parameter_intensity,
    partitioned_bandwidth,
    required_bandwidth,
)
from zero_infinity.planner.hardware import load

_SOURCE = "SC'21 talk on ZeRO-Infinity"
_GB = 1e9
_SEQ = 1024
_NODES = 64


def required() -> Exhibit:
    cells = (
        Cell(
            ("parameters and gradients", "overlapped"),
            required_bandwidth(parameter_intensity(1, _SEQ), 0.5) / _GB,
            "70",
            "50% at batch 1; the talk's own slide prints 60",
            x=0,
        ),
        Cell(
            ("optimizer states", "not overlapped"),
            required_bandwidth(optimizer_intensity(2, _SEQ), 0.9) / _GB,
            "1500",
            "90% at batch 2; the slide's caption says 50% for all three, which holds for parameters only",
            x=1,
        ),
        Cell(
            ("activations, hidden 2K", "overlapped"),
            required_bandwidth(checkpoint_intensity(2048), 0.5) / _GB,
            "2",
            "50%; printed as 1-4 GB/s for all widths, and over 50% at 2 GB/s in the paper's text",
            x=2,
        ),
        Cell(
            ("activations, hidden 8K", "overlapped"),
            required_bandwidth(checkpoint_intensity(8192), 0.5) / _GB,
            "1",
            "50%; the paper: less than 1 GB/s above 8K",
            x=3,
        ),
    )
    return Exhibit(
        "bandwidth-required",
        "Bandwidth that each kind of data needs",
        f"{_SOURCE}; also arXiv 2104.07857, section 4.2",
        ("data", "overlap"),
        "GB/s",
        cells,
        plot=Plot(PlotKind.BARS, "data", "GB/s", log_y=True),
    )


def partitioned() -> Exhibit:
    """min(#gpus x host link, GPU-GPU), 1 to 64 nodes."""
    printed = {(1, "CPU"): "64", (1, "NVMe"): "28", (64, "CPU"): "4096", (64, "NVMe"): "1792"}
    cells: list[Cell] = []
    for profile in ("dgx2-slides", "dgx2"):
        hardware = load(profile)
        for tier in (hardware.host, hardware.storage[0]):
            for nodes in (1, 4, 16, 64):
                devices = nodes * hardware.devices_per_node
                link = tier.read / hardware.devices_per_node
                text = printed.get((nodes, tier.name)) if profile == "dgx2-slides" else None
                label = f"{profile}: {tier.name}"
                cells.append(Cell((f"{label}, all links", str(nodes)), devices * link / _GB, text, x=nodes))
                gather = hardware.cluster_link if nodes > 1 else hardware.node_link
                for what, ours in (
                    ("with the gather", partitioned_bandwidth(devices, link, gather)),
                    ("owner's link alone", owner_bandwidth(tier.one_device, gather)),
                ):
                    cells.append(Cell((f"{label}, {what}", str(nodes)), ours / _GB, x=nodes))
    return Exhibit(
        "bandwidth-partitioned",
        "Bandwidth into one GPU: all links with an all-gather, or the owner's link with a broadcast",
        f"{_SOURCE}; also arXiv 2104.07857, section 6.1",
        ("source", "nodes"),
        "GB/s",
        tuple(cells),
        ("The talk's figures need its own profile (4 and 1.75 GB/s a GPU); the paper's 3 and 1.6 give less.",),
        Plot(PlotKind.LINES, "nodes", "GB/s", log_x=True, log_y=True),
    )


def sufficient() -> Exhibit:
    """1,024 GPUs: is what there is enough?"""
    printed = {
        ("parameters and gradients", "NVMe"): "70",
        ("parameters and gradients", "CPU"): "70",
        ("optimizer states", "NVMe"): "1792",
        ("optimizer states", "CPU"): "4096",
        ("activations", "NVMe"): "1.75",
        ("activations", "CPU"): "4",
    }
    needs = {
        "parameters and gradients": required_bandwidth(parameter_intensity(1, _SEQ), 0.5) / _GB,
        "optimizer states": required_bandwidth(optimizer_intensity(2, _SEQ), 0.9) / _GB,
        "activations": required_bandwidth(checkpoint_intensity(2048), 0.5) / _GB,
    }
    cells: list[Cell] = []
    for profile in ("dgx2-slides", "dgx2"):
        hardware = load(profile)
        devices = _NODES * hardware.devices_per_node
        for tier in (hardware.storage[0], hardware.host):
            link = tier.read / hardware.devices_per_node
            has = {
                "parameters and gradients": partitioned_bandwidth(devices, link, hardware.cluster_link) / _GB,
                "optimizer states": devices * link / _GB,
                "activations": link / _GB,
            }
            for number, (data, ours) in enumerate(has.items()):
                enough = "enough" if ours >= needs[data] else "not enough"
                text = printed[data, tier.name] if profile == "dgx2-slides" else None
                note = f"needs {needs[data]:.3g} GB/s: {enough}"
                cells.append(Cell((f"{profile}: {tier.name}", data), ours, text, note, x=number))
        owner = owner_bandwidth(hardware.host.one_device, hardware.cluster_link) / _GB
        text = "12" if profile == "dgx2-slides" else None
        note = f"needs {needs['parameters and gradients']:.3g} GB/s: not enough"
        cells.append(Cell((f"{profile}: CPU", "parameters, one owner each"), owner, text, note, x=len(needs)))
    return Exhibit(
        "bandwidth-sufficient",
        "64 DGX-2 nodes, 1,024 GPUs: bandwidth needed and had",
        _SOURCE,
        ("memory", "data"),
        "GB/s",
        tuple(cells),
        plot=Plot(PlotKind.BARS, "data", "GB/s", log_y=True),
    )
