from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.activations.replicas import fingerprint


def drawn(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 40_000), st.integers(0, 1000), st.data())
def test_one_byte_more_or_less_shows(num_bytes: int, seed: int, data: st.DataObject) -> None:
    values = drawn(num_bytes, seed)
    place = data.draw(st.integers(0, num_bytes - 1))
    other = values.clone()
    other[place] ^= data.draw(st.integers(1, 255))
    assert fingerprint(values) == fingerprint(values.clone())
    assert fingerprint(values) != fingerprint(other)


@pytest.mark.parametrize("num_words", [1, 5000, 9000])
def test_the_highest_bit_of_any_word_shows(num_words: int) -> None:
    values = drawn(8 * num_words, 0)
    for word in range(0, num_words, 97):
        other = values.clone()
        other[8 * word + 7] ^= 128
        assert fingerprint(values) != fingerprint(other), f"word {word}"


@given(st.integers(2, 6), st.integers(1, 3000), st.integers(0, 1000), st.randoms())
def test_other_orders_show(num_rows: int, width: int, seed: int, random: object) -> None:
    """Rows of a batch that were swapped, parts of a sequence in another order."""
    values = drawn(num_rows * width * 8, seed).view(num_rows, -1)
    order = list(range(num_rows))
    random.shuffle(order)  # type: ignore[attr-defined]
    turned = values[order]
    assert (fingerprint(values.view(-1)) == fingerprint(turned.reshape(-1))) == torch.equal(values, turned)


def test_swapped_columns_show() -> None:
    values = drawn(8 * 1024 * 8, 0).view(torch.int64).view(8, 1024)
    turned = values.flip(1)
    assert fingerprint(values.view(-1).view(torch.uint8)) != fingerprint(turned.reshape(-1).view(torch.uint8))
