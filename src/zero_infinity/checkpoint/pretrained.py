"""Loads weights from safetensors files of any origin into a model that is prepared or built by `zi.init`.

Values go straight from the files into blocks, converted to the block's dtype. Tensors that transformers assembles from
several others (`hf_names`) are in memory one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import nn

from zero_infinity.checkpoint.dtype_conversion import TensorSource, as_real
from zero_infinity.checkpoint.hf_names import NameConversion, NamePlan, plan_loading
from zero_infinity.checkpoint.io_thread_pool import IOThreadPool, Progress, ProgressMeter
from zero_infinity.checkpoint.manifest import MODEL
from zero_infinity.checkpoint.model_contents import BlockContent, Key, contents_of
from zero_infinity.checkpoint.shard_reader import FillTask, ShardReader
from zero_infinity.checkpoint.tensor_matching import MatchProblems
from zero_infinity.checkpoint.training_view import WeightsView
from zero_infinity.checkpoint.verified_tensors import StoredTensor
from zero_infinity.checkpoint.weight_files import open_weights
from zero_infinity.comm.agreement import Agreement
from zero_infinity.errors import CheckpointError
from zero_infinity.interrupts import held
from zero_infinity.optim.state_records import MASTER
from zero_infinity.params.unit import Unit


class PretrainedLoad:
    """One load of weights into one model, on one rank."""

    def __init__(self, model: nn.Module, view: WeightsView, *, strict: bool) -> None:
        self._model = model
        self._view = view
        self._strict = strict
        self._contents = contents_of(model, view)
        self._agreement = Agreement("zi.load_pretrained", view.ranks, view.step_channel)

    def read(self, path: Path, progress: Progress | None = None) -> None:
        self._view.background_save.wait()
        with ExitStack() as stack:
            with self._agreement.agreed("checks"):
                weights = open_weights(path, stack)
                plan = plan_loading(self._model, weights, self._all_names())
                makers = self._match(path, weights, plan)
            with self._agreement.agreed("reading"), held(), self._view.replacing():
                self._fill(weights, makers, ProgressMeter(progress))

    def _all_names(self) -> list[str]:
        return [name for names in self._contents.names.values() for name in names] + [
            name for name in self._contents.plain if name not in self._contents.managed
        ]

    # ------------------------------------------------------------------ matching

    def _match(
        self, path: Path, weights: Mapping[str, StoredTensor], plan: NamePlan
    ) -> dict[str, StoredTensor | NameConversion]:
        """The source of each of the model's tensors, by its first name."""
        shapes: dict[str, tuple[int, ...]] = {n: weights[source].true_shape for n, source in plan.direct.items()}
        dtypes = {n: weights[source].dtype for n, source in plan.direct.items()}
        found: dict[str, StoredTensor | NameConversion] = {n: weights[source] for n, source in plan.direct.items()}
        for conversion in plan.conversions:
            for name, made in self._made(path, conversion, weights).items():
                shapes[name], dtypes[name], found[name] = tuple(made.shape), made.dtype, conversion
        problems = MatchProblems()
        if self._strict:
            problems.add("only in the files", plan.unknown)
        makers = {}
        contents = self._contents
        names_of = {names[0]: names for names in contents.names.values()}
        for first in (*contents.managed, *contents.plain):
            saved = [n for n in names_of.get(first, [first]) if n in found]
            if not saved:
                problems.add("only in the model", [first] if self._strict else [])
                continue
            shape, dtype = self._wanted(first)
            if shapes[saved[0]] != shape:
                problems.add("different shapes", [f"{first} {list(shapes[saved[0]])}, in the model {list(shape)}"])
            if dtypes[saved[0]].is_floating_point != dtype.is_floating_point:
                # Integers in place of floats are quantized weights, which are useless without their scales.
                problems.add(
                    "integers for floating-point numbers, or the reverse",
                    [f"{first} {dtypes[saved[0]]}, in the model {dtype}"],
                )
            makers[first] = found[saved[0]]
        problems.raise_if_any(
            f"the weights in {path} do not fit the model",
            "build the model with the config of these weights, or strict=False to skip what either side lacks",
        )
        return makers

    def _wanted(self, first: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and the dtype of one of the model's tensors."""
        known = self._contents.managed.get(first)
        if known is not None:
            return tuple(known.shape), known.parts[0].unit.dtype
        value = as_real(self._contents.plain[first])
        return tuple(value.shape), value.dtype

    def _made(
        self, path: Path, conversion: NameConversion, weights: Mapping[str, StoredTensor]
    ) -> dict[str, torch.Tensor]:
        """The results of a conversion, on the meta device."""
        try:
            return conversion.apply(
                self._model,
                lambda name: torch.empty(weights[name].shape, dtype=weights[name].dtype, device="meta"),
            )
        except Exception as error:
            listed = ", ".join(name for _, name in conversion.sources[:3])
            raise CheckpointError(f"{path}: transformers cannot convert {listed}, ... ({error})") from error

    # ------------------------------------------------------------------ values

    def _fill(
        self,
        weights: Mapping[str, StoredTensor],
        makers: Mapping[str, StoredTensor | NameConversion],
        meter: ProgressMeter,
    ) -> None:
        contents = self._contents
        meter.total = self._num_bytes(makers)
        with self._view.staging() as num_bytes, IOThreadPool(num_bytes) as thread_pool:
            filling = ShardReader(contents, self._view, thread_pool, replaces_records=False, meter=meter)
            made = _Made(self._model, weights, makers, thread_pool)
            by_kind: dict[bool, list[Unit]] = {False: [], True: []}
            for unit in contents.units:
                by_kind[self._is_converted(unit, makers)].append(unit)
            filling.run(task for unit in by_kind[False] for task in self._tasks(filling, unit, made))
            # Their sources are read by the same threads, before the blocks are filled.
            for unit in by_kind[True]:
                filling.run(list(self._tasks(filling, unit, made)))
            for name, value in contents.plain.items():
                if name in makers:
                    with torch.no_grad():
                        as_real(value).copy_(made.whole(name))

    def _is_converted(self, unit: Unit, makers: Mapping[str, StoredTensor | NameConversion]) -> bool:
        return any(isinstance(makers.get(name), NameConversion) for name in self._names_in(unit))

    def _tasks(self, filling: ShardReader, unit: Unit, made: _Made) -> Iterator[FillTask]:
        sources = self._sources(unit, made)
        yield from filling.of_unit(unit, sources)
        record = self._contents.records.get(unit)
        if record is not None and record.has_master:
            yield from filling.of_record(record, dict.fromkeys(record.state_names, (MASTER,)), sources)

    def _num_bytes(self, makers: Mapping[str, StoredTensor | NameConversion]) -> int:
        """Bytes that go into this rank's blocks. Does not ask for sources: that would run conversions."""
        return sum(
            (part.stop - part.start) * content.dtype.itemsize
            for unit in self._contents.units
            for content in self._filled(unit)
            for part in content.parts
            if part.key[1] in makers
        )

    def _filled(self, unit: Unit) -> Iterator[BlockContent]:
        """The blocks that `_tasks` fills."""
        yield self._contents.of_unit(unit)
        record = self._contents.records.get(unit)
        if record is not None and record.has_master:
            yield from self._contents.of_record(record, dict.fromkeys(record.state_names, (MASTER,)))

    def _sources(self, unit: Unit, made: _Made) -> dict[Key, TensorSource]:
        names = self._names_in(unit)
        return {(MODEL, name): source for name in names if (source := made.source(name)) is not None}

    def _names_in(self, unit: Unit) -> list[str]:
        contents = self._contents
        return [contents.first_name(known) for known in unit.parameters if known.parameter in contents.names]


class _Made:
    """Sources of tensors. Keeps results of a conversion until they are used."""

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, StoredTensor],
        makers: Mapping[str, StoredTensor | NameConversion],
        thread_pool: IOThreadPool,
    ) -> None:
        self._model = model
        self._weights = weights
        self._makers = makers
        self._thread_pool = thread_pool
        self._waiting: dict[str, torch.Tensor] = {}

    def source(self, name: str) -> TensorSource | None:
        maker = self._makers.get(name)
        if maker is None or isinstance(maker, StoredTensor):
            return maker
        if name not in self._waiting:
            self._waiting.update(maker.apply(self._model, lambda source: self._read(self._weights[source])))
        return self._waiting.pop(name)

    def whole(self, name: str) -> torch.Tensor:
        source = self.source(name)
        return self._read(source) if isinstance(source, StoredTensor) else _given(source)

    def _read(self, tensor: StoredTensor) -> torch.Tensor:
        result: list[torch.Tensor] = []
        self._thread_pool.run([partial(_read_whole, tensor, result)])
        return result[0]


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise CheckpointError("a tensor has no source")
    return tensor


def _read_whole(tensor: StoredTensor, result: list[torch.Tensor], room: memoryview) -> None:
    result.append(tensor.whole(room))
