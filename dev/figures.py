"""Figures in README.md and docs/numbers.md, out of what the benchmarks wrote.

    python dev/figures.py --take bench-out     # keep these results (docs/results) and write the documents
    python dev/figures.py                      # write the documents again
    python dev/figures.py --check              # fail when they are not in step with docs/results

A document says where a table goes: between `<!-- figures: NAME -->` and `<!-- end -->`. A region whose results are not
there is left as it is. Every table names the command, the commit, the machine and the date.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "numbers.md")
NAMES = ("train", "peers", "capacity", "growth", "ablations", "plan", "checkpoint", "update")
_REGION = re.compile(r"(<!-- figures: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# Where somebody's drive is mounted is nobody's business.
_PLACE = re.compile(r"(--nvme|--out|bench (?:capacity|plan|checkpoint|update)) [^\s-]\S*")
_GIB = 2**30


def render(text: str, results: dict[str, dict[str, Any]]) -> str:
    """The document with every region replaced whose results are there."""

    def region(match: re.Match[str]) -> str:
        name = match[2]
        sources, write = WRITERS[name]
        if not all(source in results for source in sources.split()):
            return match[0]
        return f"{match[1]}{write(*(results[source] for source in sources.split())).strip()}\n{match[4]}"

    return _REGION.sub(region, text)


def load(folder: Path) -> dict[str, dict[str, Any]]:
    files = {name: folder / f"{name}.json" for name in NAMES}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def take(source: Path, folder: Path) -> list[str]:
    """Copy results and pictures that are newer than those that are kept; returns the names of what was copied."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    kept = load(folder)
    for name in NAMES:
        file = source / f"{name}.json"
        if not file.exists():
            continue
        content = json.loads(file.read_text(encoding="utf-8"))
        if name in kept and content["date"] < kept[name]["date"]:
            print(f"not taken: {file} is of {content['date']}, what is kept of {kept[name]['date']}", file=sys.stderr)
            continue
        content["command"] = _PLACE.sub(r"\1 DIR", content.get("command", ""))
        (folder / file.name).write_text(json.dumps(_small(content), indent=1) + "\n", encoding="utf-8")
        picture = source / f"{name}.svg"
        if picture.exists():
            shutil.copy(picture, folder / picture.name)
        taken.append(name)
    return taken


def _small(value: Any) -> Any:
    """Without each step's sample, and floats without digits that mean nothing."""
    if isinstance(value, dict):
        return {key: _small(item) for key, item in value.items() if key not in ("samples", "nvme")}
    if isinstance(value, list):
        return [_small(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


# ---------------------------------------------------------------------- tables


def _origin(result: dict[str, Any]) -> str:
    machine = ", ".join(str(value) for key, value in result["machine"].items() if key != "load")
    return f"`{result['command']}`, commit {result['commit']}, {result['date'][:10]}; {machine}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / 2**20:.0f} MiB"


def _model(race: dict[str, Any]) -> str:
    return f"{race['layers']} layers x {race['hidden']}, batch {race['batch']} x {race['seq']}"


def _train(result: dict[str, Any]) -> str:
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
                _size(one["memory"]) if one["memory"] else "",
                f"{figures['seconds']:.2f}",
                f"{wall['median']:.3f} ({wall['p10']:.2f}-{wall['p90']:.2f})" if wall else "",
                f"{figures['seconds'] / plain:.3f}" if plain else "",
                f"{wall['best']:.3f}" if wall else "",
                f"{cpu['median']:.3f}" if cpu else "",
                f"{figures['wait_fraction']:.1%}",
                f"{figures['read_bytes'] / 1e9:.2f} / {figures['written_bytes'] / 1e9:.2f}",
                _size(finish["peak_rss"]) if finish else "",
            ]
        )
    headings = ["", "budget", "s/step", "time against plain: median (p10-p90)", "of medians", "best/best", "CPU",
                "exposed wait", "GB read / written", "peak RSS"]  # fmt: skip
    exact = "; ".join(result["differences"]) or "losses of all steps and final weights equal, bit for bit"
    picture = "![time against plain PyTorch, by budget](results/train.svg)"
    return f"{_origin(result)}; {_model(result['race'])}; {exact}:\n\n{_table(headings, rows)}\n\n{picture}"


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
                _size(figures["peak_rss"]),
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
    return [_table(headings, rows), *told]


def _peers(result: dict[str, Any]) -> str:
    lines = [f"{_origin(result)}; layers x width:"]
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


