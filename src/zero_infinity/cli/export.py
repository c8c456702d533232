"""`zero-infinity export CHECKPOINT DIR`: writes the weights of a checkpoint as safetensors files.

torch is imported only when the command runs, so that --help and invalid options answer at once.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from zero_infinity.byte_sizes import format_bytes

DTYPES = ("float32", "bfloat16", "float16")
EPILOG = """\
examples:
  zero-infinity export checkpoints model              the latest checkpoint
  zero-infinity export checkpoints/step-00000100 model --dtype bfloat16

Neither a GPU nor the model's code is needed. If the model is one of transformers, load the result with
AutoModelForCausalLM.from_pretrained("model"); for any model, use safetensors.torch.load_file.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write the weights of a checkpoint to a new folder, as safetensors files."
    parser.epilog = EPILOG
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="directory written by train --save or zi.save"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="new or empty directory")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of floating-point weights (default: as saved)")
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
