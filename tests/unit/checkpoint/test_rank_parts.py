from __future__ import annotations

import pytest
import torch
from support.prepared import Prepared
from torch import nn

import zero_infinity as zi
from zero_infinity.checkpoint.manifest import StateEntry
from zero_infinity.checkpoint.rank_parts import contents_of, order_of


def test_every_element_is_in_one_place(prepared: Prepared) -> None:
    model, _, view = prepared
    contents = contents_of(model, view)
    assert contents.tied == {"2.weight": "0.weight"}
    assert set(contents.plain) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    found = dict.fromkeys(contents.managed, 0)
    for unit in contents.units:
        content = contents.of_unit(unit)
        used: set[int] = set()
        for part in content.parts:
            found[part.key[1]] += part.stop - part.start
            places = set(range(part.at, part.at + part.stop - part.start))
            assert not used & places
            used |= places
    assert found == {name: known.num_elements for name, known in contents.managed.items()}
    states = {name: StateEntry(("exp_avg",), {}) for name in contents.managed}
    keys = {p.key for unit in contents.units for c in contents.of_record(unit, states) for p in c.parts}
    assert keys == {("optimizer", f"exp_avg/{name}") for name in contents.managed}


def test_a_part_of_the_model_is_refused(prepared: Prepared) -> None:
    model, _, view = prepared
    with pytest.raises(zi.UsageError, match="more parameters of the prepared model are not in this one"):
        contents_of(model[0], view)


def test_memory_order() -> None:
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    model, _ = zi.prepare(
        nn.Sequential(conv, nn.Linear(2, 2)), torch.optim.SGD(conv.parameters()), zi.Config(memory="8MiB")
    )
    contents = contents_of(model, zi.api.engine_of(model))
    assert order_of(contents.managed["0.weight"]) == (0, 2, 3, 1)
    assert order_of(contents.managed["1.weight"]) is None
