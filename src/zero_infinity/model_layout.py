"""Plans a model's layout before any data moves: units, tiles, optimizer state records, division of memory.

A layout is plain data; the engine carries it out. A model that does not fit with whole layers is laid out again, with
tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import CapacityError, UsageError
from zero_infinity.optim.no_updates import is_trained
from zero_infinity.optim.state_records import StateRecord, make_record
from zero_infinity.optim.update_kind import UpdateKinds
from zero_infinity.optim.update_rule import exchanges_weights
from zero_infinity.params import offloaded_param
from zero_infinity.params.environment import TrainingEnvironment
from zero_infinity.params.find_parameters import find_parameters
from zero_infinity.params.unit import ManagedParameter, Unit, make_unit
from zero_infinity.params.unshard import ParameterOwner, unsharder_of
from zero_infinity.policy.alignment import round_up, round_up_elements
from zero_infinity.policy.chunk_size import MAX_CHUNK_BYTES
from zero_infinity.policy.device_homes import DeviceDivision, DeviceUnit, divide_device
from zero_infinity.policy.homes import Home
from zero_infinity.policy.memory_budget import MemoryDivision, SharedBuffers, place, shared_buffers
from zero_infinity.policy.partition import Span
from zero_infinity.policy.unit_sizes import ElementBytes, UnitElements, UnitSize, unit_size
from zero_infinity.tiers.copier import copy_size
from zero_infinity.tiers.host_cache import SpareBytes
from zero_infinity.tiling.tile_plan import Tiling, check_room_to_cut, cut, find_tileable

Owners = dict[nn.Module, list[ManagedParameter]]


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The plan for one model."""

    owners: Owners  # the parameters of each module that owns some
    units: list[Unit]
    managed: dict[nn.Parameter, ManagedParameter]
    unmanaged: dict[nn.Parameter, None]  # trained in place
    tiled: dict[ManagedParameter, bool]  # weights in tiles, and whether they produce logits
    computed: frozenset[torch.dtype]  # compute dtypes, except of modules that must differ
    replaced: list[Unit]  # units of `zi.init` that are now stored or split differently
    built_by: set[ParameterOwner]  # owners of the parameters so far: a `zi.init`
    records: dict[Unit, StateRecord]
    sizes: list[UnitSize]
    homes: dict[Unit, Home]
    whole_gradients: bool  # keep whole gradients, although this rank updates a shard
    placement: MemoryDivision  # of host memory
    on_device: DeviceDivision | None  # of an accelerator's memory
    copies: int  # bytes for copies of units that modules cannot use in their stored form
    least_on_device: int  # the largest units that are needed together on an accelerator
    bucket_bytes: int  # for gradients being sent to other ranks
    spare: SpareBytes  # for materialized tiles and, where nothing is evicted, for saved tensors

    @property
    def lives_on_device(self) -> bool:
        """True if units live on an accelerator."""
        return Home.DEVICE in self.homes.values()


def plan_layout(
    model: nn.Module, optimizer: Optimizer, environment: TrainingEnvironment, recomputed: Sequence[nn.Module]
) -> ModelLayout:
    """Use whole layers if they fit, so that nothing changes for such a model; otherwise use tiles."""
    kinds = UpdateKinds(optimizer)  # probed once, also if the model is laid out again
    if environment.config.tile_above is not None:
        return _lay_out(model, kinds, environment, recomputed, Tiling(environment.config.tile_above))
    found: ModelLayout | None = None
    try:
        found = _lay_out(model, kinds, environment, recomputed, None)
    except CapacityError:
        found = None
    finally:
        if environment.ranks is not None and not environment.ranks.phases.smallest(
            "whether layers fit whole", int(found is not None)
        ):
            found = None
    return found or _lay_out(model, kinds, environment, recomputed, Tiling.by_default(environment.least_budget))


def lay_out_units(
    model: nn.Module, optimizer: Optimizer, environment: TrainingEnvironment
) -> tuple[list[Unit], dict[Unit, StateRecord]]:
    """Return the units of whole layers that a model would have, and their records, for a plan."""
    kinds = UpdateKinds(optimizer)
    sorting = _Sorting(model, environment, None, kinds)
    units = list(dict.fromkeys(p.unit for members in sorting.owners.values() for p in members))
    managed = {p.parameter: p for unit in units for p in unit.parameters}
    _assign_groups(optimizer, managed, list(model.parameters()))
    return units, _make_records(units, kinds, environment)


def is_copied(unit: Unit) -> bool:
    """True if modules on the CPU use a copy of it."""
    return unit.compute_dtype != unit.dtype or unit.is_stored_in_parts


