"""One server per test process, from which ranks and other child processes are forked.

It has imported what they need, once: a child starts in hundredths of a second instead of some seconds. The path to this
package reaches it by PYTHONPATH (see conftest.py), since it does not take over the `sys.path` of its parent.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

from support.patience import SECONDS


def context() -> ForkServerContext:
    """Where to make processes and pipes."""
    made = multiprocessing.get_context("forkserver")
    # The same list everywhere: only the one that is set when the server starts counts.
    made.set_forkserver_preload(["support.preloaded"])
    return made


def run_alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a new process, and return what it returns.

    For what counts threads, descriptors, mappings or resident pages: those of no other test are there.
    """
    made = context()
    receiver, sender = made.Pipe(duplex=False)
    process = made.Process(target=_call, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            raise AssertionError(f"{function.__name__} did not end within {SECONDS:.0f} s")
        result, error = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        raise AssertionError(f"the process of {function.__name__} ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise AssertionError(error)
    return result


def in_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test function in a new process; the fixtures that it takes have to be picklable."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        run_alone(_call_test, test.__module__, test.__name__, fixtures)

    return run


def _call_test(module: str, name: str, fixtures: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**fixtures)


def _call(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    result, error = None, None
    try:
        result = function(*arguments)
    except BaseException:  # noqa: BLE001 - handed to the test
        error = traceback.format_exc()
    atexit._run_exitfuncs()  # as at the end of an interpreter, which a forked process does not get to
    pipe.send_bytes(pickle.dumps((result, error)))
