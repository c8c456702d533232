"""Random numbers of single elements, and rounding by them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.optim.stochastic_rounding import random_bits, round_into, rounding_key

KEY = rounding_key(0, "layer.weight", "values", 3)
MASK = (1 << 64) - 1


def by_hand(key: int, element: int) -> int:
    """splitmix64 in Python integers: its 64 bits are those of four elements."""
    word = ((element // 4) * 0x9E3779B97F4A7C15 + key) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    word ^= word >> 31
    return word >> 16 * (element % 4) & 0xFFFF


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 40))
def test_the_numbers_are_those_of_splitmix64(key: int, first: int) -> None:
    assert random_bits(key, first, first + 9).tolist() == [by_hand(key, first + number) for number in range(9)]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_slices_are_rounded_as_the_whole(cuts: list[int]) -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(0))
    whole, parts = torch.empty(2, 300, dtype=torch.bfloat16).unbind()
    round_into(whole, values, KEY)
    edges = sorted({0, *cuts, 300})
    for start, stop in zip(edges, edges[1:], strict=False):
        round_into(parts[start:stop], values[start:stop], KEY, start)
    assert torch.equal(whole, parts)


def test_pieces_of_a_large_tensor_are_rounded_as_the_whole() -> None:
    values = torch.linspace(1, 2, 200_003)
    whole = torch.empty(len(values), dtype=torch.bfloat16)
    round_into(whole, values, KEY)
    last = torch.empty(3, dtype=torch.bfloat16)
    round_into(last, values[-3:], KEY, len(values) - 3)
    assert torch.equal(whole[-3:], last)


@pytest.mark.parametrize("value", [1.0 + 2**-10, -1.0 - 3 * 2**-10, 1e-30, 3e38])
def test_the_mean_is_the_value(value: float) -> None:
    """Over elements, and over updates: up to five standard deviations."""
    draws = 40_000
    exact = torch.full((draws,), value)
    low, high = sorted({exact.bfloat16()[0].item(), _other_neighbour(exact)})
    spread = 5 * (high - low) / (2 * draws**0.5)
    over_elements, over_updates = torch.empty(draws, dtype=torch.bfloat16), []
    round_into(over_elements, exact, KEY)
    for number in range(2000):
        one = torch.empty(1, dtype=torch.bfloat16)
        round_into(one, exact[:1], rounding_key(1, "bias", "values", number), 7)
        over_updates.append(one)
    assert set(over_elements.double().unique().tolist()) == {low, high}
    assert abs(over_elements.double().mean().item() - exact[0].double().item()) < spread
    assert abs(torch.cat(over_updates).double().mean().item() - exact[0].double().item()) < spread * 20**0.5


def _other_neighbour(exact: torch.Tensor) -> float:
    """The bfloat16 number on the other side of a value than its nearest one."""
    nearest = exact.bfloat16()[0]
    away = torch.tensor(float("inf") if exact[0] > nearest else -float("inf"), dtype=torch.bfloat16)
    return torch.nextafter(nearest, away).item()


def test_what_is_exact_stays() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf"), float("nan"), 2.0**-133])
    kept = torch.empty(len(values), dtype=torch.bfloat16)
    for number in range(50):
        round_into(kept, values, rounding_key(0, "p", "values", number))
        assert torch.equal(kept.float().nan_to_num(7.0), values.nan_to_num(7.0))
        assert kept.signbit()[1]
        assert kept[6].isnan()


@pytest.mark.parametrize(
    "other", [(1, "p", "values", 0), (0, "q", "values", 0), (0, "p", "exp_avg", 0), (0, "p", "values", 1)]
)
def test_everything_that_a_key_is_made_of_changes_the_numbers(other: tuple[int, str, str, int]) -> None:
    same = (random_bits(rounding_key(0, "p", "values", 0), 0, 1000) == random_bits(rounding_key(*other), 0, 1000)).sum()
    assert same < 5


def test_the_sixteen_bits_are_uniform_and_unrelated() -> None:
    """Each bit is set half of the time, also of neighbouring elements together: within five standard deviations."""
    drawn = random_bits(KEY, 0, 100_000)
    bits = torch.stack([drawn >> bit & 1 for bit in range(16)]).double()
    together = (bits[:, 1:] == bits[:, :-1]).double()
    for found in (bits, together):
        assert (found.mean(1) - 0.5).abs().max() < 5 * 0.5 / 100_000**0.5
