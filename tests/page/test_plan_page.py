"""The page of plans: what it shows is what the command says. Its script runs in node, and in a browser if there is one."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from zero_infinity.cli.main import main

SWEEP = ("batch=1,2,4,8,32", "accumulation=1,2,8", "interval=0,1", "hardware=rtx4090,dgx-a100,laptop")
MODEL = (
    "--layers",
    "4",
    "--hidden",
    "2048",
    "--heads",
    "16",
    "--vocabulary",
    "32000",
    "--seq",
    "512",
    "--memory",
    "4GiB",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "plans.html"
    sweeps = [argument for sweep in SWEEP for argument in ("--sweep", sweep)]
    assert main(["plan", *MODEL, *sweeps, "--page", str(file)]) == 0
    return file


def script_of(page: Path) -> str:
    found = re.search(r"<script>(.*)</script>", page.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_nothing_comes_from_a_network(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"https?://|<link|@import|src=", text)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_two_hundred_points_are_those_of_the_command(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(24)
    options = [sweep.partition("=")[2].split(",") for sweep in SWEEP]
    points = [[draw.randrange(len(values)) for values in options] for _ in range(200)]
    asked = f"{script_of(page)};console.log(JSON.stringify({json.dumps(points)}.map((p) => lookup(GRID, p))))"
    shown = json.loads(subprocess.run(["node", "-e", asked], capture_output=True, text=True, check=True).stdout)
    seen: dict[tuple[int, ...], dict] = {}
    for point, plan in zip(points, shown, strict=True):
        if tuple(point) not in seen and len(seen) < 40:  # each of these plans is made once more, by the command
            batch, accumulation, interval, hardware = (values[at] for values, at in zip(options, point, strict=True))
            arguments = ("--batch", batch, "--accumulation", accumulation, "--interval", interval)
            code = main(["plan", *MODEL, *arguments, "--hardware", hardware, "--json"])
            printed = capsys.readouterr().out
            seen[tuple(point)] = json.loads(printed)["step"] if code == 0 else {}
        expected = seen.get(tuple(point))
        if expected is None:
            continue
        if not expected:
            assert plan["problem"] is not None
            continue
        names = ("seconds", "tokens_per_second", "compute_seconds", "bottleneck")
        assert {name: plan[name] for name in names} == {name: expected[name] for name in names}


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_a_plan(page: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.search(r"tokens/s</th><td>[\d.]+", shown)
    assert "It does not fit" not in shown
