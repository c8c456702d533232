"""`python -m benchmarks train`, run for real on a tiny model, and its parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from support.patience import SECONDS

from benchmarks.__main__ import main
from benchmarks.numbers.contest_tables import train_table
from benchmarks.provenance import Provenance
from benchmarks.train import command as train
from benchmarks.train.report import Report
from benchmarks.turns import rounds
from benchmarks.turns.contender import Contender
from benchmarks.turns.messages import FinishReport, Race, Sample, Setting
from zero_infinity.models.presets import Shape

TINY = "--layers=2 --hidden=64 --batch=2 --seq=32 --steps=2 --warmup=1 --timeout=240".split()  # noqa: SIM905 - as typed
RACE = Race(layers=1, hidden=64, heads=1, batch=1, seq=8, seed=0, lr=1e-3, num_steps=4)

# Speaks the protocol without torch. Takes two steps; what happens then is the test's choice.
FAKE = """
import json, sys, os, time, signal
def say(**message): print(json.dumps(message), flush=True)
say(process=os.getpid())
sys.stdin.readline()
say(num_parameters=1, weight_bytes=4, build_seconds=0.0, prepare_seconds=0.0, torch="none", num_threads=1)
for number, line in enumerate(sys.stdin):
    if json.loads(line)["do"] == "finish":
        say(peak_rss=1, memory_peak=0, num_deviations=0, weights="0")
        break
    if number == 2:
        {fault}
    say(seconds=1.0, cpu_seconds=1.0, waited_seconds=0.0, drain_seconds=0.0, bytes_read=0, bytes_written=0,
        others_cpu_seconds=0.0, loss=0.5)
