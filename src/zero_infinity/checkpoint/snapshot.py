"""What a save contains: the model's tensors, optimizer states and settings at one moment, and their manifest.

Describes tensors and the blocks they are in. Reads no block and writes no file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum

import torch
from torch import nn

from zero_infinity.checkpoint.copy_into_block import dtype_name
from zero_infinity.checkpoint.file_layout import FilePlan, TensorKind
from zero_infinity.checkpoint.hf_names import hugging_face_files
from zero_infinity.checkpoint.manifest import (
    MODEL,
    OPTIMIZER,
    FileEntry,
    GroupEntry,
    Manifest,
    OptimizerEntry,
    StateEntry,
    TensorEntry,
)
from zero_infinity.checkpoint.rank_parts import (
    BlockContent,
    Key,
    ModelContents,
    as_real,
    contents_of,
    order_of,
    state_key,
)
from zero_infinity.checkpoint.safetensors_header import NAMES
from zero_infinity.checkpoint.training_view import TrainingView
from zero_infinity.optim.state_slots import TensorForm
from zero_infinity.optim.update_rule import copy_scalars, split_state
from zero_infinity.params.unit import ManagedParameter


class Which(Enum):
    """The parameters of a save."""

    ALL = "all"
    TRAINED = "trained"  # without frozen ones
    OF_PART = "of part"  # of a model that has lost some since it was prepared: merged adapters


class Snapshot:
    """A model at rest. What the manifest says is copied: it stays valid while training continues."""

    def __init__(
        self, model: nn.Module, view: TrainingView, num_ranks: int, *, with_optimizer: bool, which: Which
    ) -> None:
        self._view = view
        self._contents = contents_of(model, view, of_part=which is Which.OF_PART)
        if which is Which.TRAINED:
            self._contents.leave_out_frozen()
        self._states = _states(self._contents, view) if with_optimizer else None
        # Tensors outside of blocks: buffers, parameters in no unit, and the latter's states.
        self.values: dict[Key, torch.Tensor] = {(MODEL, n): as_real(t) for n, t in self._contents.plain.items()}
        self.kinds = self._find_kinds()
        self.step = view.num_steps
        scale = view.loss_scale
        self._manifest = Manifest(
            step=self.step,
            num_ranks=num_ranks,
            model_class=type(model).__name__,
            model_config=hugging_face_files(model),
            tensors={},
            tied=self._contents.tied,
            optimizer=self._optimizer_entry(),
            loss_scale=scale.state_dict() if scale is not None else None,
            files={},
        )

    def describe(self) -> str:
        """Equal on two ranks if they are about to save the same tensors of the same step."""
        return json.dumps([self.step, [[*key, kind.dtype, kind.shape] for key, kind in self.kinds.items()]])

    def parameter_blocks(self) -> Iterator[BlockContent]:
        yield from map(self._contents.of_unit, self._contents.units)

    def state_blocks(self) -> Iterator[BlockContent]:
        for unit in self._contents.units:
            yield from self._contents.of_record(unit, self._states or {})

    def manifest(
        self, plans: Mapping[str, FilePlan], rank_files: Mapping[str, FileEntry], entries: Mapping[Key, TensorEntry]
    ) -> Manifest:
        """The manifest, once the checksums of all files and tensors are known."""
        tensors = {
            section: {name: entry for (own, name), entry in entries.items() if own == section}
            for section in (MODEL, OPTIMIZER)
        }
        files = {**{name: plan.entry for name, plan in plans.items()}, **rank_files}
        return replace(self._manifest, tensors=tensors, files=files)

    def _find_kinds(self) -> dict[Key, TensorKind]:
        kinds: dict[Key, TensorKind] = {}
        for name, known in self._contents.managed.items():
            kinds[MODEL, name] = _kind(known, self._contents.value_dtype(known))
        for (section, name), value in self.values.items():
            kinds[section, name] = TensorKind(dtype_name(value, name), tuple(value.shape))
        for name, state in (self._states or {}).items():
            owner = self._contents.managed.get(name)
            for slot in state.slots:
                key = (OPTIMIZER, state_key(slot, name))
                if owner is not None:
                    kinds[key] = _kind_of_state(self._contents, owner, slot)
                else:
                    parameter = next(p for p, names in self._contents.names.items() if names[0] == name)
                    value = self.values[key] = as_real(self._view.user_optimizer.state[parameter][slot])
                    kinds[key] = TensorKind(dtype_name(value, name), tuple(value.shape))
        return kinds

    def _optimizer_entry(self) -> OptimizerEntry | None:
        if self._states is None:
            return None
        optimizer, names = self._view.user_optimizer, self._contents.names
        groups = tuple(
            GroupEntry(
                copy.deepcopy({name: value for name, value in group.items() if name != "params"}),
                tuple(names[parameter][0] for parameter in group["params"]),
            )
            for group in optimizer.param_groups
        )
        return OptimizerEntry(type(optimizer).__name__, groups, self._states)


def _kind_of_state(contents: ModelContents, owner: ManagedParameter, slot: str) -> TensorKind:
    record = contents.records[owner.parts[0].unit]
    form = record.form_of(owner, slot)
    return _kind(form if owner in record.wholes else owner, form.dtype)


def _kind(known: ManagedParameter | TensorForm, dtype: torch.dtype) -> TensorKind:
    order = order_of(known)
    shape = tuple(known.shape) if order is None else tuple(known.shape[number] for number in order)
    return TensorKind(NAMES[dtype], shape, order)


def _states(contents: ModelContents, view: TrainingView) -> dict[str, StateEntry]:
    """The optimizer's states of all parameters that have one."""
    states = {}
    for parameter, names in contents.names.items():
        known = contents.managed.get(names[0])
        if known is None and names[0] not in contents.plain:
            continue  # left out
        if known is not None:
            part = known.parts[0]  # all tiles have the same scalars
            record = contents.records.get(part.unit)
            if record is not None and part in record.started:
                states[names[0]] = StateEntry(record.started[part], copy_scalars(record.scalars[part]))
        elif view.user_optimizer.state.get(parameter):
            state = view.user_optimizer.state[parameter]
            states[names[0]] = StateEntry(tuple(state), copy_scalars(split_state(state, parameter.shape)[1]))
    return states
