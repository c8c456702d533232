"""A port for ranks to meet at, which nobody takes before they do."""

from __future__ import annotations

import random
import socket

# Below those that the kernel gives to connections: one of these could be somebody's before rank 0 listens on it.
_FIRST, _LAST = 20_000, 32_000
_TRIES = 100


def free_port() -> int:
    for _ in range(_TRIES):
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {_FIRST} to {_LAST} was free in {_TRIES} tries")