def _quotients(result: dict[str, Any]) -> str:
    """This library beside DeepSpeed, of one heat: by the median steps, and by the fastest ones."""
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
    return _table(headings, rows)


_IN_README = ("plain", "fits", "1/2", "1/8", "ds-cpu", "ds-nvme", "ds-params", "ds-pipe", "fsdp2", "mapped")


def _peers_short(result: dict[str, Any]) -> str:
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
            times += [median, _size(figures["peak_rss"]) if figures else ""]
        start = f"{first['figures']['start_seconds']:.1f} s" if first["figures"] else ""
        rows.append([first["name"], *times, start, str(first["changed_lines"])])
    headings = [""]
    for contest in contests:
        headings += [f"{_subject(contest)}: time of a step (best/best)", "peak RSS"]
    headings += ["start", "lines changed"]
    sizes = {_network(contest): contest["num_parameters"] for contest in contests if contest["num_parameters"]}
    told = ", ".join(f"{network}: {count / 1e6:.0f}M" for network, count in sizes.items())
    return f"Parameters of a model (layers x width): {told}; {_origin(result)}:\n\n{_table(headings, rows)}"


def _capacity(result: dict[str, Any]) -> str:
    rows = []
    for one in result["capacities"]:
        best, failed = one["largest"], one["failed"]
        row = ["none", "", "", "", ""]
        if best is not None:
            count = best["num_parameters"]
            peak = _size(best["peak_bytes"]) if best["peak_bytes"] else ""
            row = [f"{count / 1e6:,.0f}M", f"{12 * count / 1e9:.1f} GB", peak, f"{best['seconds']:.1f}",
                   f"{best['start_seconds']:.0f} s"]  # fmt: skip
        why = "not tried" if failed is None else f"{failed['num_parameters'] / 1e6:,.0f}M: {failed['error']}"
        rows.append([one["name"], *row, why])
    headings = ["", "parameters", "states", "peak of the group", "s/step (fastest)", "start", "the next one"]
    lines = [
        f"{_origin(result)}; within {_size(result['limit'])}, width {result['hidden']}, 3 steps each (this library 6):",
        "",
    ]
    lines.append(_table(headings, rows))
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


def _headline(result: dict[str, Any]) -> str:
    """One sentence for the README."""
    ours = result["capacities"][1]["largest"]
    if ours is None:
        return "No model was trained within the limit."
    count, limit = ours["num_parameters"], _size(result["limit"])
    reference = result["without_a_limit"]
    equal = reference is not None and reference["losses"] == ours["losses"]
    told = "the same losses, bit for bit, as without the limit" if equal else "LOSSES THAT DIFFER from those without"
    return (
        f"Within {limit} of memory (a cgroup limit), this library trained a model of {count / 1e9:.2f}B parameters, "
        f"{12 * count / 1e9:.1f} GB of states, in {ours['seconds']:.1f} s a step (the fastest), with {told}.\n"
        f"{_origin(result)}."
    )


# System -> its keys in peers.json (states in RAM; states on NVMe), and its names in capacity.json.
_SYSTEMS = {
    "plain PyTorch": (("plain",), (), ("plain PyTorch",)),
    "FSDP2, CPU offload": (("fsdp2",), (), ("FSDP2, CPU offload",)),
    "DeepSpeed ZeRO-3": (("ds-cpu",), ("ds-params", "ds-pipe"), ("DeepSpeed, all in RAM", "DeepSpeed, all on NVMe")),
    "zero-infinity": (("fits",), ("1/8",), ("this library",)),
}


def _comparison(peers: dict[str, Any], capacity: dict[str, Any]) -> str:
    """One row a system, for the README: the contest of the first model with its smallest batch."""
    first = _network(peers["contests"][0])
    contest = [one for one in peers["contests"] if _network(one) == first][-1]
    figures = {one["key"]: one["figures"] for one in _peer_rows(contest) if one["figures"]}
    lines = {one["key"]: one["changed_lines"] for one in _peer_rows(contest)}
    largest = {one["name"]: one["largest"]["num_parameters"] for one in capacity["capacities"] if one["largest"]}
    rows = []
    for system, (in_ram, on_nvme, names) in _SYSTEMS.items():
        changed = sorted({lines[key] for key in (*in_ram, *on_nvme) if key in lines})
        size = max((largest[name] for name in names if name in largest), default=0)
        rows.append(
            [
                system,
                _fastest(figures, in_ram),
                _fastest(figures, on_nvme),
                f"{size / 1e6:,.0f}M" if size else "",
                " to ".join(dict.fromkeys(str(count) for count in (changed[:1] + changed[-1:]))),
            ]
        )
    headings = ["", "states in RAM: step time, peak memory", "states on NVMe", "largest model", "lines changed"]
    model = f"{contest['num_parameters'] / 1e6:.0f}M parameters ({_subject(contest)})"
    return (
        f"{_table(headings, rows)}\n\n"
        f"Step time is relative to plain PyTorch, runs interleaved: {model}, float32, AdamW; on NVMe, zero-infinity "
        f"has 1/8 of the states in RAM. Largest model: within {_size(capacity['limit'])} of memory. {_origin(peers)}."
    )