def _lay_out(
    model: nn.Module,
    kinds: UpdateKinds,
    environment: TrainingEnvironment,
    recomputed: Sequence[nn.Module],
    tiling: Tiling | None,
) -> ModelLayout:
    config, accelerator, trains = environment.config, environment.accelerator, is_trained(kinds.optimizer)
    sorting = _Sorting(model, environment, tiling, kinds)
    owners, replaced = sorting.owners, list(sorting.replaced)
    units = list(dict.fromkeys(p.unit for members in owners.values() for p in members))
    managed = {p.parameter: p.whole or p for unit in units for p in unit.parameters}
    unmanaged = _assign_groups(kinds.optimizer, managed, list(model.parameters()))
    records = _make_records(units, kinds, environment)
    whole_gradients = environment.sharding.keeps_whole_gradients
    sizes = [_size(unit, records.get(unit), environment) for unit in units]
    owners_before = {unsharder_of(p).owner for unit in {*units, *replaced} for p in unit.parameters if unit.is_stored}
    for owner in owners_before:
        owner.parameter_store.check_same_place(config)

    together = _needed_together(owners, recomputed)
    buffers = _buffers(dict(zip(units, sizes, strict=True)), together, environment, trains=trains)
    least_on_device = max((sum(map(copy_size, group)) for group in together), default=0)
    if accelerator is not None:
        _check_device_room(together, environment.device_memory or 0)
    exchanges = exchanges_weights(kinds.optimizer)
    updated_here = {unit for unit, record in records.items() if record.wholes or record.rounds or exchanges}
    on_device = _divide_device(
        dict(zip(units, sizes, strict=True)), together, buffers, environment, updated_here, trains=trains
    )
    at_home = on_device.at_home if on_device is not None else [False] * len(units)
    staying = {unit for unit, is_home in zip(units, at_home, strict=True) if is_home}
    on_host = [unit for unit in units if unit not in staying]
    at_once = [
        (group[0].name, sum(round_up(unit.stored_bytes) for unit in group if unit not in staying)) for group in together
    ]
    # Units that will be replaced are still in memory while their successors move in.
    old = sum(u.the_block().held_bytes for u in replaced if u.the_block().home is Home.RAM)
    free = environment.budget - buffers.total - old
    activations = trains and config.offload_activations in (True, "all")
    on_host_sizes = [size for unit, size in zip(units, sizes, strict=True) if unit not in staying]
    placement = place(on_host_sizes, free, at_once, nvme=bool(config.nvme), activations=activations, trains=trains)
    on_host_homes = dict(zip(on_host, placement.homes, strict=True))
    check_room_to_cut(sorting.tiled, placement.cache, environment.budget)
    return ModelLayout(
        owners=owners,
        units=units,
        managed=managed,
        unmanaged=unmanaged,
        tiled=sorting.tiled,
        computed=frozenset(sorting.computed),
        replaced=replaced,
        built_by=owners_before,
        records=records,
        sizes=sizes,
        homes={unit: Home.DEVICE if unit in staying else on_host_homes[unit] for unit in units},
        whole_gradients=whole_gradients,
        placement=placement,
        on_device=on_device,
        copies=buffers.copies,
        least_on_device=least_on_device,
        bucket_bytes=buffers.bucket,
        spare=SpareBytes(free - placement.needed),
    )


