"""ZeRO-Infinity (arXiv 2104.07857), what follows from equations alone: figures 2 and 3, tables 3 and 4.

Facts of the paper stand here as printed; where it disagrees with itself or with the talk, both are shown.
"""

from __future__ import annotations

from zero_infinity.papers.exhibit import Cell, Exhibit, Plot, PlotKind
from zero_infinity.papers.infinity_equations import Transformer
from zero_infinity.planner.bandwidth_model import (
    V100_PEAK,
    V100_PEAK_RANGE,
    checkpoint_intensity,
    efficiency,
    optimizer_intensity,
    parameter_intensity,
    required_bandwidth,
)
from zero_infinity.planner.hardware import Hardware, load

SOURCE = "ZeRO-Infinity, arXiv 2104.07857"
_SEQ = 1024
_GIB = 2**30
_TIB = 2**40
_GB = 1e9
_TRILLION = 1e12

# Trillions of parameters, layers, hidden in K, heads; then printed: states, activations and checkpoints in TB (the last
# two of a node), MSWM and AWM in GB. Powers of 1024.
_FIGURE_2A = (
    ("0.10", 80, 10, 128, "1.83", "2.03", "0.05", "1.95", "1.63"),
    ("0.50", 100, 20, 160, "9.16", "3.91", "0.12", "6.25", "2.50"),
    ("1.01", 128, 25, 256, "18.31", "7.13", "0.20", "9.77", "3.56"),
    ("10.05", 195, 64, 512, "182.81", "24.38", "0.76", "64.00", "8.00"),
    ("101.47", 315, 160, 1024, "1845.70", "88.59", "3.08", "400.00", "18.00"),
)
_NODE_BATCH = 32
# What activations and AWM are printed for: see the note of the figure.
_PRINTED_NODE_BATCH = 64
_PRINTED_DEVICE_BATCH = 4

# Nodes, devices; printed: GPU, CPU, NVMe in TB; CPU and NVMe bandwidth of a GPU in GB/s.
_FIGURE_2B = (
    (1, 1, "0.032", "1.5", "28", "12.0", "12.0"),
    (1, 16, "0.5", "1.5", "28", "3.0", "1.6"),
    (4, 16, "2", "6", "112", "3.0", "1.6"),
    (16, 16, "8", "24", "448", "3.0", "1.6"),
    (64, 16, "32", "96", "1792", "3.0", "1.6"),
    (96, 16, "48", "144", "2688", "3.0", "1.6"),
)

# Table 4: degradation by parameters, optimizer and activations; efficiency; range and measured TFLOP/s.
TABLE_4 = {
    "5T": (3.0, 49152, "0.25", "0.10", "0.020", "0.63", "39", "63.82", "44"),
    "10T": (2.0, 65536, "0.33", "0.14", "0.015", "0.515", "32", "52.22", "43"),
    "20T": (1.25, 90112, "0.44", "0.21", "0.01", "0.34", "21.08", "34.73", "34"),
}
_TABLE_4_GATHER = 70e9
_TABLE_4_AGGREGATE = 819e9
_TABLE_4_CHECKPOINTS = 3e9
_TABLE_4_MARGIN = 1.3  # the paper's own allowance at the upper end


def figure_2a() -> Exhibit:
    cells: list[Cell] = []
    for label, layers, kilo_hidden, heads, *printed in _FIGURE_2A:
        model = Transformer(layers, kilo_hidden * 1024, heads, _SEQ)
        mswm_note = "" if layers != 80 else "the printed cell is not 16 x hidden^2 for this row; all others are"
        columns = (
            ("parameters, T", model.num_parameters / _TRILLION, label, ""),
            ("model states, TB", model.state_bytes / _TIB, printed[0], ""),
            ("activations, TB/node", model.activation_bytes(_PRINTED_NODE_BATCH) / _TIB, printed[1], ""),
            ("checkpoints, TB/node", model.checkpoint_bytes(_NODE_BATCH) / _TIB, printed[2], ""),
            ("MSWM, GB", model.state_working_bytes / _GIB, printed[3], mswm_note),
            ("AWM, GB", model.activation_working_bytes(_PRINTED_DEVICE_BATCH) / _GIB, printed[4], ""),
        )
        cells += [
            Cell((name, f"{label}T"), ours, text, note, x=model.num_parameters / _TRILLION)
            for name, ours, text, note in columns
        ]
    return Exhibit(
        "infinity-figure2a",
        "Memory that training needs, by model size",
        f"{SOURCE}, figure 2a",
        ("quantity", "model"),
        "TB and GB are powers of 1024",
        tuple(cells),
        (
            "Activations and AWM match with a batch of 64 a node, 4 a GPU, or with 32 and 2 if the equation counts "
            "16-bit elements; the text names both batches. Checkpoints match with 32 a node.",
        ),
        Plot(PlotKind.LINES, "trillion parameters", "TB or GB", log_x=True, log_y=True),
    )


