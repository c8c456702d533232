"""The documentation is complete, its links resolve, and the code in it runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import SECONDS

import zero_infinity
from zero_infinity import Config, Stats, ZeroInfinityError, errors
from zero_infinity.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_RUNNABLE = re.compile(r"<!-- runnable -->\n```python\n(.*?)```", re.DOTALL)
_FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def _read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Sphinx spell them."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_public_name_is_in_the_api_reference() -> None:
    documented = set(re.findall(r"^\.\. auto\w+:: zero_infinity\.(\w+)$", _read("api.md"), re.MULTILINE))
    assert documented == set(zero_infinity.__all__)


def test_every_public_name_has_a_docstring() -> None:
    missing = [name for name in zero_infinity.__all__ if not inspect.getdoc(getattr(zero_infinity, name))]
    assert missing == []


def test_every_setting_is_described() -> None:
    described = re.findall(r"^    (\w+): ", inspect.getdoc(Config) or "", re.MULTILINE)
    assert described == [field.name for field in dataclasses.fields(Config)]


def test_every_statistic_is_described() -> None:
    described = re.findall(r"^\| `(\w+)` \|", _read("api.md"), re.MULTILINE)
    assert described == [field.name for field in dataclasses.fields(Stats)]


def test_troubleshooting_has_every_error() -> None:
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ZeroInfinityError)]
    text = _read("troubleshooting.md")
    assert [kind.__name__ for kind in classes if f"`{kind.__name__}" not in text] == []


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    tree = inspect.getdoc(errors) or ""
    drawn = [(len(indent), name) for indent, name in re.findall(r"^([ │├└─]*)(\w+Error)\b", tree, re.MULTILINE)]
    parents: list[tuple[int, str]] = []
    for indent, name in drawn:
        while parents and parents[-1][0] >= indent:
            parents.pop()
        base = getattr(errors, name).__mro__[1].__name__
        assert not parents or base == parents[-1][1], name
        parents.append((indent, name))
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert {name for _, name in drawn} == classes


def test_every_command_is_in_the_command_line_reference() -> None:
    shown = re.findall(r"^```\{program-output\} zero-infinity ([\w-]+) --help$", _read("cli.md"), re.MULTILINE)
    assert set(shown) == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_runnable_code_runs(page: str, tmp_path: Path) -> None:
    blocks = _RUNNABLE.findall((ROOT / page).read_text(encoding="utf-8"))
    assert blocks
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", "\n".join(blocks)],
        cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


def test_the_map_of_modules_is_complete() -> None:
    spec = importlib.util.spec_from_file_location("module_map", DOCS / "module_map.py")
    assert spec is not None
    assert spec.loader is not None
    module_map = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module_map)
    text = _read("architecture.md")
    assert set(re.findall(r"<!-- modules: ([a-z_.]+) -->", text)) == module_map.packages()
    assert module_map.render(text) == text, "run python docs/module_map.py"


def test_the_chains_of_the_architecture_name_code_that_exists() -> None:
    chains = _read("architecture.md").split("## The way of ...")[1].split("\n## ")[0]
    package = ROOT / "src" / "zero_infinity"
    named = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", chains)
    assert len(named) > 50
    gone = []
    for file, name in named:
        text = (package / file).read_text(encoding="utf-8") if (package / file).exists() else ""
        parts = name.split(".") if name else []
        if not text or any(not re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE) for part in parts):
            gone.append(f"{file}: {name}")
    assert gone == []
