"""A plugin of Axolotl: `plugins: [zero_infinity.integrations.axolotl.ZeroInfinityPlugin]` in its YAML file.

The settings are the table `zero_infinity:` of that file, with the names of `zero_infinity.Config`. Without the table
the plugin changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from zero_infinity.config import Config
from zero_infinity.errors import ConfigError
from zero_infinity.integrations.transformers import Mixin

# Settings of Axolotl that shard the model themselves, and those whose trainers take other arguments.
_OTHER_ENGINES = ("deepspeed", "fsdp", "fsdp_config")
_OTHER_TRAINERS = ("rl", "reward_model", "process_reward_model")


class ZeroInfinityArgs(BaseModel):
    """What the plugin adds to Axolotl's settings."""

    zero_infinity: dict[str, Any] | None = None


class ZeroInfinityPlugin(BasePlugin):  # type: ignore[misc]
    """Lets Axolotl's trainer train within a memory budget."""

    def get_input_args(self) -> str:
        """Where the settings that the plugin adds are declared."""
        return f"{__name__}.{ZeroInfinityArgs.__name__}"

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Check the settings before anything is loaded."""
        config = _config_of(cfg)
        for name in (*_OTHER_ENGINES, *_OTHER_TRAINERS) if config is not None else ():
            if not cfg.get(name):
                continue
            fix = f"leave out {name}:"
            if name in _OTHER_TRAINERS:
                fix = "TRL's trainer with zero_infinity.integrations.transformers.Mixin, without Axolotl"
            raise ConfigError(f"{name}: does not go together with zero_infinity:\n  fix:   {fix}")

    def get_trainer_cls(self, cfg: Mapping[str, Any]) -> type | None:
        """Return the trainer that Axolotl would use for this file, within the budget."""
        config = _config_of(cfg)
        if config is None:
            return None
        module, _, name = str(cfg.get("trainer_cls") or "axolotl.core.trainers.base.AxolotlTrainer").rpartition(".")
        theirs: Any = getattr(import_module(module), name)

        class ZeroInfinityAxolotlTrainer(Mixin, theirs):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, zero_infinity=config, **kwargs)

        return ZeroInfinityAxolotlTrainer


def _config_of(cfg: Mapping[str, Any]) -> Config | None:
    table = cfg.get("zero_infinity")
    if table is None:
        return None
    try:
        return Config.from_dict({str(name): value for name, value in dict(table).items()})
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"zero_infinity: in Axolotl's settings: {error}") from None
