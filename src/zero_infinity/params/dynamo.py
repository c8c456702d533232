"""Keeps torch.compile away from code that must not be traced, and from threads that run updates.

Functions that swap parameters cause a graph break. `torch.compiler.disable` would import the compiler (seconds) for
every user; the marker here is used only where the compiler is already loaded.

While one thread compiles, `torch.compiler.is_compiling()` is true in all threads: an optimizer that runs on another
thread then keeps its step count in float32, and the last bit of an update may differ (seen on a busy machine). So that
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

# No compiled code is known to wait for an update; if one does, both wait this long.
_PATIENCE_SECONDS = 60.0


def not_compiled(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Return the function, run eagerly even inside a compiled model, with everything that it calls."""
    return _eager(function, recursive=True)


def not_traced(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Return the function, run eagerly even inside a compiled model; what it calls may be compiled."""
    return _eager(function, recursive=False)


def _eager(function: Callable[_Params, _Result], *, recursive: bool) -> Callable[_Params, _Result]:
    apart: list[Any] = []

    @functools.wraps(function)
    def run(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if not apart:
            disable = dynamo_disable()
            if disable is None:
                return function(*args, **kwargs)
            apart.append(disable(function, recursive=recursive, wrapping=False))
        result: _Result = apart[0](*args, **kwargs)
        return result

    mark_not_compiled(run, "parameters are swapped here")
    return run


@contextmanager
def no_compiling() -> Iterator[None]:
    """No other thread compiles inside this context. Only for short work that does not wait."""
    lock = compile_lock()
    if lock is None or not lock.acquire(timeout=_PATIENCE_SECONDS):
        yield
        return
    try:
        yield
    finally:
        lock.release()