def figure_2b() -> Exhibit:
    hardware = load("dgx2")
    cells: list[Cell] = []
    for nodes, devices, *printed in _FIGURE_2B:
        key = f"{nodes} x {devices}"
        for (name, ours, note), text in zip(_hierarchy(hardware, nodes, devices), printed, strict=True):
            cell = Cell((name, key), ours, text)
            cells.append(Cell(cell.keys, ours, text, "" if cell.agrees else note, x=nodes * devices))
    return Exhibit(
        "infinity-figure2b",
        "Memory and bandwidth of DGX-2 clusters",
        f"{SOURCE}, figure 2b",
        ("quantity", "nodes x GPUs"),
        "TB, GB/s",
        tuple(cells),
        ("The talk has 4 and 1.75 GB/s a GPU where the paper has 3 and 1.6: profiles dgx2-slides and dgx2.",),
        Plot(PlotKind.LINES, "GPUs", "TB or GB/s", log_x=True, log_y=True),
    )


def _hierarchy(hardware: Hardware, nodes: int, devices: int) -> list[tuple[str, float, str]]:
    device_bytes = hardware.device.capacity if hardware.device is not None else 0
    nvme = hardware.storage[0]
    rounded = "16 x 0.032 is 0.512; the paper counts 0.5 TB a node"
    rows = [
        ("GPU memory, TB", nodes * devices * device_bytes / _TRILLION, rounded),
        ("CPU memory, TB", nodes * hardware.host.capacity / _TRILLION, ""),
        ("NVMe, TB", nodes * nvme.capacity / _TRILLION, ""),
    ]
    for name, tier in (("CPU, GB/s a GPU", hardware.host), ("NVMe, GB/s a GPU", nvme)):
        rows.append((name, min(tier.one_device, tier.read / devices) / _GB, ""))
    return rows


def figure_3(part: str) -> Exhibit:
    """a: parameters and gradients, b: optimizer states, c: activation checkpoints."""
    titles = {"a": "parameter and gradient", "b": "optimizer state", "c": "activation checkpoint"}
    cells: list[Cell] = []
    if part == "c":
        for kilo in (2, 4, 8, 16, 32, 64):
            for bandwidth in (1, 2, 3, 4, 8, 16, 32):
                ours = 100 * efficiency(checkpoint_intensity(kilo * 1024), bandwidth * _GB)
                cells.append(
                    Cell((f"hidden {kilo}K", f"{bandwidth}"), ours, _FIGURE_3_C.get((kilo, bandwidth)), x=bandwidth)
                )
    else:
        intensity = parameter_intensity if part == "a" else optimizer_intensity
        known = _FIGURE_3_A if part == "a" else _FIGURE_3_B
        bandwidths = (1, 3, 6, 12, 24, 48, 70, 96, 192) if part == "a" else (12, 48, 192, 280, 768, 1230, 1500, 3072)
        for batch in (1, 2, 4, 8, 16):
            for bandwidth in bandwidths:
                ours = 100 * efficiency(intensity(batch, _SEQ), bandwidth * _GB)
                cells.append(Cell((f"batch {batch}", f"{bandwidth}"), ours, known.get((batch, bandwidth)), x=bandwidth))
    return Exhibit(
        f"infinity-figure3{part}",
        f"Efficiency against {titles[part]} bandwidth, at a peak of 70 TFLOP/s",
        f"{SOURCE}, figure 3{part}",
        ("curve", "GB/s"),
        "%",
        tuple(cells),
        (
            "The paper prints curves; the published column has the points that its text states: 50% at 70 GB/s and "
            "batch 1, 90% at 1.5 TB/s and batch 2, over 50% at 2 GB/s for hidden 2K, over 80% at 3 GB/s for hidden 8K.",
        ),
        Plot(PlotKind.LINES, "GB/s", "efficiency, %", log_x=True),
    )


