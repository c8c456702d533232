"""Ports that nobody else takes between the moment when they are found and the one when they are used."""

from __future__ import annotations

import itertools
import os
import socket

_RANGE = 500
_offsets = itertools.count(os.getpid())  # another run of the tests begins elsewhere


def free_port() -> int:
    """A port of this machine that is free, and stays so.

    It is below those that the kernel gives to connections, and each worker of pytest-xdist has a range of its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for _ in range(_RANGE):
        port = 10_000 + _RANGE * (worker % 40) + next(_offsets) % _RANGE
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError("no port is free")
