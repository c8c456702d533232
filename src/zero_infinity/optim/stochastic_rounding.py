"""Rounds float32 values to bfloat16 stochastically: up or down with the probability that keeps the mean.

A value between two bfloat16 numbers goes to the upper one with the probability of its distance from the lower one, so
that many updates, each too small for bfloat16, add up. The random numbers are those of a counter: a function of a key
and of an element's index. Whatever cuts a tensor into slices (a tier, a budget, ranks) changes no bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

# What a parameter's state has beside the optimizer's own values: how many of its updates were rounded.
NUM_ROUNDINGS = "num_roundings"

# 64 bits are drawn at once, for four elements of 16 bits each.
_ELEMENTS = 4
# Elements at once: temporary tensors stay in a core's cache.
_PIECE = 1 << 16


def rounding_key(seed: int, parameter: str, slot: str, number: int) -> int:
    """The key of the `number`th update of one state (or of the values) of a parameter."""
    digest = hashlib.blake2b(f"{seed}\n{parameter}\n{slot}\n{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def round_into(target: torch.Tensor, values: torch.Tensor, key: int, first: int = 0) -> None:
    """Round flat `values` into flat `target`, which are elements from `first` on. Exact values stay as they are."""
    for start, stop in _pieces(len(values)):
        exact = values[start:stop].to(torch.float32, copy=True)
        bits = exact.view(torch.int32)
        drawn = random_bits(key, first + start, first + stop)
        # A bfloat16 has the upper half of the bits. What the lower half is more than the drawn number carries into it.
        rounded = drawn.add_(bits).bitwise_and_(-(1 << 16))
        target[start:stop] = torch.where(exact.isfinite(), rounded, bits).view(torch.float32)


def random_bits(key: int, first: int, stop: int) -> torch.Tensor:
    """Return 16 random bits for each of the elements `first` to `stop`: integers from 0 to 65535.

    This is splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), with integers that
    wrap around.
    """
    start = first // _ELEMENTS
    counter = torch.arange(start, -(-stop // _ELEMENTS), dtype=torch.int64, device="cpu")
    mixed = counter.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    _mix(mixed, 30).mul_(_signed(0xBF58476D1CE4E5B9))
    _mix(mixed, 27).mul_(_signed(0x94D049BB133111EB))
    words = _mix(mixed, 31).view(torch.int16)
    skipped = first - start * _ELEMENTS
    return words[skipped : skipped + stop - first].to(torch.int32).bitwise_and_(0xFFFF)


def _mix(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Exclusive or with itself, shifted right with zeros."""
    return words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _signed(word: int) -> int:
    return word - (1 << 64)


def _pieces(num_elements: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_elements, _PIECE):
        yield start, min(start + _PIECE, num_elements)
