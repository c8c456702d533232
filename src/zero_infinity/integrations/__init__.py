"""Thin layers between zero_infinity and other training libraries, each imported only when it is asked for."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["accelerate", "axolotl", "lightning", "peft", "transformers", "trl"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
