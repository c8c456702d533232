"""`zero-infinity train` on several ranks: processes with what torchrun puts into their environment, and torchrun itself.

Most tests fork their ranks from a server that has torch loaded; the environment is the same as under torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patience import wait_until
from support.rank_command import SECONDS, Running

from zero_infinity.cli import ranks
from zero_infinity.models import text

TINY = ["--layers", "3", "--hidden", "64", "--heads", "2", "--seq", "32", "--warmup", "2", "--data", "text"]
TIGHT = ["--memory", "1300KiB", "--nvme", "swap"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swap").mkdir()
    (tmp_path / "text").write_text("to be or not to be, that is the question; " * 200)
    return tmp_path


def train(folder: Path, num_ranks: int, *argv: str, **own: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The steps and the summary of a run that ends well."""
    first, *others = Running(folder, num_ranks, *argv, "--json", **own).end()
    assert all(ended.code == 0 for ended in (first, *others)), (first.err, others)
    assert all((ended.out, said(ended.err)) == ("", "") for ended in others)
    assert first.err == ""
    assert os.listdir(folder / "swap") == []
    *steps, summary = map(json.loads, first.out.splitlines())
    return steps, summary


def said(errors: str) -> str:
    """Without torch's own warning that the store is gone: rank 0 keeps it here, and may end first."""
    return errors.partition("[rank")[0]


def losses(steps: list[dict[str, Any]]) -> list[float]:
    return [step["loss"] for step in steps]


def test_ranks_train_what_one_alone_trains_on_the_joined_batch(here: Path) -> None:
    common = [*TINY, "--steps", "4", "--accumulate", "2"]
    alone, _ = train(here, 1, *common, "--batch", "6", "--nvme", "none")
    larger = ["--memory", "2MiB"]
    together, summary = train(here, 2, *common, "--batch", "3", "--stage", "3", *TIGHT, rank1=larger)
    assert losses(together) == pytest.approx(losses(alone), abs=2e-5)
    assert summary["ranks"] == 2
    assert [figures["rank"] for figures in summary["by_rank"]] == [0, 1]
    assert [figures["memory_budget"] for figures in summary["by_rank"]] == [1300 << 10, 2 << 20]


def test_the_summary_counts_bytes_by_kind_and_exchange(here: Path) -> None:
    """Per step (N-1)/N of the parameters' bytes for each pass over them: gradients once, parameters once or twice."""
    common = [*TINY, "--steps", "3", "--batch", "2"]
    steps, summary = train(here, 2, *common, "--stage", "3", *TIGHT)
    half = summary["parameters"] * 4 / 2
    assert steps[-1]["ranks"] == 2
    assert summary["memory_peak"] <= summary["memory_budget"] == 1300 << 10
    for figures in summary["by_rank"]:
        assert figures["memory_peak"] <= figures["memory_budget"]
        sent = figures["sent_bytes_per_step"]
        assert set(sent) == {"parameter gather", "gradient sum"}
        assert sent["gradient sum"] == pytest.approx(half, rel=0.01)
        assert half * 0.99 <= sent["parameter gather"] <= 2.5 * half  # copies of the last layers are kept for backward
        assert figures["exchanges_per_step"].keys() == sent.keys()
        assert figures["parameter_bytes"] == pytest.approx(half, rel=0.1)  # whole pages
        assert figures["optimizer_bytes"] == pytest.approx(2 * half, rel=0.01)
        assert figures["gradient_bytes"] == pytest.approx(half, rel=0.01)
        assert figures["bucket_bytes"] > 0
        assert figures["read_bytes"] > 0
    assert summary["read_bytes"] == sum(figures["read_bytes"] for figures in summary["by_rank"])
    for stage, second, parts in (("0", "gradient gather", (4, 2)), ("2", "parameter gather", (2, 1))):
        same, summary = train(here, 2, *common, "--stage", stage, "--nvme", "none")
        assert losses(same) == losses(steps)
        figures = summary["by_rank"][1]
        sent = figures["sent_bytes_per_step"]
        assert sent == {"gradient sum": pytest.approx(half, rel=0.01), second: pytest.approx(half, rel=0.01)}
        held = [figures["optimizer_bytes"], figures["gradient_bytes"]]
        assert held == pytest.approx([part * half for part in parts], rel=0.01)
        assert figures["parameter_bytes"] == pytest.approx(2 * half, rel=0.1)


def test_a_model_of_several_budgets_is_built_over_ranks(here: Path) -> None:
    """Room for whole layers comes out of the budget while the model is built, too."""
    _, summary = train(here, 2, *TINY, "--layers", "24", "--steps", "1", "--batch", "2", *TIGHT)
    assert summary["state_ratio"] > 5
    assert all(figures["memory_peak"] <= figures["memory_budget"] for figures in summary["by_rank"])


