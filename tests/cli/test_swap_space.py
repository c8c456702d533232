"""Swap space that nobody asked for is temporary."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from zero_infinity.cli.swap_space import SWAP_PREFIX, with_swap_space
from zero_infinity.config import Config
from zero_infinity.errors import ConfigError


def test_it_is_made_in_the_current_directory_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with with_swap_space(Config(), None) as config:
        assert [path.name.startswith(SWAP_PREFIX) for path in config.nvme] == [True]
        assert config.nvme[0].is_dir()
    assert not [*tmp_path.iterdir()]


def test_what_was_asked_for_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with with_swap_space(Config(), ["none"]) as config:
        assert config.nvme == ()
    with with_swap_space(Config(nvme=tmp_path), None) as config:
        assert config.nvme == (tmp_path,)


def test_a_directory_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(ConfigError, match="cannot create a swap directory"), with_swap_space(Config(), None):
        pass