# Points that the text states (section 4.2), in percent.
_FIGURE_3_A = {(1, 70): "50"}
_FIGURE_3_B = {(2, 1500): "90"}
_FIGURE_3_C = {(2, 2): "50", (8, 3): "80"}


def table_3() -> Exhibit:
    """What hardware 10 and 100 times as fast needs: the same equations with another peak."""
    printed = {1: ("3", "1.5", "70"), 10: ("30", "15", "700"), 100: ("300", "150", "7000")}
    devices = 512
    cells: list[Cell] = []
    for factor, (slow, aggregate, gather) in printed.items():
        peak = factor * V100_PEAK
        optimizer = required_bandwidth(optimizer_intensity(2, _SEQ), 0.9, peak)
        key = "V100" if factor == 1 else f"{factor}x"
        cells += [
            Cell(("slow memory, GB/s a device", key), optimizer / devices / _GB, slow, x=factor),
            Cell(("slow memory, TB/s in all", key), optimizer / _TRILLION, aggregate, x=factor),
            Cell(
                ("GPU-GPU, GB/s", key),
                required_bandwidth(parameter_intensity(1, _SEQ), 0.5, peak) / _GB,
                gather,
                x=factor,
            ),
        ]
    return Exhibit(
        "infinity-table3",
        "Bandwidth that 512 devices need: V100, and 10 and 100 times as fast",
        f"{SOURCE}, table 3",
        ("quantity", "device"),
        "GB/s, TB/s",
        tuple(cells),
        (
            "Ours: 90% efficiency of the optimizer states at batch 2, 50% of the parameters at batch 1. The paper "
            "rounds 1.23 up to 1.5 TB/s, and 2.4 up to 3 GB/s.",
        ),
        Plot(PlotKind.LINES, "times a V100", "GB/s or TB/s", log_x=True, log_y=True),
    )


def table_4() -> Exhibit:
    cells: list[Cell] = []
    for number, (model, row) in enumerate(TABLE_4.items()):
        batch, hidden, params, optimizer, activations, total, low, high, actual = row
        lost = (
            1 - efficiency(parameter_intensity(batch, _SEQ), _TABLE_4_GATHER),
            1 - efficiency(optimizer_intensity(batch, _SEQ), _TABLE_4_AGGREGATE),
            1 - efficiency(checkpoint_intensity(hidden), _TABLE_4_CHECKPOINTS),
        )
        left = 1 - sum(lost)
        slowest, fastest = (left * peak / 1e12 for peak in V100_PEAK_RANGE)
        cells += [
            Cell(("lost to parameters", model), lost[0], params),
            Cell(("lost to optimizer states", model), lost[1], optimizer),
            Cell(("lost to activations", model), lost[2], activations),
            Cell(("efficiency", model), left, total),
            Cell(("least TFLOP/s", model), slowest, low, x=number),
            Cell(("most TFLOP/s", model), _TABLE_4_MARGIN * fastest, high, x=number),
            Cell(
                ("middle of the range against measured, TFLOP/s", model),
                (slowest + _TABLE_4_MARGIN * fastest) / 2,
                actual,
                x=number,
            ),
        ]
    return Exhibit(
        "infinity-table4",
        "Predicted and measured throughput on 512 V100",
        f"{SOURCE}, table 4",
        ("quantity", "model"),
        "parts of 1, TFLOP/s a GPU",
        tuple(cells),
        (
            "The simulated throughput of the same models is in infinity-figure5a.",
            "20T is slower than 10T for want of CPU memory for checkpoints, which keeps its batch small (page 10 of "
            "the paper); what limits a small batch is the link between GPUs, 70 GB/s (page 11).",
        ),
        Plot(PlotKind.BARS, "model", "TFLOP/s a GPU"),
    )
