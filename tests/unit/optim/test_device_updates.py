"""Updates on the device by the user's optimizer. Here the device is the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_infinity.optim import device_updates
from zero_infinity.optim.device_gradients import DeviceGradients
from zero_infinity.optim.device_updates import DeviceUpdates
from zero_infinity.optim.state_records import MASTER, StateRecord, make_device_chunk, make_record
from zero_infinity.optim.update_kind import UpdateKinds
from zero_infinity.params.precision import Precision
from zero_infinity.params.unit import Unit, make_unit
from zero_infinity.params.unit_values import DeviceValues, ValueSources
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.buffer_pool import BufferPool

CPU = torch.device("cpu")


class Trained:
    """Two units and their plain twins."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        shapes = [[(4, 5), (7,)], [(33,)]]
        self.plain = [[nn.Parameter(torch.randn(shape).to(dtype)) for shape in unit] for unit in shapes]
        self.plain_optimizer = self._optimizer([p for unit in self.plain for p in unit])
        mine = [[nn.Parameter(p.detach().clone()) for p in unit] for unit in self.plain]
        self.optimizer = self._optimizer([p for unit in mine for p in unit])
        self.store = BlockStore(BufferPool(1 << 20))
        self.records: dict[Unit, StateRecord] = {}
        kinds = UpdateKinds(self.optimizer)
        optimized = torch.float32
        precision = Precision(dtype, dtype, optimized, optimized, has_master=dtype != optimized)
        for number, members in enumerate(mine):
            named = [(f"p{place}", p) for place, p in enumerate(members)]
            unit = make_unit(f"unit{number}", named, dtype=dtype, compute_dtype=dtype, device=CPU)
            block = self.store.create_on_device(unit.name, unit.stored_bytes, CPU)
            unit.state.store_in(block)
            for known in unit.parameters:
                known.train_in(0 if number == 0 else 1)
                known.of(block.the_device_bytes().view(dtype)).copy_(known.parameter.detach())
            record = make_record(unit, precision, kinds)
            assert record is not None
            make_device_chunk(record, self.store, CPU)
            self.records[unit] = record
            if record.has_master:
                memory = record.chunks[0].record.the_device_bytes()
                for segment in record.chunks[0].segments:
                    flat = segment.parameter.parameter.detach().float().view(-1)
                    record.chunks[0].state(memory, MASTER, segment).copy_(flat)
        self.gradients = DeviceGradients(self.records)
        self.updates = DeviceUpdates(self.optimizer, self.records, ValueSources(DeviceValues()))

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.01}]
        return torch.optim.AdamW(groups)

    def values(self) -> list[torch.Tensor]:
        return [
            known.of(unit.the_block().the_device_bytes().view(unit.dtype))
            for unit in self.records
            for known in unit.parameters
        ]


@pytest.mark.parametrize("most_together", [1, 64 << 20])
def test_as_the_plain_optimizer(most_together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_updates, "_MOST_TOGETHER", most_together)
    trained = Trained(torch.float32)
    for step in range(4):
        for unit, plain in zip(trained.records, trained.plain, strict=True):
            for known, parameter in zip(unit.parameters, plain, strict=True):
                gradient = torch.randn(parameter.shape)
                parameter.grad = gradient * 0.5
                if step == 1 and known is unit.parameters[0]:
                    parameter.grad = None  # this one has none
                else:
                    trained.gradients.add(known, gradient.view(-1))
        trained.plain_optimizer.step()
        assert trained.updates.run(trained.gradients, [torch.tensor(0.5)])
        trained.gradients.clear()
        for expected, found in zip([p for unit in trained.plain for p in unit], trained.values(), strict=True):
            assert torch.equal(expected, found)
    assert trained.updates.run(trained.gradients, []) == []
    record = next(iter(trained.records.values()))
    assert [scalars["step"].item() for scalars in record.scalars.values()] == [3, 4]
    assert record.started[record.unit.parameters[0]] == ("step", "exp_avg", "exp_avg_sq")


def test_master_weights_are_updated_and_rounded() -> None:
    trained = Trained(torch.bfloat16)
    masters = [p.detach().float() for unit in trained.plain for p in unit]
    plain = [nn.Parameter(master) for master in masters]
    optimizer = trained._optimizer(plain)
    for _ in range(3):
        for parameter, known in zip(plain, [k for unit in trained.records for k in unit.parameters], strict=True):
            gradient = torch.randn(parameter.shape).bfloat16()
            parameter.grad = gradient.float()
            trained.gradients.add(known, gradient.view(-1))
        optimizer.step()
        trained.updates.run(trained.gradients, [])
        trained.gradients.clear()
        for expected, found in zip(plain, trained.values(), strict=True):
            assert torch.equal(expected.bfloat16(), found)