def _fastest(figures: dict[str, dict[str, Any]], keys: Sequence[str]) -> str:
    """Step time and peak memory of the fastest of these settings."""
    found = [figures[key] for key in keys if key in figures]
    if not found:
        return "failed" if keys else "no"
    best = min(found, key=lambda one: one["wall"]["median"])
    return f"{best['wall']['median']:.2f}, {_size(best['peak_rss'])}"


def _growth(result: dict[str, Any]) -> str:
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
                    f"{_size(measured['held_bytes'])} of {_size(point['memory'])}",
                    _size(measured["peak_rss"]),
                    _size(law["peak_rss"]),
                    f"{measured['start_seconds']:.2f}",
                    f"{measured['moved_bytes'] / 1e6:.0f}",
                ]
            )
    headings = ["", "s/step", "law", "held", "peak RSS, all ranks", "law", "start, s", "MB moved a step and rank"]
    table = _table(headings, rows)
    return f"{_origin(result)}:\n\n![growth, with the expected law](results/growth.svg)\n\n{table}"


def _ablations(result: dict[str, Any]) -> str:
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
        f"{_origin(result)}; {race['layers']} layers x {race['hidden']}, sequences of {race['seq']}, {budget}:\n\n"
        f"![ablations](results/ablations.svg)\n\n{_table(headings, rows)}"
    )


def _plan(result: dict[str, Any]) -> str:
    rows = []
    for one in result["comparisons"]:
        planned, measured = one["predicted"], one["measured"]
        moved = f"{(measured['read'] + measured['written']) / 1e6:,.0f}"
        rows.append(
            [
                one["name"],
                f"{_size(one['memory'])}{' each' if one['num_ranks'] > 1 else ''}",
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
    return f"{_origin(result)}:\n\n{_table(headings, rows)}\n\n{told}"


def _checkpoint(result: dict[str, Any]) -> str:
    rows = []
    for one in result["rows"]:
        rates = (f"{one[what] / 1e9:.2f}" for what in ("checkpoint", "drive"))
        rows.append([f"{one['home']}, {one['act']}", *rates, f"{one['ratio']:.2f}"])
    table = _table(["states in", "GB/s", "drive alone, GB/s", "ratio"], rows)
    told = f"{_size(result['num_bytes'])} of states, medians of {result['rounds']} rounds"
    return f"{_origin(result)}; {told}:\n\n{table}"


def _update(result: dict[str, Any]) -> str:
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
    told = f"{_size(result['num_bytes'])} of states; median ratio {result['ratio']:.2f}"
    return f"{_origin(result)}; {told}:\n\n{_table(headings, rows)}"


# Region -> the results that it is made of, and its writer.
WRITERS: dict[str, tuple[str, Callable[..., str]]] = {
    "train": ("train", _train),
    "peers": ("peers", _peers),
    "peers-short": ("peers", _peers_short),
    "peers-quotients": ("peers", _quotients),
    "capacity": ("capacity", _capacity),
    "headline": ("capacity", _headline),
    "comparison": ("peers capacity", _comparison),
    "growth": ("growth", _growth),
    "ablations": ("ablations", _ablations),
    "plan": ("plan", _plan),
    "checkpoint": ("checkpoint", _checkpoint),
    "update": ("update", _update),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, metavar="DIR", help="keep the results that are there")
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a document is out of step")
    args = parser.parse_args()
    if args.take is not None:
        print(f"taken: {', '.join(take(args.take, RESULTS)) or 'nothing'}")
    results = load(RESULTS)
    code = 0
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        new = render(text, results)
        if new == text:
            continue
        if args.check:
            print(f"{document.name} is not in step with docs/results: run make numbers", file=sys.stderr)
            code = 1
        else:
            document.write_text(new, encoding="utf-8")
            print(f"written: {document.name}")
    return code


if __name__ == "__main__":
    sys.exit(main())
