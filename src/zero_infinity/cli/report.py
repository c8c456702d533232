"""`zero-infinity report`: a self-contained HTML page from the trace of a real or simulated run."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from zero_infinity import trace as traces
from zero_infinity.cli.report_data import page_data
from zero_infinity.errors import ConfigError

_EPILOG = """\
examples:
  zero-infinity simulate --model gpt3-13b --hardware rtx4090 --batch 4 --trace step.json
  zero-infinity report step.json -o step.html
  zero-infinity train --preset 125M --memory 256MiB --steps 5 --trace run.json
  zero-infinity report run.json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make an HTML page from a trace: lanes over time, memory held against its budget, traffic by link\n"
        "and exposed waits by module. The page is self-contained and needs no network."
    )
    parser.epilog = _EPILOG
    text = "Chrome trace written by train, simulate or zi.Config(trace=...)"
    parser.add_argument("trace", type=Path, metavar="TRACE", help=text)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="page to write (default: TRACE with .html)")
    parser.add_argument("--json", action="store_true", help="print the page's numbers as JSON instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data = page_data(traces.read(args.trace))
    if args.json:
        print(json.dumps({key: value for key, value in data.items() if key not in ("lanes", "memory")}, indent=2))
        return 0
    output = args.output or args.trace.with_suffix(".html")
    try:
        output.write_text(page(data), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error.strerror}") from None
    print(f"written: {output}", file=sys.stderr)
    return 0


def page(data: dict[str, Any]) -> str:
    """The page with its data embedded."""
    template = (resources.files(__package__) / "report.html").read_text(encoding="utf-8")
    # "</" could end the script element early; in JSON the slash may be escaped.
    return template.replace("__DATA__", json.dumps(data, ensure_ascii=False).replace("</", "<\\/"), 1)
