"""Averages gradients over ranks, by ZeRO stage, between autograd and the optimizer update.

What a rank keeps of a gradient until `step()`: at stages 2 and 3, and of what leaves the accelerator on which it is
summed, its own part of the sum; gradients of each backward are reduced as soon as their unit is complete. Else, at
stages 0 and 1, this rank's whole gradient, which is reduced once, when the update is due.

Reductions are submitted as units become complete, and the rest (parts of a unit without a gradient, experts) at the end
of backward or in `step()`, after ranks have told each other what they have. A gradient that a rank does not have counts
as zeros, if any rank has it. A rank that had no gradients of a unit when others summed theirs gets its shard of the sum
at the end of backward, and may still add gradients of its own: sums of one unit add up, and such a partial sum never
updates early. A unit is updated early only if the last steps of all ranks allow it, and never at stages 1 and 2, where
updated units are all-gathered.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from zero_infinity.comm.reduce_scatter import SumKind
from zero_infinity.comm.topics import (
    END_OF_BACKWARD,
    EXISTING_GRADIENTS,
    LEFT_OVER_SUM,
    NORMS,
    SHOWN_GRADIENTS,
    STEP,
    UPDATED,
    Topic,
)
from zero_infinity.errors import UsageError
from zero_infinity.interrupts import through
from zero_infinity.optim.chunk_update import FreshGradients, UnitUpdate, part_of
from zero_infinity.optim.device_updates import whole_on_device
from zero_infinity.optim.gradient_collectives import GradientCollectives
from zero_infinity.optim.gradient_flow import GradientFlow, room_for
from zero_infinity.optim.gradient_parts import GradientParts, GradientSettings
from zero_infinity.optim.parameter_sets import ParameterSets
from zero_infinity.optim.reduced_gradients import HeldGradients, ReducedGradients, local_gradients
from zero_infinity.optim.state_records import Segment
from zero_infinity.optim.step_cycle import check_same_backwards
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.policy.partition import Span

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A sum that was submitted in this backward."""

    unit: Unit
    parameters: Sequence[ManagedParameter]
    kind: SumKind
    update: UnitUpdate | None  # submitted with it


