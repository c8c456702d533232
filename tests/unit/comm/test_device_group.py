"""Threads launch collectives in the order of their numbers, whoever comes first."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.comm.device_group import DeviceGroup
from zero_infinity.errors import EngineClosedError


def launches(number: int) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    return [([], [torch.tensor(number)])]


@given(st.permutations(range(5)))
def test_launches_are_made_by_number(arrivals: list[int]) -> None:
    made: list[int] = []
    group = DeviceGroup(lambda _, sent: made.append(int(sent[0])))
    assert [group.next_number() for _ in arrivals] == sorted(arrivals)
    threads = [threading.Thread(target=group.launch, args=(number, launches(number))) for number in arrivals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == sorted(arrivals)


def test_a_launch_that_fails_lets_later_ones_be_made() -> None:
    made: list[int] = []

    def exchange(_: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        if int(sent[0]) == 0:
            raise RuntimeError("no such communicator")
        made.append(int(sent[0]))

    group = DeviceGroup(exchange)
    with pytest.raises(RuntimeError, match="no such communicator"):
        group.launch(0, launches(0))
    group.launch(1, launches(1))
    assert made == [1]


def test_a_thread_that_waits_for_an_earlier_launch_gets_an_error_when_the_engine_ends() -> None:
    group = DeviceGroup(lambda _, __: None)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            group.launch(1, launches(1))
        except EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    group.cut()
    thread.join()
    assert len(errors) == 1
    with pytest.raises(EngineClosedError):
        group.launch(0, launches(0))
