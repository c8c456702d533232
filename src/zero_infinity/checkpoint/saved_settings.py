"""Whether saved settings of a parameter group are fit for the optimizer: kinds of values, finite, accepted by it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zero_infinity.optim.combined_optimizer import owner_of_group


def problems_of(optimizer: Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    """Say what is wrong with the settings that were saved for `group`."""
    wrong = [name for name, value in saved.items() if name in group and not _same_kind(group[name], value)]
    yield from (f"{name}={str(saved[name])[:40]!r}, in the optimizer {group[name]!r}" for name in wrong)
    owner = owner_of_group(optimizer, group)
    if not wrong and (refused := _refused(owner, saved)) and not _refused(owner, group):
        yield refused


def _same_kind(known: object, saved: object) -> bool:
    """True if `saved` is a value like `known`; a number must be finite."""
    if _is_number(known) and _is_number(saved):
        return math.isfinite(saved) or saved == known  # type: ignore[arg-type]
    if isinstance(known, list | tuple) and isinstance(saved, list | tuple):
        return len(known) == len(saved) and all(map(_same_kind, known, saved))
    if known is None or (saved is None and isinstance(known, bool | str)):
        return not (_is_number(saved) and not math.isfinite(saved))  # type: ignore[arg-type]
    return isinstance(saved, str) == isinstance(known, str) and not isinstance(saved, list | tuple | dict | None)


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)


def _refused(optimizer: Optimizer, settings: Mapping[str, Any]) -> str:
    """What the optimizer's class says about these settings when it is made; torch's own check theirs there alone."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return ""
    known = inspect.signature(kind).parameters.keys() - {"params"}
    try:
        kind([torch.zeros(2, 2, requires_grad=True)], **{name: settings[name] for name in known if name in settings})
    except (ValueError, TypeError) as error:
        return str(error)
    except RuntimeError:  # a setting that fits the parameters' device and not this one
        return ""
    return ""
