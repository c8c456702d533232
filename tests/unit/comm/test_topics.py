"""Numbers of exchanges that belong to no unit."""

from __future__ import annotations

from zero_infinity.comm import topics
from zero_infinity.comm.topics import NAMES, Topic


def test_each_has_a_number_of_its_own_that_no_unit_has() -> None:
    every = [value for value in vars(topics).values() if isinstance(value, Topic)]
    numbers = [topic.number for topic in every]
    assert len(set(numbers)) == len(numbers)
    assert all(number < 0 for number in numbers)
    assert NAMES.items() <= {topic.number: topic.name for topic in every}.items()
