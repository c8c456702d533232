"""Tables of the benchmarks of single parts: capacity, growth, ablations, plan, checkpoint and update."""

from __future__ import annotations

from typing import Any

from benchmarks.numbers.cells import origin, size
from benchmarks.tables import markdown_table


def capacity_table(result: dict[str, Any]) -> str:
    rows = []
    for one in result["capacities"]:
        best, failed = one["largest"], one["failed"]
        row = ["none", "", "", "", ""]
        if best is not None:
            count = best["num_parameters"]
            peak = size(best["peak_bytes"]) if best["peak_bytes"] else ""
            row = [f"{count / 1e6:,.0f}M", f"{12 * count / 1e9:.1f} GB", peak, f"{best['seconds']:.1f}",
                   f"{best['start_seconds']:.0f} s"]  # fmt: skip
        why = "not tried" if failed is None else f"{failed['num_parameters'] / 1e6:,.0f}M: {failed['error']}"
        rows.append([one["name"], *row, why])
    headings = ["", "parameters", "states", "peak of the group", "s/step (fastest)", "start", "the next one"]
    lines = [
        f"{origin(result)}; within {size(result['limit'])}, width {result['hidden']}, 3 steps each (this library 6):",
        "",
    ]
    lines.append(markdown_table(headings, rows))
    ours, reference = result["capacities"][1]["largest"], result["without_a_limit"]
    if ours is not None and reference is not None:
        losses = ", ".join(f"{loss:.6f}" for loss in ours["losses"])
        equal = (
            "the same, bit for bit" if ours["losses"] == reference["losses"] else f"DIFFERENT: {reference['losses']}"
        )
        lines += ["", f"Losses of this library's largest model: {losses}; of a run without the limit: {equal}."]
    if ours is not None and result.get("drive"):
        rate = ours["moved_bytes"] / ours["seconds"]
        lines += [
            "",
            f"Its fastest step moves {ours['moved_bytes'] / 1e9:.1f} GB to and from the drive, {rate / 1e9:.2f} GB/s: "
            f"{rate / result['drive']:.2f} of what the drive does alone, half reads and half writes "
            f"({result['drive'] / 1e9:.2f} GB/s).",
        ]
    return "\n".join(lines)


def capacity_sentence(result: dict[str, Any]) -> str:
    """One sentence for the README."""
    ours = result["capacities"][1]["largest"]
    if ours is None:
        return "No model was trained within the limit."
    count, limit = ours["num_parameters"], size(result["limit"])
    reference = result["without_a_limit"]
    equal = reference is not None and reference["losses"] == ours["losses"]
    told = "the same losses, bit for bit, as without the limit" if equal else "LOSSES THAT DIFFER from those without"
    return (
        f"Within {limit} of memory (a cgroup limit), this library trained a model of {count / 1e9:.2f}B parameters, "
        f"{12 * count / 1e9:.1f} GB of states, in {ours['seconds']:.1f} s a step (the fastest), with {told}.\n"
        f"{origin(result)}."
    )


def growth_table(result: dict[str, Any]) -> str:
    rows = []
    for axis in result["axes"]:
        for point in axis["points"]:
            name = f"{point['axis']} {point['value']:g}"
            measured, law = point["measured"], point["expected"]
            if measured is None or law is None:
                rows.append([name, f"failed: {point['error']}", *[""] * 6])
                continue
            rows.append(
                [
                    name,
                    f"{measured['seconds']:.3f}",
                    f"{law['seconds']:.3f}",
                    f"{size(measured['held_bytes'])} of {size(point['memory'])}",
                    size(measured["peak_rss"]),
                    size(law["peak_rss"]),
                    f"{measured['start_seconds']:.2f}",
                    f"{measured['moved_bytes'] / 1e6:.0f}",
                ]
            )
    headings = ["", "s/step", "law", "held", "peak RSS, all ranks", "law", "start, s", "MB moved a step and rank"]
    table = markdown_table(headings, rows)
    return f"{origin(result)}:\n\n![growth, with the expected law](results/growth.svg)\n\n{table}"


