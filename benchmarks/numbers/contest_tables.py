"""Tables of the benchmarks `train` and `peers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.numbers.cells import model, origin, size
from benchmarks.tables import markdown_table


def train_table(result: dict[str, Any]) -> str:
    rows = []
    plain = next((one["figures"]["seconds"] for one in result["contenders"] if one["figures"]), None)
    for one in result["contenders"]:
        figures, finish = one["figures"], one["finish"]
        if figures is None:
            rows.append([one["name"], "", f"failed: {one['error']}", *[""] * 7])
            continue
        wall, cpu = figures["wall"], figures["cpu"]
        rows.append(
            [
                one["name"],
                size(one["memory"]) if one["memory"] else "",
                f"{figures['seconds']:.2f}",
                f"{wall['median']:.3f} ({wall['p10']:.2f}-{wall['p90']:.2f})" if wall else "",
                f"{figures['seconds'] / plain:.3f}" if plain else "",
                f"{wall['best']:.3f}" if wall else "",
                f"{cpu['median']:.3f}" if cpu else "",
                f"{figures['wait_fraction']:.1%}",
                f"{figures['read_bytes'] / 1e9:.2f} / {figures['written_bytes'] / 1e9:.2f}",
                size(finish["peak_rss"]) if finish else "",
            ]
        )
    headings = ["", "budget", "s/step", "time against plain: median (p10-p90)", "of medians", "best/best", "CPU",
                "exposed wait", "GB read / written", "peak RSS"]  # fmt: skip
    exact = "; ".join(result["differences"]) or "losses of all steps and final weights equal, bit for bit"
    picture = "![time against plain PyTorch, by budget](results/train.svg)"
    return f"{origin(result)}; {model(result['race'])}; {exact}:\n\n{markdown_table(headings, rows)}\n\n{picture}"


def _peer_rows(contest: dict[str, Any]) -> list[dict[str, Any]]:
    """Plain PyTorch once, then everybody."""
    return [one for number, heat in enumerate(contest["heats"]) for one in (heat if number == 0 else heat[1:])]


def _network(contest: dict[str, Any]) -> str:
    return f"{contest['race']['layers']} x {contest['race']['hidden']}"


def _subject(contest: dict[str, Any]) -> str:
    return f"{_network(contest)}, batch {contest['race']['batch']} x {contest['race']['seq']}"


def _contest(contest: dict[str, Any]) -> list[str]:
    rows = []
    for one in _peer_rows(contest):
        figures = one["figures"]
        if figures is None:
            rows.append([one["name"], f"failed: {one['error']}", *[""] * 6, str(one["changed_lines"]), ""])
            continue
        wall, difference = figures["wall"], figures["loss_difference"]
        rows.append(
            [
                one["name"],
                f"{figures['seconds']:.2f}",
                f"{wall['median']:.2f} ({wall['p10']:.2f}-{wall['p90']:.2f})",
                f"{wall['best']:.2f}",
                f"{figures['cpu_seconds']:.1f}",
                size(figures["peak_rss"]),
                f"{figures['read_bytes'] / 1e9:.2f} / {figures['written_bytes'] / 1e9:.2f}",
                f"{figures['start_seconds']:.1f} s",
                str(one["changed_lines"]),
                "equal" if difference == 0 else f"within {difference:.0e}",
            ]
        )
    headings = [_subject(contest), "s/step", "time against plain: median (p10-p90)", "best/best", "CPU s a step",
                "peak RSS", "GB read / written", "start", "lines changed", "losses"]  # fmt: skip
    failed = [one for one in _peer_rows(contest) if one["figures"] and one["error"]]
    told = [f"{one['name']} failed after step {one['num_steps']}: {one['error']}." for one in failed]
    return [markdown_table(headings, rows), *told]


def peers_table(result: dict[str, Any]) -> str:
    lines = [f"{origin(result)}; layers x width:"]
    lines += [text for contest in result["contests"] for text in _contest(contest)]
    building = result["building"]
    if building is not None:
        told = f"took {building['seconds']:.0f} s" if building["error"] is None else f"failed: {building['error']}"
        lines.append(f"Compiling DeepSpeed's extensions before its first start {told}; it is not in these starts.")
    return "\n\n".join([*lines, "![time of a step and peak memory](results/peers.svg)"])


_PAIRS = (
    ("fits", "ds-cpu"),
    ("1/2", "ds-cpu"),
    ("1/8", "ds-cpu"),
    ("1/8", "ds-nvme"),
    ("1/8", "ds-params"),
    ("1/8", "ds-pipe"),
)


def peers_quotients_table(result: dict[str, Any]) -> str:
    """This library against DeepSpeed in the same heat, by median and by fastest steps."""
    rows = []
    for ours, theirs in _PAIRS:
        names: list[str] = []
        cells: list[str] = []
        for contest in result["contests"]:
            by_key = {one["key"]: one for one in _peer_rows(contest)}
            pair = [by_key[key] for key in (ours, theirs) if key in by_key]
            if len(pair) < 2:
                cells += ["", ""]
                continue
            names = [one["name"] for one in pair]
            mine, other = (one["figures"] for one in pair)
            if mine is None or other is None:
                cells += ["failed", ""]
                continue
            median, best = other["seconds"] / mine["seconds"], other["wall"]["best"] / mine["wall"]["best"]
            cells += [f"{median:.2f} ({best:.2f})", f"{mine['peak_rss'] / other['peak_rss']:.2f}"]
        if names:
            rows.append([*names, *cells])
    headings = ["", "against"]
    for contest in result["contests"]:
        headings += [f"{_subject(contest)}: times as fast", "its memory"]
    return markdown_table(headings, rows)


_IN_README = ("plain", "fits", "1/2", "1/8", "ds-cpu", "ds-nvme", "ds-params", "ds-pipe", "fsdp2", "mapped")


def peers_short_table(result: dict[str, Any]) -> str:
    contests = result["contests"]
    by_key = [{one["key"]: one for one in _peer_rows(contest)} for contest in contests]
    rows = []
    for key in _IN_README:
        found = [entries.get(key) for entries in by_key]
        first = found[0]
        if first is None:
            continue
        times = []
        for one in found:
            if one is None:
                times += ["", ""]
                continue
            figures = one["figures"]
            median = f"{figures['wall']['median']:.2f} ({figures['wall']['best']:.2f})" if figures else "failed"
            times += [median, size(figures["peak_rss"]) if figures else ""]
        start = f"{first['figures']['start_seconds']:.1f} s" if first["figures"] else ""
        rows.append([first["name"], *times, start, str(first["changed_lines"])])
    headings = [""]
    for contest in contests:
        headings += [f"{_subject(contest)}: time of a step (best/best)", "peak RSS"]
    headings += ["start", "lines changed"]
    sizes = {_network(contest): contest["num_parameters"] for contest in contests if contest["num_parameters"]}
    told = ", ".join(f"{network}: {count / 1e6:.0f}M" for network, count in sizes.items())
    return f"Parameters of a model (layers x width): {told}; {origin(result)}:\n\n{markdown_table(headings, rows)}"


# System -> its keys in peers.json (states in RAM; states on NVMe), and its names in capacity.json.
_SYSTEMS = {
    "plain PyTorch": (("plain",), (), ("plain PyTorch",)),
    "FSDP2, CPU offload": (("fsdp2",), (), ("FSDP2, CPU offload",)),
    "DeepSpeed ZeRO-3": (("ds-cpu",), ("ds-params", "ds-pipe"), ("DeepSpeed, all in RAM", "DeepSpeed, all on NVMe")),
    "zero-infinity": (("fits",), ("1/8",), ("this library",)),
}


def comparison_table(peers: dict[str, Any], capacity: dict[str, Any]) -> str:
    """One row per system, for the README: the contest of the first model with its smallest batch."""
    first = _network(peers["contests"][0])
    contest = [one for one in peers["contests"] if _network(one) == first][-1]
    figures = {one["key"]: one["figures"] for one in _peer_rows(contest) if one["figures"]}
    lines = {one["key"]: one["changed_lines"] for one in _peer_rows(contest)}
    largest = {one["name"]: one["largest"]["num_parameters"] for one in capacity["capacities"] if one["largest"]}
    rows = []
    for system, (in_ram, on_nvme, names) in _SYSTEMS.items():
        changed = sorted({lines[key] for key in (*in_ram, *on_nvme) if key in lines})
        most = max((largest[name] for name in names if name in largest), default=0)
        rows.append(
            [
                system,
                _fastest(figures, in_ram),
                _fastest(figures, on_nvme),
                f"{most / 1e6:,.0f}M" if most else "",
                " to ".join(dict.fromkeys(str(count) for count in (changed[:1] + changed[-1:]))),
            ]
        )
    headings = ["", "states in RAM: step time, peak memory", "states on NVMe", "largest model", "lines changed"]
    trained = f"{contest['num_parameters'] / 1e6:.0f}M parameters ({_subject(contest)})"
    return (
        f"{markdown_table(headings, rows)}\n\n"
        f"Step time is relative to plain PyTorch, runs interleaved: {trained}, float32, AdamW; on NVMe, zero-infinity "
        f"has 1/8 of the states in RAM. Largest model: within {size(capacity['limit'])} of memory. {origin(peers)}."
    )


def _fastest(figures: dict[str, dict[str, Any]], keys: Sequence[str]) -> str:
    """Step time and peak memory of the fastest of these settings."""
    found = [figures[key] for key in keys if key in figures]
    if not found:
        return "failed" if keys else "no"
    best = min(found, key=lambda one: one["wall"]["median"])
    return f"{best['wall']['median']:.2f}, {size(best['peak_rss'])}"
