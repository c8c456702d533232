"""Converts names between Hugging Face files and a model, with transformers' own conversion tables.

Some models fuse tensors that are separate in files (one matrix for all experts, where files have one per expert), or
use other names. transformers has the rules for both directions and does the arithmetic. This module only finds out
which tensors are made from which, so that they can be converted one at a time.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

ReadTensor = Callable[[str], torch.Tensor]


@dataclass(slots=True)
class NameConversion:
    """Tensors that are made from others in one operation."""

    name: str  # given by transformers: that of the first result
    converter: Any  # a transformers.core_model_loading.WeightConverter; copied before use
    sources: list[tuple[str, str]] = field(default_factory=list)  # pattern and name
    rename: Callable[[str], str] = str  # applied to the results' names

    def apply(self, model: nn.Module, read: ReadTensor) -> dict[str, torch.Tensor]:
        """The results by name; `read` returns a source."""
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.name, name, pattern, lambda name=name: read(name))
        made = converter.convert(self.name, model=model, config=model.config)
        return {self.rename(name): tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


@dataclass(slots=True)
class NamePlan:
    """Which tensors are made from which."""

    direct: dict[str, str] = field(default_factory=dict)  # target -> source
    conversions: list[NameConversion] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # sources without a target


def is_hugging_face(model: nn.Module) -> bool:
    """True for a transformers model. Does not import transformers: such a model has imported it already."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def plan_loading(model: Any, in_files: Iterable[str], in_model: Collection[str]) -> NamePlan:
    """Which of the model's tensors are made from which tensors of the files."""
    if not is_hugging_face(model):
        known = set(in_model)
        names = list(in_files)
        return NamePlan({n: n for n in names if n in known}, unknown=[n for n in names if n not in known])
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings, converters, by_pattern = _sorted_by_kind(get_model_conversion_mapping(model))
    known_names = dict.fromkeys(in_model, True)
    prefix: Any = model.base_model_prefix
    plan, found = NamePlan(), dict[str, NameConversion]()
    for name in sorted(in_files, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known_names)
        if target not in known_names and name in known_names:
            target, pattern = name, None
        if target not in known_names:
            plan.unknown.append(name)
        elif pattern is None:
            plan.direct[target] = name
        else:
            conversion = found.setdefault(target, NameConversion(target, by_pattern[pattern]))
            conversion.sources.append((pattern, name))
    plan.conversions = list(found.values())
    ignored: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    plan.unknown = [n for n in plan.unknown if not any(re.search(expression, n) for expression in ignored)]
    return plan


def plan_export(model: Any, names: Iterable[str]) -> NamePlan:
    """Which tensors of the files are made from which of the model's (the reverse of `plan_loading`)."""
    if model is None or not is_hugging_face(model):
        return NamePlan({name: name for name in names})
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, apply_converters, apply_renamings, dot_natural_key

    # Legacy names are not written, and whether a file had a prefix is unknown.
    transforms = [t for t in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(t, PrefixChange)]
    renamings, converters, by_pattern = _sorted_by_kind([t.reverse_transform() for t in transforms[::-1]])
    plan, found = NamePlan(), dict[str, NameConversion]()
    for name in sorted(names, key=dot_natural_key):
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            plan.direct[apply_renamings(name, renamings)] = name
        else:
            conversion = NameConversion(
                target, by_pattern[pattern], rename=lambda made: apply_renamings(made, renamings)
            )
            found.setdefault(target, conversion).sources.append((pattern, name))
    plan.conversions = list(found.values())
    return plan


def _sorted_by_kind(transforms: list[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """The renamings, the converters, and the converter of each pattern."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    return [transform for transform in transforms if isinstance(transform, WeightRenaming)], converters, by_pattern


def hugging_face_files(model: nn.Module) -> dict[str, Any] | None:
    """The JSON files that accompany a Hugging Face model's weights, by name; None for other models."""
    config: Any = getattr(model, "config", None)
    if not (hasattr(config, "to_json_string") and hasattr(config, "model_type")):
        return None
    values = {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]}
    files = {"config.json": values}
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = json.loads(generation.to_json_string())
    return files
