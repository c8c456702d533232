from __future__ import annotations

import pytest
import torch
from support.quantised import KINDS, WIDTH
from torch import nn

from zero_infinity.params.packed_layers import holder_of, is_made_of_others, is_quantised, pack
from zero_infinity.params.packed_tensor import PackedTensor, part_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_scales_are_packed_together(kind: str) -> None:
    torch.manual_seed(0)
    layer, x = KINDS[kind](), torch.randn(2, WIDTH)
    expected = layer(x)
    holder = pack(layer, CPU)
    assert holder is not None
    assert holder.nbytes == WIDTH * WIDTH + 4 * WIDTH
    assert holder_of(layer) is holder
    assert pack(layer, CPU) is holder
    assert torch.equal(layer(x), expected)


def test_tables_and_other_layers_stay() -> None:
    layer = KINDS["state"]()
    pack(layer, CPU)
    assert not isinstance(layer.weight.state.table, PackedTensor)
    assert isinstance(layer.weight.state.scales, PackedTensor)
    for other in (nn.Linear(64, 64), nn.BatchNorm1d(2048), nn.Linear(64, 64).requires_grad_(False)):
        assert pack(other, CPU) is None
        assert holder_of(other) is None
    positions = nn.Module()
    positions.register_buffer("ids", torch.arange(4096))
    positions.register_buffer("mask", torch.ones(4096, dtype=torch.bool))
    assert pack(positions, CPU) is None


def test_a_tensor_that_is_referred_to_twice_is_packed_once() -> None:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.ones(4096, dtype=torch.int8), requires_grad=False)
    layer.weight.again = layer.weight.data
    holder = pack(layer, CPU)
    assert holder is not None
    assert holder.nbytes == 4096
    assert part_of(layer.weight) == part_of(layer.weight.again)


def test_a_layer_that_computes_elsewhere_is_moved() -> None:
    layer = KINDS["state"]()
    holder = pack(layer, CPU)
    assert pack(layer, torch.device("meta")) is holder
    assert layer.weight.is_meta
    assert layer.weight.state.scales.is_meta


def test_what_is_quantised() -> None:
    def parameter(*, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Parameter:
        return nn.Parameter(torch.ones(4, dtype=dtype, device=device), requires_grad=False)

    assert is_quantised(parameter(dtype=torch.int8))
    assert is_quantised(KINDS["subclass"]().weight)
    assert not is_quantised(parameter(dtype=torch.int8, device="meta"))
    assert not is_quantised(parameter())
    assert not is_quantised(parameter(dtype=torch.complex64))
    assert not is_quantised(nn.Parameter(torch.ones(4)))
    assert is_made_of_others(KINDS["subclass"]().weight)
    assert not is_made_of_others(parameter())


def test_the_other_kernel_of_bitsandbytes_is_switched_off() -> None:
    layer = KINDS["state"]()
    layer.support_avx512bf16_for_cpu = True
    pack(layer, CPU)
    assert layer.support_avx512bf16_for_cpu is False
