"""Writes the tables of README.md and docs/numbers.md from the JSON files in docs/results.

A document marks the place of a table with `<!-- figures: NAME -->` and `<!-- end -->`. A region without results stays
as it is. Every table names the command, the commit, the machine and the date.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.numbers.contest_tables import (
    comparison_table,
    peers_quotients_table,
    peers_short_table,
    peers_table,
    train_table,
)
from benchmarks.numbers.engine_tables import (
    ablations_table,
    capacity_sentence,
    capacity_table,
    checkpoint_table,
    growth_table,
    plan_table,
    update_table,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "numbers.md")
NAMES = ("train", "peers", "capacity", "growth", "ablations", "plan", "checkpoint", "update")
_EPILOG = """\
examples:
  python -m benchmarks numbers --take bench-out
  python -m benchmarks numbers --check
"""
_REGION = re.compile(r"(<!-- figures: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# The directory of a drive is private, and is not published.
_PLACE = re.compile(r"(--nvme|--out|(?:bench|benchmarks) (?:capacity|plan|checkpoint|update)) [^\s-]\S*")


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


# Region -> the results that it is made of, and its writer.
WRITERS: dict[str, tuple[str, Callable[..., str]]] = {
    "train": ("train", train_table),
    "peers": ("peers", peers_table),
    "peers-short": ("peers", peers_short_table),
    "peers-quotients": ("peers", peers_quotients_table),
    "capacity": ("capacity", capacity_table),
    "headline": ("capacity", capacity_sentence),
    "comparison": ("peers capacity", comparison_table),
    "growth": ("growth", growth_table),
    "ablations": ("ablations", ablations_table),
    "plan": ("plan", plan_table),
    "checkpoint": ("checkpoint", checkpoint_table),
    "update": ("update", update_table),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "numbers",
        help="write the tables of README.md and docs/numbers.md",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--take", type=Path, metavar="DIR", help="first copy the results in DIR to docs/results")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a document is out of date")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
