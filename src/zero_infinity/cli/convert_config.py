"""`zero-infinity convert-config DS_CONFIG`: turns a DeepSpeed config into one of zero-infinity.

Says of each field of the file what becomes of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from zero_infinity.config import read_settings
from zero_infinity.deepspeed_config import Converted, Verdict, convert
from zero_infinity.errors import ConfigError

EPILOG = """\
examples:
  zero-infinity convert-config ds_config.json                 print the config and what became of each field
  zero-infinity convert-config ds_config.json --out zi.json   and write the config

Use it by zi.Config.from_file("zi.json") or zero-infinity train --config zi.json.
zi.Config.from_deepspeed("ds_config.json") converts without a file.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Turn a DeepSpeed config into one of zero-infinity."
    parser.epilog = EPILOG
    parser.add_argument("file", type=Path, metavar="DS_CONFIG", help="DeepSpeed's JSON file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the config to this new .json file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    converted = convert(read_settings(args.file))
    written = json.dumps(converted.settings, indent=2) + "\n"
    if args.out is not None:
        try:
            with args.out.open("x", encoding="utf-8") as file:
                file.write(written)
        except OSError as error:
            raise ConfigError(f"{args.out}: cannot be written: {error.strerror}\n  fix:   a new file") from None
    if args.json:
        fields = [{"field": n.field, "verdict": n.verdict.value, "text": n.text} for n in converted.notes]
        print(json.dumps({"config": converted.settings, "fields": fields}))
        return 0
    print(written, end="")
    _print_notes(converted)
    if args.out is not None:
        print(f"written: {args.out}", file=sys.stderr)
    return 0


def _print_notes(converted: Converted) -> None:
    width = max((len(note.field) for note in converted.notes), default=0)
    for verdict in Verdict:
        for note in converted.notes:
            if note.verdict is verdict:
                print(f"{note.field:{width}}  {verdict.value}: {note.text}", file=sys.stderr)
    print(
        f"{'memory':{width}}  add: host RAM for the engine, which DeepSpeed does not ask for; default: 70% of what is "
        "available",
        file=sys.stderr,
    )