class _Sorting:
    """Sorts the parameters of a model into units and tiles."""

    def __init__(
        self, model: nn.Module, environment: TrainingEnvironment, tiling: Tiling | None, kinds: UpdateKinds
    ) -> None:
        self.owners: Owners = {}
        self.replaced: dict[Unit, None] = {}
        self.tiled: dict[ManagedParameter, bool] = {}
        self.computed: set[torch.dtype] = set()
        self._kinds = kinds
        self._environment = environment
        self._tiling = tiling
        self._groups = kinds.groups()
        self._loads = [0] * environment.sharding.partition.num_ranks  # elements of units that one rank updates
        self._tileable = find_tileable(model) if tiling is not None else {}
        self._numbers = _numbers_after(model)
        for module, name, parameters in find_parameters(model):
            self._sort(module, name or type(model).__name__, parameters)

    def _sort(self, module: nn.Module, name: str, parameters: list[tuple[str, nn.Parameter]]) -> None:
        """Sort the parameters of one module: those already stored as required stay, others move in."""
        mine: list[ManagedParameter] = []
        num_rows = {p: self._rows_of_a_tile(module, full_name, p) for full_name, p in parameters}
        torn_up = {
            known.unit
            for p, rows in num_rows.items()
            if (known := offloaded_param.managed(p)) is not None
            and (
                (p in self._tileable and rows != known.rows_of_a_tile)
                or (self._is_whole(module, p) and sum(map(bool, map(len, known.spans))) > 1)
            )
        }
        fresh: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for full_name, parameter in parameters:
            rows = num_rows[parameter]
            known = offloaded_param.managed(parameter)
            if parameter.is_floating_point():
                self.computed.add(self._environment.precision_of(parameter.dtype).computed)
            if known is not None and known.unit not in torn_up and self._stays(module, known, rows):
                known.rename(name, full_name)
                mine.extend(known.parts)
                if known.tiles:
                    self.tiled[known] = self._tileable[parameter]
                continue
            if known is not None:
                self.replaced.update(dict.fromkeys(part.unit for part in known.parts))
            if rows is None:
                fresh.setdefault(parameter.dtype, []).append((full_name, parameter))
            else:
                mine.extend(self._cut(module, name, full_name, parameter, rows).tiles)
        for own, members in fresh.items():
            unit_name = name + (f" ({own})" if len(fresh) > 1 else "")
            mine.extend(self._make_unit(module, unit_name, own, members).parameters)
        if mine:
            self.owners[module] = mine

    def _rows_of_a_tile(self, module: nn.Module, name: str, parameter: nn.Parameter) -> int | None:
        if self._tiling is None or parameter not in self._tileable or self._is_whole(module, parameter):
            return None
        return self._tiling.rows(name, parameter.shape, self._environment.precision_of(parameter.dtype, module))

    def _is_whole(self, module: nn.Module, parameter: nn.Parameter) -> bool:
        """True if its optimizer must see it whole."""
        stored = self._environment.precision_of(parameter.dtype, module).stored
        dtype = self._environment.precision_of(stored).optimized
        return parameter in self._groups and self._kinds.is_whole(self._groups[parameter], dtype)

    def _owner(self, module: nn.Module, members: list[tuple[str, nn.Parameter]]) -> int | None:
        """Return the rank that updates a unit which may not be cut: the one with the least to update so far."""
        if not any(self._is_whole(module, parameter) for _, parameter in members):
            return None
        owner = self._loads.index(min(self._loads))
        self._loads[owner] += sum(parameter.numel() for _, parameter in members)
        return owner

    def _stays(self, module: nn.Module, known: ManagedParameter, rows: int | None) -> bool:
        dtypes = self._environment.precision_of(known.parameter.dtype, module)
        as_now = (known.unit.dtype, known.unit.compute_dtype) == (dtypes.stored, dtypes.computed)
        return as_now and rows == known.rows_of_a_tile

    def _cut(
        self, module: nn.Module, name: str, full_name: str, parameter: nn.Parameter, rows: int
    ) -> ManagedParameter:
        whole = cut(
            name,
            full_name,
            parameter,
            rows,
            precision=self._environment.precision_of(parameter.dtype, module),
            device=self._environment.device,
            numbers=self._numbers,
            sharding=self._environment.sharding,
        )
        self.tiled[whole] = self._tileable[parameter]
        return whole

    def _make_unit(
        self, module: nn.Module, name: str, own: torch.dtype, members: list[tuple[str, nn.Parameter]]
    ) -> Unit:
        dtypes = self._environment.precision_of(own, module)
        return make_unit(
            name,
            members,
            dtype=dtypes.stored,
            compute_dtype=dtypes.computed,
            device=self._environment.device,
            number=next(self._numbers),
            sharding=self._environment.sharding,
            owner=self._owner(module, members),
        )


def _numbers_after(model: nn.Module) -> Iterator[int]:
    """Numbers for new units that `zi.init` has not used."""
    known = (managed for p in model.parameters() if (managed := offloaded_param.managed(p)) is not None)
    return itertools.count(max((part.unit.number for managed in known for part in managed.parts), default=-1) + 1)


def _assign_groups(
    optimizer: Optimizer, managed: dict[nn.Parameter, ManagedParameter], model_parameters: Collection[nn.Parameter]
) -> dict[nn.Parameter, None]:
    """Set each parameter's group; returns the unmanaged parameters that are in a group, in model order."""
    unmanaged = set(model_parameters) - managed.keys()
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter in managed:
                managed[parameter].train_in(number)
            elif parameter not in unmanaged:
                raise UsageError(
                    f"parameter group {number} has a parameter of shape {tuple(parameter.shape)} ({parameter.dtype}) "
                    "that is not one of the model's parameters\n"
                    "  fix:   create the optimizer from model.parameters()"
                )
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    return dict.fromkeys(p for p in model_parameters if p in unmanaged and p in trained)


def _make_records(
    units: Iterable[Unit], kinds: UpdateKinds, environment: TrainingEnvironment
) -> dict[Unit, StateRecord]:
    seed = environment.config.rounding_seed
    made = {unit: make_record(unit, environment.precision_of(unit.dtype), kinds, rounding_seed=seed) for unit in units}
    return {unit: record for unit, record in made.items() if record is not None}


