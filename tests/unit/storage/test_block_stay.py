"""A stay begins in the queue for room."""

from __future__ import annotations

from zero_infinity.storage.block_stay import BlockStay, Residence


def test_a_stay_begins_queued_unused_and_without_memory() -> None:
    stay = BlockStay()
    assert stay.residence is Residence.QUEUED
    assert (stay.buffer, stay.request, stay.num_uses, stay.evicting) == (None, None, 0, False)
