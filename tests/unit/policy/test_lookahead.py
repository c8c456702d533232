"""How far ahead of use blocks are fetched and copies made."""

from __future__ import annotations

from support.unit_sizes import adam

from zero_infinity.policy.lookahead import copy_lookahead, inference_lookahead
from zero_infinity.policy.memory_budget import place

MIB = 2**20


def test_what_is_fetched_ahead_is_two_large_units_with_their_records_and_the_rest_is_kept() -> None:
    units = [adam(f"layer {number}", 16 * MIB) for number in range(30)]
    found = place(units, 700 * MIB, [], nvme=True)
    assert found.lookahead == 96 * MIB
    assert found.cache > 500 * MIB
    small = [adam(f"layer {number}", MIB) for number in range(300)]
    assert place(small, 700 * MIB, [], nvme=True).lookahead == 64 * MIB


def test_a_small_cache_is_mostly_for_what_comes_next() -> None:
    units = [adam(f"layer {number}", 16 * MIB) for number in range(18)]
    found = place(units, 109 * MIB, [], nvme=True)
    assert found.lookahead == int(0.9 * found.cache)


def test_copies_are_made_ahead_as_far_as_a_third_of_their_room_allows() -> None:
    assert copy_lookahead(300 * MIB, on_device=False) == 100 * MIB
    assert copy_lookahead(0, on_device=False) == 0


def test_copies_on_a_device_are_made_ahead_as_far_as_all_of_their_room_allows() -> None:
    assert copy_lookahead(300 * MIB, on_device=True) == 300 * MIB


def test_inference_fetches_two_usual_units_ahead_whatever_the_largest_is() -> None:
    layers = [16 * MIB] * 60
    assert inference_lookahead(layers, 600 * MIB) == 32 * MIB
    assert inference_lookahead(layers, 100 * MIB) == 32 * MIB
    with_embedding = [*layers, 100 * MIB]
    assert 32 * MIB < inference_lookahead(with_embedding, 100 * MIB) < 64 * MIB
    assert inference_lookahead([100 * MIB], 110 * MIB) == int(99 * MIB)
    assert inference_lookahead(layers, 960 * MIB) == 32 * MIB
    assert inference_lookahead(layers, 1920 * MIB) == 60 * MIB
    assert inference_lookahead(layers, 10 << 30) == 64 * MIB
    assert inference_lookahead([], 0) == 0
