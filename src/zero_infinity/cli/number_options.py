"""Types of numeric options: a number outside of its range is a usage error of argparse, with the range."""

from __future__ import annotations

import argparse
import math


def integer(text: str, least: int = 1, most: int | None = None) -> int:
    """An integer, which may be grouped by commas or underscores."""
    try:
        number = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        wanted = f"of at least {least}" if most is None else f"between {least} and {most:,}"
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer {wanted}")
    return number


def above_zero(text: str, most: float = math.inf) -> float:
    """A finite number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and 0 < number <= most):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return number
