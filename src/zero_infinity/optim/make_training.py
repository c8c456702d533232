"""Builds the objects that train a model's parameters, on one rank or on several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero_infinity.comm.connect import Channels
from zero_infinity.comm.gather_updates import UpdateAllGather
from zero_infinity.comm.reduce_scatter import GradientDevice, ReduceScatter
from zero_infinity.optim.gradient_collectives import GradientCollectives
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.gradient_parts import GradientParts, GradientSettings
from zero_infinity.optim.group_settings import GroupSettings
from zero_infinity.optim.loss_scale import LossScale
from zero_infinity.optim.optimizer_state_dict import OptimizerStateDict
from zero_infinity.optim.optimizer_state_io import OptimizerStateIO
from zero_infinity.optim.reduced_gradients import local_gradients
from zero_infinity.optim.resident_params import ResidentParameters
from zero_infinity.optim.scaled_backward import BackwardScaling
from zero_infinity.optim.sharded_gradients import ShardedGradients
from zero_infinity.optim.training_observer import TrainingObserver
from zero_infinity.optim.training_step import TrainingStep
from zero_infinity.optim.weight_exchange import WeightExchange
from zero_infinity.params.moe_routing import ExpertRouting
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.policy.homes import Home
from zero_infinity.policy.partition import Sharding
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.tiers.device_cache import DeviceCache


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """The trained parameters of one model, by kind."""

    managed: Mapping[nn.Parameter, ManagedParameter]
    resident: Collection[nn.Parameter]  # trained in place
    all: Sequence[nn.Parameter]  # in model order


@dataclass(frozen=True, slots=True)
class Training:
    """The objects that train one model."""

    gradients: GradientFlow
    state_io: OptimizerStateIO
    states: OptimizerStateDict
    step: TrainingStep
    observer: TrainingObserver
    loss_scale: LossScale | None
    scaling: BackwardScaling | None  # applies it
    exchange: WeightExchange


def make_collectives(
    store: BlockStore,
    channels: Channels,
    sharding: Sharding,
    routing: ExpertRouting,
    cache: DeviceCache | None,
    accelerator: GradientDevice | None,
    units: Iterable[Unit],
    *,
    bucket_bytes: int,
    reduce_dtype: str | None,
    on_close: Callable[[Callable[[], None]], None],
) -> GradientCollectives:
    """Return the collectives of one of several ranks. `on_close` registers how to end their threads."""
    by_number = {unit.number: unit for unit in units}
    reduce_scatter = ReduceScatter(
        channels.gradients,
        bucket_bytes,
        wire_dtype=getattr(torch, reduce_dtype) if reduce_dtype else None,
        all_reduce=sharding.reduces_everywhere,
        absent=lambda number: local_gradients(
            by_number[number], {}, stays=by_number[number].the_block().home is Home.DEVICE
        ),
        accelerator=accelerator,
    )
    on_close(reduce_scatter.close)
    channels.steps.pauses.append(reduce_scatter.pause)
    all_gather = None
    if channels.updates is not None:
        all_gather = UpdateAllGather(store, channels.updates)
        on_close(all_gather.close)
    gathered = cache if sharding.shards_parameters else None
    device = accelerator.device if accelerator is not None else torch.device("cpu")
    sends_float16 = reduce_dtype == "float16"
    updated = channels.on_device
    return GradientCollectives(
        sharding, channels.steps, reduce_scatter, all_gather, routing, gathered, device, sends_float16, updated
    )


def make_training(
    parts: GradientParts,
    settings: GradientSettings,
    parameters: TrainedParameters,
    collectives: GradientCollectives | None,
    *,
    max_grad_norm: float | None,
) -> Training:
    """Return everything that trains these parameters."""
    loss_scale = parts.loss_scale
    channel = collectives.channel if collectives is not None else None
    state_io = OptimizerStateIO(parts.host_cache, parts.records, channel)
    gradients = GradientFlow(parts, settings) if collectives is None else ShardedGradients(parts, settings, collectives)
    resident = ResidentParameters(parts.optimizer, parameters.resident)
    states = OptimizerStateDict(parts.optimizer, parameters.managed, parts.records, state_io, resident)
    step = TrainingStep(
        gradients,
        resident,
        parameters.managed,
        parameters.all,
        max_grad_norm=max_grad_norm,
        loss_scale=loss_scale,
        channel=channel,
        groups=GroupSettings(parts.optimizer),
    )
    scaling = BackwardScaling(loss_scale) if loss_scale is not None else None
    observer = TrainingObserver(gradients, state_io, parts.records, parts.run_trace, scaling)
    all_gather = collectives.all_gather if collectives is not None else None
    exchange = WeightExchange(parts, gradients, resident, all_gather)
    return Training(gradients, state_io, states, step, observer, loss_scale, scaling, exchange)
