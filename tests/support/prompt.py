"""Makes a run synchronous, so that it moves exactly the bytes that the policy decided on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from zero_infinity.api import engine_of


def let_nothing_lag(model: nn.Module) -> None:
    """Wait for everything as soon as it is asked for.

    A block that is asked for again before it has left need not leave, and saves a transfer. Where a thread comes late,
    on a busy machine, that is so now and then: fewer bytes than the decisions say, which are what a plan has.
    """
    engine = engine_of(model)
    update_worker, cache = engine.parameter_store.update_worker, engine.cache

    def then(first: Callable[..., None], *later: Callable[[], None]) -> Callable[..., None]:
        def both(*arguments: Any, **keywords: Any) -> None:
            first(*arguments, **keywords)
            for wait in later:
                wait()

        return both

    engine.host_cache.access = then(engine.host_cache.access, engine.store.settle)  # type: ignore[method-assign]
    update_worker.submit = then(update_worker.submit, update_worker.drain)  # type: ignore[method-assign]
    if cache is not None:
        copier = cache.copier
        copier.submit = then(copier.submit, copier.drain)  # type: ignore[method-assign]
