"""Train PyTorch models far larger than memory, on accelerator, host RAM and NVMe together.

The public names are imported on first use (PEP 562), so that `import zero_infinity` and the command line's `--help`
take milliseconds and do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what a type checker sees instead of _HOMES
    import zero_infinity.integrations as integrations  # noqa: F401 - see __getattr__
    from zero_infinity.api import clip_grad_norm_ as clip_grad_norm_
    from zero_infinity.api import export as export
    from zero_infinity.api import gathered as gathered
    from zero_infinity.api import init as init
    from zero_infinity.api import load as load
    from zero_infinity.api import load_pretrained as load_pretrained
    from zero_infinity.api import prepare as prepare
    from zero_infinity.api import save as save
    from zero_infinity.api import stats as stats
    from zero_infinity.api import synchronize as synchronize
    from zero_infinity.config import Config as Config
    from zero_infinity.config import ConfigWarning as ConfigWarning
    from zero_infinity.engine_stats import Stats as Stats
    from zero_infinity.errors import CapacityError as CapacityError
    from zero_infinity.errors import CheckpointError as CheckpointError
    from zero_infinity.errors import ConfigError as ConfigError
    from zero_infinity.errors import CorruptionError as CorruptionError
    from zero_infinity.errors import DivergenceError as DivergenceError
    from zero_infinity.errors import EngineClosedError as EngineClosedError
    from zero_infinity.errors import LostRankError as LostRankError
    from zero_infinity.errors import RankError as RankError
    from zero_infinity.errors import StorageError as StorageError
    from zero_infinity.errors import StuckThreadError as StuckThreadError
    from zero_infinity.errors import SwapSpaceError as SwapSpaceError
    from zero_infinity.errors import TornStepError as TornStepError
    from zero_infinity.errors import TransferError as TransferError
    from zero_infinity.errors import UsageError as UsageError
    from zero_infinity.errors import ZeroInfinityError as ZeroInfinityError
    from zero_infinity.micro_batches import accumulate as accumulate
    from zero_infinity.optim.combined_optimizer import combine_optimizers as combine_optimizers
    from zero_infinity.params.stream_weights import stream_weights as stream_weights
    from zero_infinity.plan_model import plan as plan
    from zero_infinity.tiers.emulated_accelerator import EmulatedAccelerator as EmulatedAccelerator

__version__ = "0.1.0"

# Module -> the public names defined in it.
_EXPORTS = {
    "api": "clip_grad_norm_ export gathered init load load_pretrained prepare save stats synchronize",
    "config": "Config ConfigWarning",
    "errors": "CapacityError CheckpointError ConfigError CorruptionError DivergenceError EngineClosedError "
    "LostRankError RankError StorageError StuckThreadError SwapSpaceError TornStepError TransferError UsageError "
    "ZeroInfinityError",
    "micro_batches": "accumulate",
    "optim.combined_optimizer": "combine_optimizers",
    "plan_model": "plan",
    "params.stream_weights": "stream_weights",
    "tiers.emulated_accelerator": "EmulatedAccelerator",
    "engine_stats": "Stats",
}
_HOMES = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name == "integrations":
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access does not call __getattr__
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
