"""`zero-infinity generate FOLDER --prompt TEXT`: its options. Generating is in `generate_text.py`.

torch is imported only when the command runs, so that --help and invalid options answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.cli.number_options import above_zero, integer
from zero_infinity.cli.swap_space import with_swap_space
from zero_infinity.config import Config
from zero_infinity.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
EPILOG = """\
examples:
  zero-infinity generate ~/models/llama --prompt "Once upon a time" --memory 4GiB --nvme /mnt/nvme
  zero-infinity generate ~/models/llama --prompt "What is a cache?" --chat --max-new-tokens 200
  zero-infinity generate ~/models/llama --prompt "One" "Two" "Three" --json

The folder has config.json, *.safetensors and a tokenizer, as save_pretrained of transformers writes them; or adapters,
as PEFT and train --lora --output write them: then the base is read from the folder that they name. What does not fit in
--memory is read once for each token and for all prompts together. One process; no torchrun.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Generate text with a Hugging Face model that may be larger than memory."
    parser.epilog = EPILOG
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="Hugging Face folder of a model with a tokenizer")
    parser.add_argument("--prompt", nargs="+", required=True, metavar="TEXT", help="one or more prompts")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message in the chat template")
    parser.add_argument("--max-new-tokens", type=integer, default=50, metavar="N", help="at most N (default 50)")
    parser.add_argument(
        "--temperature", type=above_zero, metavar="T", help="sample at this temperature (default: the likeliest token)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (default 0)")

    places = parser.add_argument_group("memory and storage")
    places.add_argument(
        "--memory", metavar="SIZE", help='host memory for the engine, "256MiB" (default: 70%% of what is available)'
    )
    places.add_argument("--nvme", nargs="+", metavar="DIR", help='directories for swap space; "none": host memory '
                        "only (default: a temporary directory in the current one)")  # fmt: skip
    places.add_argument("--device", metavar="NAME", help='device to compute on, "cuda:1" (default: the current one)')
    places.add_argument("--device-memory", metavar="SIZE", help="device memory for parameters (default: measured)")
    places.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: that of the files)")

    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "zero-infinity generate is one process, and torchrun has started several\n"
            "  fix:   without torchrun; over ranks write a script: model.generate(..., synced_gpus=True)"
        )
    with with_swap_space(_config(args), args.nvme) as config:
        from zero_infinity.cli.generate_text import GenerateJob, generate

        names = ("folder", "prompt", "chat", "max_new_tokens", "temperature", "seed", "device", "dtype")
        result = generate(GenerateJob(**{name: getattr(args, name) for name in names}), config, shown=not args.json)
    if args.json:
        print(json.dumps({**asdict(result), "bytes_per_token": result.bytes_per_token}))
        return 0
    share = f" ({result.bytes_per_token / result.model_bytes:.2f} of the model)" if result.bytes_per_token else ""
    print(
        f"{result.num_tokens} tokens in {result.seconds:.1f} s ({result.num_tokens / max(result.seconds, 1e-9):.2f} "
        f"tokens/s), the first after {result.first_seconds:.1f} s; {format_bytes(int(result.bytes_per_token))} read a "
        f"token{share}; model {format_bytes(result.model_bytes)}, memory {format_bytes(result.memory_peak)} at most",
        file=sys.stderr,
    )
    return 0


def _config(args: argparse.Namespace) -> Config:
    changes: dict[str, object] = {"memory": args.memory, "device_memory": args.device_memory}
    if args.nvme is not None and args.nvme != ["none"]:
        changes["nvme"] = args.nvme
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = Config().replace(**changes)
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    return config
