"""Averages gradients over ranks, by ZeRO stage, between autograd and the optimizer update.

The stage decides what a rank keeps of a gradient until `step()`. Stages 2 and 3: its own shard of the sum; the
gradients of each backward are reduced as soon as their unit is complete. Stages 0 and 1: this rank's whole gradient,
which is reduced once, when the update is due.

Reductions are submitted in an order that is the same on every rank: as units become complete, and the rest (parts of a
unit without a gradient, units that not every rank uses) at the end of backward or in `step()`, after ranks have told
each other what they have. Whether a unit is updated early or in `step()` is local to each rank: no other rank waits for
it. (In stages 1 and 2 updated parameters are all-gathered: there every update waits for `step()`.)
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from zero_infinity.comm.channel import Channel, Topic
from zero_infinity.comm.gather_updates import UpdateAllGather
from zero_infinity.comm.reduce_scatter import LocalGradients, ReducedShard, ReduceScatter
from zero_infinity.errors import DivergenceError, UsageError
from zero_infinity.interrupts import through
from zero_infinity.optim.chunk_update import part_of
from zero_infinity.optim.gradient_flow import GradientFlow, room_for
from zero_infinity.optim.gradient_parts import GradientParts, GradientSettings
from zero_infinity.optim.state_records import Segment
from zero_infinity.params.moe_routing import ExpertRouting
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.policy.partition import Sharding, Span
from zero_infinity.tiers.device_cache import DeviceCache

# Topic numbers that belong to no unit.
_LEFT_OVER, _NORMS, _GRADIENT, _LEFT_OVER_SUM = -1, -2, -3, -4
_POLL_SECONDS = 0.1
_BITS = 62  # per number in an agreement


class ReducedGradients:
    """The average over ranks of the gradients of one unit's parameters: the shard that this rank updates."""

    __slots__ = ("_shard", "parameters")

    def __init__(self, parameters: Sequence[ManagedParameter], shard: ReducedShard) -> None:
        self.parameters = parameters  # those with a gradient on any rank
        self._shard = shard

    @property
    def is_ready(self) -> bool:
        return self._shard.is_ready

    def part(self, segment: Segment) -> torch.Tensor | None:
        """Return the elements of `segment`; None if no rank has a gradient of its parameter. Waits."""
        if segment.parameter not in self.parameters:
            return None
        first = segment.parameter.offset - self._shard.span.start
        return self._shard.wait()[first + segment.start : first + segment.stop]


@dataclass(frozen=True, slots=True)
class GradientCollectives:
    """The collectives for gradients and updated parameters."""

    sharding: Sharding
    channel: Channel  # of the compute thread
    reduce_scatter: ReduceScatter
    all_gather: UpdateAllGather | None  # of updated shards, where every rank stores whole units
    routing: ExpertRouting
    gathered: DeviceCache | None  # unsharded copies of sharded parameters
    device: torch.device  # where gradients are summed


