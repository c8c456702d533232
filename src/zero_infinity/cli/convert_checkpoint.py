"""`zero-infinity convert-checkpoint CHECKPOINT DIR`: writes the weights of a DeepSpeed checkpoint as safetensors files.

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
  zero-infinity convert-checkpoint runs/deepspeed weights                    the latest checkpoint
  zero-infinity convert-checkpoint runs/deepspeed/global_step500 weights --dtype bfloat16

It reads checkpoints of ZeRO stages 1 to 3, universal ones, and those without ZeRO: the float32 master weights, without
optimizer states. DeepSpeed is not needed. Nothing in the files is run: they are read as tensors only, one parameter at
a time. Load DIR by zi.load_pretrained(model, "DIR"), or with the model's config.json beside it by
from_pretrained.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write the weights of a DeepSpeed checkpoint to a new folder, as safetensors files."
    parser.epilog = EPILOG
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="folder given to engine.save_checkpoint, or one in it"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="new or empty directory")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of floating-point weights (default: as saved)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from zero_infinity.checkpoint.deepspeed_checkpoint import read_deepspeed
    from zero_infinity.checkpoint.weight_writer import write_weights

    start = time.perf_counter()
    weights = read_deepspeed(args.checkpoint, getattr(torch, args.dtype) if args.dtype else None)
    num_bytes = write_weights(args.directory, weights.kinds, weights.values())
    seconds = time.perf_counter() - start
    if args.json:
        told = {"directory": str(args.directory), "bytes": num_bytes, "tensors": len(weights.kinds), "seconds": seconds}
        print(json.dumps(told))
    else:
        print(f"written: {args.directory}, {len(weights.kinds)} tensors, {format_bytes(num_bytes)} in {seconds:.1f} s")
    return 0
