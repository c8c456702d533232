"""The order of turns: contenders take one step each, and each round begins with the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from benchmarks.turns.child_process import machine_cpu_seconds
from benchmarks.turns.contender import Contender
from zero_infinity.byte_sizes import format_seconds

# A step is quiet when other processes used at most this part of one core during it.
QUIET_CORES = 0.1
_QUIET_SECONDS = 0.5  # clock ticks of 10 ms have to add up


def compete(
    contenders: Sequence[Contender],
    num_rounds: int,
    say: Callable[[str], None],
    *,
    drain: bool = False,
    patience: float = 0.0,
) -> None:
    """Let everybody take all steps. Whatever ends this, no process is left."""
    try:
        for contender in contenders:
            say(f"starting: {contender.setting.name}")
            # One after the other, else one's start is measured while another's imports run.
            contender.launch()
            contender.greet()
            contender.start()
            if contender.error is not None:
                say(f"{contender.setting.name} failed: {contender.error}")
        for number in range(num_rounds):
            first = number % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                if contender.alive:
                    _wait_for_quiet(patience)
                    contender.step(drain=drain)
                    if contender.error is not None:
                        say(f"{contender.setting.name} failed: {contender.error}")
            say(f"round {number + 1}/{num_rounds}: " + "  ".join(map(_last_step, contenders)))
        for contender in contenders:
            contender.finish()
    finally:
        for contender in contenders:
            contender.kill()


def _wait_for_quiet(patience: float) -> None:
    """Until the machine idles (contenders are stopped now, so what it does is others'), or `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        before = machine_cpu_seconds()
        time.sleep(_QUIET_SECONDS)
        if machine_cpu_seconds() - before <= QUIET_CORES * _QUIET_SECONDS:
            return


def _last_step(contender: Contender) -> str:
    if contender.error is not None:
        return f"{contender.setting.name}: failed"
    return f"{contender.setting.name}: {format_seconds(contender.samples[-1].seconds)}"
