"""Exit codes of commands, and the text of an error.

0 success, 1 failure, 2 invalid command, setting or call; 130, 143 and 141 after SIGINT, SIGTERM and SIGPIPE.
"""

from __future__ import annotations

from zero_infinity.errors import ConfigError, TornStepError, UsageError, ZeroInfinityError

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
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
