"""Matches tensors of a checkpoint with those of a model, and reports all mismatches at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.optim import Optimizer

from zero_infinity.checkpoint.manifest import MODEL, OPTIMIZER, OptimizerEntry, StateEntry
from zero_infinity.checkpoint.rank_parts import Key, ModelContents, state_key
from zero_infinity.checkpoint.saved_settings import problems_of
from zero_infinity.checkpoint.verify import OpenCheckpoint, StoredTensor
from zero_infinity.errors import CheckpointError

_SHOWN = 12  # names of each kind


@dataclass(slots=True)
class MatchProblems:
    """Mismatches, by kind."""

    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, what: Iterable[str]) -> None:
        self.found.setdefault(kind, []).extend(what)

    def raise_if_any(self, summary: str, fix: str) -> None:
        lines = []
        for kind, items in self.found.items():
            if items:
                rest = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
                lines.append(f"\n  {kind} ({len(items)}): {'; '.join(sorted(items)[:_SHOWN])}{rest}")
        if lines:
            raise CheckpointError(f"{summary}{''.join(lines)}\n  fix:   {fix}")


@dataclass(slots=True)
class TensorMatch:
    """Sources of a model's tensors, under the model's own first names, and the states of its parameters."""

    sources: dict[Key, StoredTensor] = field(default_factory=dict)
    states: dict[str, StateEntry] = field(default_factory=dict)


def match(
    contents: ModelContents, checkpoint: OpenCheckpoint, optimizer: Optimizer | None, *, strict: bool
) -> tuple[TensorMatch, MatchProblems]:
    """Find the source of each tensor. `optimizer`: None to match values only."""
    result, problems = TensorMatch(), MatchProblems()
    used = _match_values(contents, checkpoint, result, problems, strict=strict)
    if strict:
        problems.add("only in the checkpoint", (n for s, n in checkpoint.tensors if s == MODEL and n not in used))
    entry = checkpoint.manifest.optimizer
    if optimizer is None:
        return result, problems
    if entry is None:
        problems.add("the optimizer", ["was not saved; zi.load(path, model) loads only the values"])
    elif entry.kind != type(optimizer).__name__:
        problems.add("the optimizer", [f"was {entry.kind} and now is {type(optimizer).__name__}"])
    else:
        _match_optimizer(contents, checkpoint, entry, optimizer, result, problems)
    return result, problems


def _match_values(
    contents: ModelContents, checkpoint: OpenCheckpoint, result: TensorMatch, problems: MatchProblems, *, strict: bool
) -> set[str]:
    used = set()
    for name, all_names, shape, _ in contents.tensors:
        saved = {found for n in all_names if (found := checkpoint.saved_name(n)) is not None}
        used |= saved
        if not saved:
            problems.add("only in the model", [name] if strict else [])
            continue
        if len(saved) > 1:
            problems.add("tied in the model, separate in the checkpoint", [" = ".join(sorted(saved))])
            continue
        source = checkpoint.tensors[MODEL, saved.pop()]
        if source.true_shape != shape:
            problems.add("different shapes", [f"{name} {list(source.true_shape)}, in the model {list(shape)}"])
        result.sources[MODEL, name] = source
    return used


def _match_optimizer(
    contents: ModelContents,
    checkpoint: OpenCheckpoint,
    entry: OptimizerEntry,
    optimizer: Optimizer,
    result: TensorMatch,
    problems: MatchProblems,
) -> None:
    groups = [[contents.names[p][0] for p in group["params"]] for group in optimizer.param_groups]
    saved = [[own_name(contents, checkpoint, name) for name in group.parameters] for group in entry.groups]
    if [sorted(map(str, group)) for group in saved] != [sorted(group) for group in groups]:
        sizes = [[len(group) for group in all_groups] for all_groups in (saved, groups)]
        problems.add(
            "the optimizer",
            [f"had groups of {sizes[0]} parameters and now has {sizes[1]}, or different parameters in them"],
        )
        return
    for number, (group, settings) in enumerate(zip(optimizer.param_groups, entry.groups, strict=True)):
        wrong = problems_of(optimizer, group, settings.settings)
        problems.add("settings that are no settings of the optimizer", (f"group {number}: {one}" for one in wrong))
    for saved_name, state in entry.states.items():
        name = own_name(contents, checkpoint, saved_name)
        if name is None:
            problems.add("states of parameters not in the model", [saved_name])
            continue
        known = contents.managed.get(name)
        if known is not None:
            record = contents.records[known.parts[0].unit]
            wanted = record.state_names.get(known.parts[0], ())
            whole = record.wholes.get(known)  # some of its states may come in later steps
            if not set(state.slots) <= set(wanted) or (whole is None and len(wanted) > len(state.slots)):
                problems.add("different states", [f"{name} {list(state.slots)}, in the optimizer {list(wanted)}"])
                continue
        for slot in state.slots:
            source = checkpoint.tensors.get((OPTIMIZER, state_key(slot, saved_name)))
            shape = tuple(record.form_of(known, slot).shape) if known is not None else None
            if source is None or (shape is not None and source.true_shape != shape):
                problems.add("states that are missing or have different shapes", [f"{slot} of {name}"])
            else:
                result.sources[OPTIMIZER, state_key(slot, name)] = source
        result.states[name] = state


def own_name(contents: ModelContents, checkpoint: OpenCheckpoint, saved: str) -> str | None:
    """The model's first name of the parameter that was saved as `saved`."""
    first_names = {names[0] for names in contents.names.values()}
    for name in checkpoint.names_of(saved):
        first = contents.tied.get(name, name)
        if first in first_names:
            return first
    return None
