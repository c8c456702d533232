"""Builds the engine of one model, in an order that leaves the model unchanged if anything fails.

First, everything that a user error can break is checked, before any data moves; then memory is reserved, ranks connect,
and values move into blocks. The parameters are offloaded last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity._torch import replace_call
from zero_infinity.activations import recompute
from zero_infinity.activations.activation_storage import ActivationBlocks, ActivationStorage, BlockActivationStorage
from zero_infinity.activations.block_finder import Stack
from zero_infinity.activations.device_activation_storage import DeviceActivationStorage
from zero_infinity.activations.offload import ActivationOffload, make_activation_offload
from zero_infinity.byte_sizes import format_count
from zero_infinity.comm.connect import Channels, connect
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.comm.topics import START
from zero_infinity.config import Config
from zero_infinity.deferred_init import DeferredInit
from zero_infinity.engine_parts import EngineParts
from zero_infinity.errors import UsageError
from zero_infinity.model_layout import ModelLayout, is_copied, plan_layout
from zero_infinity.optim.gradient_hook import GradientHook, NoGradientHook
from zero_infinity.optim.gradient_parts import GradientParts, GradientSettings
from zero_infinity.optim.loss_scale import CastInputs, LossScale
from zero_infinity.optim.make_training import TrainedParameters, Training, make_collectives, make_training
from zero_infinity.optim.no_updates import is_trained
from zero_infinity.optim.state_records import make_chunks, make_device_chunk
from zero_infinity.params import module_hooks, offloaded_param
from zero_infinity.params.access_phases import AccessPhases
from zero_infinity.params.dtensor import check_group, local_of
from zero_infinity.params.environment import environment_of
from zero_infinity.params.find_parameters import refuse_shared_memory
from zero_infinity.params.forward_again import ForwardAgain
from zero_infinity.params.module_hooks import ForwardStack
from zero_infinity.params.moe_routing import ExpertRouting, RoutingWatch
from zero_infinity.params.packed_layers import pack
from zero_infinity.params.packed_tensor import PackedTensor
from zero_infinity.params.parameter_store import ParameterStore
from zero_infinity.params.saved_tensors import SavedTensorHooks
from zero_infinity.params.unit_access import UnitAccess
from zero_infinity.params.unit_values import CopiedValues, DeviceValues
from zero_infinity.params.unshard import ParameterOwner, Unsharder
from zero_infinity.policy.activation_stays import ActivationStays
from zero_infinity.policy.homes import Home
from zero_infinity.policy.lookahead import copy_lookahead, inference_lookahead
from zero_infinity.storage.numa import cores_near, keep_near
from zero_infinity.storage.pinning import accelerator_pinning
from zero_infinity.tiers.compute_device import ComputeDevice, CpuDevice, memory_of, memory_to_compute_into
from zero_infinity.tiers.copier import copy_size
from zero_infinity.tiers.device_cache import DeviceCache, make_device_cache
from zero_infinity.tiers.device_room import DeviceRoom, make_device_room
from zero_infinity.tiers.direct_read import DirectReader, find_direct_reader
from zero_infinity.tiers.host_cache import SpareBytes
from zero_infinity.tiers.torch_accelerator import TorchAccelerator
from zero_infinity.tiling.attach_tiles import attach_tiles
from zero_infinity.tiling.materialize import Materializer
from zero_infinity.trace import COPIES, DEVICE


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts of an engine."""

    channels: Channels | None
    cache: DeviceCache | None
    room: DeviceRoom | None
    activations: ActivationOffload | None
    training: Training
    unsharder: Unsharder
    phases: AccessPhases
    forwards: ForwardStack


