from __future__ import annotations

import io

import pytest
from rich.console import Console

from zero_infinity.cli import progress_display
from zero_infinity.cli.progress_display import JsonProgress, PlainProgress, Step, TerminalProgress, choose
from zero_infinity.cli.train_summary import Summary

STEP = Step(
    step=3,
    steps=20,
    loss=2.5,
    seconds=0.5,
    tokens_per_second=1234.5,
    memory_held=3 << 20,
    memory_budget=4 << 20,
    read_bytes_per_second=2.1e9,
    write_bytes_per_second=1.2e9,
    wait_fraction=0.034,
    seconds_left=125.0,
)


def test_a_terminal_gets_a_bar_and_a_table() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    progress = choose(as_json=False, every=1, make_console=lambda: console)
    assert isinstance(progress, TerminalProgress)
    with progress.live():
        progress.show(STEP)
    summary = Summary(
        steps=20,
        parameters=25_000_000,
        first_loss=5.5,
        last_loss=2.5,
        recent_loss=2.6,
        tokens_per_second=500,
        seconds=40,
        state_bytes=300 << 20,
        memory_budget=48 << 20,
        memory_peak=47 << 20,
        process_peak=700 << 20,
        wait_seconds=1,
        read_bytes_per_step=300e6,
        write_bytes_per_step=300e6,
        read_bytes=int(6e9),
        write_bytes=int(6e9),
        interrupted_by=None,
    )
    summary.print(console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "step 3/20",
        "━",
        "2.1 GB/s / 1.2 GB/s",
        "3.0 MiB of 4.0 MiB",
        "3%",
        "2 m 05 s",
        "6.2 x the memory budget",
    ):
        assert part in output
    assert "2M steps use it up" in output


def test_elsewhere_plain_or_json() -> None:
    assert isinstance(choose(as_json=False, every=1, make_console=lambda: Console(file=io.StringIO())), PlainProgress)
    assert isinstance(choose(as_json=True, every=1), JsonProgress)


def test_the_rate_is_that_of_the_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A minute before the first byte, in which transformers is imported, is no sign of a slow drive."""
    monkeypatch.setattr(progress_display, "_LINE_SECONDS", 0.0)
    now = 0.0
    with PlainProgress(1, get_time=lambda: now).transfer("loading") as shown:
        assert shown is not None
        now = 60.0
        shown(2_000_000, 10_000_000)
        now = 62.0
        shown(6_000_000, 10_000_000)
    lines = capsys.readouterr().out.splitlines()
    assert "  0 MB/s  " in lines[0]
    assert "  2 MB/s  " in lines[1]
    assert lines[1].endswith("left 2.00 s")


def test_how_far_it_is_is_shown_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    terminal = choose(as_json=False, every=1, make_console=lambda: console)
    with terminal.transfer("loading") as shown, pytest.MonkeyPatch.context() as patch:
        assert shown is not None
        patch.setattr(shown, "_seconds", 0.0)
        shown(1 << 20, 2 << 20)
        with terminal.live(), terminal.transfer("saving") as other:
            assert other is not None
            patch.setattr(other, "_seconds", 0.0)
            other(2 << 20, 2 << 20)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1.0 MiB of 2.0 MiB" in text
    assert "2.0 MiB of 2.0 MiB" in text
