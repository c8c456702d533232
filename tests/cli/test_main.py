from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
import types

import pytest

from zero_infinity import CapacityError, ConfigError, SwapSpaceError, TornStepError, UsageError, __version__
from zero_infinity.cli.main import COMMANDS, EXIT_BROKEN_PIPE, main

COMMAND = [sys.executable, "-m", "zero_infinity"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A subcommand `probe` whose `action` a test may replace."""
    module = types.ModuleType("zero_infinity.cli.probe")

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--count", type=int, default=0)
        parser.set_defaults(run=lambda arguments: module.action(arguments))

    module.__dict__.update(add_options=add_options, action=lambda arguments: arguments.count)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "probe", "a command for tests")
    return module


def raising(error: BaseException) -> object:
    def action(arguments: argparse.Namespace) -> int:
        raise error

    return action


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(line in output for line in COMMANDS.values())


@pytest.mark.parametrize("words", [*([name] for name in COMMANDS), ["bench", "io"], ["bench", "hardware"]])
def test_the_help_of_every_command_has_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    _, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    assert f"  zero-infinity {' '.join(words)} " in examples


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["plan", "--hardwear", "a100"], "'--hardwear'; did you mean '--hardware'?"),
        (["train", "--memry=1MiB"], "'--memry'; did you mean '--memory'?"),
        (["bench", "io", ".", "--sizze", "1MiB"], "'--sizze'; did you mean '--size'?"),
        (["plan", "--qqqqqqqq"], "'--qqqqqqqq'; see zero-infinity plan --help"),
    ],
)
def test_an_unknown_option_is_told_with_the_nearest_one(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"ConfigError: unknown option {hint}\n"


def test_options_may_be_shortened_and_values_may_look_like_options(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "--co", "3"]) == 3
    assert main(["probe", "--", "--strange"]) == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_help_imports_neither_torch_nor_a_command() -> None:
    code = (
        "import sys; from zero_infinity.cli.main import main; main(['--help']); "
        "sys.exit(any(m == 'torch' or m == 'rich' or m.startswith('zero_infinity.storage') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_version() -> None:
    result = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"zero-infinity {__version__}\n"


def test_no_command_shows_the_help_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "commands:" in captured.err


def test_unknown_command_suggests_the_nearest() -> None:
    result = subprocess.run([*COMMAND, "docter", "--json"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "ConfigError: unknown command 'docter'; did you mean 'doctor'?\n"


def test_unknown_command_far_from_all_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["xyzzy"]) == 2
    assert f"there are: {', '.join(COMMANDS)}" in capsys.readouterr().err


def test_exit_code_is_the_command_s(command: types.ModuleType) -> None:
    assert main(["probe"]) == 0
    assert main(["probe", "--count", "7"]) == 7


def test_wrong_argument(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--count", "x"]) == 2
    assert "argument --count: invalid int value: 'x'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("stage=4 is not valid"), 2),
        (UsageError("not now"), 2),
        (CapacityError("too large\n  fix: memory=..."), 1),
        (TornStepError("half-way"), 1),
    ],
)
def test_our_errors_are_lines_without_a_traceback(
    error: Exception, code: int, command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    command.__dict__["action"] = raising(error)
    assert main(["probe"]) == code
    assert capsys.readouterr().err == f"{type(error).__name__}: {error}\n"


def test_storage_error_is_its_message_alone(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    command.__dict__["action"] = raising(SwapSpaceError(errno.ENOSPC, "nvme='/x': 2.0 GiB is needed", "/x"))
    assert main(["probe"]) == 1
    assert capsys.readouterr().err == "SwapSpaceError: nvme='/x': 2.0 GiB is needed\n"


def test_the_fix_is_spelt_as_options_of_the_command(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    message = 'memory is 1 KiB\n  fix:   nvme="/path/on a/drive", or memory="12MiB" or more; zi.Config(stage=3)'
    command.__dict__["action"] = raising(CapacityError(message))
    assert main(["probe"]) == 1
    said = capsys.readouterr().err
    assert "memory is 1 KiB\n  fix:   --nvme /path/on a/drive, or --memory 12MiB or more; zi.Config(stage=3)" in said


def test_a_wrong_value_is_not_hidden_behind_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--steps", "x"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("zero-infinity train: error: argument --steps: 'x' is not an integer of at least 1\n  fix:")
    assert said.count("\n") == 2


def test_other_errors_keep_their_traceback(command: types.ModuleType) -> None:
    command.__dict__["action"] = raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["probe"])


def test_interrupt(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    command.__dict__["action"] = raising(KeyboardInterrupt())
    assert main(["probe"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # before the command has written anything
    # Unbuffered, argparse would meet the closed pipe itself, and swallow it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(
        [*COMMAND, "--help"], stdout=writer, stderr=subprocess.PIPE, env=environment, text=True, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (EXIT_BROKEN_PIPE, "")
