"""Hugging Face models with random weights, built from a config.json alone; nothing is downloaded.

Owns which configs are accepted, which model a config describes, and what inputs that model takes. Only language models
are trained, on bytes; any other kind is only described, for a plan.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_infinity.errors import ConfigError
from zero_infinity.models.presets import VOCABULARY

# Numbers that every model of the kind needs: at least 1, and at most this many. A larger one is a typo, and building
# such a model module by module would take hours before anything fails.
_MOST = {
    "hidden_size": 10**7,
    "intermediate_size": 10**8,
    "vocab_size": 10**8,
    "num_attention_heads": 10**6,
    "num_key_value_heads": 10**6,
    "num_hidden_layers": 10**4,
    "num_decoder_layers": 10**4,
    "encoder_layers": 10**4,
    "decoder_layers": 10**4,
}

_USUAL_IMAGE_SIZE = 224  # convolutions accept any size, and their configs give none


@dataclass(frozen=True, slots=True)
class HuggingFaceConfig:
    """A model's config, read and checked; `build` makes the model."""

    path: Path
    settings: Any  # a transformers.PretrainedConfig
    model_class: Any  # a transformers.PreTrainedModel

    @property
    def max_seq(self) -> int | None:
        """The largest number of tokens that the model has positions for, if its config says so."""
        text = self.settings.get_text_config()
        for name in ("max_position_embeddings", "max_target_positions"):
            limit = getattr(text, name, None)
            if isinstance(limit, int) and limit > 0:
                return limit
        return None

    def build(self, *, without_memory: bool = False) -> nn.Module:
        """Return the model; `without_memory`: for tensors without memory, which no initialisation can read."""
        # Without memory, experts run in 16 bits only.
        settings = {"dtype": torch.bfloat16} if without_memory and part_of_experts(self) < 1 else {}
        with _uninitialised() if without_memory else nullcontext():
            model: nn.Module = self.model_class._from_config(self.settings, **settings)
        return model.train()


def read_config(path: Path) -> HuggingFaceConfig:
    """Read the `config.json` of a language model to be trained on bytes, or the one in a folder."""
    path, values = _read(path)
    settings = _make_settings(path, values)
    from transformers import AutoModelForCausalLM

    mapping = AutoModelForCausalLM._model_mapping
    if type(settings) not in mapping:
        raise ConfigError(f"hf: {path}: {values['model_type']!r} has no causal language model in transformers")
    vocabulary = getattr(settings, "vocab_size", 0)
    if not isinstance(vocabulary, int) or vocabulary < VOCABULARY:
        raise ConfigError(
            f"hf: {path} has a vocabulary of {vocabulary}, but training data is bytes\n"
            f'  fix:   "vocab_size": {VOCABULARY} or more'
        )
    return HuggingFaceConfig(path, settings, mapping[type(settings)])


def read_any_config(path: Path) -> HuggingFaceConfig:
    """Read the `config.json` of any model that transformers knows, or the one in a folder: for planning, not training.

    The model is the one in "architectures"; without it, the usual one of its kind.
    """
    path, values = _read(path)
    settings = _make_settings(path, values)
    import transformers

    named = values.get("architectures")
    for name in named if isinstance(named, list) else []:
        model_class = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(model_class, type) and getattr(model_class, "config_class", None) is type(settings):
            return HuggingFaceConfig(path, settings, model_class)
    for kind in _usual_kinds(is_encoder_decoder=bool(getattr(settings, "is_encoder_decoder", False))):
        if type(settings) in kind._model_mapping:
            return HuggingFaceConfig(path, settings, kind._model_mapping[type(settings)])
    raise ConfigError(
        f"hf: {path}: transformers has no model for {values['model_type']!r}\n"
        "  fix:   --layers, --hidden and --heads, or for a model of your own in Python "
        "zero_infinity.planner.module_shapes.describe"
    )


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the model's own training loss; the model shifts the labels by one."""
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def inputs_of(config: HuggingFaceConfig, model: nn.Module, seq: int) -> list[dict[str, Any]]:
    """Return arguments to call a model with: one sequence, one picture, or both; the likeliest first.

    Empty if the config does not tell what the model takes. The tensors are made on the default device.
    """
    accepted = inspect.signature(model.forward).parameters
    text: dict[str, Any] = {}
    tokens = torch.zeros(1, seq, dtype=torch.long)
    settings = config.settings
    if "input_features" in accepted and hasattr(settings, "num_mel_bins"):  # speech: two frames per position
        text["input_features"] = torch.zeros(1, settings.num_mel_bins, 2 * settings.max_source_positions)
    elif "input_ids" in accepted:
        text["input_ids"] = tokens
    if "decoder_input_ids" in accepted:
        text["decoder_input_ids"] = tokens
    if text and "labels" in accepted and _predicts_tokens(config):
        text["labels"] = tokens
    if text and "use_cache" in accepted:
        text["use_cache"] = False
    picture: dict[str, Any] = {}
    if "pixel_values" in accepted:
        vision = getattr(settings, "vision_config", settings)
        picture["pixel_values"] = torch.zeros(1, getattr(vision, "num_channels", 3), *_image_size(vision))
    return [inputs for inputs in (text, {**text, **picture} if picture else {}) if inputs]


