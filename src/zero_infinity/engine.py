"""The engine of one prepared model: composes the parts and exposes steps, checkpoints and stats.

The engine only composes; its parts do the work. Several engines can exist in one process; there are no globals. An
engine ends with its model: when the model is garbage-collected, or the process ends, its threads, memory and swap files
are released.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity.accumulation.accumulation import Accumulation
from zero_infinity.checkpoint.save_thread import BackgroundSave
from zero_infinity.checkpoint.training_view import borrowed_staging
from zero_infinity.comm.channel import Channel
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.config import Config
from zero_infinity.engine_builder import EngineBuilder
from zero_infinity.engine_parts import DEFAULT_PARTS, EngineParts
from zero_infinity.engine_stats import Stats, collect_stats
from zero_infinity.interrupts import held
from zero_infinity.optim.foreign_training import refuse_others
from zero_infinity.params.module_hooks import ZeroGradients
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.params.unit_values import UnitValues
from zero_infinity.policy.homes import Home
from zero_infinity.run_trace import STEP
from zero_infinity.tiers.compute_device import ComputeDevice
from zero_infinity.trace import HOST


class TrainingEngine:
    """Trains one model with one optimizer within a byte budget, or only computes with it (`NoUpdates`).

    It owns the model's parameters (`params.unshard.ParameterOwner`), drives the streamed optimizer
    (`optim.wrapped_optimizer.StreamedTraining`) and is what checkpoints see (`checkpoint.training_view.TrainingView`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: Config,
        accelerator: ComputeDevice | None,
        ranks: RankGroup | None = None,
        replicas: RankGroup | None = None,
        parts: EngineParts = DEFAULT_PARTS,
    ) -> None:
        builder = EngineBuilder(model, optimizer, config, accelerator, ranks, replicas, parts)
        self.user_optimizer = optimizer
        self.ranks = builder.ranks
        self.parameter_store = builder.parameter_store
        self.store = self.parameter_store.store
        self.host_cache = self.parameter_store.host_cache
        self.units: list[Unit] = builder.layout.units
        self.records = builder.layout.records
        self.division = builder.layout.placement
        self.background_save = BackgroundSave(self.ranks)
        self._accelerator = accelerator
        self._replicas = replicas
        self._layout = builder.layout
        self._run_trace = self.parameter_store.run_trace
        self._num_steps = 0
        self._built = builder.build(self)
        training = self._built.training
        self.gradients, self.state_io, self.states = training.gradients, training.state_io, training.states
        self.loss_scale, self._step = training.loss_scale, training.step
        self.activations, self.cache = self._built.activations, self._built.cache
        self.accumulation = Accumulation(
            config,
            self._built.forwards,
            self.gradients,
            backward_scaling=training.scaling,
            activations=self.activations,
            channel=self.step_channel,
            device=accelerator.device if accelerator is not None else torch.device("cpu"),
        )
        model.__dict__["zero_grad"] = ZeroGradients(model, self)
        refuse_others()
        if training.scaling is not None:
            self.parameter_store.closers.append(training.scaling.end_step)
        self.parameter_store.closers.append(self.background_save.close)  # closed before everything that it uses

    # ------------------------------------------------------------------ the owner of the parameters

    def on_copy(self, original: ManagedParameter, copy: nn.Parameter) -> None:
        """Nothing to do: a copy of a prepared parameter is a plain one."""

    def showing_gradients(self, parameters: Sequence[ManagedParameter]) -> AbstractContextManager[None]:
        """Inside, retained gradients are in `.grad` of the unsharded parameters; changes are kept."""
        return self._step.showing_gradients(parameters)

    @property
    def edit_channel(self) -> Channel | None:
        """The channel to ranks that share edits of gathered values."""
        return self.step_channel

    # ------------------------------------------------------------------ steps

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global gradient norm of the last step, if `max_grad_norm` is set."""
        return self._step.grad_norm

    def step(self) -> bool:
        """Update with the remaining gradients; False if they overflowed and the step was skipped."""
        self._built.unsharder.access.check_process()
        self._built.phases.train()
        run_trace = self._run_trace
        if run_trace is not None:
            run_trace.begin(STEP)
            run_trace.computing("optimizer step")
        with held():
            updated = self._step.run()
            if updated:
                self._end_step()
            if self._built.training.scaling is not None:
                self._built.training.scaling.end_step()
        if run_trace is not None:
            run_trace.trace.held(HOST, time.perf_counter(), self.store.pool.held_bytes)
            run_trace.end(STEP)
        return updated

    def _end_step(self) -> None:
        for source in self._sources():
            source.end_cycle(same_order=self.gradients.cycle.same_order)
        if self.activations is not None:
            self.activations.end_cycle()
        self.go_on_from(self._num_steps + 1)
        if self._built.room is not None:
            self._built.room.end_step(self._num_steps)

    def exchange_weights(self, method: str) -> None:
        """Call `train()` or `eval()` of an optimizer that exchanges weights."""
        self._built.unsharder.access.check_process()
        with held():
            self._built.training.exchange.run(method)
            for source in self._sources():
                source.end_cycle(same_order=False)
            self.host_cache.end_cycle(same_order=False)

    def discard_gradients(self, *, set_to_none: bool) -> None:
        """Drop gradients for which no update was submitted, or set those that existed to zero."""
        self._built.unsharder.access.check_process()
        with held():
            self._step.discard_gradients(set_to_none=set_to_none)

    def accumulating(self) -> AbstractContextManager[None]:
        """Backward passes inside this context only accumulate gradients."""
        return self.gradients.accumulating()

    def settle(self) -> None:
        """Wait until every submitted update is done and no transfer is in flight."""
        self._built.unsharder.access.check_process()
        self.gradients.lagging.submit_all()
        self.parameter_store.update_worker.drain()
        self.gradients.drain()
        if self.cache is not None:
            self.cache.drain()
        self.store.settle()

    # ------------------------------------------------------------------ checkpoints

    @property
    def step_channel(self) -> Channel | None:
        """The compute thread's channel to the other ranks."""
        return self._built.channels.steps if self._built.channels is not None else None

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._accelerator.device if self._accelerator is not None else torch.device("cpu")

    @property
    def verify(self) -> bool:
        return self.parameter_store.config.verify

    @property
    def spare_bytes(self) -> int:
        """Bytes of the host cache that training does not need."""
        return self.division.cache - self.division.least

    def staging(self) -> AbstractContextManager[int]:
        """Bytes for checkpoint I/O between two steps: those set aside for gradients, or else from the host cache."""
        if self.division.set_aside:
            return nullcontext(self.division.set_aside)
        return borrowed_staging(self.host_cache, self._layout.spare)

    def rest(self) -> None:
        """Wait until nothing is in flight and every block holds the current values; between two steps only."""
        self.gradients.check_between_steps()
        self.settle()
        for source in self._sources():
            source.write_home()
        self.state_io.share_scalars()
        for unit, record in self.records.items():
            for managed in unit.parameters:
                if record.has_master and managed.state.is_edited and managed in record.state_names:
                    self.state_io.take_edits(managed)
        self._finish_device()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Inside, every value and state is replaced. A failure leaves a mix of old and new ones: a torn step."""
        self.gradients.restart()
        self.settle()
        self._finish_device()
        for unit in self._all_units():
            self.parameter_store.sources.of(unit).updated(unit)
        self.host_cache.end_cycle(same_order=False)  # do not prefetch for a next step
        with self.gradients.cycle.torn_unless_finished(
            "loading a checkpoint failed half-way: some values are old, some new"
        ):
            yield
        for managed in self._layout.managed.values():
            for part in managed.parts:
                part.state.replace()
                part.state.edits_taken()
        for source in self._sources():
            source.end_cycle(same_order=False)
        self.host_cache.end_cycle(same_order=False)

    def go_on_from(self, num_steps: int) -> None:
        """Set the number of steps taken."""
        self._num_steps = num_steps
        if self.ranks is not None:
            self.ranks.steps_taken(num_steps)

    # ------------------------------------------------------------------ reports

    def write_trace(self) -> None:
        """Write the events recorded so far, if tracing is on."""
        if self._run_trace is not None:
            self._run_trace.write()

    def stats(self) -> Stats:
        """Return what is held and what was done so far."""
        self._built.unsharder.access.check_process()
        groups = [group for group in (self.ranks, self._replicas) if group is not None]
        room = self._built.room
        return collect_stats(
            self.parameter_store,
            self._layout,
            num_steps=self._num_steps,
            traffics=[group.traffic for group in groups],
            activation_bytes=self.activations.storage.total_bytes if self.activations is not None else 0,
            bytes_read_directly=self.cache.copier.bytes_read_directly if self.cache is not None else 0,
            device_budget=room.budget if room is not None else 0,
            device_others=room.others_bytes if room is not None else 0,
        )

    # ------------------------------------------------------------------ inside

    def _finish_device(self) -> None:
        """Wait for what was launched on units that live on the device: threads without its streams use them next."""
        if self._accelerator is not None and Home.DEVICE in self._layout.homes.values():
            torch.accelerator.synchronize(self._accelerator.device)

    def _all_units(self) -> list[Unit]:
        """All units, including those that are materialized from tiles, which come first."""
        return [*(whole.unit for whole in self._layout.tiled), *self.units]

    def _sources(self) -> Sequence[UnitValues]:
        return self.parameter_store.sources.of_all(self._all_units())
