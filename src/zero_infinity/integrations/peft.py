"""Weights of PEFT models with their adapters merged in, streamed: the base is read, never changed.

`model.merge_adapter()` and `merge_and_unload()` of PEFT work as well, but they write the base, and what they merged
rounds when it is taken out again.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from zero_infinity import api
from zero_infinity.checkpoint.weight_writer import kind_of, write_weights
from zero_infinity.errors import UsageError
from zero_infinity.params.packed_tensor import PackedTensor
from zero_infinity.params.stream_weights import stream_weights

_OUTER = "base_model.model."
_ADAPTED = ".base_layer."


def stream_merged_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter of a prepared PEFT model's base, under its name there, with the active adapters merged in.

    One adapted layer at a time is copied and merged, in torch's memory beside the budget; everything else comes as from
    `zi.stream_weights`. On several ranks all of them iterate.
    """
    layers = dict(_adapted_layers(model))
    merged: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in stream_weights(model, buffers=False):
        place = _place(model, name, layers)
        if place is None:
            continue
        own, layer_name, parameter = place
        if layer_name is None:
            yield own, value
            continue
        if layer_name not in merged:
            merged = {layer_name: _merged(layers[layer_name], layer_name)}
        yield own, merged[layer_name][parameter]


def save_merged(model: nn.Module, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
    """Write the merged weights of a prepared PEFT model to a new folder, with the base's config.

    `from_pretrained` of transformers reads it, without PEFT. The model goes on with its adapters as before. All ranks
    call it.

    Args:
        model: The PEFT model that was prepared.
        directory: A new or empty folder.
        dtype: Of floating-point weights. Default: that of the model.
    """
    layers = dict(_adapted_layers(model))
    kinds = {}
    for name, parameter in model.named_parameters():
        place = _place(model, name, layers)
        if place is not None:
            kinds[place[0]] = kind_of(parameter.dtype, parameter.shape, dtype)
    values = stream_merged_weights(model)
    ranks = api.engine_of(model).ranks
    if ranks is None or ranks.rank == 0:
        write_weights(Path(directory), kinds, values, _settings(model, dtype))
    for _ in values:  # on the other ranks
        pass


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    if not hasattr(model, "peft_config"):
        raise UsageError("this model has no adapters\n  fix:   zi.export(directory, model)")
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            own = cast(nn.Module, module).parameters()
            if any(isinstance(p, PackedTensor) for p in own):
                raise UsageError(
                    f"{name!r} is quantised, and merging would quantise it again\n"
                    "  fix:   save the adapters, load them on the weights that were quantised, and merge there"
                )
            yield name, module


def _place(model: nn.Module, name: str, layers: dict[str, BaseTunerLayer]) -> tuple[str, str | None, str] | None:
    """The name in the base, and of a layer with adapters its name and the parameter's in its base layer."""
    for kept in _saved_modules(model):
        if name.startswith(f"{kept}.original_module."):
            return None
        if name.startswith(f"{kept}.modules_to_save."):
            adapter, _, rest = name.removeprefix(f"{kept}.modules_to_save.").partition(".")
            wrapper: Any = model.get_submodule(kept)
            is_active = adapter in wrapper.active_adapters
            return (f"{kept}.{rest}".removeprefix(_OUTER), None, rest) if is_active else None
    layer_name, adapted, parameter = name.partition(_ADAPTED)
    if adapted and layer_name in layers:
        return f"{layer_name}.{parameter}".removeprefix(_OUTER), layer_name, parameter
    if any(name.startswith(f"{layer}.") for layer in layers):
        return None  # of the adapters
    return name.removeprefix(_OUTER), None, name


def _saved_modules(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]


def _merged(layer: BaseTunerLayer, name: str) -> dict[str, torch.Tensor]:
    if layer.merged:
        raise UsageError(f"{name!r} is merged already\n  fix:   model.unmerge_adapter(), or zi.export")
    own: Any = copy.deepcopy(layer)
    with torch.no_grad():
        own.merge()
    return dict(own.get_base_layer().named_parameters())


def _settings(model: nn.Module, dtype: torch.dtype | None) -> dict[str, bytes]:
    whole: Any = model
    base = whole.get_base_model() if hasattr(model, "get_base_model") else whole
    files = {}
    config = getattr(base, "config", None)
    if config is not None and callable(getattr(config, "to_json_string", None)):
        values = json.loads(config.to_json_string(use_diff=False))
        kept = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        values |= {"dtype": str(dtype or kept).removeprefix("torch."), "architectures": [type(base).__name__]}
        files["config.json"] = json.dumps(values, indent=2).encode() + b"\n"
    generation = getattr(base, "generation_config", None)
    if generation is not None:
        files["generation_config.json"] = generation.to_json_string().encode()
    return files
