"""ZeRO (arXiv 1910.02054): tables 1 and 2, figure 1."""

from __future__ import annotations

from dataclasses import replace

from zero_infinity.papers.exhibit import Cell, Exhibit, Plot, PlotKind
from zero_infinity.papers.zero_equations import (
    PartitionedActivations,
    activation_bytes,
    block_checkpoint_bytes,
    checkpointed_activation_bytes,
    communication_elements,
    fused_buffer_bytes,
    largest_model,
    state_bytes,
)
from zero_infinity.policy.zero_stage import ZeroStage

_SOURCE = "ZeRO, arXiv 1910.02054"
_GB = 1e9
_BILLION = 1e9
_STAGE_NAMES = {
    ZeroStage.NONE: "baseline",
    ZeroStage.OPTIMIZER: "P_os",
    ZeroStage.GRADIENTS: "P_os+g",
    ZeroStage.PARAMETERS: "P_os+g+p",
}
_STAGES = (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS)

# Rows: degree of data parallelism. Columns: 7.5B, 128B and 1T parameters, each with the three stages.
_TABLE_1 = {
    1: ("120", "120", "120", "2048", "2048", "2048", "16000", "16000", "16000"),
    4: ("52.5", "41.3", "30", "896", "704", "512", "7000", "5500", "4000"),
    16: ("35.6", "21.6", "7.5", "608", "368", "128", "4750", "2875", "1000"),
    64: ("31.4", "16.6", "1.88", "536", "284", "32", "4187", "2218", "250"),
    256: ("30.4", "15.4", "0.47", "518", "263", "8", "4046", "2054", "62.5"),
    1024: ("30.1", "15.1", "0.12", "513", "257", "2", "4011", "2013", "15.6"),
}
_MODELS = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}

# Rows: degree of model parallelism. Columns: the four stages by analysis, then measured: baseline, P_os. Billions.
_TABLE_2 = {
    1: ("2", "7.6", "14.4", "128", "1.3", "6.2"),
    2: ("4", "15.2", "28.8", "256", "2.5", "12.5"),
    4: ("8", "30.4", "57.6", "500", "5", "25"),
    8: ("16", "60.8", "115.2", "1000", "10", "50"),
    16: ("32", "121.6", "230.4", "2000", "20", "100"),
}
_TABLE_2_RANKS = 64  # data-parallel, in every row
_V100_BYTES = 32e9

_FIGURE_1 = {
    ZeroStage.NONE: "120",
    ZeroStage.OPTIMIZER: "31.4",
    ZeroStage.GRADIENTS: "16.6",
    ZeroStage.PARAMETERS: "1.9",
}


def table_1() -> Exhibit:
    cells = []
    for column, (model, num_parameters) in enumerate(_MODELS.items()):
        for offset, stage in enumerate(_STAGES):
            for num_ranks, printed in _TABLE_1.items():
                ours = state_bytes(num_parameters, stage, num_ranks) / _GB
                cell = Cell(
                    (f"{model} {_STAGE_NAMES[stage]}", str(num_ranks)), ours, printed[3 * column + offset], x=num_ranks
                )
                cells.append(_with_note(cell))
    return Exhibit(
        "zero-table1",
        "Per-device memory of model states against the degree of data parallelism",
        f"{_SOURCE}, table 1",
        ("model and stage", "N_d"),
        "GB",
        tuple(cells),
        ("The large cells of the printed table are cut off rather than rounded; they are marked.",),
        Plot(PlotKind.LINES, "degree of data parallelism", "GB a device", log_x=True, log_y=True),
    )


