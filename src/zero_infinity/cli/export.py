"""`zero-infinity export CHECKPOINT DIR`: the weights of a checkpoint for everybody else.

Imports no torch before the command runs, so that --help and a mistake in the options answer at once.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from zero_infinity.units import format_bytes

DTYPES = ("float32", "bfloat16", "float16")
EPILOG = """\
examples:
  zero-infinity export checkpoints model              the latest checkpoint in the folder
  zero-infinity export checkpoints/step-00000100 model --dtype bfloat16

Neither a GPU nor the model's code is needed. AutoModelForCausalLM.from_pretrained("model") reads what is written, where
the model was one of transformers'; safetensors.torch.load_file reads the weights of any.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export",
        help="the weights of a checkpoint as a Hugging Face folder",
        description="Write the weights of a checkpoint to a new folder, as safetensors files.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="what train --save or zi.save has written")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a folder that is not there yet, or is empty")
    parser.add_argument("--dtype", choices=DTYPES, help="of floating-point weights (default: as they were saved)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from zero_infinity.checkpoint.export import export_checkpoint
    from zero_infinity.cli.progress_display import choose

    start = time.perf_counter()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    with choose(as_json=args.json, every=1).transfer("exporting") as shown:
        num_bytes = export_checkpoint(args.checkpoint, args.directory, dtype=dtype, progress=shown)
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps({"directory": str(args.directory), "bytes": num_bytes, "seconds": seconds}))
    else:
        rate = num_bytes / max(seconds, 1e-9) / 1e6
        print(f"written: {args.directory}, {format_bytes(num_bytes)} in {seconds:.1f} s ({rate:,.0f} MB/s)")
    return 0