class ShardedGradients(GradientFlow):
    """Takes gradients, averages them over ranks and submits updates."""

    def __init__(self, parts: GradientParts, settings: GradientSettings, collectives: GradientCollectives) -> None:
        # Updated shards are all-gathered in one order, so in that case every update waits for `step()`.
        early = settings.early and collectives.all_gather is None
        super().__init__(parts, replace(settings, early=early, norms=False))
        self._keeps_whole = not collectives.sharding.shards_gradients
        self._channel = collectives.channel
        self._reduce_scatter = collectives.reduce_scatter
        self._all_gather = collectives.all_gather
        self._routing = collectives.routing
        self._gathered = collectives.gathered
        self._sum_device = collectives.device
        self._parameters = [p for record in parts.records.values() for p in record.state_names]
        self._collected: dict[Unit, dict[ManagedParameter, torch.Tensor]] = {}
        self._unsummed: set[ManagedParameter] = set()  # retained gradients that are not reduced yet
        self._held: dict[Unit, ReducedGradients] = {}  # reduced gradients that wait for step()
        self._squares: dict[Segment, float] | None = {} if settings.norms else None
        # Units that not every rank uses, detected at the first gradient: they are reduced after backward.
        self._late: set[Unit] = set()
        self._submitted_bytes = 0  # of gradients that are being reduced
        self._released = threading.Condition(self._lock)

    # ------------------------------------------------------------------ taking in

    def take(self, parameter: ManagedParameter, gradient: torch.Tensor) -> None:
        for container in self._routing.classify():
            self._late.update(container.units)
            if self._gathered is not None:
                self._gathered.join(container.name, container.units)
        unit = parameter.unit
        if self._keeps_whole and not self._may_update_early(unit):
            flat = self._flat(parameter, gradient).wait()
            if parameter in self._retained and parameter not in self._unsummed:
                raise UsageError(
                    f"{parameter.name!r} got another gradient after its gradients were summed over ranks\n"
                    "  fix:   read or clip gradients after the last backward of a step"
                )
            self._retain(parameter, flat)
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

    def _flat_to_sum(self, parameter: ManagedParameter, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient flat, in the record's dtype, on the device where ranks sum it."""
        if self._sum_device.type == "cpu":
            return self._flat(parameter, gradient).wait()
        flat = self._flat_here(parameter, gradient)
        return flat.to(self._sum_device, self._records[parameter.unit].dtype)

    def _is_complete(self, unit: Unit) -> bool:
        """True if all gradients expected in this backward are available."""
        if unit in self._late:
            return False
        if self._keeps_whole:
            return self._has_fired(unit)
        trained = [p for p in self._records[unit].state_names if p.parameter.requires_grad]
        return len(self._collected[unit]) == len(trained)

    def _may_update_early(self, unit: Unit) -> bool:
        return unit not in self._late and super()._may_update_early(unit)

    def _backward_done(self) -> None:
        super()._backward_done()
        if not self._keeps_whole:
            self._sum_what_is_left()

    def _sum_what_is_left(self) -> None:
        """Reduce every gradient that any rank has not submitted yet."""
        mine = {p for collected in self._collected.values() for p in collected} | self._unsummed
        words = [0] * -(-len(self._parameters) // _BITS)
        for number, parameter in enumerate(self._parameters):
            words[number // _BITS] |= (parameter in mine) << (number % _BITS)
        said = self._channel.agree(Topic("gradients", _LEFT_OVER, "the end of backward or optimizer.step()"), words)
        wanted: dict[Unit, list[ManagedParameter]] = {}
        for number, parameter in enumerate(self._parameters):
            has = [bool(words[number // _BITS] >> (number % _BITS) & 1) for words in said]
            if any(has):
                wanted.setdefault(parameter.unit, []).append(parameter)
                if not all(has) and parameter.unit not in self._late:
                    raise _divergence(parameter, has)
        if wanted and self._keeps_whole:
            # One at a time: all of them together may exceed the reserve.
            for unit in self._in_order(wanted):
                self._sum([(unit, wanted[unit])], Topic("gradient sum", unit.number, unit.name))
        elif wanted:
            self._sum(list(wanted.items()), Topic("gradient sum", _LEFT_OVER_SUM, "small and unused units"))

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
        for unit, parameters in units:
            flats = self._collected.pop(unit, {})
            for parameter in [p for p in parameters if p in self._unsummed]:
                retained = self._take_back(parameter)
                if parameter in flats:
                    flats[parameter].add_(retained)
                else:
                    flats[parameter] = retained
            num_bytes += sum(flat.nbytes for flat in flats.values())
            pieces = {parameter.offset: flat for parameter, flat in flats.items()}
            asked.append(LocalGradients(unit.shards, _sum_dtype(unit), pieces))
            if self._keeps_whole:
                self._retained.expire([unit])
        with self._lock:
            self._submitted_bytes += num_bytes
        results = self._reduce_scatter.submit(topic, asked, lambda: self._summed(num_bytes))
        for (unit, parameters), shard in zip(units, results, strict=True):
            self._arrived(unit, ReducedGradients(parameters, shard))

    def _take_back(self, parameter: ManagedParameter) -> torch.Tensor:
        """Return a whole retained gradient of this rank, which is dropped."""
        flat = torch.zeros(parameter.num_elements, dtype=self._records[parameter.unit].dtype)
        self._make_room(flat.nbytes, parameter.unit)
        self._retained.read(parameter, flat)
        self._retained.release([parameter])
        self._unsummed.discard(parameter)
        return flat.to(self._sum_device)

    def _arrived(self, unit: Unit, reduced: ReducedGradients) -> None:
        """A reduction was submitted: update with its result, or keep it."""
        early = self._may_update_early(unit) and self._has_fired(unit)
        if early and not unit.is_saved and not self._sources.of(unit).aliased(unit):
            retained = [p for p in self._records[unit].state_names if p in self._retained]
            self._retained.release(retained)
            self._early_settings = self._early_settings or self._settings()
            self._mark_updated(unit, [*reduced.parameters, *retained])
            self._update(unit, reduced, [*dict.fromkeys([*reduced.parameters, *retained])], retained, (), _nothing)
            return
        if early:
            self.cycle.deferred.add(unit)
        if self._keeps_whole and self._squares is None:
            self._held[unit] = reduced
        else:
            self._keep(unit, reduced, reduced.parameters, self._squares, _nothing)

    # ------------------------------------------------------------------ the step

    def before_step(self) -> None:
        """Reduce the remaining gradients; compute the norms, if they are needed."""
        self._sum_what_is_left()
        if self._squares is not None:
            self._update_worker.drain()
            self.norms = self._norms_over_ranks(self._squares)

    def _norms_over_ranks(self, squares: dict[Segment, float]) -> dict[ManagedParameter, torch.Tensor]:
        totals = torch.zeros(self._channel.num_ranks, len(self._parameters), dtype=torch.float64)
        mine = totals[self._channel.rank]
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        for segment, square in squares.items():
            # Values that every rank has count once.
            if segment.parameter.unit.is_updated_in_parts or self._channel.rank == 0:
                mine[numbers[segment.parameter]] += square
        topic = Topic("norms", _NORMS, "the norms of gradients")
        self._channel.agree(topic)
        self._channel.gather(topic, [(totals.view(-1), _rows(totals))])
        norms = totals.sum(0).sqrt().float()
        return {p: norms[numbers[p]] for p in self._parameters if p in self._retained}

    def _submit_all(self, factors: tuple[torch.Tensor, ...]) -> None:
        held, self._held = self._held, {}
        for unit in self._in_order({*held, *self._retained.units}):
            retained = [p for p in self._records[unit].state_names if p in self._retained]
            if unit in held:
                self._update(unit, held[unit], held[unit].parameters, [], factors, _nothing)
            else:
                self._submit(unit, {}, retained, factors)
            if self._all_gather is not None:
                topic = Topic("parameter gather", unit.number, unit.name)
                self._all_gather.submit(topic, unit.the_block(), unit.dtype, unit.spans)
        if self._squares is not None:
            self._squares.clear()

    def drain(self) -> None:
        if self._all_gather is not None:
            self._all_gather.drain()

    def discard(self) -> None:
        super().discard()
        for collected in self._collected.values():
            for flat in collected.values():
                self._release(flat.nbytes)
        self._collected.clear()
        self._unsummed.clear()
        self._held.clear()
        if self._squares is not None:
            self._squares.clear()

    # ------------------------------------------------------------------ looking

    def has(self, parameter: ManagedParameter) -> bool:
        held = self._held.get(parameter.unit)
        return (
            super().has(parameter)
            or parameter in self._collected.get(parameter.unit, {})
            or (held is not None and parameter in held.parameters)
        )

    def gather(self, parameter: ManagedParameter) -> torch.Tensor | None:
        """Return the whole average over ranks. Collective: every rank must call it."""
        self._sum_what_is_left()
        for unit, reduced in self._held.items():
            self._keep(unit, reduced, reduced.parameters, self._squares, _nothing)
        self._held.clear()
        self._update_worker.drain()
        if parameter not in self._retained:
            return None
        flat = torch.zeros(parameter.num_elements, dtype=self._records[parameter.unit].dtype)
        self._retained.read(parameter, flat)
        if parameter.unit.is_updated_in_parts:
            topic = Topic("gradient gather", _GRADIENT, parameter.name)
            self._channel.agree(topic)
            self._channel.gather(topic, [(flat, parameter.spans)])
        return flat.as_strided(parameter.shape, parameter.stride)

    def replace(self, parameter: ManagedParameter, gradient: torch.Tensor) -> None:
        flat = parameter.flattened(gradient.detach()).to(self._records[parameter.unit].dtype)
        for chunk in self._records[parameter.unit].chunks:
            for segment in chunk.segments:
                if segment.parameter is parameter:
                    with self._host_cache.writing(chunk.gradient) as memory:
                        part_of(memory, segment, flat.dtype).copy_(flat[segment.start : segment.stop])
        self._retained.note([parameter])

    def _in_order(self, units: Collection[Unit]) -> list[Unit]:
        """In model order: which units were read, and when, may differ between ranks."""
        return [unit for unit in self._records if unit in units]


def _divergence(parameter: ManagedParameter, has: list[bool]) -> DivergenceError:
    with_it, without = ([rank for rank, one in enumerate(has) if one is wanted] for wanted in (True, False))
    return DivergenceError(
        f"ranks diverged: {parameter.name!r} has a gradient on {_listed(with_it)} and none on {_listed(without)}\n"
        "  fix:   every rank must use the same layers; layers that a rank may choose from belong in one nn.ModuleList"
    )


def _listed(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _sum_dtype(unit: Unit) -> torch.dtype:
    return torch.float64 if unit.dtype is torch.float64 else torch.float32


def _rows(matrix: torch.Tensor) -> Sequence[Span]:
    width = matrix.shape[1]
    return [Span(row * width, (row + 1) * width) for row in range(len(matrix))]


def _nothing() -> None:
    return None
