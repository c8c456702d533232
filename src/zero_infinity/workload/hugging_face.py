"""A Hugging Face model with random weights, from a config.json alone: nothing is downloaded."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zero_infinity.errors import ConfigError
from zero_infinity.workload.presets import VOCABULARY


@dataclass(frozen=True, slots=True)
class HuggingFaceConfig:
    """A causal language model's config, read and checked; `build` makes the model."""

    path: Path
    settings: Any  # a transformers.PretrainedConfig

    @property
    def max_seq(self) -> int | None:
        """The most tokens that the model has positions for, where it says so."""
        limit = getattr(self.settings, "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    def build(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_config(self.settings)  # type: ignore[no-untyped-call]
        return model.train()


def read_config(path: Path) -> HuggingFaceConfig:
    """Read `config.json`, or the one in a folder."""
    if path.is_dir():
        path /= "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"hf: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"hf: {path} is not JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"hf: {path} names no model_type\n  fix:   give the config.json of a model, as saved by it")
    settings = _make_settings(path, values)
    vocabulary = getattr(settings, "vocab_size", 0)
    if not isinstance(vocabulary, int) or vocabulary < VOCABULARY:
        raise ConfigError(
            f"hf: {path} has a vocabulary of {vocabulary}, but text is trained on as bytes\n"
            f'  fix:   "vocab_size": {VOCABULARY} or more'
        )
    return HuggingFaceConfig(path, settings)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The model's own training loss; it shifts the labels by one itself."""
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _make_settings(path: Path, values: dict[str, Any]) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: it shall ask no server
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, logging
    except ImportError:
        raise ConfigError("hf: transformers is not installed\n  fix:   pip install 'zero-infinity[hf]'") from None
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # of tokens that bytes do not have, and the like
    model_type = values["model_type"]
    try:
        settings = AutoConfig.for_model(**values)
    except Exception as error:  # noqa: BLE001 - each model's config checks its values in its own way
        raise ConfigError(f"hf: {path}: transformers refuses it: {str(error).splitlines()[0]}") from None
    if type(settings) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"hf: {path}: {model_type!r} has no causal language model in transformers")
    return settings