class EngineBuilder:
    """Plans a model's layout when constructed, and builds the engine's parts from it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: Config,
        accelerator: ComputeDevice | None,
        ranks: RankGroup | None,
        replicas: RankGroup | None,
        parts: EngineParts,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._stays = ActivationStays()
        self._trains = is_trained(optimizer)
        self._config = config
        self._accelerator = accelerator
        self._replicas = replicas
        self._environment = environment_of(model, config, accelerator, ranks)
        self.ranks = self._environment.ranks
        with self._environment.agreed("zi.prepare (checks)"):
            self._check(model)
            self._recomputed = self._find_recomputed(model) if self._trains else []
            self.layout: ModelLayout = plan_layout(model, optimizer, self._environment, self._recomputed)
            self.parameter_store = self._find_store(parts)
        trace = self.parameter_store.run_trace
        if trace is not None:
            trace.set_title(self._title())

    def build(self, owner: ParameterOwner) -> BuiltEngine:
        """Return the engine's parts; from then on `owner` owns the model's parameters."""
        try:
            with self._environment.agreed("zi.prepare (swap space)"):
                self._divide()
            with self._environment.agreed("zi.prepare (connecting)"):
                channels = self._connect()
                activations = self._make_activations()
            with self._environment.agreed("zi.prepare (moving in)"):
                routing = self._make_routing(channels)
                built = self._move_in(owner, channels, activations, routing)
        except BaseException:
            # Nothing is offloaded yet: without the store, the model is plain again.
            self.parameter_store.close()
            raise
        self._attach(built, routing)
        return built

    # ------------------------------------------------------------------ checks and plans

    def _check(self, model: nn.Module) -> None:
        refuse_shared_memory(model)
        for module in model.modules():
            pack(module, self._environment.device)
        check_group(dict(model.named_parameters()), self.ranks.group if self.ranks is not None else None)

    def _find_recomputed(self, model: nn.Module) -> Stack:
        recomputed = recompute.find_blocks(model, self._config)
        if self._replicas is not None and not recomputed:
            raise UsageError(
                "activation_group= splits the inputs of recomputed blocks, but no block is recomputed\n"
                "  fix:   checkpoint_activations=True in zi.Config"
            )
        return recomputed

    def _find_store(self, parts: EngineParts) -> ParameterStore:
        """Return the store of a model built by `zi.init`, else a new one."""
        for owner in self.layout.built_by:
            return owner.parameter_store
        device = self._environment.device
        pinning = accelerator_pinning(device) if device.type != "cpu" else None
        return ParameterStore(self._config, self.ranks, self._environment.budget, parts, pinning)

    def _title(self) -> str:
        """The title of a trace."""
        size = format_count(sum(p.num_elements for p in self.layout.managed.values()))
        rank = f", rank {self.ranks.rank} of {self.ranks.num_ranks}" if self.ranks is not None else ""
        return f"{type(self._model).__name__}: {size} parameters{rank}"

    # ------------------------------------------------------------------ memory and connections

    def _divide(self) -> None:
        """Subtract what is not for the host tier's blocks, and reserve space on NVMe."""
        store, division = self.parameter_store, self.layout.placement
        for owner in self.layout.built_by:
            if isinstance(owner, DeferredInit):
                owner.finish()
        store.host_cache.limit(division.cache, division.lookahead)
        store.store.pool.charge(division.set_aside + self.layout.copies + 2 * self.layout.bucket_bytes)
        store.store.reserve(division.swap)

    def _connect(self) -> Channels | None:
        if self.ranks is None:
            return None
        copied = self._accelerator is not None or self.layout.copies
        names = {unit.number: unit.name for unit in self.layout.units}
        num_elements = sum(unit.num_elements for unit in self.layout.units)
        device = self._environment.device
        return connect(
            self.ranks,
            self._environment.sharding,
            names,
            num_elements,
            copies_on=device if copied else None,
            gradients_on=device,
            homes_on=device if self.layout.lives_on_device else None,
        )

    def _make_activations(self) -> ActivationOffload | None:
        store = self.parameter_store
        if self._replicas is not None:
            if store.run_trace is not None:
                self._replicas.trace_into(store.run_trace.trace)
            store.closers.append(self._replicas.leave)
        if not self._trains:
            return None
        return make_activation_offload(
            self._config,
            store.host_cache,
            self._environment.device,
            self.layout.placement,
            self.layout.spare,
            self._replicas,
            self._storage_of_activations,
        )

    def _storage_of_activations(self, blocks: ActivationBlocks) -> ActivationStorage:
        accelerator = self._environment.torch_accelerator
        if accelerator is None:
            return BlockActivationStorage(blocks)
        storage = DeviceActivationStorage(blocks, accelerator.link(), self._stays, accelerator.device)
        self.parameter_store.closers.append(storage.close)
        return storage

    def _make_routing(self, channels: Channels | None) -> ExpertRouting | None:
        if channels is None:
            return None
        return ExpertRouting(RoutingWatch(self._model, self.layout.owners), channels.steps)

    # ------------------------------------------------------------------ moving in

    def _move_in(
        self,
        owner: ParameterOwner,
        channels: Channels | None,
        activations: ActivationOffload | None,
        routing: ExpertRouting | None,
    ) -> BuiltEngine:
        store, layout = self.parameter_store, self.layout
        store.drop_forgotten({*layout.units, *layout.replaced})
        self._spread_values(channels)
        cache = self._make_cache(channels)
        new_units = [unit for unit in layout.units if not unit.is_stored]
        for unit in (*layout.units, *(whole.unit for whole in layout.tiled)):
            for managed in unit.parameters:
                offloaded_param.move(managed, self._environment.device)
        with self._environment.making_homes(layout.on_device.homes if layout.on_device is not None else 0):
            for unit, home in layout.homes.items():
                if home is Home.DEVICE:
                    store.add_on_device(unit, self._environment.device)
                elif not unit.is_stored:
                    store.add(unit, home)
            self._make_chunks()
        room = self._serve_copies(channels, cache)
        store.closers.append(store.update_worker.close)  # closed before the copies, which may wait for an update
        training = self._make_training(channels, cache, routing)
        access = UnitAccess(store.compute_thread, store.sources, store.storages, training.observer)
        pack = activations.pack if activations is not None else None
        hooks = SavedTensorHooks(access, pack, keeps_all=self._config.offload_activations == "all")
        unsharder = Unsharder(owner, access, hooks)
        self._write_masters(training)
        for unit in new_units:
            store.fill(unit)
        training.states.take_states()
        attach_tiles(layout.tiled, unsharder, self._materializer(access, cache), training.gradients)
        store.store.settle()
        for unit in new_units:
            store.offload(unit, unsharder)
        for unit in layout.replaced:
            if cache is not None:
                cache.remove(unit)
            store.drop(unit)
        store.store.reset_heap_baseline()
        if self.ranks is not None:
            store.closers.append(self.ranks.leave)
        phases = AccessPhases(store.host_cache, cache, trains=self._trains)
        forwards = ForwardStack(unsharder, phases, store.run_trace)
        return BuiltEngine(channels, cache, room, activations, training, unsharder, phases, forwards)

    def _spread_values(self, channels: Channels | None) -> None:
        """Broadcast the values of rank 0."""
        if channels is None:
            return
        plain = [local_of(p.detach()) for p in self.layout.managed if offloaded_param.managed(p) is None]
        buffers = [buffer for buffer in self._model.buffers() if not isinstance(buffer, PackedTensor)]
        for tensor in [*plain, *map(local_of, buffers)]:
            host = tensor.to("cpu")
            channels.steps.spread(START, host)
            if tensor is not host and channels.steps.rank != 0:
                tensor.copy_(host)

    def _make_cache(self, channels: Channels | None) -> DeviceCache | None:
        store, copies = self.parameter_store, self.layout.copies
        if self._accelerator is None and not copies:
            return None
        device: ComputeDevice = self._accelerator or CpuDevice(copies)
        budget = copies or self._environment.device_memory or 0
        if self.layout.on_device is not None:
            device.set_aside(self.layout.on_device.homes)
            budget = self.layout.on_device.copies
        channel = channels.copies if channels is not None else None
        cache = make_device_cache(
            store.host_cache,
            device,
            store.parts.make_policy,
            budget,
            self._copy_lookahead(is_gathered=channel is not None)(budget),
            channel=channel,
            tier_name=COPIES if self._accelerator is None else DEVICE,
            direct=self._find_direct_reader(channels),
        )
        store.closers.append(cache.copier.close)
        if channels is not None and channel is not None:
            channels.steps.pauses.append(cache.copier.pause)
        if self._accelerator is not None:
            io_threads = store.store.engine.thread_ids if store.store.engine is not None else []
            keep_near([*io_threads, cache.copier.thread_id], cores_near(self._environment.device))
        return cache

    def _copy_lookahead(self, *, is_gathered: bool) -> Callable[[int], int]:
        """Return a function of the budget. It does not refer to the model, or the cache would keep that."""
        if self._trains:
            return partial(copy_lookahead, on_device=self._accelerator is not None and not is_gathered)
        return partial(inference_lookahead, [copy_size(unit) for unit in self.layout.units])

    def _find_direct_reader(self, channels: Channels | None) -> DirectReader | None:
        nvme = self._config.nvme
        if channels is not None or nvme is None or not isinstance(self._accelerator, TorchAccelerator):
            return None
        return find_direct_reader(self._environment.device, nvme)

    def _make_room(self, channels: Channels | None, cache: DeviceCache) -> DeviceRoom | None:
        accelerator = self._environment.torch_accelerator
        if accelerator is None:
            return None
        is_gathered = cache.copier.is_collective
        return make_device_room(
            accelerator,
            cache,
            self._copy_lookahead(is_gathered=is_gathered),
            least=self.layout.least_on_device,
            channel=channels.steps if channels is not None and is_gathered else None,
            trains=self._trains,
            stays=self._stays,
        )

    def _serve_copies(self, channels: Channels | None, cache: DeviceCache | None) -> DeviceRoom | None:
        """Let modules use copies of units that they cannot use where they are stored, or in the form they are.

        Returns what sets the budget of these copies on an accelerator.
        """
        if cache is None:
            return None
        sources, there, copied = self.parameter_store.sources, DeviceValues(), []
        for unit in (*self.layout.units, *self.layout.replaced):
            if self.layout.homes.get(unit) is Home.DEVICE and not is_copied(unit):
                sources.serve(unit, there)
            elif self._accelerator is not None or is_copied(unit):
                cache.add(unit)
                copied.append(unit)
        room = self._make_room(channels, cache)
        copies = CopiedValues(cache, room)
        for unit in copied:
            sources.serve(unit, copies)
        return room

    def _make_chunks(self) -> None:
        store, layout = self.parameter_store, self.layout
        for unit, record in layout.records.items():
            if layout.homes[unit] is Home.DEVICE:
                make_device_chunk(record, store.store, self._environment.device)
                continue
            chunk_bytes, home = layout.placement.chunk_bytes, unit.the_block().home
            for block in make_chunks(record, chunk_bytes, home, store.store, whole_gradients=layout.whole_gradients):
                store.host_cache.add(block)

    def _make_training(
        self, channels: Channels | None, cache: DeviceCache | None, routing: ExpertRouting | None
    ) -> Training:
        store, layout, config = self.parameter_store, self.layout, self._config
        is_scaled = self._trains and any(u.compute_dtype is torch.float16 for u in layout.units)
        loss_scale = LossScale() if is_scaled else None
        clips = config.max_grad_norm is not None
        collectives = None
        if channels is not None and routing is not None and self._trains:
            collectives = make_collectives(
                store.store,
                channels,
                self._environment.sharding,
                routing,
                cache,
                self._environment.torch_accelerator,
                layout.records,
                bucket_bytes=layout.bucket_bytes,
                reduce_dtype=config.reduce_dtype,
                on_close=store.closers.append,
            )
        return make_training(
            GradientParts(
                store.host_cache,
                store.update_worker,
                store.sources,
                self._optimizer,
                layout.records,
                store.run_trace,
                self._accelerator,
                loss_scale,
            ),
            GradientSettings(
                reserve=layout.placement.set_aside,
                num_backwards=config.gradient_accumulation_steps,
                early=config.update == "auto" and not clips and loss_scale is None,
                norms=clips or loss_scale is not None,
            ),
            TrainedParameters(layout.managed, layout.unmanaged, list(self._model.parameters())),
            collectives,
            max_grad_norm=config.max_grad_norm,
        )

    def _write_masters(self, training: Training) -> None:
        for record in self.layout.records.values():
            if record.has_master:
                for managed in record.state_names:
                    training.state_io.write_master(managed, local_of(managed.value()))

    def _materializer(self, access: UnitAccess, cache: DeviceCache | None) -> Materializer:
        store = self.parameter_store
        if self._accelerator is not None and cache is not None:
            budget = self._environment.device_memory or 0
            return Materializer(access, cache, memory_to_compute_into(self._accelerator), SpareBytes(0), budget)
        allocate, budget = memory_of(store.store.pool), self._environment.budget
        return Materializer(access, store.host_cache, allocate, self.layout.spare, budget)

    # ------------------------------------------------------------------ hooks

    def _attach(self, built: BuiltEngine, routing: ExpertRouting | None) -> None:
        """From here on, every read, change and gradient is observed."""
        model, layout, training = self._model, self.layout, built.training
        for managed in layout.managed.values():
            offloaded_param.adopt(managed, built.unsharder)
            if managed.group is not None:
                managed.hook_gradient(GradientHook(training.gradients, managed))
            elif not self._trains and managed.parameter.is_floating_point():
                managed.parameter.requires_grad_(False)
                managed.hook_gradient(NoGradientHook(managed.name))
        module_hooks.attach(model, built.unsharder, built.forwards, layout.owners)
        recompute.attach(self._recomputed, built.unsharder.hooks if built.activations is not None else None)
        if routing is not None:
            routing.start()
        computed = layout.computed
        if len(computed) == 1 and (self._config.param_dtype or self._config.compute_dtype):
            model.register_forward_pre_hook(CastInputs(*computed), prepend=True, with_kwargs=True)
        if built.room is not None:
            replace_call(model, ForwardAgain(model, self._environment.device, built.room))