def ablations_table(result: dict[str, Any]) -> str:
    cells = result["cells"]
    columns = list(dict.fromkeys((cell["bytes_per_second"], cell["race"]["batch"]) for cell in cells))
    found = {
        (cell["bytes_per_second"], cell["race"]["batch"], row["name"]): row for cell in cells for row in cell["rows"]
    }
    names = list(dict.fromkeys((row["name"], row["against"]) for cell in cells for row in cell["rows"]))
    rows = []
    for name, against in names:
        row = [name if name == against else f"{name} (against {against})"]
        for drive, batch in columns:
            one = found.get((drive, batch, name))
            if one is None or one["ratio"] is None:
                row.append("failed" if one else "")
            elif name == against:
                row.append(f"{one['seconds']:.2f} s")
            else:
                row.append(f"{one['ratio']['median']:.2f} ({one['ratio']['p10']:.2f}-{one['ratio']['p90']:.2f})")
        rows.append(row)
    headings = [""]
    for link, batch in columns:
        headings.append(f"batch {batch}, {'links as they are' if link is None else f'links of {link / 1e6:.0f} MB/s'}")
    race = cells[0]["race"]
    budget = f"budget {result['fraction']:g} of the states where nothing else is said"
    return (
        f"{origin(result)}; {race['layers']} layers x {race['hidden']}, sequences of {race['seq']}, {budget}:\n\n"
        f"![ablations](results/ablations.svg)\n\n{markdown_table(headings, rows)}"
    )


def plan_table(result: dict[str, Any]) -> str:
    rows = []
    for one in result["comparisons"]:
        planned, measured = one["predicted"], one["measured"]
        moved = f"{(measured['read'] + measured['written']) / 1e6:,.0f}"
        rows.append(
            [
                one["name"],
                f"{size(one['memory'])}{' each' if one['num_ranks'] > 1 else ''}",
                "exact" if one["bytes_are_exact"] else "NOT EXACT",
                moved,
                f"{one['held_error']:+.1%}",
                f"{one['plain_seconds']:.2f}",
                f"{planned['seconds']:.2f}",
                f"{measured['seconds']:.2f}",
                f"{one['time_error']:+.0%}",
            ]
        )
    headings = ["configuration", "memory", "bytes", "MB to and from NVMe", "held", "plain, s", "planned, s",
                "measured, s", "error"]  # fmt: skip
    errors = [abs(one["time_error"]) for one in result["comparisons"]]
    exact = sum(one["bytes_are_exact"] for one in result["comparisons"])
    held = max(abs(one["held_error"]) for one in result["comparisons"])
    off, block = result["median_time_error"], 1e3 * result["block_cpu_seconds"]
    told = (
        f"Bytes exact in {exact} of {len(errors)}, held bytes within {held:.1%}, time off by {off:.0%} (median), "
        f"{max(errors):.0%} at most; the engine takes {block:.2f} ms of CPU a block."
    )
    return f"{origin(result)}:\n\n{markdown_table(headings, rows)}\n\n{told}"


def checkpoint_table(result: dict[str, Any]) -> str:
    rows = []
    for one in result["rows"]:
        rates = (f"{one[what] / 1e9:.2f}" for what in ("checkpoint", "drive"))
        rows.append([f"{one['home']}, {one['act']}", *rates, f"{one['ratio']:.2f}"])
    table = markdown_table(["states in", "GB/s", "drive alone, GB/s", "ratio"], rows)
    told = f"{size(result['num_bytes'])} of states, medians of {result['rounds']} rounds"
    return f"{origin(result)}; {told}:\n\n{table}"


def update_table(result: dict[str, Any]) -> str:
    rows = [
        [
            str(number),
            f"{one['seconds']:.2f}",
            f"{one['bytes_read'] / 1e9:.2f} / {one['bytes_written'] / 1e9:.2f}",
            f"{one['rate'] / 1e9:.2f}",
            f"{one['drive'] / 1e9:.2f}",
            f"{one['ratio']:.2f}",
            f"{one['cores']:.2f}",
        ]
        for number, one in enumerate(result["rounds"], 1)
    ]
    headings = ["round", "seconds", "GB read / written", "GB/s", "drive alone, GB/s", "ratio", "cores busy"]
    told = f"{size(result['num_bytes'])} of states; median ratio {result['ratio']:.2f}"
    return f"{origin(result)}; {told}:\n\n{markdown_table(headings, rows)}"
