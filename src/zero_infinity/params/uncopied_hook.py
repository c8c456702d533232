"""Hooks that are not copied with their module: a deep copy of a prepared model is a plain model."""

from __future__ import annotations

from typing import Any


class _Inert:
    """Replaces a hook in a copied module."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


class Hook:
    """A hook that is not copied with its module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _Inert()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Inert, ())