def _size(unit: Unit, record: StateRecord | None, environment: TrainingEnvironment) -> UnitSize:
    trained = updated = 0
    widths = ElementBytes(unit.dtype.itemsize, record=0, gradient=0)
    wholes: dict[ManagedParameter, int] = {}
    if record is not None:
        trained, updated = record.num_elements(Span(0, unit.num_elements)), record.num_elements(unit.owned)
        widths, wholes = record.widths, record.whole_sizes(unit.owned)
    size = unit_size(
        unit.name,
        UnitElements(len(unit.stored), trained, updated),
        widths,
        is_reduced=environment.sharding.is_distributed,
        whole_gradients=environment.sharding.keeps_whole_gradients,
        # An accelerator has its own memory for copies.
        copied=copy_size(unit) if environment.accelerator is None and is_copied(unit) else 0,
        home=unit.the_block().home if unit.is_stored else None,
    )
    if not wholes:
        return size
    in_slices = updated - sum(round_up_elements(parameter.num_elements) for parameter in wholes)
    needed = [
        round_up(num_bytes) + round_up(round_up_elements(parameter.num_elements) * widths.gradient)
        for parameter, num_bytes in wholes.items()
    ]
    record_bytes = in_slices * widths.record + sum(wholes.values())
    return replace(size, record=record_bytes, num_wholes=len(wholes), largest_whole=max(needed))


def _needed_together(owners: Owners, recomputed: Iterable[nn.Module]) -> list[list[Unit]]:
    """Return, for each module, the units that are read together."""
    # The first operation of a block in backward starts its recomputation, while that operation's own unit is in use.
    first: dict[nn.Module, Unit] = {}
    for block in recomputed:
        units = [p.unit for module in block.modules() for p in owners.get(module, [])]
        if units:
            first.update(dict.fromkeys(block.modules(), max(units, key=lambda unit: unit.stored_bytes)))
    together = []
    for module, parameters in owners.items():
        members = list(parameters)
        if isinstance(module, nn.MultiheadAttention):
            # Its single operation also uses the output projection's parameters.
            members += [p for child in module.modules() if child is not module for p in owners.get(child, [])]
        units = [p.unit for p in members if p.whole is None] + ([first[module]] if module in first else [])
        tiles = [[p.unit] for p in members if p.whole is not None]
        # One tile at a time.
        together += [list(dict.fromkeys([*tile, *units])) for tile in tiles or [[]]]
    return together


def _buffers(
    sizes: dict[Unit, UnitSize],
    together: Sequence[Sequence[Unit]],
    environment: TrainingEnvironment,
    *,
    trains: bool,
) -> SharedBuffers:
    return shared_buffers(
        list(sizes.values()),
        max((sum(sizes[unit].copied for unit in group) for group in together), default=0),
        environment.common_budget,
        gathered=environment.sharding.shards_parameters,
        num_ranks=environment.sharding.partition.num_ranks if trains else 1,
    )


def _divide_device(
    sizes: dict[Unit, UnitSize],
    together: Sequence[Sequence[Unit]],
    buffers: SharedBuffers,
    environment: TrainingEnvironment,
    updated_here: Collection[Unit],
    *,
    trains: bool,
) -> DeviceDivision | None:
    """Choose the units that live on the accelerator, the same on every rank.

    Those of which a parameter is updated whole, in its true shape, rounded stochastically or exchanged are
    `updated_here`, on the host.
    """
    sharding = environment.sharding
    by_owner = sharding.is_distributed and sharding.partition.kind == "owner"  # then ranks have other sizes
    # Without a number, device memory is what activations leave, which is not known yet: homes could not give it back.
    is_given = environment.torch_accelerator is not None and environment.config.device_memory is not None
    if not is_given or by_owner or not trains:
        return None
    numbers = {unit: number for number, unit in enumerate(sizes)}
    found = [
        DeviceUnit(
            size.parameters,
            at_home=size.parameters + round_up(size.record) + round_up(size.gradients),
            copy=copy_size(unit),
            copy_at_home=copy_size(unit) if is_copied(unit) else 0,
            on_host=size.total(MAX_CHUNK_BYTES),
            may_move=unit not in updated_here and all(parameter.whole is None for parameter in unit.parameters),
        )
        for unit, size in sizes.items()
    ]
    set_aside = max((size.arriving for size in sizes.values()), default=0)
    host_room = environment.common_budget - buffers.total - set_aside
    groups = [[numbers[unit] for unit in group] for group in together]
    return divide_device(found, environment.device_memory or 0, groups, host_room)


def _check_device_room(together: Iterable[Sequence[Unit]], budget: int) -> None:
    """Raise if units that are needed together do not fit on the compute device."""
    for units in together:
        needed = sum(copy_size(unit) for unit in units)
        if needed > budget:
            raise CapacityError(
                f"{units[0].name!r} needs {format_bytes(needed)} of device memory to be used, but device_memory is "
                f"{format_bytes(budget)}\n  fix:   device_memory={-(-needed // 2**20)}MiB or more"
            )
