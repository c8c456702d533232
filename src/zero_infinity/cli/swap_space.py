"""Swap space of a command that was given none: a temporary directory in the current one, removed at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_infinity.config import Config
from zero_infinity.errors import ConfigError

SWAP_PREFIX = ".zero-infinity-swap-"


@contextmanager
def with_swap_space(config: Config, asked: list[str] | None) -> Iterator[Config]:
    """The settings; without --nvme (`asked`), swap space goes to a temporary directory."""
    if config.nvme or asked is not None:
        yield config
        return
    try:
        directory = tempfile.TemporaryDirectory(prefix=SWAP_PREFIX, dir=".")
    except OSError as error:
        raise ConfigError(
            f"cannot create a swap directory in {Path.cwd()}: {error.strerror}\n"
            "  fix:   --nvme DIR on a drive, or --nvme none for RAM only"
        ) from None
    with directory as path:
        yield config.replace(nvme=path)