class ShardedGradients(GradientFlow):
    """Takes gradients, averages them over ranks and submits updates."""

    def __init__(self, parts: GradientParts, settings: GradientSettings, collectives: GradientCollectives) -> None:
        # Updated shards are all-gathered in one order, so in that case every update is submitted in `step()`.
        early = settings.early and collectives.all_gather is None
        super().__init__(parts, replace(settings, early=early, norms=False, may_lag=False))
        is_kept = collectives.device.type == "cpu" or all(self._on_device.is_home_of(unit) for unit in parts.records)
        self._keeps_whole = is_kept and not collectives.sharding.shards_gradients
        self._channel = collectives.channel
        self._reduce_scatter = collectives.reduce_scatter
        self._all_gather = collectives.all_gather
        self._routing = collectives.routing
        self._gathered = collectives.gathered
        self._sum_device = collectives.device
        self._sends_scaled = self.loss_scale is not None and collectives.sends_float16
        self._updated = collectives.updated
        self._parameters = [p for record in parts.records.values() for p in record.state_names]
        self._collected: dict[Unit, dict[ManagedParameter, torch.Tensor]] = {}
        self._unsummed: set[ManagedParameter] = set()  # retained gradients that are not reduced yet
        self._is_unknown = False  # which gradients other ranks have: they are not reduced at the end of backward
        self._held: dict[Unit, HeldGradients] = {}  # reduced gradients that wait for step()
        self._submitted: list[_Submitted] = []  # since ranks last waited for each other
        self._by_number = {unit.number: unit for unit in parts.records}
        self._squares: dict[Segment, float] | None = {} if settings.norms else None
        # Units that not every rank uses, detected at the first gradient: they are reduced after backward.
        self._late: set[Unit] = set()
        self._submitted_bytes = 0  # of gradients that are being reduced
        self._released = threading.Condition(self._lock)

    # ------------------------------------------------------------------ taking in

    def take(self, parameter: ManagedParameter, gradient: torch.Tensor) -> None:
        self._classify()
        unit = parameter.unit
        if self._keeps_whole and not self._may_update_early(unit):
            here = self._flat_here(parameter, gradient)
            is_kept = parameter in self._retained or parameter in self._on_device
            if is_kept and parameter not in self._unsummed:
                raise UsageError(
                    f"{parameter.name!r} got another gradient after its gradients were summed over ranks\n"
                    "  fix:   read or clip gradients after the last backward of a step, and call zero_grad() after "
                    "step(); stages 2 and 3 can add to summed gradients"
                )
            if self._on_device.is_home_of(unit):
                self._on_device.add(parameter, self._unscaled(parameter, here))
            else:
                self._retain(parameter, self._on_host(parameter, here).wait())
            self._unsummed.add(parameter)
            return
        flat = self._flat_to_sum(parameter, gradient)
        self._make_room(flat.nbytes, unit)
        collected = self._collected.setdefault(unit, {})
        if parameter in collected:
            collected[parameter].add_(flat)
            self._release(flat.nbytes)
        else:
            collected[parameter] = flat
        if self._is_complete(unit):
            self._sum([(unit, list(collected))], Topic("gradient sum", unit.number, unit.name))

    def _classify(self) -> None:
        for container in self._routing.classify():
            self._late.update(container.units)
            if self._gathered is not None:
                self._gathered.join(container.name, container.units)

    def _flat_to_sum(self, parameter: ManagedParameter, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient flat, in the record's dtype, on the device where ranks sum it."""
        flat = self._flat_here(parameter, gradient)
        if self._sum_device.type == "cpu":
            return self._on_host(parameter, flat).wait()
        return self._unscaled(parameter, flat).to(self._sum_device)

    def _is_complete(self, unit: Unit) -> bool:
        """True if all gradients expected in this backward are available."""
        if unit in self._late:
            return False
        if self._keeps_whole and not self.cycle.has_fired(unit):
            return False
        return len(self._collected[unit]) == len(self._trained(unit))

    def _trained(self, unit: Unit) -> list[ManagedParameter]:
        return [p for p in self._records[unit].state_names if p.parameter.requires_grad]

    def _may_update_early(self, unit: Unit) -> bool:
        return unit not in self._late and super()._may_update_early(unit)

    def _backward_done(self) -> None:
        super()._backward_done()
        self._is_unknown = self._keeps_whole
        if not self._keeps_whole:
            self._sum_what_is_left(END_OF_BACKWARD)

    def _sum_what_is_left(self, moment: Topic) -> None:
        """Reduce every gradient that any rank has not submitted yet. Every rank has to be at the same moment."""
        self._classify()
        bits = ParameterSets(self._parameters)

        def say() -> list[int]:
            # Every rank waits here now: whatever was submitted is summed.
            collected = {p for collected in self._collected.values() for p in collected}
            in_part = {p for sum_ in self._submitted if sum_.kind.is_partial for p in sum_.parameters}
            sets = (collected | self._unsummed, in_part, self._not_early())
            return [*(word for members in sets for word in bits.pack(members)), self.cycle.now.num_backwards]

        said = self._channel.agree(moment, say)
        check_same_backwards([words.pop() for words in said])
        left, in_part, not_early = (bits.unpack(said, number) for number in range(3))
        self.has_rest |= moment is END_OF_BACKWARD and bool(left)
        self._take_partial_sums(in_part)
        if moment is STEP:
            # An update that is early on one rank only would change what others still read.
            for unit in {parameter.unit for parameter in not_early}:
                self.cycle.deferred(unit)
        wanted: dict[Unit, list[ManagedParameter]] = {}
        for parameter in left:
            wanted.setdefault(parameter.unit, []).append(parameter)
        if wanted and self._keeps_whole:
            # One at a time: all of them together may exceed the reserve.
            for unit in self._in_order(wanted):
                self._sum([(unit, wanted[unit])], Topic("gradient sum", unit.number, unit.name))
        elif wanted:
            self._sum(list(wanted.items()), LEFT_OVER_SUM)
        self._submitted.clear()

    def _not_early(self) -> set[ManagedParameter]:
        """Return the parameters that, as this cycle goes here, cannot be updated before `step()`."""
        return {
            parameter
            for unit in self._records
            if not self.cycle.allows_early_update(unit)
            or any(parameter not in self.cycle.now.firings for parameter in self._trained(unit))
            for parameter in self._records[unit].state_names
        }

    def _take_partial_sums(self, summed: Collection[ManagedParameter]) -> None:
        """Keep the sums in which not every rank had gradients; `summed` are their parameters."""
        for number, shard in self._reduce_scatter.take_absent():
            unit = self._by_number[number]
            parameters = [p for p in self._records[unit].state_names if p in summed]
            reduced = ReducedGradients(parameters, shard, self._sent_scale())
            if self._on_device.is_home_of(unit):
                self._hold_on_device(unit, reduced)
            else:
                self._hold(unit, parameters, reduced)
        for sum_ in [sum_ for sum_ in self._submitted if sum_.update is not None and sum_.kind.is_partial]:
            # It was to update while backward ran. That is not done: other ranks may have had more gradients.
            self._update_worker.drain()
            if sum_.update is not None:
                self.cycle.postponed(sum_.unit, sum_.update.hyperparameters)
                self._hold(sum_.unit, list(sum_.update.hyperparameters), sum_.update.postponed)

    def _hold(self, unit: Unit, parameters: Sequence[ManagedParameter], gradients: FreshGradients) -> None:
        """Keep reduced gradients until `step()`."""
        self.lifetimes.fresh.update(parameters)  # on each rank, also where it is zero
        if self._keeps_whole and self._squares is None:
            self._held.setdefault(unit, HeldGradients()).add(parameters, gradients)
        else:
            self._keep(unit, gradients, parameters, self._squares, _nothing)

    def _hold_on_device(self, unit: Unit, reduced: ReducedGradients) -> None:
        self.lifetimes.fresh.update(reduced.parameters)  # on each rank, also where it is zero
        self._on_device.add_reduced(unit, reduced)

    def _make_room(self, num_bytes: int, unit: Unit) -> None:
        """Wait until a gradient of this size fits in the reserve, or nothing in flight will make room."""
        with self._lock:
            if self._is_short_of(num_bytes):
                with self._compute_thread.waiting(room_for(unit)):
                    while self._is_short_of(num_bytes):
                        with through():
                            self._released.wait(_POLL_SECONDS)
            self._outstanding_bytes += num_bytes

    def _is_short_of(self, num_bytes: int) -> bool:
        return self._outstanding_bytes + num_bytes > self._reserve and self._submitted_bytes > 0

    def _summed(self, num_bytes: int) -> None:
        self._release(num_bytes)
        with self._lock:
            self._submitted_bytes -= num_bytes
            self._released.notify_all()

    # ------------------------------------------------------------------ summing

    def _sum(self, units: list[tuple[Unit, list[ManagedParameter]]], topic: Topic) -> None:
        asked = []
        num_bytes = 0
        scale = self._sent_scale()
        for unit, parameters in units:
            flats = self._collected.pop(unit, {})
            for parameter in [p for p in parameters if p in self._unsummed]:
                retained = self._take_back(parameter)
                if parameter in flats:
                    flats[parameter].add_(retained)
                else:
                    flats[parameter] = retained
            num_bytes += sum(flat.nbytes for flat in flats.values())
            if scale != 1:
                flats = {parameter: flat * scale for parameter, flat in flats.items()}
            pieces = {parameter.offset: flat for parameter, flat in flats.items()}
            stays = self._on_device.is_home_of(unit)
            asked.append(local_gradients(unit, pieces, stays=stays))
            if self._keeps_whole:
                self._retained.expire([unit])
        with self._lock:
            self._submitted_bytes += num_bytes
        results = self._reduce_scatter.submit(topic, asked, lambda: self._summed(num_bytes))
        for (unit, parameters), shard in zip(units, results, strict=True):
            update = self._arrived(unit, ReducedGradients(parameters, shard, scale))
            self._submitted.append(_Submitted(unit, parameters, shard.kind, update))

    def _sent_scale(self) -> float:
        """What gradients are multiplied by where they are sent."""
        return self.loss_scale.scale if self.loss_scale is not None and self._sends_scaled else 1.0

    def _take_back(self, parameter: ManagedParameter) -> torch.Tensor:
        """Return a whole retained gradient of this rank, which is dropped."""
        if parameter in self._on_device:
            self._unsummed.discard(parameter)
            flat = self._on_device.take(parameter)
            self._make_room(flat.nbytes, parameter.unit)
            return flat
        flat = torch.zeros(parameter.num_elements, dtype=self._records[parameter.unit].dtype)
        self._make_room(flat.nbytes, parameter.unit)
        self._retained.read(parameter, flat)
        self._retained.release([parameter])
        self._unsummed.discard(parameter)
        return flat

    def _arrived(self, unit: Unit, reduced: ReducedGradients) -> UnitUpdate | None:
        """A reduction was submitted: update with its result, or keep it."""
        if self._on_device.is_home_of(unit):
            self._hold_on_device(unit, reduced)
            return None
        early = self._may_update_early(unit) and self.cycle.has_fired(unit) and unit not in self._held
        if early and not unit.is_saved and not self._sources.of(unit).aliased(unit):
            retained = [p for p in self._records[unit].state_names if p in self._retained]
            self._retained.release(retained)
            parameters = list(dict.fromkeys([*reduced.parameters, *retained]))
            self.cycle.updated(unit, parameters)
            update = self._submission.update(unit, reduced, parameters, retained, (), _nothing, keeps_gradients=False)
            self._sources.of(unit).look_ahead()
            return update
        if early:
            self.cycle.deferred(unit)
        self._hold(unit, reduced.parameters, reduced)
        return None

    # ------------------------------------------------------------------ the step

    def before_step(self) -> None:
        """Reduce the remaining gradients; compute the norms, if they are needed."""
        self._sum_what_is_left(STEP)
        if self._squares is not None:
            self._update_worker.drain()
            self._take_squares(p for p in self._retained if p not in self.lifetimes.fresh)
            self.norms = self._norms_over_ranks({**self._squares, **self._on_device.squares()})

    def _take_squares(self, parameters: Iterable[ManagedParameter]) -> None:
        """Sum the squares of retained gradients that came by another way than the update worker's."""
        if self._squares is not None:
            self._squares.update(self._retained.squares(parameters))

    def _norms_over_ranks(self, squares: dict[Segment, float]) -> dict[ManagedParameter, torch.Tensor]:
        totals = torch.zeros(self._channel.num_ranks, len(self._parameters), dtype=torch.float64)
        mine = totals[self._channel.rank]
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        for segment, square in squares.items():
            # Values that every rank has count once.
            if segment.parameter.unit.is_updated_in_parts or self._channel.rank == 0:
                mine[numbers[segment.parameter]] += square
        self._channel.agree(NORMS)
        self._channel.gather(NORMS, [(totals.view(-1), _rows(totals))])
        norms = totals.sum(0).sqrt().float()
        return {p: norms[numbers[p]] for p in self._parameters if p in self._retained or p in self._on_device}

    def _submit_all(self, factors: tuple[torch.Tensor, ...]) -> None:
        if self._keeps:
            self._keep_held()
        self._on_device.settle()
        if (updated := self._device_updates.run(self._on_device, factors)) and self._updated is not None:
            self._updated.agree(UPDATED)
            self._updated.gather(UPDATED, [(whole_on_device(unit), unit.spans) for unit in updated])
        held, self._held = self._held, {}
        for unit in self._in_order({*held, *self._retained.units}):
            retained = [p for p in self._records[unit].state_names if p in self._retained]
            if unit in held:
                self._submission.update(
                    unit, held[unit], list(held[unit].parameters), [], factors, _nothing, keeps_gradients=False
                )
            else:
                self.lagging.update(unit, retained, factors, keeps_gradients=self._keeps)
            if self._all_gather is not None:
                topic = Topic("parameter gather", unit.number, unit.name)
                self._all_gather.submit(topic, unit.the_block(), unit.dtype, unit.spans)
            self._sources.of(unit).look_ahead()  # after every use of the block that changes it
        if self._squares is not None:
            self._squares.clear()

    def drain(self) -> None:
        if self._all_gather is not None:
            self._all_gather.drain()

    def discard(self, *, to_none: bool = True) -> None:
        super().discard(to_none=to_none)
        for collected in self._collected.values():
            for flat in collected.values():
                self._release(flat.nbytes)
        self._collected.clear()
        self._unsummed.clear()
        self._held.clear()
        self._submitted.clear()
        if self._squares is not None:
            self._squares.clear()

    # ------------------------------------------------------------------ looking

    def drop(self, parameter: ManagedParameter, *, to_none: bool) -> None:
        self._keep_held()
        super().drop(parameter, to_none=to_none)
        self._unsummed.discard(parameter)
        flat = self._collected.get(parameter.unit, {}).pop(parameter, None)
        if flat is not None:
            self._release(flat.nbytes)

    def _gathered_flat(self, parameter: ManagedParameter) -> torch.Tensor:
        """Return the whole average over ranks. Collective: every rank must call it."""
        self._sum_what_is_left(SHOWN_GRADIENTS)
        self._keep_held()
        self._update_worker.drain()
        flat = torch.zeros(parameter.num_elements, dtype=self._records[parameter.unit].dtype)
        if parameter in self._on_device:
            self._on_device.copy_into(parameter, flat)
        elif parameter in self._retained:
            self._retained.read(parameter, flat)
        else:
            return flat
        if parameter.unit.is_updated_in_parts:
            topic = Topic("gradient gather", SHOWN_GRADIENTS.number, parameter.name)
            self._channel.agree(topic)
            self._channel.gather(topic, [(flat, parameter.spans)])
        return flat

    def exists(self, parameter: ManagedParameter) -> bool:
        """True on each rank if any has a gradient. Collective after a backward, at the first question."""
        if self._is_unknown:
            bits = ParameterSets(self._parameters)
            said = self._channel.agree(EXISTING_GRADIENTS, bits.pack(self.lifetimes.fresh))
            self.lifetimes.fresh.update(bits.unpack(said, 0))
            self._is_unknown = False
        return super().exists(parameter)

    def can_show(self, parameter: ManagedParameter) -> bool:
        """True on each rank if any has a gradient. Collective: every rank must call it."""
        self._sum_what_is_left(SHOWN_GRADIENTS)
        return super().can_show(parameter)

    def _keep_held(self) -> None:
        """Retain reduced gradients that are held for step()."""
        for unit, held in self._held.items():
            self._keep(unit, held, list(held.parameters), self._squares, _nothing)
        self._held.clear()

    def replace(self, parameter: ManagedParameter, gradient: torch.Tensor) -> None:
        self.lifetimes.changed(parameter)
        flat = parameter.flattened(gradient.detach()).to(self._records[parameter.unit].dtype)
        if self._on_device.is_home_of(parameter.unit):
            self._on_device.replace(parameter, flat)
            return
        for chunk in self._records[parameter.unit].chunks:
            for segment in chunk.segments:
                if segment.parameter is parameter:
                    with self._host_cache.writing(chunk.gradient) as memory:
                        part_of(memory, segment, flat.dtype).copy_(flat[segment.start : segment.stop])
        self._retained.note([parameter])
        self._take_squares([parameter])

    def _in_order(self, units: Collection[Unit]) -> list[Unit]:
        """In model order: which units were read, and when, may differ between ranks."""
        return [unit for unit in self._records if unit in units]


def _rows(matrix: torch.Tensor) -> Sequence[Span]:
    return [Span(row * matrix.shape[1], (row + 1) * matrix.shape[1]) for row in range(len(matrix))]


def _nothing() -> None:
    return None
