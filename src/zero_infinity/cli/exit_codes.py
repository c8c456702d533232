"""Exit codes of commands, and the text of an error.

0 success, 1 failure, 2 invalid command, setting or call; 130, 143 and 141 after SIGINT, SIGTERM and SIGPIPE.
"""

from __future__ import annotations

import re

from zero_infinity.errors import ConfigError, TornStepError, UsageError, ZeroInfinityError

# Of settings that are options of the same name: memory="12MiB", nvme="/path".
_SETTING = re.compile(r"\b(memory|nvme)=(?:\"([^\"\n]*)\"|([^\s,\"]+))")

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 128 + 2  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 128 + 13  # SIGPIPE


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ended with `error`."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FAILED
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    # A torn step is not the user's mistake: no other command or setting would fix it.
    is_mistake = isinstance(error, ConfigError | UsageError) and not isinstance(error, TornStepError)
    return EXIT_MISTAKE if is_mistake else EXIT_FAILED


def describe(error: ZeroInfinityError | KeyboardInterrupt) -> str:
    """The text printed for `error`."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {_as_options(str(error))}"


def _as_options(message: str) -> str:
    """Spell the settings in the fix of a message as the options that a command has for them."""
    problem, fix, rest = message.partition("\n  fix:   ")
    return problem + fix + _SETTING.sub(lambda found: f"--{found[1]} {found[2] or found[3]}", rest)
