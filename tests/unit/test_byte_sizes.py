from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.byte_sizes import format_bytes, format_count, format_rate, format_seconds, parse_bytes, parse_count
from zero_infinity.errors import ConfigError

BINARY = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4, "PiB": 1024**5, "EiB": 1024**6}
DECIMAL = {"kB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4, "PB": 1000**5, "EB": 1000**6}
SIZES = st.integers(min_value=0, max_value=2**62)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 * 1024**3),
        ("1.5 GB", 1_500_000_000),
        ("512mib", 512 * 1024**2),
        ("4096", 4096),
        (" 4_096 B ", 4096),
        ("1,000.5 MiB", 1049100288),
        (".5KiB", 512),
        ("0.1GiB", 107374182),  # 107,374,182.4: the part of a byte is dropped
        ("0", 0),
        (4096, 4096),
    ],
)
def test_parse_bytes(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "wrong",
    ["12 parsecs", "", " ", "-1", "-1GiB", "nan", "inf", "1e9", "0.5", "1.5 B", "0.0001KiB", "GiB", "1..5GB", "1,0GB",
     "٣GiB", "9" * 5000, -1, True, 1.5, float("nan"), None],
)  # fmt: skip
def test_parse_bytes_says_what_it_accepts(wrong: object) -> None:
    with pytest.raises(ConfigError, match="accepted: bytes as an integer, or text such as"):
        parse_bytes(wrong)  # type: ignore[arg-type]


def test_a_bare_prefix_is_ambiguous() -> None:
    with pytest.raises(ConfigError, match=r"write 2GiB \(1024s\) or 2GB \(1000s\)"):
        parse_bytes("2g")


@pytest.mark.parametrize(("text", "meant"), [("8Gb", "8GB"), ("1.5 Mb", "1.5MB"), ("2Gib", "2GiB"), ("3Kb", "3KB")])
def test_bits_are_no_bytes(text: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"a small b stands for bits; write {meant};"):
        parse_bytes(text)
    assert parse_bytes(text.lower()) == parse_bytes(meant)


@given(SIZES, st.sampled_from(sorted((BINARY | DECIMAL).items())), st.sampled_from(["", " "]), st.booleans())
def test_whole_units_are_exact(count: int, unit: tuple[str, int], space: str, upper: bool) -> None:
    name, size = unit
    assert parse_bytes(f"{count}{space}{name.upper() if upper else name.lower()}") == count * size


@given(st.integers(min_value=0, max_value=10**6), st.sampled_from(sorted(BINARY)))
def test_a_round_size_survives_format_and_parse(count: int, unit: str) -> None:
    num_bytes = count * BINARY[unit]
    if count < 1024:
        assert parse_bytes(format_bytes(num_bytes)) == num_bytes


@given(SIZES)
def test_any_size_survives_format_and_parse_to_its_last_digit(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    tolerance = next((BINARY[name] // 20 + 1 for name in BINARY if text.endswith(name)), 0)
    assert abs(parse_bytes(text) - num_bytes) <= tolerance


@given(SIZES)
def test_format_bytes_uses_the_largest_unit_reached(num_bytes: int) -> None:
    number, unit = format_bytes(num_bytes).split()
    if unit != "EiB":
        assert float(number.replace(",", "")) < 1024
    if unit != "B":
        assert float(number.replace(",", "")) >= 1


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),  # never "1,024.0 KiB"
        (4 * 1024**3, "4.0 GiB"),
        (int(1000.8 * 1024**2), "1,000.8 MiB"),
        (-(1024**3), "-1.0 GiB"),
        (5000 * 1024**6, "5,000.0 EiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("1.3B", 1_300_000_000), ("350m", 350_000_000), ("12 K", 12_000), ("2T", 2 * 10**12), ("7", 7), (7, 7)],
)
def test_parse_count(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("wrong", ["", "1.5", "3GiB", "-2M", "lots", False, 1.0])
def test_parse_count_says_what_it_accepts(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r'accepted: an integer, or text such as .*"1\.3B"'):
        parse_count(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1K"), (999_999, "1.0M"), (25_000_000, "25M"), (25_000_001, "25.0M"),
     (124_439_808, "124.4M"), (1_300_000_000, "1.3B"), (10**16, "10,000T"), (-1500, "-1.5K")],
)  # fmt: skip
def test_format_count(count: int, text: str) -> None:
    assert format_count(count) == text


@given(st.integers(min_value=0, max_value=9999), st.sampled_from(["K", "M", "B", "T"]))
def test_a_round_count_survives_format_and_parse(tenths: int, unit: str) -> None:
    count = parse_count(f"{tenths // 10}.{tenths % 10}{unit}")
    assert parse_count(format_count(count)) == count


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0.0 B/s"), (999.96, "1.0 kB/s"), (3.2e9, "3.2 GB/s"), (2.5e21, "2,500.0 EB/s"), (float("inf"), "inf EB/s")],
)
def test_format_rate(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (350e-6, "350 µs"), (0.0123, "12.3 ms"), (0.99999, "1.00 s"), (4.2, "4.20 s"), (59.999, "1 m 00 s"),
     (125, "2 m 05 s"), (3720, "1 h 02 m"), (273600, "3 d 04 h"), (-4.2, "-4.20 s"), (float("inf"), "inf s"),
     (float("nan"), "nan s")],
)  # fmt: skip
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
