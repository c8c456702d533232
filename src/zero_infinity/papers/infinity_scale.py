"""ZeRO-Infinity (arXiv 2104.07857), how large a model can be: figures 1, 6a and 6b."""

from __future__ import annotations

from zero_infinity.papers.exhibit import Cell, Exhibit, Plot, PlotKind
from zero_infinity.papers.infinity_equations import Strategy, largest_hidden, largest_model
from zero_infinity.papers.infinity_paper import SOURCE
from zero_infinity.planner.hardware import load

_GIB = 2**30
_TRILLION = 1e12

# Figure 1: trillions of parameters by nodes.
_FIGURE_1 = {
    Strategy.INFINITY_NVME: {1: "1", 8: "8", 16: "16", 32: "32", 64: "64", 128: "128"},
    Strategy.THREE_D: {1: "0.02", 8: "0.16", 16: "0.32", 32: "0.64", 64: "1.28", 128: "2.56"},
}
# Figure 6a: billions of parameters on one DGX-2.
_FIGURE_6A = {
    Strategy.DATA_PARALLEL: "1.4",
    Strategy.ZERO_2: "10",
    Strategy.ZERO_OFFLOAD: "13",
    Strategy.ZERO_3: "20",
    Strategy.THREE_D: "20",
    Strategy.INFINITY_CPU: "70",
    Strategy.INFINITY_NVME: "1000",
}
_FIGURE_6B = {1: "8", 2: "16", 4: "32", 16: "64"}  # tiles -> hidden in K
_CHUNK_BYTES = 2 * _GIB


def figure_1() -> Exhibit:
    hardware = load("dgx2")
    cells = [
        Cell((str(strategy), str(nodes)), largest_model(strategy, hardware, nodes) / _TRILLION, printed, x=nodes)
        for strategy, row in _FIGURE_1.items()
        for nodes, printed in row.items()
    ]
    return Exhibit(
        "infinity-figure1",
        "Largest model against the number of DGX-2 nodes",
        f"{SOURCE}, figure 1",
        ("strategy", "nodes"),
        "trillion parameters",
        tuple(cells),
        (
            "Ours is the bound by model states alone, at 20 bytes a parameter in all memory there is; the paper "
            "trained what it prints for up to 32 nodes and projects the rest.",
            "1T on one node is the paper's; a picture of the talk says on one GPU.",
            "1T was said to take 800 V100: that is for 3D parallelism (0.02T a node); states alone fill 625 of 32 GB.",
            "GPT-3 was fine-tuned on 16 nodes by the talk, on 8 by the paper.",
        ),
        Plot(PlotKind.LINES, "nodes", "trillion parameters", log_x=True, log_y=True),
        measured=True,
    )


def figure_6a() -> Exhibit:
    hardware = load("dgx2")
    cells = []
    for number, (strategy, printed) in enumerate(_FIGURE_6A.items()):
        optimizer, parameters = strategy.placement
        note = f"optimizer: {optimizer}; parameters: {parameters}"
        if strategy is Strategy.INFINITY_CPU:
            note += "; the text says almost 100, its 125 x 8192 has 100.7B parameters"
        cells.append(Cell((str(strategy),), largest_model(strategy, hardware) / 1e9, printed, note, x=float(number)))
    return Exhibit(
        "infinity-figure6a",
        "Largest model on one DGX-2, by strategy",
        f"{SOURCE}, figure 6a",
        ("strategy",),
        "billion parameters",
        tuple(cells),
        (
            "Ours is the bound by model states alone, at 20 bytes a parameter; the paper's are sizes that ran.",
            "The appendix has 1.4B as 40 x 1536, 1.13B without embeddings; and 4-way tensor slicing for 1T, where "
            "the paper's section 7.4 and table 1 have none.",
        ),
        Plot(PlotKind.BARS, "strategy", "billion parameters", log_y=True),
        measured=True,
    )


def figure_6b() -> Exhibit:
    cells = [
        Cell(
            (reading, str(tiles)),
            largest_hidden(_CHUNK_BYTES, tiles, with_gradient=with_gradient) / 1024,
            printed,
            x=tiles,
        )
        for reading, with_gradient in (("a chunk holds a weight", False), ("a chunk holds weight and gradient", True))
        for tiles, printed in _FIGURE_6B.items()
    ]
    return Exhibit(
        "infinity-figure6b",
        "Widest layer with memory in chunks of 2 GB, against the tiling factor",
        f"{SOURCE}, figure 6b",
        ("reading", "tiles"),
        "K",
        tuple(cells),
        ("Neither reading gives all four: with a weight a chunk, 1 tile is 16K; with both, 4 and 16 are half.",),
        Plot(PlotKind.LINES, "tiles", "hidden size in K", log_x=True, log_y=True),
    )
