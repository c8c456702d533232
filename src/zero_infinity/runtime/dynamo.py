"""Keeps torch.compile out of functions that swap parameters: they are no part of a graph, and break it where they run.

`torch.compiler.disable` would import the compiler (seconds) for everyone; this asks for it only where it is loaded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def not_compiled(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """The function, run as it is also inside of a compiled model."""
    apart: list[Any] = []

    @functools.wraps(function)
    def run(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if not apart:
            dynamo = sys.modules.get("torch._dynamo")
            if dynamo is None or not hasattr(dynamo, "disable"):
                return function(*args, **kwargs)
            apart.append(dynamo.disable(function, wrapping=False))
        result: _Result = apart[0](*args, **kwargs)
        return result

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = "parameters are swapped here"  # type: ignore[attr-defined]
    return run
