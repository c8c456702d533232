"""Keeps torch.compile apart from what is no part of a graph.

Functions that swap parameters break the graph where they run. `torch.compiler.disable` would import the compiler
(seconds) for everyone; this asks for it only where it is loaded.

And while one thread compiles, `torch.compiler.is_compiling()` is true in all of them: an optimizer that another thread
runs then counts its steps in float32, and the last bit of an update may differ (seen on a busy machine). So that
thread waits for the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from zero_infinity._torch import compile_lock, dynamo_disable, mark_not_compiled

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

# Nothing that is compiled waits for an update, as far as is known; should it, that is how long both wait.
_PATIENCE_SECONDS = 60.0


def not_compiled(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """The function, run as it is also inside of a compiled model."""
    apart: list[Any] = []

    @functools.wraps(function)
    def run(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if not apart:
            disable = dynamo_disable()
            if disable is None:
                return function(*args, **kwargs)
            apart.append(disable(function, wrapping=False))
        result: _Result = apart[0](*args, **kwargs)
        return result

    mark_not_compiled(run, "parameters are swapped here")
    return run


@contextmanager
def no_compiling() -> Iterator[None]:
    """Inside, no other thread compiles. For what neither waits nor takes long."""
    lock = compile_lock()
    if lock is None or not lock.acquire(timeout=_PATIENCE_SECONDS):
        yield
        return
    try:
        yield
    finally:
        lock.release()