def test_batches_of_ranks_are_the_slices_of_one(here: Path) -> None:
    corpus = text.collect([Path("text")])
    whole = text.ByteBatches(corpus, 6, 16, seed=3)
    parts = [text.ByteBatches(corpus, 2, 16, seed=3, rank=rank, num_ranks=3) for rank in range(3)]
    for _ in range(3):
        joined = [torch.cat(tensors) for tensors in zip(*(next(part) for part in parts), strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(joined, next(whole), strict=True))


def test_a_mistake_that_all_make_is_told_once(here: Path) -> None:
    for argv, message in (
        (["--steps", "0"], "argument --steps: '0' is not an integer of at least 1"),
        (["--preset", "26M"], "did you mean 25M?"),
        (["--data", "missing"], "missing does not exist"),
        ([*TINY, "--nvme", "none", "--memory", "300KiB"], "CapacityError: "),
    ):
        ended = Running(here, 2, *argv).end()
        assert [e.code for e in ended] == [1 if message.startswith("Capacity") else 2] * 2
        told = "".join(e.err for e in ended)
        assert told.count(message) == 1, told
        assert "Traceback" not in told
        assert [e.out for e in ended] == ["", ""]


def test_the_mistake_of_one_rank_is_told_by_that_rank(here: Path) -> None:
    first, second = Running(here, 2, *TINY, "--steps", "2", rank1=["--nvme", "missing"]).end()
    assert (first.code, first.err, second.code) == (1, "", 2)
    assert second.err.startswith("rank 1: ConfigError: nvme: ")
    assert "missing does not exist" in second.err
    assert second.err.count("Error") == 1
    first, second = Running(here, 2, *TINY, "--steps", "2", "--nvme", "none", rank1=["--lr", "0.5"]).end()
    assert [first.code, second.code] == [2, 2]
    assert (first.err + second.err).count("rank 1 differs from rank 0 in the command's options") == 1
    assert "lr=0.5" in first.err + second.err


def _fail_at_three(rank: int) -> None:
    real = text.ByteBatches.__next__

    def fail(self: text.ByteBatches) -> Any:
        if rank == 1 and self.position == 2:
            raise text.StorageError(5, "data: the drive has gone", "text")
        return real(self)

    text.ByteBatches.__next__ = fail  # type: ignore[method-assign]


def _die_at_three(rank: int) -> None:
    real = text.ByteBatches.__next__

    def die(self: text.ByteBatches) -> Any:
        if rank == 1 and self.position == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self)

    text.ByteBatches.__next__ = die  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [_fail_at_three, _die_at_three])
def test_a_lost_rank_ends_the_others(change: Callable[[int], None], here: Path) -> None:
    first, second = Running(here, 2, *TINY, *TIGHT, "--steps", "1000", change=change).end()
    if change is _fail_at_three:
        assert (second.code, second.err) == (1, "rank 1: StorageError: data: the drive has gone\n")
    else:
        assert second.code == -signal.SIGKILL
    assert first.code == 1
    assert first.err.startswith("rank 0: LostRankError: rank 1 did not answer while rank 0 was waiting for")
    assert "Traceback" not in first.err
    assert os.listdir(here / "swap") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(number: signal.Signals, here: Path) -> None:
    running = Running(here, 2, *TINY, *TIGHT, "--steps", "1000000", "--json")
    running.await_steps(2)
    os.kill(running.processes[1].pid or 0, number)
    first, second = running.end()
    assert first.code == second.code == 128 + number
    *steps, summary = map(json.loads, first.out.splitlines())
    assert summary["interrupted_by"] == number.name
    assert summary["steps"] == len(steps)
    assert first.err == f"stopped by {number.name} after step {len(steps)} of 1000000\n"
    assert (second.out, said(second.err)) == ("", "")
    assert os.listdir(here / "swap") == []


def test_a_signal_ends_a_rank_that_waits_for_one_that_never_joins(here: Path) -> None:
    waiting = Running(here, 2, *TINY, "--steps", "4", *TIGHT, change=_never_joins)
    waiting.await_steps(0)
    wait_until((here / "joins").exists)
    time.sleep(0.5)  # it is inside torch now, or ends all the same
    os.kill(waiting.processes[0].pid or 0, signal.SIGTERM)
    assert waiting.end()[0].code in (-signal.SIGTERM, 128 + signal.SIGTERM)


def _never_joins(rank: int) -> None:
    if rank:
        os._exit(0)
    real = ranks._join

    def join(*arguments: Any) -> Any:
        Path("joins").touch()
        return real(*arguments)

    ranks._join = join


def test_torchrun(here: Path) -> None:
    """The command of the README; and SIGTERM to torchrun, which it hands on."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "zero_infinity", "train", *TINY, "--memory", "1300KiB", "--stage", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--steps", "1000000", "--log-every", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert "2 ranks, stage 3" in process.stdout.readline()
        assert process.stdout.readline().startswith("step       1/1000000")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert errors.count("stopped by SIGTERM after step") == 1
    rows = [line for line in output.splitlines() if not line.startswith("step")]
    assert [row.split("  ")[0] for row in rows][-4:] == [
        "ranks",
        "on each rank",
        "parameter gather per step",
        "gradient sum per step",
    ]
    assert sorted(os.listdir(here)) == ["swap", "text"]
