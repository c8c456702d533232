from __future__ import annotations

import argparse

import pytest

from zero_infinity.cli.number_options import above_zero, integer


def test_numbers_in_range() -> None:
    assert [integer("7"), integer("1,000"), integer("1_0"), integer("0", least=0), integer("9", most=9)] == [
        *(7, 1000, 10, 0, 9)
    ]
    assert [above_zero("1e-3"), above_zero("5", most=5)] == [0.001, 5.0]


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_other_integers_are_refused_with_the_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not an integer of at least 1"):
        integer(text)
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not an integer between 1 and 1,000"):
        integer(text, most=1000)
    with pytest.raises(argparse.ArgumentTypeError, match="'1001' is not an integer between"):
        integer("1001", most=1000)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", "11"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a number above zero"):
        above_zero(text, most=10)
