"""Takes gradients from autograd's hooks and submits optimizer updates, early in backward or in `step()`.

A gradient that completes its unit during backward is submitted to the update worker immediately, if the last cycle
shows that nothing reads the old value any more. Every other gradient is *retained*: added into the gradient blocks of
its chunks, which the policy may evict to NVMe, until `step()`, or until its unit is used next (`lagging_updates.py`).
In both cases `p.grad` is None after backward. Gradients of units that live in device memory stay there
(`device_gradients.py`).

Gradients that wait for the worker were allocated by autograd, outside the pool. A reserve is set aside for them; when
it is used up, the hook waits for the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from zero_infinity._torch import call_after_backward, current_graph_task_id, no_torch_function
from zero_infinity.errors import UsageError
from zero_infinity.optim.accumulated_gradients import AccumulatedGradients
from zero_infinity.optim.chunk_update import FreshGradients, WholeGradients
from zero_infinity.optim.device_gradients import DeviceGradients
from zero_infinity.optim.device_updates import DeviceUpdates
from zero_infinity.optim.flat_gradient import FlatGradient, download
from zero_infinity.optim.gradient_lifetimes import GradientLifetimes
from zero_infinity.optim.gradient_parts import GradientParts, GradientSettings
from zero_infinity.optim.lagging_updates import LaggingUpdates
from zero_infinity.optim.sparse_gradients import DenseGradients
from zero_infinity.optim.state_records import Segment
from zero_infinity.optim.step_cycle import StepCycle
from zero_infinity.optim.update_submission import UpdateSubmission
from zero_infinity.params.dtensor import local_gradient
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.run_trace import BACKWARD


class GradientFlow:
    """Takes gradients and submits updates."""

    def __init__(self, parts: GradientParts, settings: GradientSettings) -> None:
        self._host_cache = parts.host_cache
        self._compute_thread = parts.host_cache.compute_thread
        self._update_worker = parts.update_worker
        self._sources = parts.sources
        self._records = parts.records
        self._run_trace = parts.run_trace
        self._accelerator = parts.accelerator
        self.loss_scale = parts.loss_scale
        self._submission = UpdateSubmission(
            parts.host_cache,
            parts.update_worker,
            parts.sources,
            parts.optimizer,
            parts.records,
            # With an accelerator, the host cores are free for the update worker.
            is_shared=parts.accelerator is None,
            on_all_cores=parts.accelerator is not None and parts.accelerator.device.type != "cpu",
        )
        self._retained = AccumulatedGradients(parts.host_cache, parts.records)
        self._on_device = DeviceGradients(parts.records)
        self._device_updates = DeviceUpdates(parts.optimizer, parts.records, parts.sources)
        self._reserve = settings.reserve
        self._norms = settings.norms
        self._dense = DenseGradients()
        self.cycle = StepCycle(parts.optimizer, settings.num_backwards, early=settings.early)
        self.lagging = LaggingUpdates(self._submission, parts.sources, self.cycle, may_lag=settings.may_lag)
        self._waiting: dict[Unit, dict[ManagedParameter, FlatGradient]] = {}
        self._outstanding_bytes = 0
        self._lock = threading.Lock()
        self.norms: dict[ManagedParameter, torch.Tensor] = {}
        self._unknown_norms: set[ManagedParameter] = set()  # of gradients that are added up on the host
        self.lifetimes = GradientLifetimes()
        self._keeps = False  # the step that is being taken keeps its gradients
        # Gradients of these parameters are put here as they come: parts of one that is not complete yet.
        self.partial: dict[ManagedParameter, torch.Tensor | None] = {}
        self.has_rest = False  # some backward left gradients that ranks had to sum at its end

    # ------------------------------------------------------------------ events from the model

    def on_read(self, unit: Unit) -> None:
        """The compute thread reads a unit's values."""
        self.cycle.read(unit)
        self.lagging.before_use(unit)

    def on_gradient(self, parameter: ManagedParameter) -> None:
        """Autograd has accumulated a gradient on the parameter."""
        with no_torch_function():
            gradient = parameter.parameter.grad
            parameter.parameter.grad = None
        if gradient is None:
            return
        if parameter in self.partial:
            self.partial[parameter] = gradient
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
        here = self._flat_here(parameter, gradient)
        if self._on_device.is_home_of(unit):
            self._on_device.add(parameter, self._unscaled(parameter, here))
            return
        flat = self._on_host(parameter, here)
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
        elif here.is_cpu or (flat.is_here and not self._norms):
            self._retain(parameter, flat.wait())
        else:
            if self._norms:
                self._note_norm(parameter, here)
            self._retain_on_arrival(parameter, flat)

    def _on_host(self, parameter: ManagedParameter, flat: torch.Tensor) -> FlatGradient:
        """Start to download a flat gradient from an accelerator."""
        dtype = self._records[parameter.unit].dtype
        divisor = self._divisor()
        if self._accelerator is None or flat.device != self._accelerator.device:  # zeros, or set by hand
            return FlatGradient(flat, dtype, divisor=divisor)
        trace = self._host_cache.store.trace
        return download(flat, dtype, self._accelerator, parameter.unit.name, trace, divisor=divisor)

    def _unscaled(self, parameter: ManagedParameter, flat: torch.Tensor) -> torch.Tensor:
        """Return a flat gradient in the record's dtype, without the loss scale, where it is."""
        there = flat.to(self._records[parameter.unit].dtype)
        divisor = self._divisor()
        return there if divisor == 1 else there / divisor

    def _divisor(self) -> float:
        """What a gradient that arrives now has to be divided by."""
        return self.loss_scale.divisor if self.loss_scale is not None else 1.0

    def _flat_here(self, parameter: ManagedParameter, gradient: torch.Tensor) -> torch.Tensor:
        """Note a gradient and return it flat, in the order of its unit's elements, where it was computed."""
        gradient = self._dense.of(parameter.name, local_gradient(parameter.parameter, gradient))
        self.lagging.before_use(parameter.unit)
        self.lifetimes.came(parameter)
        self.cycle.fired(parameter)
        return parameter.flattened(gradient.detach())

    def _follow_backward(self) -> None:
        if not self.cycle.enter_backward(current_graph_task_id()):
            return
        if self._run_trace is not None:
            self._run_trace.begin(BACKWARD)
        call_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        if not self.cycle.is_in_pieces or self.has_rest:
            self._backward_done()
        if self._run_trace is not None:
            self._run_trace.end(BACKWARD)

    def _backward_done(self) -> None:
        self.cycle.end_backward()

    # ------------------------------------------------------------------ updates during backward

    def _may_update_early(self, unit: Unit) -> bool:
        return self.cycle.may_update_early(unit)

    def _update_when_complete(self, unit: Unit) -> None:
        """Update the unit if each of its parameters has had as many gradients as in the last cycle."""
        if not self.cycle.has_fired(unit):
            return
        waiting = self._waiting.pop(unit)
        if unit.is_saved or self._sources.of(unit).aliased(unit):
            # Autograd (retain_graph, a second graph) or the user (w.detach()) still holds the old value, which must not
            # change while they hold it.
            self.cycle.deferred(unit)
            for parameter, flat in waiting.items():
                self._retain(parameter, flat.wait())
                self._release(flat.nbytes)
            return
        retained = [p for p in unit.parameters if p in self._retained]
        self._retained.release(retained)
        self.cycle.updated(unit, [*waiting, *retained])
        self._submit_early(unit, waiting, retained)
        self._sources.of(unit).look_ahead()

    def _make_room(self, num_bytes: int, unit: Unit) -> None:
        """Wait until a gradient of this size fits in the reserve; may first retain waiting gradients."""
        if self._outstanding_bytes + num_bytes > self._reserve:
            with self._compute_thread.waiting(room_for(unit)):
                self._update_worker.wait_until(lambda: self._outstanding_bytes + num_bytes <= self._reserve)
        if self._outstanding_bytes + num_bytes > self._reserve:
            self._retain_waiting()
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
            self._unknown_norms.discard(parameter)
        self._retained.add(parameter, flat)

    def _note_norm(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """Compute the norm of a gradient where it is, unless it is added to another one on the host."""
        if parameter in self._retained:
            self._unknown_norms.add(parameter)
        else:
            whole = self._unscaled(parameter, flat).as_strided(parameter.shape, parameter.stride)
            self.norms[parameter] = torch.linalg.vector_norm(whole)

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
        self.lagging.before_use(unit)
        self._submission.retain(unit, fresh, frozenset(self._retained), squares, done)
        self._retained.note(parameters)

    def exists(self, parameter: ManagedParameter) -> bool:
        """True if `.grad` of the parameter is not None."""
        return self.lifetimes.exists(parameter)

    def can_show(self, parameter: ManagedParameter) -> bool:
        """True if the parameter has a gradient that was not consumed."""
        lives = self.lifetimes
        is_used = parameter in lives.consumed or parameter in self.cycle.now.updated_parameters
        return lives.exists(parameter) and not is_used

    def gradient_dtype(self, parameter: ManagedParameter) -> torch.dtype:
        """What retained gradients of the parameter are kept in."""
        return self._records[parameter.parts[0].unit].dtype

    def gather(self, parameter: ManagedParameter) -> torch.Tensor:
        """Return the whole gradient of `parameter`; zeros if it has none."""
        self.cycle.gradients_are_used()
        self.lifetimes.read(parameter, is_updated=parameter in self.cycle.now.updated_parameters)
        self._retain_waiting()
        flat = self._gathered_flat(parameter)
        return flat.as_strided(parameter.shape, parameter.stride)

    def _gathered_flat(self, parameter: ManagedParameter) -> torch.Tensor:
        is_there = parameter in self._on_device
        device = parameter.cell.device if is_there else None
        flat = torch.zeros(parameter.num_elements, dtype=self._records[parameter.unit].dtype, device=device)
        if self._accelerator is not None:
            self._update_worker.drain()
        if is_there:
            self._on_device.copy_into(parameter, flat)
        elif parameter in self._retained:
            self._retained.read(parameter, flat)
        return flat

    def _retain_waiting(self) -> None:
        """Retain the gradients whose unit is not complete."""
        for waiting in self._waiting.values():
            for parameter, flat in waiting.items():
                self._retain(parameter, flat.wait())
                self._release(flat.nbytes)
        self._waiting.clear()

    def drop(self, parameter: ManagedParameter, *, to_none: bool) -> None:
        """Forget the gradient of one parameter."""
        is_fresh = parameter in self.lifetimes.fresh
        if parameter in self.cycle.now.updated_parameters or is_fresh:
            self.cycle.discarded(any_fresh=is_fresh)
        self._retain_waiting()
        self.lifetimes.zeroed(parameter, to_none=to_none)
        self.norms.pop(parameter, None)
        self._on_device.drop(parameter)
        if parameter in self._retained:
            self._retained.release([parameter])
            if parameter.unit not in self._retained.units:
                self._retained.expire([parameter.unit])

    def replace(self, parameter: ManagedParameter, gradient: torch.Tensor) -> None:
        """Replace the retained gradient."""
        self.lifetimes.changed(parameter)
        if self._on_device.is_home_of(parameter.unit):
            self._on_device.replace(parameter, parameter.flattened(gradient.detach()))
            return
        self._retained.release([parameter])
        flat = parameter.flattened(gradient.detach().to("cpu"))
        self._retain(parameter, flat.to(self._records[parameter.unit].dtype))

    def drain(self) -> None:
        """Wait for work that follows updates, such as all-gathers."""

    def discard(self, *, to_none: bool = True) -> None:
        """Drop all gradients for which no update was submitted."""
        self.cycle.discarded(any_fresh=bool(self.lifetimes.fresh))
        self.lifetimes.all_zeroed(to_none=to_none)
        for waiting in self._waiting.values():
            for flat in waiting.values():
                self._release(flat.nbytes)
        self._waiting.clear()
        self._retained.expire(self._retained.units)
        self._forget()

    def _forget(self) -> None:
        """The gradients were used or dropped."""
        self._retained.clear()
        self._on_device.clear()
        self._forget_norms()

    def _forget_norms(self) -> None:
        self.norms.clear()
        self._unknown_norms.clear()

    def accumulating(self) -> AbstractContextManager[None]:
        """Backward passes inside this context only accumulate gradients."""
        return self.cycle.accumulating()

    @contextmanager
    def in_pieces(self, num_micro_batches: int) -> Iterator[None]:
        """All backward passes inside, besides those that only accumulate, are one."""
        with self.cycle.in_pieces(num_micro_batches):
            yield
        self._backward_done()

    def check_between_steps(self) -> None:
        """Raise if a step is torn, or has begun and is not finished."""
        self.cycle.check()
        begun = next(iter(self.lifetimes.fresh), None)
        if begun is not None:
            raise UsageError(
                f"{begun.name!r} has a gradient that waits for optimizer.step(): a partial step cannot be "
                "saved\n  fix:   zi.save after optimizer.step(), before the next backward"
            )

    def restart(self) -> None:
        """Drop all gradients and the history of steps, including a torn one: all values will be replaced."""
        if self.cycle.is_torn:
            self.lagging.drop()
        self.lagging.submit_all()
        self._update_worker.drain()
        self.drain()
        self.cycle.restart()
        self.discard()

    # ------------------------------------------------------------------ the step

    def step(self, factors: tuple[torch.Tensor, ...] = ()) -> None:
        """Update with all remaining gradients and begin the next cycle."""
        self._update_worker.check()
        self.cycle.check_may_step()
        self._keeps = self.lifetimes.keeps
        with self.cycle.torn_unless_finished("step() was interrupted, and some of its updates had run"):
            self._submit_all(factors)
            if not self._keeps:
                self._forget()
            self._forget_norms()
            self._end_cycle()

    def before_step(self) -> None:
        """Compute the norms, if they are needed and not known: those of gradients that no backward has added to."""
        if not self._norms:
            return
        self.norms.update(self._on_device.norms())
        for parameter in [p for p in self._retained if p in self._unknown_norms or p not in self.norms]:
            flat = self._gathered_flat(parameter)
            self.norms[parameter] = torch.linalg.vector_norm(flat.as_strided(parameter.shape, parameter.stride))

    @property
    def are_on_device(self) -> bool:
        """True if every gradient that waits for `step()` is on the device."""
        return not self._retained and not self._waiting

    def _submit_all(self, factors: tuple[torch.Tensor, ...]) -> None:
        self._device_updates.run(self._on_device, factors)
        for unit in self._in_next_order():
            direct = self._waiting.pop(unit, {})
            for parameter, flat in direct.items():
                self._retain(parameter, flat.wait())
                self._release(flat.nbytes)
            retained = [p for p in unit.parameters if p in self._retained]
            self.lagging.update(unit, retained, factors, keeps_gradients=self._keeps)
            self._sources.of(unit).look_ahead()

    def skip(self) -> None:
        """End the cycle without an update."""
        self.discard()
        self._end_cycle()

    def _in_next_order(self) -> list[Unit]:
        """Return the units with gradients, in the order in which the next forward reads them."""
        return self._in_order({*self._waiting, *self._retained.units})

    def _in_order(self, units: Collection[Unit]) -> list[Unit]:
        first = [unit for unit in self.cycle.now.read_order if unit in units]
        return first + [unit for unit in self._records if unit in units and unit not in self.cycle.now.read_order]

    def _submit_early(
        self, unit: Unit, flats: dict[ManagedParameter, FlatGradient], retained: Sequence[ManagedParameter]
    ) -> None:
        """Update a unit with fresh and retained gradients while backward continues."""
        num_bytes = sum(flat.nbytes for flat in flats.values())
        self._submission.update(
            unit,
            WholeGradients(flats),
            [*flats, *retained],
            retained,
            (),
            lambda: self._release(num_bytes),
            keeps_gradients=False,
        )

    def _end_cycle(self) -> None:
        self._keeps = False
        self.cycle.end(self._records, may_consume=self.lifetimes.are_zeroed)
        self.lifetimes.end_step()
        self._host_cache.end_cycle(same_order=self.lagging.end_cycle() and self.cycle.same_order)


def room_for(unit: Unit) -> str:
    """Return the name of the wait for gradient reserve."""
    return f"{unit.name}: room for its gradient"
