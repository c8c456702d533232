"""`zero-infinity paper`: tables and figures of the ZeRO papers, recomputed by the package `papers`."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path

from rich.console import Console

from zero_infinity.errors import ConfigError
from zero_infinity.papers import catalogue, page, terminal
from zero_infinity.papers.exhibit import Exhibit

_EPILOG = """\
examples:
  zero-infinity paper zero-table1
  zero-infinity paper all --out paper-out     every exhibit as CSV, SVG and PNG, and index.html
  zero-infinity paper infinity-figure5a --json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Recompute tables and figures of the ZeRO and ZeRO-Infinity papers, and compare them with the "
        "published numbers."
    )
    parser.epilog = _EPILOG + "\nexhibits:\n" + textwrap.fill(", ".join(catalogue.NAMES), 78)
    parser.add_argument("name", nargs="?", default="all", metavar="NAME", help="name of an exhibit (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write CSV, SVG, PNG and index.html to DIR")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {args.out}: {error.strerror}\n  fix:   another directory") from None
    exhibits: list[Exhibit] = []
    console = Console()
    for name in catalogue.NAMES if args.name == "all" else (args.name,):
        exhibits.append(catalogue.make(name))
        if not args.json:
            terminal.show(console, exhibits[-1])
    if args.json:
        print(json.dumps([terminal.as_json(exhibit) for exhibit in exhibits], indent=2))
    if args.out is not None:
        print(f"written: {page.write(args.out, exhibits)}", file=sys.stderr)
    return 0
