"""The `zero-infinity` command: its subcommands, and how errors become exit codes.

Each subcommand is a module of this package with `add_options(parser)`, which adds its options and sets the default
`run`, a function from the parsed arguments to an exit code. Only the module of the given command is imported;
`zero-infinity --help` uses the table below and needs no torch.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from typing import NoReturn

from zero_infinity import __version__
from zero_infinity.cli.exit_codes import EXIT_BROKEN_PIPE, EXIT_MISTAKE, describe, exit_code
from zero_infinity.cli.ranks import speaks
from zero_infinity.errors import ConfigError, ZeroInfinityError

# Command (also the name of its module) -> the line that --help shows.
COMMANDS = {
    "doctor": "check this machine: accelerators, direct I/O, limits",
    "train": "train a model whose states are larger than memory",
    "export": "write a checkpoint's weights as a Hugging Face folder",
    "generate": "generate text with a model larger than memory",
    "convert-config": "turn a DeepSpeed config into one of zero-infinity",
    "convert-checkpoint": "convert a DeepSpeed checkpoint to safetensors",
    "plan": "predict memory per tier and step time before training",
    "simulate": "simulate a training step on given hardware",
    "report": "make an HTML page from a trace",
    "bench": "measure this machine: drives, accelerator, profile",
    "paper": "recompute the tables and figures of the ZeRO papers",
    "completion": "print a completion script for bash, zsh or fish",
}

EPILOG = """\
examples:
  zero-infinity doctor /mnt/nvme      check this machine and that drive
  zero-infinity train --memory 64MiB  train 25M parameters (294 MiB of states) on Python's own source code
  zero-infinity bench io /mnt/nvme    measure the drive
  zero-infinity plan --model gpt3-13b --hardware rtx4090 --batch 4

Run `zero-infinity COMMAND --help` for the options of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()  # here, where a closed pipe can still be handled
    except (ZeroInfinityError, KeyboardInterrupt) as error:
        if speaks():  # one rank per machine prints an error that all have
            print(describe(error), file=sys.stderr)
        return exit_code(error)
    except BrokenPipeError:
        # Python flushes stdout again on exit, which would fail on the same pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return code


def _run(argv: list[str]) -> int:
    # No top-level option takes a value, so the first word that is not an option is the command.
    command = next((word for word in argv if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {command!r}; {hint}")
    parser, own = _build_parser(command)
    if own is not None:
        _check_options(argv, own)
    try:
        with _once():
            arguments = parser.parse_args(argv)
    except SystemExit as stop:  # raised by argparse after --help, --version and invalid arguments
        return stop.code if isinstance(stop.code, int) else EXIT_MISTAKE
    if command is None:
        parser.print_help(sys.stderr)
        return EXIT_MISTAKE
    return int(arguments.run(arguments))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong without the whole usage, which would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_MISTAKE, f"{self.prog}: error: {message}\n  fix:   see {self.prog} --help\n")


def _check_options(argv: Sequence[str], own: argparse.ArgumentParser) -> None:
    """Suggest the nearest option for one that does not exist; argparse only repeats it."""
    known = _options_of(own) | {"--version"}
    for word in itertools.takewhile(lambda word: word != "--", argv):
        name = word.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"see {own.prog} --help"
            raise ConfigError(f"unknown option {name!r}; {hint}")


def _options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Names of all options of a command, and of its subcommands."""
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found.update(*map(_options_of, action.choices.values()))
    return found


def _build_parser(command: str | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser | None]:
    """A parser with all options of `command`, and only the names of the others; and that of the command."""
    parser = _Parser(
        prog="zero-infinity",
        description="Train PyTorch models far larger than memory, on accelerator, host RAM and NVMe together.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zero-infinity {__version__}")
    chosen = None
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, line in COMMANDS.items():
        own = subparsers.add_parser(name, help=line, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == command:
            import_module(f"zero_infinity.cli.{name.replace('-', '_')}").add_options(own)
            chosen = own
    return parser, chosen


@contextmanager
def _once() -> Iterator[None]:
    """Let only one rank per machine print what is the same for all of them."""
    if speaks():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