def num_patches(config: HuggingFaceConfig) -> int | None:
    """Return the sequence length that a model makes of a picture; None for a text model."""
    if config.model_class.main_input_name != "pixel_values":
        return None
    vision = getattr(config.settings, "vision_config", config.settings)
    height, width = _image_size(vision)
    patch = _pair(getattr(vision, "patch_size", None))
    return 1 if patch is None else max(1, (height // patch[0]) * (width // patch[1]))


def part_of_experts(config: HuggingFaceConfig) -> float:
    """Return the fraction of its experts that a token uses; 1 for a model without experts."""
    settings = config.settings.get_text_config()
    used = getattr(settings, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        total = getattr(settings, name, None)
        if isinstance(used, int) and isinstance(total, int) and 0 < used <= total:
            return used / total
    return 1.0


def reason(error: Exception) -> str:
    """Return an error in one line; of an error with several lines, the last has the numbers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) or "no reason given"
    return f"{type(error).__name__}: {text}" if isinstance(error, LookupError | ArithmeticError) else text


def _usual_kinds(*, is_encoder_decoder: bool) -> list[Any]:
    import transformers as t

    pairs = [t.AutoModelForSeq2SeqLM, t.AutoModelForSpeechSeq2Seq]
    return [*(pairs if is_encoder_decoder else [t.AutoModelForCausalLM]), t.AutoModel]


def _predicts_tokens(config: HuggingFaceConfig) -> bool:
    """True if labels are tokens, one per position."""
    import transformers as t

    kinds = (t.AutoModelForCausalLM, t.AutoModelForMaskedLM, t.AutoModelForSeq2SeqLM, t.AutoModelForSpeechSeq2Seq)
    return any(kind._model_mapping.get(type(config.settings), None) is config.model_class for kind in kinds)


def _image_size(vision: Any) -> tuple[int, int]:
    return _pair(getattr(vision, "image_size", None)) or (_USUAL_IMAGE_SIZE, _USUAL_IMAGE_SIZE)


def _pair(value: Any) -> tuple[int, int] | None:
    """Return height and width from either form in a config."""
    if isinstance(value, int) and value > 0:
        return value, value
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value):
        return value[0], value[1]
    return None


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    if path.is_dir():
        path /= "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"hf: {path} cannot be read: {error.strerror}\n  fix:   the path of a config.json, or of its folder"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"hf: {path} is not JSON: {error}\n  fix:   use the config.json that the model was saved with"
        ) from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"hf: {path} names no model_type\n  fix:   use the config.json that the model was saved with")
    return path, values


def _make_settings(path: Path, values: dict[str, Any]) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: contact no server
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, logging
    except ImportError:
        raise ConfigError("hf: transformers is not installed\n  fix:   pip install 'zero-infinity[hf]'") from None
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # of tokens that bytes do not have, and the like
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, CONFIG_MAPPING.keys(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"hf: {path}: transformers knows no model_type {model_type!r}\n"
            f"  fix:   {hint}a model_type that it has, or zero-infinity plan with --layers, --hidden and --heads"
        )
    try:
        settings = AutoConfig.for_model(**values)
    except Exception as error:  # noqa: BLE001 - each model's config validates its values differently
        raise ConfigError(
            f"hf: {path}: transformers refuses it: {reason(error)}\n"
            "  fix:   use the values that a model of this type was saved with"
        ) from None
    _check_numbers(path, settings)
    return settings


def _check_numbers(path: Path, settings: Any) -> None:
    parts = [getattr(settings, name, None) for name in getattr(settings, "sub_configs", {})]
    for part in [settings, *(part for part in parts if part is not None)]:
        for name, most in _MOST.items():
            value = getattr(part, name, None)
            if isinstance(value, int) and not 1 <= value <= most:
                spelled = part.attribute_map.get(name, name)
                raise ConfigError(f'hf: {path}: "{spelled}" is {value}\n  fix:   an integer between 1 and {most:,}')


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Models are made without values: some initialisations read the values that they have drawn."""
    from transformers import PreTrainedModel

    initialise = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = lambda _: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = initialise  # type: ignore[method-assign]
