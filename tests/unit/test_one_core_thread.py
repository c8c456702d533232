"""Threads that compute on one core, and what they leave alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.patience import SECONDS
from torch import nn

import zero_infinity as zi
from zero_infinity.one_core_thread import use_one_core


def in_a_thread(action: object) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(action()))  # type: ignore[operator]
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_stays_on_one_core_also_when_others_set_their_number_before_and_after() -> None:
    before = torch.get_num_threads()

    def work() -> int:
        torch.set_num_threads(3)
        use_one_core()
        in_a_thread(lambda: torch.set_num_threads(before))
        torch.ones(1 << 22).add_(1)  # asks how many
        return torch.get_num_threads()

    assert in_a_thread(work) == 1
    assert torch.get_num_threads() == before
    assert in_a_thread(torch.get_num_threads) == before


def test_a_worker_that_updates_makes_no_team_of_threads(tmp_path: Path) -> None:
    """In a process of its own: teams of other tests would be counted."""
    program = f"""
import os, torch, zero_infinity as zi
from torch import nn
from zero_infinity.storage.block_store import BlockStore
torch.set_num_threads(2)
BlockStore.changeable = lambda self, block: False  # all is left to the worker
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model, optimizer = zi.prepare(model, optimizer, zi.Config(memory="6MiB", nvme={str(tmp_path)!r}))
for _ in range(3):
    model(torch.randn(64, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    zi.synchronize(model)
import threading
named = {{t.native_id for t in threading.enumerate()}}
print(len([t for t in map(int, os.listdir("/proc/self/task")) if t not in named]))
"""
    plain = "import torch, os; torch.set_num_threads(2); a = torch.randn(512, 512, requires_grad=True); "
    plain += "(a @ a).sum().backward(); torch.optim.AdamW([a], fused=True).step(); "
    plain += "print(len(os.listdir('/proc/self/task')) - 1)"
    unnamed = [
        int(
            subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=SECONDS
            ).stdout
        )
        for code in (plain, program)
    ]
    assert unnamed[1] == unnamed[0]


def test_preparing_a_model_never_sets_the_number_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Any such call makes attention slower from then on, in the whole process."""
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    model, optimizer = zi.prepare(
        model := nn.Linear(64, 64),
        torch.optim.AdamW(model.parameters()),
        zi.Config(memory="1MiB", nvme=str(tmp_path), compute_dtype="bfloat16"),
    )
    for _ in range(2):
        model(torch.randn(2, 64, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    zi.save(tmp_path / "checkpoint", model, optimizer)
    assert calls == []
