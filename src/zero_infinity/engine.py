"""One prepared model: the parts put together, and what can be asked of the whole.

The engine adds training to a host of parameters: records of optimizer state, the flow of gradients, the worker and the
hooks. Several engines live side by side in one process; there are no globals. An engine ends with its model: when that
is collected, or the process ends, threads, memory and swap files go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity._torch import current_graph_task_id, no_torch_function, order_of_norms
from zero_infinity.activations import recompute
from zero_infinity.activations.activation_storage import ActivationStorage, BlockActivationStorage
from zero_infinity.activations.arena import ActivationArena
from zero_infinity.activations.offload import ActivationOffload
from zero_infinity.activations.replicas import Replicas
from zero_infinity.checkpoint.background_save import BackgroundSave
from zero_infinity.comm.all_gather import ParameterAllGather
from zero_infinity.comm.channel import Channel, Topic
from zero_infinity.comm.channels import START, Channels, connect
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.comm.reduce_scatter import ReduceScatter
from zero_infinity.config import Config
from zero_infinity.engine_parts import DEFAULT_PARTS, EngineParts
from zero_infinity.engine_stats import Stats
from zero_infinity.errors import UsageError
from zero_infinity.interrupts import held
from zero_infinity.model_layout import is_copied, plan_layout
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.gradient_hook import GradientHook
from zero_infinity.optim.loss_scale import CastInputs, LossScale, ScaleOutputs
from zero_infinity.optim.moe_agreement import find_choices
from zero_infinity.optim.optimizer_state_io import OptimizerStateIO
from zero_infinity.optim.resident_params import ResidentParameters
from zero_infinity.optim.sharded_gradients import ShardedGradients
from zero_infinity.optim.state_records import make_chunks
from zero_infinity.optim.update_worker import UpdateWorker
from zero_infinity.params import module_hooks, offloaded_param
from zero_infinity.params.dtensor import check_group, like, local_of, whole_norms
from zero_infinity.params.environment import environment_of
from zero_infinity.params.moe_routing import RoutingWatch
from zero_infinity.params.parameter_store import ParameterStore
from zero_infinity.params.unit import ManagedParameter, Unit, refuse_shared_memory
from zero_infinity.policy.memory_budget import Home, copy_lookahead
from zero_infinity.run_trace import BACKWARD, STEP
from zero_infinity.tiers.accelerator import ComputeDevice, CpuDevice, DeviceMemory
from zero_infinity.tiers.device_cache import DeviceCache, UnitSource
from zero_infinity.tiers.host_cache import SpareBytes
from zero_infinity.tiling.lazy_logits import make_logits
from zero_infinity.tiling.materialize import Lender, Materializer
from zero_infinity.tiling.tiled_ops import TiledWeight
from zero_infinity.trace import COPIES, DEVICE, HOST
from zero_infinity.units import format_count


class TrainingEngine:
    """Trains one model with one optimizer within a byte budget."""

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
        self.config = config
        self.user_optimizer = optimizer
        self.grad_norm: torch.Tensor | None = None
        self._zeros = False  # gradients were set to zeros rather than to None
        self._num_steps = 0
        self._replicas = replicas
        self._parts = parts  # of a new store: a model from `zi.init` keeps those of its own
        self._accelerator = accelerator
        self._model_parameters = list(model.parameters())
        self._environment = environment_of(model, config, accelerator, ranks)
        self.ranks = self._environment.ranks
        self.background_save = BackgroundSave(self.ranks)

        # First what can fail for a user's mistake, before anything moves.
        with self._environment.agreed("zi.prepare (checks)"):
            self._plan(model, optimizer)
        try:
            with self._environment.agreed("zi.prepare (swap space)"):
                self._divide()
            with self._environment.agreed("zi.prepare (connecting)"):
                self._channels = self._connect()
                self.activations = self._make_activations()
            with self._environment.agreed("zi.prepare (moving in)"):
                self._build(model)
        except BaseException:
            # Nothing was offloaded yet: with the host gone the model is as plain as before.
            self.host.close()
            raise
        self._watch(model)

    # ------------------------------------------------------------------ setting up

    def _plan(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Find out what there is and where it goes."""
        refuse_shared_memory(model)
        check_group(dict(model.named_parameters()), self.ranks.group if self.ranks is not None else None)
        self._recomputed = recompute.find_blocks(model, self.config)
        if self._replicas is not None and not self._recomputed:
            raise UsageError(
                "activation_group= splits the inputs of recomputed blocks, and none is recomputed\n"
                "  fix:   checkpoint_activations=True in zi.Config"
            )
        self._layout = plan_layout(model, optimizer, self._environment, self._recomputed)
        self.units, self.records, self.placement = self._layout.units, self._layout.records, self._layout.placement
        self._managed = self._layout.managed
        self._unmanaged = ResidentParameters(optimizer, self._layout.unmanaged)
        hosts = self._layout.hosts
        if hosts:
            self.host = hosts.pop()
        else:
            self.host = ParameterStore(self.config, self.ranks, self._environment.budget, self._parts)
        self.store = self.host.store
        self.host_cache = self.host.host_cache
        self._run_trace = self.host.run_trace
        if self._run_trace is not None:
            self._run_trace.trace.title = self._title(model)
        self.loss_scale = LossScale() if any(u.compute_dtype is torch.float16 for u in self.units) else None

    def _title(self, model: nn.Module) -> str:
        """Of a trace."""
        num_parameters = format_count(sum(p.num_elements for p in self._managed.values()))
        rank = f", rank {self.ranks.rank} of {self.ranks.num_ranks}" if self.ranks is not None else ""
        return f"{type(model).__name__}: {num_parameters} parameters{rank}"

    def _divide(self) -> None:
        """Set apart what is not for the cache, and reserve room on NVMe."""
        placement, layout = self.placement, self._layout
        self.host.end_construction()
        self.host_cache.limit(placement.cache, placement.lookahead)
        self.store.pool.charge(placement.set_aside + layout.copies + 2 * layout.bucket_bytes)
        self.store.reserve(placement.swap)

    def _connect(self) -> Channels | None:
        if self.ranks is None:
            return None
        copied = self._accelerator is not None or self._layout.copies
        names = {unit.number: unit.name for unit in self.units}
        num_elements = sum(unit.num_elements for unit in self.units)
        device = self._environment.device if copied else None
        return connect(self.ranks, self._environment.sharding, names, num_elements, device)

    def _build(self, model: nn.Module) -> None:
        """Everything that may fail for want of room or for a drive's error; the last thing is to reshard parameters."""
        replaced = self._layout.replaced
        self.host.drop_forgotten({*self.units, *replaced})
        self._spread_values(model)
        self._cache = self._make_cache()
        new_units = [unit for unit in self.units if unit.block is None]
        self._change_source([unit for unit in (*self.units, *replaced) if unit.block is not None])
        for unit, home in zip(self.units, self.placement.homes, strict=True):
            if unit.block is None:
                self.host.add(unit, home)
        self._make_chunks()
        self.state_io = OptimizerStateIO(
            self.host_cache, self.records, self._channels.steps if self._channels is not None else None
        )
        self._update_worker = UpdateWorker(
            self.store, shares_cores=self._accelerator is None, run_trace=self.host_cache.run_trace
        )
        self.host_cache.before_wait = self._update_worker.take_over
        self.host.closers.append(self._update_worker.close)
        self.gradients = self._make_gradients()
        for unit in self.units:
            self._write_masters(unit)
        for unit in new_units:
            self.host.fill(unit)
        self._take_states()
        self._use_tiles()
        self.store.settle()
        for unit in new_units:
            self.host.reshard(unit)
        for unit in replaced:
            if self._cache is not None:
                self._cache.remove(unit)
            self.host.drop(unit)
        self.store.reset_heap_baseline()
        if self.ranks is not None:
            self.host.closers.append(self.ranks.leave)
        self.host.closers.append(self.background_save.close)  # before anything that it uses

    def _use_tiles(self) -> None:
        """Let torch functions use parameters tile by tile where that can be done, and find them whole elsewhere."""
        lender: Lender = self.host_cache
        allocate: Callable[[int], DeviceMemory] = self.store.pool.take
        spare, budget = self._layout.spare, self._environment.budget
        if self._accelerator is not None and self._cache is not None:
            lender, allocate = self._cache, self._accelerator.allocate
            spare, budget = SpareBytes(0), self.config.device_memory or self._accelerator.budget
        unsharder = self.host.unsharder
        assembled = Materializer(unsharder, lender, allocate, spare, budget)
        for whole, makes_logits in self._layout.tiled.items():
            whole.unit.source = assembled
            use = TiledWeight(whole, unsharder, assembled, self.gradients)
            # Scaled losses are made of the model's outputs, which have to be there for that.
            use.make_logits = make_logits if makes_logits and self.loss_scale is None else None
            whole.tiled_use = use

    def _spread_values(self, model: nn.Module) -> None:
        """All ranks start with the values of the first."""
        if self._channels is None:
            return
        topic = Topic("start", START, "the values to start with")
        plain = [local_of(p.detach()) for p in self._managed if offloaded_param.managed(p) is None]
        for tensor in [*plain, *map(local_of, model.buffers())]:
            self._channels.steps.spread(topic, tensor)

    def _make_cache(self) -> DeviceCache | None:
        copies = self._layout.copies
        if self._accelerator is None and not copies:
            return None
        where: ComputeDevice = self._accelerator or CpuDevice(copies)
        budget = copies or self.config.device_memory or where.budget
        channel = self._channels.copies if self._channels is not None else None
        tier = COPIES if self._accelerator is None else DEVICE
        lookahead, make_policy = copy_lookahead(budget), self.host.parts.make_policy
        cache = DeviceCache(self.host_cache, where, budget, lookahead, channel, tier=tier, make_policy=make_policy)
        self.host.closers.append(cache.copier.close)
        return cache

    def _make_activations(self) -> ActivationOffload | None:
        """Who keeps the tensors that autograd saves, if that is not torch alone."""
        offload = self.config.offload_activations
        if self._replicas is None and not offload:
            return None
        storage: ActivationStorage = ActivationArena(self._environment.device)
        if offload in (True, "all"):
            home = Home.NVME if self.config.nvme else Home.RAM
            beside = SpareBytes(self.placement.cache - self.placement.least)
            storage = BlockActivationStorage(self.host_cache, home, beside if self.config.nvme else self._layout.spare)
        if self._replicas is None:
            return ActivationOffload(storage)
        self._replicas.trace = self._run_trace.trace if self._run_trace is not None else None
        self.host.closers.append(self._replicas.leave)
        return ActivationOffload(storage, Replicas(self._replicas.channel("activations", self._environment.device)))

    def _make_chunks(self) -> None:
        for unit, record in self.records.items():
            for block in make_chunks(
                record,
                self.placement.chunk_bytes,
                unit.the_block().home,
                self.store,
                whole_gradients=self._layout.whole_gradients,
            ):
                self.host_cache.add(block)

    def _make_gradients(self) -> GradientFlow:
        clips = self.config.max_grad_norm is not None
        parts = (self.host_cache, self._update_worker, self.user_optimizer, self.records)
        reserve = self.placement.set_aside
        num_backwards = self.config.gradient_accumulation_steps
        early = self.config.update == "auto" and not clips and self.loss_scale is None
        norms = clips or self.loss_scale is not None
        download = self._accelerator.download if self._accelerator is not None else None
        if self._channels is None:
            return GradientFlow(
                *parts, reserve=reserve, num_backwards=num_backwards, early=early, norms=norms, download=download
            )
        stage = self._environment.sharding.stage
        reduce_dtype = getattr(torch, self.config.reduce_dtype) if self.config.reduce_dtype else None
        reducer = ReduceScatter(
            self._channels.gradients, self._layout.bucket_bytes, wire_dtype=reduce_dtype, all_reduce=stage == 0
        )
        self.host.closers.append(reducer.close)
        exchange = None
        if self._channels.updates is not None:
            exchange = ParameterAllGather(self.store, self._channels.updates)
            self.host.closers.append(exchange.close)
        return ShardedGradients(
            *parts,
            reserve=reserve,
            num_backwards=num_backwards,
            early=early,
            norms=norms,
            download=download,
            stage=stage,
            channel=self._channels.steps,
            reducer=reducer,
            exchange=exchange,
        )

    def _write_masters(self, unit: Unit) -> None:
        record = self.records.get(unit)
        if record is not None and record.has_master:
            for managed in record.state_names:
                self.state_io.write_master(managed, local_of(managed.value()))

    def _take_states(self) -> None:
        """Move states that the user's optimizer has (it was used before) into records."""
        taken = [(p, m) for p, m in self._managed.items() if m.group is not None and p in self.user_optimizer.state]
        for parameter, managed in taken:
            self.state_io.write_state(managed, self.user_optimizer.state[parameter])
        for parameter, _ in taken:
            del self.user_optimizer.state[parameter]

    def _watch(self, model: nn.Module) -> None:
        """From here on, see every read, change and gradient."""
        self._change_source([unit for unit in self.units if unit.source is not self._cache])
        self.host.training = self
        if self.activations is not None:
            self.host.unsharder.keep_saved = self.activations.pack
            self.host.unsharder.keeps_all = self.config.offload_activations == "all"
        self.host.unsharder.on_read = self.gradients.on_read if self._run_trace is None else self._recorded_read
        self.host.unsharder.on_edit = self._edited
        for managed in self._managed.values():
            if managed.group is not None:
                managed.gradient_hook = GradientHook(self.gradients, managed)
                managed.hook_gradient_last()
        module_hooks.attach(model, self.host.unsharder, self._layout.owners, self._run_trace)
        recompute.attach(self._recomputed, self.host.unsharder if self.activations is not None else None)
        if self._channels is not None and isinstance(self.gradients, ShardedGradients):
            cache = self._cache if self._environment.sharding.stage == 3 else None
            find_choices(RoutingWatch(model, self._layout.owners), self._channels.steps, self.gradients, cache)
        model.__dict__["zero_grad"] = module_hooks.ZeroGradients(model, self)
        computed = self._layout.computed
        if len(computed) == 1 and (self.config.param_dtype or self.config.compute_dtype):
            model.register_forward_pre_hook(CastInputs(*computed), prepend=True, with_kwargs=True)
        if self.loss_scale is not None:
            model.register_forward_hook(ScaleOutputs(self.loss_scale))

    def _change_source(self, units: Iterable[Unit]) -> None:
        """Let modules see copies of those that they cannot see as they are stored."""
        for unit in units:
            if self._cache is not None and (self._accelerator is not None or is_copied(unit)):
                self._cache.add(unit)
                unit.source = self._cache

    def _recorded_read(self, unit: Unit) -> None:
        """In place of `GradientFlow.on_read` when there is a record of the run."""
        self.gradients.on_read(unit)
        if self._run_trace is not None:
            if current_graph_task_id() >= 0:
                self._run_trace.begin(BACKWARD)
            self._run_trace.computing(unit.name)

    def _edited(self, managed: ManagedParameter, flat: torch.Tensor) -> None:
        value = managed.of(flat)
        for part in managed.parts:
            if part.unit in self.records and part.group is not None:
                self.state_io.write_master(part, value if part is managed else part.rows_of(value))

    # ------------------------------------------------------------------ the step

    def step(self) -> None:
        """Update with what is left of the gradients."""
        self.host.unsharder.check_process()
        run_trace = self._run_trace
        if run_trace is not None:
            run_trace.begin(STEP)
            run_trace.computing("optimizer step")
        with held():
            self._step()
        if run_trace is not None:
            run_trace.trace.held(HOST, time.perf_counter(), self.store.pool.held_bytes)
            run_trace.end(STEP)

    def _step(self) -> None:
        self._take_hand_made_gradients()
        self._take_zeros()
        self.gradients.before_step()
        if self._channels is not None and self._unmanaged:
            self._unmanaged.average(self._channels.steps)
        factors: tuple[torch.Tensor, ...] = ()
        norms: dict[ManagedParameter | nn.Parameter, torch.Tensor] = {}
        if self.loss_scale is not None or self.config.max_grad_norm is not None:
            norms.update(self.gradients.norms.items())
            norms.update(self._unmanaged.norms().items())
            of = [key.parameter if isinstance(key, ManagedParameter) else key for key in norms]
            norms = dict(zip(norms, whole_norms(list(norms.values()), of), strict=True))
        if self.loss_scale is not None:
            overflowed = not all(torch.isfinite(norm).item() for norm in norms.values())
            unscale = torch.tensor(1.0 / self.loss_scale.scale)
            self.loss_scale.judge(overflowed=overflowed)
            if overflowed:
                self.gradients.skip()
                return
            factors += (unscale,)
            norms = {parameter: norm * unscale for parameter, norm in norms.items()}
        if self.config.max_grad_norm is not None:
            found = [(p, norms[key]) for p in self._model_parameters for key in _parts_of(p) if key in norms]
            self.grad_norm, clip = _clip_factors(found, self.config.max_grad_norm)
            factors += clip
        self.gradients.step(factors)
        self._unmanaged.step(factors)
        for source in self._sources():
            source.end_cycle(same_order=self.gradients.same_order)
        if self.activations is not None:
            self.activations.end_cycle()
        self._num_steps += 1
        if self.ranks is not None:
            self.ranks.num_steps = self._num_steps

    def clip_now(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip the retained gradients of these parameters; returns their norm."""
        if self.gradients.cycle.updated:
            raise UsageError(
                "zi.clip_grad_norm_ comes too late: parameters were updated while backward ran\n"
                '  fix:   update="after_backward" or max_grad_norm=... in zi.Config'
            )
        clipped = list(parameters)
        found = [(p, torch.linalg.vector_norm(gradient)) for p, _, gradient in self._gradients_of(clipped)]
        of = [p for p, _ in found]
        norm, factors = _clip_factors(list(zip(of, whole_norms([n for _, n in found], of), strict=True)), max_norm)
        for _, managed, gradient in self._gradients_of(clipped):
            for factor in factors:
                gradient.mul_(factor)
            if managed is not None:
                self.gradients.replace(managed, gradient)
        return norm

    def _gradients_of(
        self, parameters: Iterable[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, ManagedParameter | None, torch.Tensor]]:
        """Retained gradients (over data-parallel ranks whole), with whose they are; and those on their parameters."""
        for parameter in parameters:
            managed = offloaded_param.managed(parameter)
            if managed is None or managed.group is None:
                if parameter.grad is not None:
                    yield parameter, None, parameter.grad
                continue
            for part in managed.parts:
                gradient = self.gradients.gather(part)
                if gradient is not None:
                    yield parameter, part, gradient

    def discard_gradients(self, *, set_to_none: bool) -> None:
        """Forget gradients that no update was submitted for; or set those that there have been to zero."""
        self.host.unsharder.check_process()
        with held(), no_torch_function():
            self.gradients.discard()
            if set_to_none:
                self.gradients.seen.clear()
            self._zeros = set_to_none is False
            self._unmanaged.zero_grad(set_to_none=set_to_none)
            for parameter, managed in self._managed.items():
                if managed.group is not None:
                    parameter.grad = None

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards in here only accumulate."""
        before = self.gradients.synchronised
        self.gradients.synchronised = False
        try:
            yield
        finally:
            self.gradients.synchronised = before

    def _take_zeros(self) -> None:
        """After zero_grad(set_to_none=False) a parameter that is not used has a gradient all the same: zeros."""
        if self._zeros:
            for managed in [
                part
                for whole in self._managed.values()
                for part in whole.parts
                if part in self.gradients.seen and not self.gradients.has(part)
            ]:
                self.gradients.take(managed, torch.zeros(managed.shape, dtype=managed.unit.compute_dtype))

    def _take_hand_made_gradients(self) -> None:
        """Gradients that the user put on parameters himself."""
        with no_torch_function():
            found = [(m, p.grad) for p, m in self._managed.items() if p.grad is not None and m.group is not None]
            for managed, _ in found:
                managed.parameter.grad = None
        for managed, gradient in found:
            if gradient is not None:
                for part in managed.parts:
                    self.gradients.take(part, part.rows_of(gradient))

    # ------------------------------------------------------------------ values and states

    @contextmanager
    def showing_gradients(self, parameters: Sequence[ManagedParameter]) -> Iterator[None]:
        """Inside, retained gradients are on the (unsharded) parameters; what is changed is kept."""
        shown = [m for m in parameters if m.group is not None]
        for managed in shown:
            gradients = [g for part in managed.parts if (g := self.gradients.gather(part)) is not None]
            whole = torch.cat(gradients) if len(gradients) > 1 else next(iter(gradients), None)
            managed.parameter.grad = like(managed.parameter, whole) if whole is not None else None
        try:
            yield
        finally:
            for managed in shown:
                gradient = managed.parameter.grad
                managed.parameter.grad = None
                if gradient is not None:
                    for part in managed.parts:
                        self.gradients.replace(part, part.rows_of(local_of(gradient)))

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What the plain optimizer's `state_dict()` would be, in memory."""
        self.settle()
        numbers = {p: i for i, p in enumerate(p for g in self.user_optimizer.param_groups for p in g["params"])}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[p] for p in group["params"]]}
            for group in self.user_optimizer.param_groups
        ]
        states = {number: self.state_of(p) for p, number in numbers.items()}
        return {"state": {n: state for n, state in states.items() if state is not None}, "param_groups": groups}

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """The optimizer's state of one parameter, in memory; None if it has none yet."""
        managed = offloaded_param.managed(parameter)
        return self.state_io.read_state(managed) if managed is not None else self._unmanaged.state(parameter)

    def has_state(self, parameter: torch.Tensor) -> bool:
        managed = offloaded_param.managed(parameter)
        if managed is None:
            return self._unmanaged.state(parameter) is not None
        record = self.records.get(managed.parts[0].unit)
        return record is not None and managed.parts[0] in record.started

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take in the states of a plain optimizer's `state_dict()`."""
        self.settle()
        parameters = [p for group in self.user_optimizer.param_groups for p in group["params"]]
        # States are under what stands for a parameter in the groups: a number, or a name (dcp.get_state_dict).
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(keys, parameters, strict=False):  # the optimizer compares their numbers below
            if key in state_dict["state"] and parameter in self._managed:
                self.state_io.check_state(self._managed[parameter], state_dict["state"][key])
        self.user_optimizer.load_state_dict(state_dict)
        self.state_io.forget_states()
        self._take_states()

    def _sources(self) -> set[UnitSource]:
        """Of all units, also of those that are put together from tiles."""
        return {unit.the_source() for unit in (*self.units, *(whole.unit for whole in self._layout.tiled))}

    def settle(self) -> None:
        """Wait until every update that was submitted is done and no byte is on its way."""
        self.host.unsharder.check_process()
        self._update_worker.drain()
        self.gradients.drain()
        if self._cache is not None:
            self._cache.copier.drain()
        self.store.settle()

    # ------------------------------------------------------------------ checkpoints

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def step_channel(self) -> Channel | None:
        """To the other ranks, for the thread that computes."""
        return self._channels.steps if self._channels is not None else None

    @property
    def verify(self) -> bool:
        return self.config.verify

    @property
    def spare_bytes(self) -> int:
        """Bytes of the host cache that training can do without."""
        return self.placement.cache - self.placement.least

    def staging(self) -> AbstractContextManager[int]:
        """Bytes for checkpoint I/O between two steps, when the gradients' staging buffers are idle."""
        return nullcontext(self.placement.set_aside)

    def rest(self) -> None:
        """Wait until nothing is under way and every block holds what its users see; between two steps only."""
        self.gradients.check_between_steps()
        self.settle()
        for source in self._sources():
            source.write_home()
        for unit, record in self.records.items():
            for managed in unit.parameters:
                if record.has_master and managed.edited and managed in record.state_names:
                    self.state_io.take_edits(managed)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Inside, every value and state is replaced. A failure leaves neither the old ones nor the new ones: torn."""
        self.gradients.restart()
        self.settle()
        for unit in (*(whole.unit for whole in self._layout.tiled), *self.units):
            unit.the_source().updated(unit)
        self.host_cache.end_cycle(same_order=False)  # what a step would use next need not be fetched
        self.gradients.torn = "loading a checkpoint failed half-way: some values are old ones and some new ones"
        yield
        self.gradients.torn = None
        for managed in self._managed.values():
            for part in managed.parts:
                part.num_changes += 1
                part.edited = False
        for source in self._sources():
            source.end_cycle(same_order=False)
        self.host_cache.end_cycle(same_order=False)

    def go_on_from(self, num_steps: int) -> None:
        """This many steps have been taken."""
        self._num_steps = num_steps
        if self.ranks is not None:
            self.ranks.num_steps = num_steps

    def write_trace(self) -> None:
        """Write what was recorded so far, if a trace is wanted."""
        if self._run_trace is not None:
            self._run_trace.write()

    def stats(self) -> Stats:
        """What is held and what was done so far."""
        self.host.unsharder.check_process()
        counters = self.store.engine.counters() if self.store.engine is not None else None
        self.store.pool.collect()
        sent, calls = self.ranks.traffic.snapshot() if self.ranks is not None else ({}, {})
        if self._replicas is not None:
            of_activations = self._replicas.traffic.snapshot()
            sent, calls = sent | of_activations[0], calls | of_activations[1]
        return Stats(
            num_steps=self._num_steps,
            num_parameters=sum(p.num_elements for p in self._managed.values()),
            state_bytes=sum(size.parameters + size.record for size in self._layout.sizes),
            memory_budget=self.store.pool.budget,
            memory_held=self.store.pool.held_bytes,
            memory_peak=self.store.pool.peak_bytes,
            swap_bytes=self.placement.swap,
            bytes_read=counters.bytes_read if counters else 0,
            bytes_written=counters.bytes_written if counters else 0,
            read_requests=counters.read_requests if counters else 0,
            write_requests=counters.write_requests if counters else 0,
            waited_seconds=self.host_cache.waited_seconds,
            io_busy_seconds=counters.busy_seconds if counters else 0.0,
            num_deviations=self.host_cache.policy.num_deviations,
            pending_updates=self._update_worker.num_pending,
            parameter_bytes=sum(size.parameters for size in self._layout.sizes),
            gradient_bytes=sum(size.gradients for size in self._layout.sizes),
            optimizer_bytes=sum(size.record for size in self._layout.sizes),
            bucket_bytes=2 * self._layout.bucket_bytes,
            copy_bytes=self._layout.copies,
            activation_bytes=self.activations.storage.total_bytes if self.activations is not None else 0,
            sent_bytes=sent,
            num_exchanges=calls,
        )


def _clip_factors(
    norms: Sequence[tuple[torch.Tensor, torch.Tensor]], max_norm: float
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The norm of all, and what `torch.nn.utils.clip_grad_norm_` would multiply gradients by; given with parameters."""
    if not norms:
        return torch.tensor(0.0), ()
    # torch adds them up by dtype, in an order of its own, which decides about the last bit.
    kinds = [torch.empty(0, dtype=p.dtype, device=p.device) for p, _ in norms]
    ordered = [norms[number][1] for number in order_of_norms(kinds)]
    norm = torch.linalg.vector_norm(torch.stack(ordered))
    return norm, (torch.clamp(max_norm / (norm + 1e-6), max=1.0),)


def _parts_of(parameter: nn.Parameter) -> Sequence[ManagedParameter | nn.Parameter]:
    """Those that norms of its gradient are known of."""
    managed = offloaded_param.managed(parameter)
    return managed.parts if managed is not None else [parameter]