"""


def fake(name: str, fault: str = "pass", timeout: float = 30.0) -> Contender:
    command = (sys.executable, "-c", FAKE.format(fault=fault))
    return Contender(RACE, Setting(name), timeout=timeout, command=command)


def report_of(contenders: Sequence[Contender]) -> Report:
    return Report(
        Provenance("bench", "today", None, {}), {"layers": 1, "hidden": 1, "batch": 1, "seq": 1}, 0, False, contenders
    )


def with_losses(name: str, losses: Sequence[float], seconds: float = 1.0) -> Contender:
    contender = fake(name)
    contender.samples = [Sample(seconds, seconds, 0.1, 0.0, 0, 0, 0.0, loss) for loss in losses]
    return contender


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_real_contenders_are_equal_and_an_impossible_budget_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that spin for each other cost seconds on a busy machine
    (tmp_path / "swap").mkdir()
    places = ["--nvme", str(tmp_path / "swap"), "--out", str(tmp_path / "out")]
    assert main(["train", *TINY, "--budgets", "fits,1/2,1/10000", *places, "--json"]) == 1
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report == json.loads((tmp_path / "out" / "train.json").read_text())
    assert report["differences"] == []
    plain, fits, half, impossible = report["contenders"]
    assert [c["name"] for c in report["contenders"]] == ["plain", "RAM, fits", "NVMe, 1/2", "NVMe, 1/10000"]
    for contender in (plain, fits, half):
        assert contender["error"] is None
        assert len(contender["samples"]) == 3
        assert [s["loss"] for s in contender["samples"]] == [s["loss"] for s in plain["samples"]]
        assert all(s["seconds"] > 0 and s["cpu_seconds"] > 0 for s in contender["samples"])
        assert contender["finish"]["weights"] == plain["finish"]["weights"]
        assert contender["finish"]["peak_rss"] > 50 << 20
    assert plain["figures"]["wall"]["median"] == 1.0
    assert 0 < fits["finish"]["memory_peak"] <= fits["memory"]
    assert 0 < half["finish"]["memory_peak"] <= half["memory"]
    assert sum(s["bytes_written"] for s in half["samples"]) > 0
    assert "memory" in impossible["error"] or "needs" in impossible["error"]
    assert impossible["samples"] == []
    assert "round 3/3" in output.err
    text = (tmp_path / "out" / "train.md").read_text()
    assert "| NVMe, 1/2 |" in text
    assert "Failed: NVMe, 1/10000: " in text
    assert os.listdir(tmp_path / "swap") == []
    table = train_table(report)
    assert "| NVMe, 1/2 | " in table
    assert "equal, bit for bit" in table
    assert "failed: " in table


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "died of SIGKILL"),
        ("sys.exit('out of luck')", "ended with exit code 1: out of luck"),
        ("say(error='the disk is full'); time.sleep(60)", "the disk is full"),
        ("print('nonsense', flush=True); time.sleep(60)", "Expecting value"),
        ("say(seconds=1)", "missing"),
    ],
)
def test_a_contender_that_fails_is_reported_and_the_others_go_on(
    fault: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    contenders = [fake("plain"), fake("broken", fault), fake("other")]
    rounds.compete(contenders, 4, lambda text: None)
    assert [len(c.samples) for c in contenders] == [4, 2, 4]
    assert [c.error is None for c in contenders] == [True, False, True]
    report = report_of(contenders)
    report.print(Console())
    output = capsys.readouterr().out
    assert message in output.replace("\n", " ")
    assert "(after 2 steps)" in output
    assert json.loads(report.to_json())["contenders"][1]["error"]


def test_a_contender_that_hangs_is_given_up_and_ended() -> None:
    contender = fake("hanging", "time.sleep(60)", timeout=1.0)
    contender.launch()
    contender.greet()
    contender.start()
    pid = contender.pid
    assert pid is not None
    for _ in range(3):
        contender.step(drain=False)
    assert contender.error == "no answer in 1 s"
    assert not is_running(pid)


def test_between_turns_a_contender_stands_still() -> None:
    contender = fake("stopped")
    contender.launch()
    contender.greet()
    contender.start()
    try:
        state = Path(f"/proc/{contender.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "T"
    finally:
        contender.kill()


def test_a_turn_waits_for_quiet_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.0, 5.0, 5.0, 10.0, 10.0, 10.0])  # seconds of CPU, before and after each look
    monkeypatch.setattr(rounds, "machine_cpu_seconds", lambda: next(busy))
    monkeypatch.setattr(rounds, "_QUIET_SECONDS", 0.01)
    rounds._wait_for_quiet(10.0)
    assert next(busy, None) is None
    seconds = iter(range(1000))
    monkeypatch.setattr(rounds, "machine_cpu_seconds", lambda: next(seconds))
    rounds._wait_for_quiet(0.05)
    assert next(seconds) > 2


def test_every_round_begins_with_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    contenders = [with_losses(name, [0.0]) for name in "abc"]
    for method in ("launch", "greet", "start", "finish"):
        monkeypatch.setattr(Contender, method, lambda self: None)
    monkeypatch.setattr(Contender, "step", lambda self, drain: turns.append(self.setting.name))
    rounds.compete(contenders, 4, lambda text: None)
    assert "".join(turns) == "abcbcacababc"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_process_is_left_when_the_command_is_ended(number: int, code: int, tmp_path: Path) -> None:
    script = (
        "import sys; from benchmarks import __main__; from benchmarks.turns import contender\n"
        f"contender.Contender.__init__.__kwdefaults__['command'] = (sys.executable, '-c', {PARENTED!r})\n"
        "sys.exit(__main__.main(['train', '--steps', '100000', '--budgets', 'fits']))"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    with command:
        assert command.stderr is not None
        while "round 2/" not in command.stderr.readline():
            assert command.poll() is None
        workers = children_of(command.pid)
        assert len(workers) == 2
        command.send_signal(number)
        assert command.wait(SECONDS) == code
    deadline = time.monotonic() + 5
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, workers))
    if number != signal.SIGKILL:
        assert os.listdir(tmp_path) == []


# Like FAKE, and ends with its parent as the real one does.
PARENTED = "import os; from benchmarks.turns.child_process import end_with\nend_with(os.getppid())" + FAKE.format(
    fault="pass"
)


def test_a_difference_is_found_to_the_last_bit_and_ends_in_failure() -> None:
    nan = float("nan")
    plain, other = with_losses("plain", [1.0, 2.0, nan]), with_losses("other", [1.0, 2.0000000000000004, nan])
    assert report_of([plain, with_losses("same", [1.0, 2.0, nan])]).differences() == []
    assert report_of([plain, other]).differences() == [
        "other: the loss of step 2 is 2.0000000000000004, plain PyTorch's 2.0 (1 of 3 steps differ)"
    ]
    plain.finish_info = FinishReport(1, 0, 0, "aa")
    same = with_losses("same", [1.0, 2.0, nan])
    same.finish_info = FinishReport(1, 0, 0, "bb")
    assert report_of([plain, same]).differences() == ["same: every loss is equal, but the final weights differ"]


def test_ratios_are_taken_within_a_round() -> None:
    plain, other = with_losses("plain", [0.0] * 4), with_losses("other", [0.0] * 4)
    plain.samples = [Sample(s, s, 0, 0, 0, 0, 0, 0.0) for s in (1.0, 10.0, 1.0, 2.0)]
    other.samples = [Sample(s, s / 2, s / 4, 0, 8, 4, 0, 0.0) for s in (1.1, 10.0, 1.3, 2.4)]
    figures = report_of([plain, other]).figures(other)
    assert figures is not None
    assert figures.wall is not None
    assert figures.cpu is not None
    assert figures.wall.median == pytest.approx(1.15)
    assert figures.wall.minimum == pytest.approx(1.0)
    assert figures.wall.best == pytest.approx(1.1)
    assert figures.cpu.median == pytest.approx(0.575)
    assert figures.wait_fraction == pytest.approx(0.25)
    assert (figures.read_bytes, figures.written_bytes) == (8, 4)


def test_quiet_steps_are_those_that_others_did_not_disturb() -> None:
    plain, other = with_losses("plain", [0.0] * 3), with_losses("other", [0.0] * 3)
    plain.samples = [Sample(s, s, 0, 0, 0, 0, others, 0.0) for s, others in ((9.0, 5.0), (1.0, 0.0), (2.0, 0.1))]
    other.samples = [Sample(s, s, 0, 0, 0, 0, others, 0.0) for s, others in ((3.0, 0.0), (9.0, 1.0), (9.0, 2.0))]
    figures = report_of([plain, other]).figures(other)
    assert figures is not None
    assert figures.quiet is not None
    assert (figures.quiet.seconds, figures.quiet.ratio, figures.quiet.num_steps) == (3.0, 2.0, 1)
    other.samples = other.samples[1:]
    disturbed = report_of([plain, other]).figures(other)
    assert disturbed is not None
    assert disturbed.quiet is None


def test_budgets_are_parts_of_the_states() -> None:
    states = 12 * Shape(1, 64, 1, 8).num_parameters
    settings = train.make_settings("plain, fits,1/8,0.5", RACE, "/nvme")
    assert settings == [
        Setting("plain"),
        Setting("plain again"),
        Setting("RAM, fits", 2 * states, None, 2.0),
        Setting("NVMe, 1/8", states // 8, "/nvme", 0.125),
        Setting("NVMe, 0.5", states // 2, "/nvme", 0.5),
    ]


def test_mistakes_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--budgets", "1/0"], "'1/0' is not a budget"),
        (["--budgets", "some"], "'some' is not a budget"),
        (["--budgets", "1/2,1/2"], "'1/2' is there twice"),
        (["--nvme", "/missing"], "--nvme /missing is no directory"),
        (["--steps", "0"], "'0' is not an integer of at least 1"),
    ):
        assert main(["train", *words]) == 2
        assert message in capsys.readouterr().err
