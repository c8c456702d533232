"""Takes gradients from autograd's hooks and submits optimizer updates, early in backward or in `step()`.

A gradient that completes its unit during backward is submitted to the update worker immediately, if the last cycle
shows that nothing reads the old value any more. Every other gradient is *retained*: added into the gradient blocks of
its chunks, which the policy may evict to NVMe, until `step()`. In both cases `p.grad` is None after backward.

Gradients that wait for the worker were allocated by autograd, outside the pool. A reserve is set aside for them; when
it is used up, the hook waits for the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from zero_infinity._torch import call_after_backward, current_graph_task_id, no_torch_function
from zero_infinity.errors import TornStepError, UsageError
from zero_infinity.optim.accumulated_gradients import AccumulatedGradients
from zero_infinity.optim.chunk_update import FreshGradients, RetainGradients, UnitUpdate, WholeGradients
from zero_infinity.optim.flat_gradient import FlatGradient, download
from zero_infinity.optim.gradient_parts import GradientParts, GradientSettings
from zero_infinity.optim.state_records import Segment
from zero_infinity.optim.step_history import StepHistory
from zero_infinity.optim.update_rule import UpdateRule, hyperparameters_of
from zero_infinity.params.dtensor import local_gradient
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.params.unit_state import Pending
from zero_infinity.run_trace import BACKWARD

_TORN = (
    '\n  fix:   reload a checkpoint or rebuild the model; update="after_backward" in zi.Config runs every '
    "update in step()"
)


class GradientFlow:
    """Takes gradients and submits updates."""

    def __init__(self, parts: GradientParts, settings: GradientSettings) -> None:
        self._host_cache = parts.host_cache
        self._compute_thread = parts.host_cache.compute_thread
        self._update_worker = parts.update_worker
        self._sources = parts.sources
        self._optimizer = parts.optimizer
        self._rule = UpdateRule(parts.optimizer)
        self._records = parts.records
        self._run_trace = parts.run_trace
        self._accelerator = parts.accelerator
        # With an accelerator, the host cores are free for the update worker.
        self._shares_cores = parts.accelerator is None
        self._retained = AccumulatedGradients(parts.host_cache, parts.records)
        self._reserve = settings.reserve
        self._num_backwards = settings.num_backwards
        self._early = settings.early
        self._norms = settings.norms
        self._last = StepHistory()
        self.cycle = StepHistory()
        self._early_units: frozenset[Unit] = frozenset()
        self.same_order = False  # True if the next cycle is expected to repeat the last one
        self._synchronised = True  # False inside no_sync()
        self._graph_task = -1
        self._waiting: dict[Unit, dict[ManagedParameter, FlatGradient]] = {}
        self._outstanding_bytes = 0
        self._lock = threading.Lock()
        self.norms: dict[ManagedParameter, torch.Tensor] = {}
        self.torn: str | None = None
        self._early_settings: list[str] | None = None  # at the first early update of this cycle
        self.seen: set[ManagedParameter] = set()  # had a gradient since it was last set to None

    # ------------------------------------------------------------------ events from the model

    def on_read(self, unit: Unit) -> None:
        """The compute thread reads a unit's values."""
        if unit.state.pending is Pending.UPDATE:
            raise TornStepError(
                f"{unit.name!r} is read after it was updated and before optimizer.step(): the values would be the next "
                "step's" + _TORN
            )
        self.cycle.read(unit)

    def on_gradient(self, parameter: ManagedParameter) -> None:
        """Autograd has accumulated a gradient on the parameter."""
        with no_torch_function():
            gradient = parameter.parameter.grad
            parameter.parameter.grad = None
        if gradient is None:
            return
        self._follow_backward()
        self._compute_thread.pass_by()
        for part in parameter.parts:
            self.take(part, part.rows_of(gradient))

    def on_tile_gradient(self, tile: ManagedParameter, gradient: torch.Tensor) -> None:
        """A tiled operation has computed the gradient of one tile, in backward."""
        self._follow_backward()
        self._compute_thread.pass_by()
        self.take(tile, gradient)

    def take(self, parameter: ManagedParameter, gradient: torch.Tensor) -> None:
        """Retain a gradient of `parameter`, or update with it."""
        unit = parameter.unit
        flat = self._flat(parameter, gradient)
        if self._may_update_early(unit):
            self._make_room(flat.nbytes, unit)
            waiting = self._waiting.setdefault(unit, {})
            earlier = waiting.pop(parameter, None)  # a tile gets one gradient per use of its parameter
            if earlier is not None:
                flat.wait().add_(earlier.wait())
                self._release(earlier.nbytes)
            if parameter in self._retained:
                self._retained.take_into(parameter, flat.wait())
            waiting[parameter] = flat
            self._update_when_complete(unit)
        elif flat.is_here or self._norms:
            self._retain(parameter, flat.wait())
        else:
            self._retain_on_arrival(parameter, flat)

    def _flat(self, parameter: ManagedParameter, gradient: torch.Tensor) -> FlatGradient:
        """Return the gradient flat; starts to download it from an accelerator."""
        flat = self._flat_here(parameter, gradient)
        dtype = self._records[parameter.unit].dtype
        if self._accelerator is None or flat.device != self._accelerator.device:  # zeros, or set by hand
            return FlatGradient(flat, dtype)
        return download(flat, dtype, self._accelerator, parameter.unit.name, self._host_cache.store.trace)

    def _flat_here(self, parameter: ManagedParameter, gradient: torch.Tensor) -> torch.Tensor:
        """Note a gradient and return it flat, in the order of its unit's elements, where it was computed."""
        gradient = local_gradient(parameter.parameter, gradient)
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"parameter {parameter.name!r} got a sparse gradient, which cannot be streamed\n"
                "  fix:   build the embedding with sparse=False"
            )
        if parameter in self.cycle.updated_parameters:
            self.torn = f"{parameter.name!r} got another gradient after its update was submitted"
            raise TornStepError(self.torn + _TORN)
        self.cycle.fired(parameter)
        self.seen.add(parameter)
        return parameter.flattened(gradient.detach())

    def _follow_backward(self) -> None:
        task = current_graph_task_id()
        if task == self._graph_task:
            return
        self._graph_task = task
        if self._synchronised:
            if self.cycle.updated and not self.cycle.backward_complete:
                self.torn = "the last backward did not finish, but some of its updates had run"
                raise TornStepError(self.torn + _TORN)
            self.cycle.begin_backward()
        if self._run_trace is not None:
            self._run_trace.begin(BACKWARD)
        call_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._backward_done()
        if self._run_trace is not None:
            self._run_trace.end(BACKWARD)

    def _backward_done(self) -> None:
        self.cycle.backward_complete = True

    # ------------------------------------------------------------------ updates during backward

    def _may_update_early(self, unit: Unit) -> bool:
        return (
            unit in self._early_units
            and unit.state.pending is Pending.NOTHING
            and self._synchronised
            and self.cycle.num_backwards == self._num_backwards
        )

    def _update_when_complete(self, unit: Unit) -> None:
        """Update the unit if each of its parameters has had as many gradients as in the last cycle."""
        if not self._has_fired(unit):
            return
        waiting = self._waiting.pop(unit)
        if unit.is_saved or self._sources.of(unit).aliased(unit):
            # Autograd (retain_graph, a second graph) or the user (w.detach()) still holds the old value, which must not
            # change while they hold it.
            self.cycle.deferred.add(unit)
            for parameter, flat in waiting.items():
                self._retain(parameter, flat.wait())
                self._release(flat.nbytes)
            return
        retained = [p for p in unit.parameters if p in self._retained]
        self._retained.release(retained)
        self._early_settings = self._early_settings or self._settings()
        self._mark_updated(unit, [*waiting, *retained])
        self._submit(unit, waiting, retained, ())

    def _mark_updated(self, unit: Unit, parameters: Iterable[ManagedParameter]) -> None:
        """Record that an update is submitted before `step()`."""
        unit.state.submit_update()
        self.cycle.updated.add(unit)
        self.cycle.updated_parameters.update(parameters)

    def _has_fired(self, unit: Unit) -> bool:
        """True if each of its parameters has had as many gradients as in the last cycle."""
        return all(self.cycle.firings.get(p, 0) >= self._last.firings.get(p, 0) for p in unit.parameters)

    def _make_room(self, num_bytes: int, unit: Unit) -> None:
        """Wait until a gradient of this size fits in the reserve; may first retain waiting gradients."""
        if self._outstanding_bytes + num_bytes > self._reserve:
            with self._compute_thread.waiting(room_for(unit)):
                self._update_worker.wait_until(lambda: self._outstanding_bytes + num_bytes <= self._reserve)
        if self._outstanding_bytes + num_bytes > self._reserve:
            for waiting in self._waiting.values():
                for parameter, flat in waiting.items():
                    self._retain(parameter, flat.wait())
                    self._release(flat.nbytes)
            self._waiting.clear()
        with self._lock:
            self._outstanding_bytes += num_bytes

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._outstanding_bytes -= num_bytes

    # ------------------------------------------------------------------ retaining

    def _retain(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """Add a gradient into its gradient blocks."""
        if self._norms:
            flat = self._retained.take_into(parameter, flat)
            self.norms[parameter] = torch.linalg.vector_norm(flat.as_strided(parameter.shape, parameter.stride))
        self._retained.add(parameter, flat)

    def _retain_on_arrival(self, parameter: ManagedParameter, flat: FlatGradient) -> None:
        """Let the update worker add a gradient into its gradient blocks once it is in host memory."""
        self._make_room(flat.nbytes, parameter.unit)
        fresh = WholeGradients({parameter: flat})
        self._keep(parameter.unit, fresh, [parameter], None, lambda: self._release(flat.nbytes))

    def _keep(
        self,
        unit: Unit,
        fresh: FreshGradients,
        parameters: Sequence[ManagedParameter],
        squares: dict[Segment, float] | None,
        done: Callable[[], None],
    ) -> None:
        """Let the update worker add fresh gradients of a unit into its gradient blocks."""
        record = self._records[unit]
        for chunk in record.chunks:
            self._host_cache.access(chunk.gradient)
            self._host_cache.store.hold(chunk.gradient)
        job = RetainGradients(record, fresh, frozenset(self._retained), squares, done)
        self._update_worker.submit(job, is_shared=self._shares_cores)
        self._retained.note(parameters)

    def has(self, parameter: ManagedParameter) -> bool:
        """True if a gradient of `parameter` waits for step() or was used by an update of this cycle."""
        waits = parameter in self._waiting.get(parameter.unit, {})
        return waits or parameter in self._retained or parameter in self.cycle.updated_parameters

    def gather(self, parameter: ManagedParameter) -> torch.Tensor | None:
        """Return the whole retained gradient of `parameter`; None if there is none."""
        if parameter not in self._retained:
            return None
        flat = torch.empty(parameter.num_elements, dtype=self._records[parameter.unit].dtype)
        self._retained.read(parameter, flat)
        return flat.as_strided(parameter.shape, parameter.stride)

    def replace(self, parameter: ManagedParameter, gradient: torch.Tensor) -> None:
        """Replace the retained gradient."""
        self._retained.release([parameter])
        flat = parameter.flattened(gradient.detach().to("cpu"))
        self._retain(parameter, flat.to(self._records[parameter.unit].dtype))

    def drain(self) -> None:
        """Wait for work that follows updates, such as all-gathers."""

    def discard(self) -> None:
        """Drop all gradients for which no update was submitted."""
        if self.cycle.updated:
            self.torn = "zero_grad() was called after some updates of this backward had run and before step()"
            raise TornStepError(self.torn + _TORN)
        for waiting in self._waiting.values():
            for flat in waiting.values():
                self._release(flat.nbytes)
        self._waiting.clear()
        self.cycle.discarded = self.cycle.discarded or bool(self._retained)
        self._retained.expire(self._retained.units)
        self._retained.clear()
        self.norms.clear()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside this context only accumulate gradients."""
        before = self._synchronised
        self._synchronised = False
        try:
            yield
        finally:
            self._synchronised = before

    @contextmanager
    def torn_unless_finished(self, reason: str) -> Iterator[None]:
        """Mark the step as torn, with this reason, unless the context ends without an error."""
        self.torn = reason
        yield
        self.torn = None

    def check_between_steps(self) -> None:
        """Raise if a step is torn, or has begun and is not finished."""
        if self.torn is not None:
            raise TornStepError(self.torn + _TORN)
        begun = next((p for p in self._retained.trained if self.has(p)), None)
        if begun is not None:
            raise UsageError(
                f"{begun.name!r} has a gradient that waits for optimizer.step(): a partial step cannot be "
                "saved\n  fix:   zi.save after optimizer.step(), before the next backward"
            )

    def restart(self) -> None:
        """Drop all gradients and the history of steps, including a torn one: all values will be replaced."""
        self._update_worker.drain()
        self.drain()
        self._last, self.cycle = StepHistory(), self._next_history()
        self._early_units, self._early_settings = frozenset(), None
        self.torn = None
        self.discard()
        self.seen.clear()

    # ------------------------------------------------------------------ the step

    def step(self, factors: tuple[torch.Tensor, ...] = ()) -> None:
        """Update with all remaining gradients and begin the next cycle."""
        self._update_worker.check()
        if self.torn is not None:
            raise TornStepError(self.torn + _TORN)
        if self.cycle.updated and not self.cycle.backward_complete:
            self.torn = "backward did not finish, but some of its updates had run"
            raise TornStepError(self.torn + _TORN)
        if self.cycle.updated and self._early_settings != self._settings():
            self.torn = "the optimizer's settings (lr, ...) were changed after some updates of this backward had run"
            raise TornStepError(self.torn + _TORN)
        self.torn = "step() was interrupted, and some of its updates had run"
        self._submit_all(factors)
        self._retained.clear()
        self.norms.clear()
        self._end_cycle()
        self.torn = None

    def before_step(self) -> None:
        """Compute the norms, if they are needed."""

    def _submit_all(self, factors: tuple[torch.Tensor, ...]) -> None:
        for unit in self._in_next_order():
            direct = self._waiting.pop(unit, {})
            for parameter, flat in direct.items():
                self._retain(parameter, flat.wait())
                self._release(flat.nbytes)
            retained = [p for p in unit.parameters if p in self._retained]
            self._submit(unit, {}, retained, factors)

    def _settings(self) -> list[str]:
        """Return the current settings of the parameter groups, for comparison."""
        return [repr(hyperparameters_of(group)) for group in self._optimizer.param_groups]

    def skip(self) -> None:
        """End the cycle without an update."""
        self.discard()
        self._end_cycle()

    def _in_next_order(self) -> list[Unit]:
        """Return the units with gradients, in the order in which the next forward reads them."""
        return self._in_order({*self._waiting, *self._retained.units})

    def _in_order(self, units: Collection[Unit]) -> list[Unit]:
        first = [unit for unit in self.cycle.read_order if unit in units]
        return first + [unit for unit in self._records if unit in units and unit not in self.cycle.read_order]

    def _submit(
        self,
        unit: Unit,
        flats: dict[ManagedParameter, FlatGradient],
        retained: Sequence[ManagedParameter],
        factors: tuple[torch.Tensor, ...],
    ) -> None:
        """Update a unit with fresh and retained gradients."""
        num_bytes = sum(flat.nbytes for flat in flats.values())
        self._update(
            unit, WholeGradients(flats), [*flats, *retained], retained, factors, lambda: self._release(num_bytes)
        )

    def _update(
        self,
        unit: Unit,
        fresh: FreshGradients,
        parameters: Iterable[ManagedParameter],
        retained: Sequence[ManagedParameter],
        factors: tuple[torch.Tensor, ...],
        done: Callable[[], None],
    ) -> None:
        """Fetch the blocks of the update in the order of their use, and submit it to the worker."""
        record = self._records[unit]
        groups = self._optimizer.param_groups
        settings = {p: hyperparameters_of(groups[p.group]) for p in parameters if p.group is not None}
        job = UnitUpdate(record, fresh, retained, settings, self._rule, factors, done)
        store, block = self._host_cache.store, unit.the_block()
        self._sources.of(unit).updated(unit)
        for whole in {p.whole.unit for p in unit.parameters if p.whole is not None}:
            self._sources.of(whole).updated(whole)
        for parameter in settings:
            parameter.state.replace()
        self._host_cache.access(block)
        store.hold(block)
        with self._host_cache.pinned(block):
            for chunk in record.chunks:
                if retained:
                    self._host_cache.access(chunk.gradient)
                    store.hold(chunk.gradient)
                if chunk.record is not None:
                    with self._host_cache.pinned(chunk.gradient):
                        self._host_cache.access(chunk.record)
                    store.hold(chunk.record)
                self._host_cache.expire(chunk.gradient)
        self._update_worker.submit(job, is_shared=self._shares_cores)

    def _end_cycle(self) -> None:
        # Two consecutive cycles must allow it: the second cycle of a loop may differ from its first.
        early = frozenset(
            unit
            for unit in self._records
            if self._early
            and self.cycle.allows_early_update(unit, self._num_backwards)
            and self._last.allows_early_update(unit, self._num_backwards)
        )
        self.same_order = early == self._early_units
        self._host_cache.end_cycle(same_order=self.same_order)
        self._early_units = early
        self._last, self.cycle = self.cycle, self._next_history()
        self._early_settings = None

    def _next_history(self) -> StepHistory:
        for unit in self.cycle.updated:
            unit.state.end_step()
        return StepHistory()


def room_for(unit: Unit) -> str:
    """Return the name of the wait for gradient reserve."""
    return f"{unit.name}: room for its gradient"