def table_2() -> Exhibit:
    cells = []
    stages = list(ZeroStage)
    for model_parallel, printed in _TABLE_2.items():
        for stage, text in zip(stages, printed, strict=False):
            ours = largest_model(_V100_BYTES, stage, _TABLE_2_RANKS, model_parallel) / _BILLION
            first = _TABLE_2[1][stages.index(stage)]
            note = ""
            cell = Cell((_STAGE_NAMES[stage], str(model_parallel)), ours, text)
            if not cell.agrees:
                multiple = model_parallel * float(first)
                if abs(multiple - float(text)) < 0.05:
                    note = f"printed: {model_parallel} x the rounded {first} of the first row"
                else:
                    note = f"printed as {float(text) / 1000:g}T"
            cells.append(Cell(cell.keys, ours, text, note, x=model_parallel))
        measured = {ZeroStage.NONE: printed[4], ZeroStage.OPTIMIZER: printed[5]}
        for stage, text in measured.items():
            bound = largest_model(_V100_BYTES, stage, _TABLE_2_RANKS, model_parallel) / _BILLION
            cells.append(
                Cell(
                    (f"{_STAGE_NAMES[stage]}, measured", str(model_parallel)),
                    bound,
                    text,
                    f"measured is {float(text) / bound:.0%} of the bound by states alone",
                    x=model_parallel,
                )
            )
    return Exhibit(
        "zero-table2",
        "Largest model on 32 GB devices, 64 data-parallel ranks each",
        f"{_SOURCE}, table 2",
        ("stage", "model parallelism"),
        "billion parameters",
        tuple(cells),
        (
            "Printed rows below the first multiply the rounded first row.",
            "Measured sizes are beside the bound by states: what activations, buffers and fragmentation leave.",
        ),
        Plot(PlotKind.LINES, "degree of model parallelism", "billion parameters", log_x=True, log_y=True),
    )


def figure_1() -> Exhibit:
    cells = [
        _with_note(Cell((_STAGE_NAMES[stage],), state_bytes(7.5e9, stage, 64) / _GB, printed, x=float(stage)))
        for stage, printed in _FIGURE_1.items()
    ]
    return Exhibit(
        "zero-figure1",
        "Model states of 7.5B parameters on one of 64 devices",
        f"{_SOURCE}, figure 1",
        ("stage",),
        "GB",
        tuple(cells),
        plot=Plot(PlotKind.BARS, "stage", "GB a device"),
    )


def residual() -> Exhibit:
    """What the text says of activations, buffers and traffic, without a table of its own."""
    gpt2 = (1600, 32, 1024, 48)  # hidden, batch, sequence, layers of the 1.5B example
    hundred_billion = PartitionedActivations(block_checkpoint_bytes(8192, 32, 1024, 125), model_parallel=16)
    half = (
        "the printed number counts 1 byte an element; in 16 bits it is twice that, as the text's 60 GB elsewhere says"
    )
    cells = [
        Cell(("activations of 1.5B, GB",), activation_bytes(*gpt2) / _GB, "60", "section 3.2: about"),
        Cell(
            ("the same with checkpoints, GB",),
            checkpointed_activation_bytes(*gpt2) / _GB,
            "8",
            "section 3.2: about; ours assumes groups of sqrt(layers) blocks",
        ),
        Cell(("fused buffer of 1.5B, GB",), fused_buffer_bytes(1.5e9) / _GB, "6", "section 3.2"),
        Cell(("fused buffer of 3B, GB",), fused_buffer_bytes(3e9) / _GB, "12", "section 5"),
        Cell(("checkpoints of 100B, GB",), hundred_billion.checkpoint_bytes / _GB, "33", f"section 6.1: {half}"),
        Cell(("the same with P_a over 16 GPUs, GB",), hundred_billion.shard_bytes / _GB, "2", f"section 6.1: {half}"),
        Cell(
            ("traffic of P_a against tensor slicing, %",),
            100 * hundred_billion.communication_overhead,
            "10",
            "section 8: less than 10%",
        ),
    ]
    printed = {ZeroStage.NONE: "2", ZeroStage.OPTIMIZER: "2", ZeroStage.GRADIENTS: "2", ZeroStage.PARAMETERS: "3"}
    for stage, text in printed.items():
        ring = communication_elements(1, stage, num_ranks=64)
        note = f"section 7; a ring of 64 ranks sends {ring:.3g}"
        cells.append(Cell((f"traffic of {_STAGE_NAMES[stage]}, Psi",), communication_elements(1, stage), text, note))
    return Exhibit(
        "zero-residual",
        "ZeRO-R and traffic: what the text states",
        f"{_SOURCE}, sections 3.2, 5, 6, 7, 8",
        ("quantity",),
        "as named",
        tuple(replace(cell, x=float(number)) for number, cell in enumerate(cells)),
        plot=Plot(PlotKind.BARS, "quantity", "GB, %, times the parameters", log_y=True),
    )


def _with_note(cell: Cell) -> Cell:
    note = f"printed cut off, not rounded (exactly {cell.ours:g})" if cell.cut_off else ""
    return Cell(cell.keys, cell.ours, cell.printed, note, cell.x)
