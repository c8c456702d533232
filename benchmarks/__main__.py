"""The command `python -m benchmarks`: the list of benchmarks, and how an error ends the process.

A benchmark is a module with `add_parser(subparsers)`, which sets the default `run`: a function from the parsed
arguments to an exit code. Only the module of the benchmark that was asked for is imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from zero_infinity.cli.exit_codes import EXIT_MISTAKE, describe, exit_code
from zero_infinity.errors import ZeroInfinityError

# Name -> its module, and the line that --help shows.
BENCHMARKS = {
    "train": ("train.command", "a training step against plain PyTorch, at several memory budgets"),
    "peers": ("peers.command", "a training step against DeepSpeed, FSDP2 and memory-mapped files"),
    "capacity": ("capacity", "the largest model that trains within a real memory limit"),
    "finetune": ("finetune.command", "a 1.1B Llama through Trainer within a real memory limit"),
    "generate": ("generate", "tokens a second with half of the model in memory, against accelerate"),
    "growth": ("growth.command", "how time, memory and traffic grow with the model"),
    "ablations": ("ablations.command", "what each part of the engine is worth"),
    "clipping": ("clipping", "a training step with max_grad_norm against one without"),
    "checkpoint": ("checkpoint", "saving and loading against the drive alone"),
    "update": ("update", "the optimizer's step against the drive alone"),
    "plan": ("plan.command", "the planner's predictions against runs on this machine"),
    "published": ("published", "the planner against published steps of other systems"),
    "accumulation": ("accumulation", "steps over several micro-batches, in a loop and layer by layer"),
    "activations": ("activations", "what offloading activations costs, by hidden size"),
    "tiling": ("tiling", "the hidden size that tiling allows, and what it costs"),
    "prefetch": ("prefetch", "what prefetching is worth on several ranks (under torchrun)"),
    "overlap": ("overlap.command", "how much of the transfers over a slow link computation hides"),
    "drive-load": ("drive_load", "plain PyTorch while another process moves a step's bytes"),
    "kills": ("kills.command", "SIGKILL at random moments: no checkpoint is lost, survivors end"),
    "simulate-faults": ("simulation.command", "whole trainings of several ranks with faults, one seed each"),
    "numbers": ("numbers.command", "write the tables of README.md and docs/numbers.md"),
}

EPILOG = """\
examples:
  python -m benchmarks train --nvme /mnt/nvme --out bench-out
  python -m benchmarks capacity --help

Run it in the root of the repository, in an environment with the `dev` extra.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    name = next((word for word in words if not word.startswith("-")), None)
    parser = _build_parser(name)
    try:
        arguments = parser.parse_args(words)
    except SystemExit as stop:  # how argparse ends after --help and after a wrong argument
        return stop.code if isinstance(stop.code, int) else EXIT_MISTAKE
    try:
        return int(arguments.run(arguments))
    except (ZeroInfinityError, KeyboardInterrupt) as error:
        print(describe(error), file=sys.stderr)
        return exit_code(error)


def _build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The whole parser of the chosen benchmark; of the others only the names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure this library on this machine. Each benchmark explains its options with --help.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for name, (module, line) in BENCHMARKS.items():
        if name == chosen:
            import_module(f"benchmarks.{module}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=line)
    return parser


if __name__ == "__main__":
    sys.exit(main())
