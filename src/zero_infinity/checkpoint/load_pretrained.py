"""Loads weights from safetensors files of any origin into a model that is prepared or built by `zi.init`.

Values go straight from the files into blocks, converted to the block's dtype. Tensors that transformers assembles from
several others (`hf_names`) are in memory one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from zero_infinity.checkpoint.copy_into_block import TensorSource
from zero_infinity.checkpoint.hf_names import NameConversion, NamePlan, plan_loading
from zero_infinity.checkpoint.io_thread_pool import IOThreadPool, Progress, ProgressMeter
from zero_infinity.checkpoint.manifest import MODEL
from zero_infinity.checkpoint.rank_parts import Key, as_real, contents_of
from zero_infinity.checkpoint.shard_reader import ShardReader
from zero_infinity.checkpoint.tensor_matching import MatchProblems
from zero_infinity.checkpoint.training_view import WeightsView
from zero_infinity.checkpoint.verify import StoredTensor
from zero_infinity.checkpoint.weight_files import open_weights
from zero_infinity.comm.checkpoint_agreement import Agreement
from zero_infinity.errors import CheckpointError
from zero_infinity.interrupts import held
from zero_infinity.params.unit import Unit

Makers = Mapping[str, StoredTensor | NameConversion]  # by the first name in the model


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
                names = [name for _, all_names, _, _ in self._contents.tensors for name in all_names]
                makers = self._match(path, weights, plan_loading(self._model, weights, names))
            with self._agreement.agreed("reading"), held(), self._view.replacing():
                self._fill(weights, makers, ProgressMeter(progress))

    def _match(self, path: Path, weights: Mapping[str, StoredTensor], plan: NamePlan) -> Makers:
        """The source of each of the model's tensors."""
        found: dict[str, tuple[torch.Tensor, StoredTensor | NameConversion]] = {
            name: (weights[source].on_meta(), weights[source]) for name, source in plan.direct.items()
        }
        for conversion in plan.conversions:
            try:
                made = conversion.apply(self._model, lambda name: weights[name].on_meta())
            except Exception as error:
                listed = ", ".join(name for _, name in conversion.sources[:3])
                raise CheckpointError(f"{path}: transformers cannot convert {listed}, ... ({error})") from error
            found.update({name: (result, conversion) for name, result in made.items()})
        problems = MatchProblems()
        if self._strict:
            problems.add("only in the files", plan.unknown)
        makers = {}
        for first, all_names, shape, dtype in self._contents.tensors:
            saved = next((found[name] for name in all_names if name in found), None)
            if saved is None:
                problems.add("only in the model", [first] if self._strict else [])
                continue
            if saved[0].shape != shape:
                problems.add("different shapes", [f"{first} {list(saved[0].shape)}, in the model {list(shape)}"])
            if saved[0].is_floating_point() != dtype.is_floating_point:
                # Integers in place of floats are quantized weights, which are useless without their scales.
                kind = "integers for floating-point numbers, or the reverse"
                problems.add(kind, [f"{first} {saved[0].dtype}, in the model {dtype}"])
            makers[first] = saved[1]
        problems.raise_if_any(
            f"the weights in {path} do not fit the model",
            "build the model with the config of these weights, or strict=False to skip what either side lacks",
        )
        return makers

    def _fill(self, weights: Mapping[str, StoredTensor], makers: Makers, meter: ProgressMeter) -> None:
        contents = self._contents
        meter.total = self._num_bytes(makers)
        with self._view.staging() as num_bytes, IOThreadPool(num_bytes) as thread_pool:
            filling = ShardReader(contents, self._view, thread_pool, meter, replaces_records=False)
            sources = _Sources(self._model, weights, makers, thread_pool)
            names = {unit: self._names_in(unit) for unit in contents.units}
            converted = [u for u in names if any(isinstance(makers.get(n), NameConversion) for n in names[u])]
            direct = [unit for unit in names if unit not in converted]
            filling.run(task for unit in direct for task in filling.tasks(unit, sources.of(names[unit]), {}))
            # Their sources are read by the same threads, before the blocks are filled.
            for unit in converted:
                filling.run(list(filling.tasks(unit, sources.of(names[unit]), {})))
            for name, value in contents.plain.items():
                if name in makers:
                    with torch.no_grad():
                        as_real(value).copy_(sources.whole(name))

    def _num_bytes(self, makers: Makers) -> int:
        """Bytes that go into this rank's blocks. Does not ask for sources: that would run conversions."""
        contents = self._contents
        return sum(
            part.num_bytes
            for unit in contents.units
            for content in (contents.of_unit(unit), *contents.of_record(unit, {}))
            for part in content.parts
            if part.key[1] in makers
        )

    def _names_in(self, unit: Unit) -> list[str]:
        contents = self._contents
        return [contents.first_name(known) for known in unit.parameters if known.parameter in contents.names]


@dataclass(frozen=True, slots=True)
class _Sources:
    """Makes the sources of tensors. Keeps results of a conversion until they are used."""

    model: nn.Module
    weights: Mapping[str, StoredTensor]
    makers: Makers
    thread_pool: IOThreadPool
    waiting: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, names: list[str]) -> dict[Key, TensorSource]:
        return {(MODEL, name): self._source(name) for name in names if name in self.makers}

    def whole(self, name: str) -> torch.Tensor:
        source = self._source(name)
        return self._read(source) if isinstance(source, StoredTensor) else source

    def _source(self, name: str) -> TensorSource:
        maker = self.makers[name]
        if isinstance(maker, StoredTensor):
            return maker
        if name not in self.waiting:
            self.waiting.update(maker.apply(self.model, lambda source: self._read(self.weights[source])))
        return self.waiting.pop(name)

    def _read(self, tensor: StoredTensor) -> torch.Tensor:
        result: list[torch.Tensor] = []
        self.thread_pool.run([lambda room: result.append(tensor.whole(room))])
        return result[0]
