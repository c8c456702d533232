"""`train()` and `eval()` of optimizers that exchange all weights with averaged ones (schedule-free), streamed.

Each is one pass over the records, as a step is, with the optimizer's own method in the place of its `step`: the worker
runs it chunk by chunk, and over ranks updated weights go where the stage wants them.
"""

from __future__ import annotations

import torch

from zero_infinity.comm.gather_updates import UpdateAllGather
from zero_infinity.comm.topics import Topic
from zero_infinity.errors import UsageError
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.gradient_parts import GradientParts
from zero_infinity.optim.group_settings import advanced
from zero_infinity.optim.resident_params import ResidentParameters
from zero_infinity.optim.state_records import Segment, StateRecord
from zero_infinity.optim.update_rule import UpdateRule
from zero_infinity.optim.update_submission import UpdateSubmission


class _NoGradients:
    """Zeros for the parameters that have a state: the others have nothing to exchange."""

    is_ready = True
    is_partial = False

    def __init__(self, record: StateRecord) -> None:
        self._record = record

    def part(self, segment: Segment) -> torch.Tensor | None:
        if segment.parameter not in self._record.started:
            return None
        return torch.zeros(segment.stop - segment.start, dtype=self._record.dtype)


class _Exchanging(UpdateSubmission):
    """Submits updates that call another method of the optimizer."""

    def __init__(self, parts: GradientParts, rule: UpdateRule) -> None:
        is_shared = parts.accelerator is None
        super().__init__(
            parts.host_cache, parts.update_worker, parts.sources, parts.optimizer, parts.records, is_shared=is_shared
        )
        self._rule = rule


class WeightExchange:
    """Calls these methods of one model's optimizer."""

    def __init__(
        self,
        parts: GradientParts,
        gradients: GradientFlow,
        resident: ResidentParameters,
        all_gather: UpdateAllGather | None,
    ) -> None:
        self._parts = parts
        self._gradients = gradients
        self._resident = resident
        self._all_gather = all_gather

    def run(self, method: str) -> None:
        """Call the method on every parameter, between two steps. Over ranks, every rank has to."""
        parts, groups = self._parts, self._parts.optimizer.param_groups
        self._check(method)
        rule = UpdateRule(parts.optimizer, method)
        changes = [advanced(rule, group) for group in groups]
        if not any(changes):
            return  # its weights are those already
        self._gradients.lagging.submit_all()
        submission = _Exchanging(parts, rule)
        for unit, record in parts.records.items():
            started = [p for p in record.state_names if p in record.started]
            if not started:
                continue
            # Gradients that are never zeroed stay in their blocks.
            submission.update(unit, _NoGradients(record), started, [], (), lambda: None, keeps_gradients=True)
            if self._all_gather is not None:
                topic = Topic("parameter gather", unit.number, unit.name)
                self._all_gather.submit(topic, unit.the_block(), unit.dtype, unit.spans)
        self._resident.call(method)
        for group, changed in zip(groups, changes, strict=True):
            group.update(changed)

    def _check(self, method: str) -> None:
        self._gradients.cycle.check()
        begun = next(iter(self._gradients.lifetimes.fresh), None)
        if begun is not None:
            raise UsageError(
                f"optimizer.{method}() exchanges weights, and {begun.name!r} has a gradient that waits for step()\n"
                f"  fix:   optimizer.{method}() after step(), before the next backward"
            )
