"""Says which argument of a public function is not what it should be, and what was probably meant."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from zero_infinity.config import Config
from zero_infinity.errors import UsageError


def check_config(config: object) -> None:
    """Raise unless it is a `Config` or None."""
    if isinstance(config, Mapping):
        raise UsageError("config= is a dict, not a zi.Config\n  fix:   zi.Config(**config)")
    if not isinstance(config, Config | None):
        raise UsageError(f"config= is a {type(config).__name__}\n  fix:   zi.Config(memory=..., nvme=...)")


def check_prepare(model: object, optimizer: object, config: object) -> None:
    """Say which argument of `prepare` is in the place of which other."""
    if isinstance(optimizer, Config | Mapping):
        raise UsageError(
            "zi.prepare was given a config in the place of the optimizer\n"
            "  fix:   zi.prepare(model, optimizer, config) to train; zi.prepare(model, config=config) for inference"
        )
    if isinstance(config, Mapping):
        check_config(config)
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"zi.prepare takes a torch.nn.Module and a torch.optim.Optimizer, and got a {type(model).__name__} and a "
            f"{type(optimizer).__name__}\n  fix:   zi.prepare(model, optimizer, config); several: zi.combine_optimizers"
        )
    check_config(config)


def check_model(model: object) -> None:
    """Raise unless it is a module: `zi.save(model, path)` is an easy mistake."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model= is a {type(model).__name__}, not a torch.nn.Module\n"
            "  fix:   the arguments in their order: zi.save(path, model, optimizer), zi.load(path, model, optimizer), "
            "zi.export(path, model), zi.load_pretrained(model, path)"
        )
