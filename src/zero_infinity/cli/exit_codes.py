"""How a command ends: its exit code, and what is said of an error.

Exit codes: 0 done, 1 it failed, 2 a mistake in the command or the settings, 130 interrupted.
"""

from __future__ import annotations

from zero_infinity.errors import ConfigError, TornStepError, UsageError, ZeroInfinityError

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 128 + 2  # as a shell reports a process that SIGINT ended
EXIT_BROKEN_PIPE = 128 + 13  # SIGPIPE


def exit_code(error: BaseException) -> int:
    """The code of a command that `error` ended."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FAILED
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    return EXIT_MISTAKE if _is_mistake(error) else EXIT_FAILED


def describe(error: ZeroInfinityError | KeyboardInterrupt) -> str:
    """What the user reads of it."""
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


def _is_mistake(error: BaseException) -> bool:
    """Whether the user can mend it by writing something else; a torn step is no one's mistake."""
    return isinstance(error, ConfigError | UsageError) and not isinstance(error, TornStepError)
