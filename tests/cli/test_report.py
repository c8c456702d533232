from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.patience import SECONDS

from zero_infinity.cli.main import main
from zero_infinity.cli.report_data import page_data
from zero_infinity.trace import Category, Trace


def small() -> Trace:
    trace = Trace("a </script> step", {"RAM": 1000})
    trace.span("layer.0", Category.COMPUTE, "compute", 10.0, 2.0)
    trace.span("layer.1", Category.FETCH, "NVMe", 10.0, 3.0, 6_000_000_000)
    trace.span("layer.1", Category.WAIT, "wait", 12.0, 1.0)
    trace.span("layer.1", Category.COMPUTE, "compute", 13.0, 1.0)
    trace.held("RAM", 10.5, 700)
    trace.held("RAM", 13.0, 900)
    return trace


def test_numbers() -> None:
    data = page_data(small())
    assert data["seconds"] == 4.0
    assert [lane["name"] for lane in data["lanes"]] == ["compute", "wait", "NVMe"]
    assert data["lanes"][0]["spans"][0] == [0.0, 2.0, "compute", "layer.0", 0]
    assert data["traffic"] == [{"link": "NVMe", "bytes": 6_000_000_000, "busy": 0.75, "busy_seconds": 3.0}]
    assert data["waits"] == [{"module": "layer.1", "seconds": 1.0}]
    assert data["memory"][0]["budget"] == 1000
    assert max(point[1] for point in data["memory"][0]["points"]) == 900


def test_many_short_spans_are_merged_and_nothing_is_lost() -> None:
    trace = Trace()
    for number in range(50_000):
        trace.span(f"m{number}", Category.FETCH, "NVMe", number * 1e-3, 0.9e-3, 10)
        trace.held("RAM", number * 1e-3, number)
    data = page_data(trace)
    (lane,) = data["lanes"]
    assert len(lane["spans"]) < 10_000
    assert sum(span[4] for span in lane["spans"]) == 500_000
    assert len(data["memory"][0]["points"]) <= 4001
    assert max(point[1] for point in data["memory"][0]["points"]) == 49_999


def test_waits_beyond_the_longest_are_summed() -> None:
    trace = Trace()
    for number in range(30):
        trace.span(f"m{number}", Category.WAIT, "wait", number, 0.01 * (number + 1))
    waits = page_data(trace)["waits"]
    assert waits[0]["module"] == "m29"
    assert waits[-1]["module"] == "10 others"
    assert sum(wait["seconds"] for wait in waits) == pytest.approx(0.01 * 465)


def test_the_page_is_self_contained_and_cannot_be_broken_by_a_name(tmp_path: Path) -> None:
    small().write(tmp_path / "t.json")
    assert main(["report", str(tmp_path / "t.json")]) == 0
    page = (tmp_path / "t.html").read_text()
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", page)
    assert page.count("</script>") == 2
    embedded = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1])["title"] == "a </script> step"


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small().write(tmp_path / "t.json")
    assert main(["report", str(tmp_path / "t.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["wait"] == 1.0


def test_an_empty_trace(tmp_path: Path) -> None:
    Trace().write(tmp_path / "t.json")
    assert main(["report", str(tmp_path / "t.json"), "-o", str(tmp_path / "page.html")]) == 0
    assert "A training run" in (tmp_path / "page.html").read_text()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "no.json")]) == 2
    small().write(tmp_path / "t.json")
    assert main(["report", str(tmp_path / "t.json"), "-o", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["simulated", "empty"])
def test_in_a_browser(content: str, tmp_path: Path) -> None:
    """Chromium draws it: the script ran to its end, every part is filled, and the lanes are on the screen."""
    browser = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if browser is None:
        pytest.skip("no Chromium here")
    if content == "simulated":
        arguments = ["--model", "gpt2-124m", "--hardware", "laptop", "--memory", "512MiB"]
        assert main(["simulate", *arguments, "--trace", str(tmp_path / "t.json")]) == 0
    else:
        Trace().write(tmp_path / "t.json")
    assert main(["report", str(tmp_path / "t.json"), "-o", str(tmp_path / "page.html")]) == 0
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--window-size=1240,1400"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    result = subprocess.run(
        [browser, *flags, profile, "--dump-dom", (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    if result.returncode or not result.stdout.strip():
        pytest.skip(f"Chromium does not start here: {result.stderr.strip()[-200:]}")
    page = result.stdout
    assert 'data-drawn="yes"' in page  # the last line of the script
    assert "Uncaught" not in result.stderr
    if content == "simulated":
        assert re.search(r'id="figures">.*computing', page, re.DOTALL)
        assert re.search(r'id="memory"><canvas', page)
        assert re.search(r'id="traffic"><table>.*NVMe', page, re.DOTALL)
        picture = tmp_path / "page.png"
        command = [browser, *flags, profile, f"--screenshot={picture}", (tmp_path / "page.html").as_uri()]
        subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
        pixels = pytest.importorskip("matplotlib.image").imread(picture)[..., :3]
        for colour in ("4c78a8", "54a24b", "f58518"):  # compute, fetch, write-back
            expected = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
            assert (abs(pixels - expected).max(axis=-1) < 0.02).sum() > 100
