"""`zero-infinity plan --page FILE`: one HTML file, without network, to play with a grid of plans.

Owns which plans are on the page. The page looks them up; it computes nothing, so it cannot differ from the command.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import resources
from pathlib import Path

from zero_infinity.cli import plan_sweep
from zero_infinity.errors import ConfigError

_MARK = "/*GRID*/null"
# What the page offers where no --sweep says otherwise.
_DEFAULT = (
    "model=llama3.2-1b,llama3-8b,qwen3-30b-a3b",
    "hardware=rtx4090,dgx-a100,dgx-h100",
    "batch=1,2,4,8,16",
    "accumulation=1,4,16",
)
_MAX_POINTS = 2_000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--page", type=Path, metavar="FILE",
        help="write one HTML file to play with: sliders over the options of --sweep (default: models, machines, batch)",
    )  # fmt: skip


def write(args: argparse.Namespace) -> int:
    """Make every plan of the grid and write the page."""
    swept = plan_sweep.parse(args.sweep or _DEFAULT)
    _check(args, swept)
    rows = list(plan_sweep.rows_of(args, swept))
    grid = {
        "options": [{"name": name, "values": values} for name, values in swept.items()],
        "given": {name: getattr(args, name) for name in ("model", "hardware") if name not in swept},
        "columns": plan_sweep.COLUMNS,
        "rows": [[row.figures[name] for name in plan_sweep.COLUMNS] for row in rows],
    }
    template = (resources.files(__package__) / "plan_page.html").read_text(encoding="utf-8")
    # "</" would end the script, wherever it is.
    page = template.replace(_MARK, json.dumps(grid).replace("</", "<\\/"))
    try:
        args.page.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--page {args.page}: cannot be written: {error.strerror}") from None
    print(f"written: {args.page}: {len(rows)} plans", file=sys.stderr)
    return 0


def _check(args: argparse.Namespace, swept: dict[str, list[object]]) -> None:
    if "hardware" not in swept and args.hardware is None:
        raise ConfigError("on which machine?\n  fix:   --hardware rtx4090, or --sweep hardware=rtx4090,dgx-a100")
    num_points = 1
    for values in swept.values():
        num_points *= len(values)
    if num_points > _MAX_POINTS:
        raise ConfigError(
            f"the page has {num_points:,} plans; at most {_MAX_POINTS:,}\n  fix:   fewer values in --sweep"
        )
