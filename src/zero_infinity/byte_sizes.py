"""Parse and format sizes, counts, rates and durations.

Owns the text form of numbers. It does not know which setting a number belongs to: `Config` adds the field's name to
the error. Parsing uses fractions, not floats, so "1.5 GB" is exactly 1,500,000,000 bytes.
"""

from __future__ import annotations

import re
from fractions import Fraction

from zero_infinity.errors import ConfigError

_PREFIXES = "kmgtpe"
_BINARY_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL_NAMES = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_COUNT_NAMES = ("", "K", "M", "B", "T")

_BYTE_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(_PREFIXES, 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(_PREFIXES, 1)},
}
_COUNT_UNITS: dict[str, int] = {name.lower(): 1000**power for power, name in enumerate(_COUNT_NAMES)}

# Thousands may be grouped ("1,000.8 MiB", "4_096"), because format_bytes writes them so. ASCII only: \d alone
# would let other scripts' digits through. Bounded, because Python refuses to convert thousands of digits.
_QUANTITY = re.compile(r"([0-9]{1,30}(?:[,_][0-9]{3}){0,10}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*([a-z]*)", re.IGNORECASE)

# "8Gb" is gigabits, as of a network. Nobody who writes "8gb" tells bits from bytes by the case.
_BITS = re.compile(r"[KMGTPE]i?b")

_BYTES_ACCEPTED = 'bytes as an integer, or text such as "4096", "512MiB", "1.5 GB" or "2TiB"'
_COUNT_ACCEPTED = 'an integer, or text such as "125000000", "350M" or "1.3B"'


def parse_bytes(text: str | int) -> int:
    """Return the bytes in "2GiB", "1.5 GB", "4096" or 4096, rounded down.

    KiB, MiB, GiB, ... are powers of 1024; kB, MB, GB, ... are powers of 1000. Case does not matter, except that
    "8Gb" is gigabits; that and the ambiguous "2G" raise a `ConfigError`.
    """
    return _parse(text, _BYTE_UNITS, noun="size", accepted=_BYTES_ACCEPTED)


def parse_count(text: str | int) -> int:
    """Return the count (of parameters, tokens) in "1.3B", "350M", "12K" or a plain number."""
    return _parse(text, _COUNT_UNITS, noun="count", accepted=_COUNT_ACCEPTED)


def format_bytes(num_bytes: int) -> str:
    """Format bytes as '512 B', '1,000.8 MiB' or '4.0 GiB': one decimal, in the largest unit reached."""
    if num_bytes < 0:
        return "-" + format_bytes(-num_bytes)
    if num_bytes < 1024:
        return f"{num_bytes:,} B"
    tenths, power = _in_largest_unit(num_bytes, 1024, len(_BINARY_NAMES) - 1)
    return f"{tenths // 10:,}.{tenths % 10} {_BINARY_NAMES[power]}"


def format_count(count: int) -> str:
    """Format a count as '1.3B', '25M' or '124.4M'. No decimal means exact: '25.0M' is about 25M."""
    if count < 0:
        return "-" + format_count(-count)
    if count < 1000:
        return str(count)
    tenths, power = _in_largest_unit(count, 1000, len(_COUNT_NAMES) - 1)
    decimal = "" if count % 1000**power == 0 else f".{tenths % 10}"
    return f"{tenths // 10:,}{decimal}{_COUNT_NAMES[power]}"


def format_rate(bytes_per_second: float) -> str:
    """Format a rate as '2.1 GB/s', in powers of 1000, as drives and links are specified."""
    rate = float(bytes_per_second)
    for name in _DECIMAL_NAMES:
        if abs(rate) < 999.95 or name == _DECIMAL_NAMES[-1]:
            break
        rate /= 1000
    return f"{rate:,.1f} {name}/s"


def format_seconds(seconds: float) -> str:
    """Format a duration as '350 µs', '12.3 ms', '4.20 s', '2 m 05 s', '1 h 02 m' or '3 d 04 h'."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    # Each limit is where rounding would show the next unit's first value.
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    if seconds == float("inf") or seconds != seconds:
        return f"{seconds} s"
    return _format_long(round(seconds))


def _format_long(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} m {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} m"
    days, hours = divmod(hours, 24)
    return f"{days:,} d {hours:02d} h"


def _parse(text: str | int, units: dict[str, int], *, noun: str, accepted: str) -> int:
    """Return the whole number in `text`, or raise a ConfigError that says what is accepted."""
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ConfigError(f"{text!r} is not a {noun}; accepted: {accepted}")
    if isinstance(text, int):
        if text < 0:
            raise ConfigError(f"{text} is negative; accepted: {accepted}")
        return text
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a {noun}; accepted: {accepted}")
    if _BITS.fullmatch(match[2]):
        unit = match[2][0].upper() + match[2][1:-1]
        raise ConfigError(
            f"{text!r} is not a {noun}: a small b stands for bits; write {match[1]}{unit}B; accepted: {accepted}"
        )
    number, unit = match[1].replace(",", "").replace("_", ""), match[2].lower()
    if unit not in units:
        raise ConfigError(f"{text!r} is not a {noun}: {_unit_hint(match[1], match[2], units)}; accepted: {accepted}")
    exact = Fraction(number) * units[unit]
    if (units[unit] == 1 and exact.denominator != 1) or 0 < exact < 1:
        raise ConfigError(f"{text!r} is not a whole number; accepted: {accepted}")
    return int(exact)


def _unit_hint(number: str, unit: str, units: dict[str, int]) -> str:
    binary, decimal = f"{unit}iB", f"{unit}B"
    if binary.lower() in units:
        return f"write {number}{binary.upper().replace('I', 'i')} (1024s) or {number}{decimal.upper()} (1000s)"
    return f"unknown unit {unit!r}"


def _in_largest_unit(value: int, base: int, max_power: int) -> tuple[int, int]:
    """Return tenths of the largest unit reached, and its power of `base`.

    Rounded half up with integers, so that the last digit is exact.
    """
    for power in range(1, max_power + 1):
        tenths = (value * 10 + base**power // 2) // base**power
        if tenths < 10 * base:
            break
    return tenths, power


def suggest_bytes(num_bytes: int) -> str:
    """Round a size up and write it as a user would in a setting: '"12MiB"'."""
    mebibytes = -(-num_bytes // 2**20)
    return f'"{-(-mebibytes // 102) / 10:.1f}GiB"' if mebibytes >= 1024 else f'"{mebibytes}MiB"'
