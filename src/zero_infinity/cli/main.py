"""The top of the `zero-infinity` command: which subcommands there are, and how an error leaves the process.

Each subcommand is a module of this package with `add_parser(subparsers)`, which adds its parser and sets the
default `run`, a function from the parsed arguments to an exit code. Only the module of the command that was asked
for is imported: `zero-infinity --help` answers from the table below, without torch.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module

from zero_infinity import __version__
from zero_infinity.cli.exit_codes import EXIT_BROKEN_PIPE, EXIT_MISTAKE, describe, exit_code
from zero_infinity.cli.ranks import speaks
from zero_infinity.errors import ConfigError, ZeroInfinityError

# Command (which is also its module) -> the line that --help shows.
COMMANDS = {
    "bench": "measure this machine: its drives, or a hardware profile",
    "doctor": "check this machine: direct I/O, memory, limits, 16-bit speed",
    "export": "the weights of a checkpoint as a Hugging Face folder",
    "paper": "the ZeRO papers' tables and figures, ours beside theirs",
    "plan": "what fits where, and how fast, before training",
    "report": "a page to look at from a trace",
    "simulate": "a training step on other hardware, on a virtual clock",
    "train": "train a model whose states are larger than memory",
}

EPILOG = """\
examples:
  zero-infinity doctor /mnt/nvme      is this machine, and that drive, fit for training?
  zero-infinity bench io --help       how fast is the drive?
  zero-infinity plan --model gpt3-13b --hardware rtx4090 --batch 4
  zero-infinity train --memory 64MiB  a model of 25M parameters (294 MiB of states), on the text at hand
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()  # here, so that a reader who left is noticed while it can be handled
    except (ZeroInfinityError, KeyboardInterrupt) as error:
        if speaks():  # of several ranks on a machine, which all make this mistake
            print(describe(error), file=sys.stderr)
        return exit_code(error)
    except BrokenPipeError:
        # Python flushes stdout once more on exit; without this it would complain about the same pipe there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return code


def _run(argv: list[str]) -> int:
    # The top level has no option that takes a value, so the first word that is not an option is the command.
    command = next((word for word in argv if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        raise _unknown_command(command)
    parser = _build_parser(command)
    try:
        with _once():
            arguments = parser.parse_args(argv)
    except SystemExit as stop:  # how argparse ends after --help, --version and a wrong argument
        return stop.code if isinstance(stop.code, int) else EXIT_MISTAKE
    if command is None:
        parser.print_help(sys.stderr)
        return EXIT_MISTAKE
    return int(arguments.run(arguments))


def _build_parser(command: str | None) -> argparse.ArgumentParser:
    """The whole parser of `command`; of the others only the names."""
    parser = argparse.ArgumentParser(
        prog="zero-infinity",
        description="Train PyTorch models far larger than memory, on accelerator, host RAM and NVMe together.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zero-infinity {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, line in COMMANDS.items():
        if name == command:
            import_module(f"zero_infinity.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=line)
    return parser


def _unknown_command(command: str) -> ConfigError:
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(COMMANDS)}"
    return ConfigError(f"unknown command {command!r}; {hint}")


@contextmanager
def _once() -> Iterator[None]:
    """What is printed in here is the same for every rank on this machine: one of them prints it."""
    if speaks():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
