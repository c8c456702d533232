from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.turns.process_usage import usage

MIB = 1 << 20
# A parent that does nothing, and a child that holds 64 MiB, writes 8 MiB past the page cache's laziness, and works.
CHILD = """
import os, sys
held = bytearray(os.urandom(1) * (64 << 20))
with open(sys.argv[1], "wb") as file:
    file.write(bytes(8 << 20)); file.flush(); os.fsync(file.fileno())
sum(range(3_000_000))
print("done", flush=True)
sys.stdin.read()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"


def test_children_count(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, CHILD, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        found = usage(process.pid)
        process.communicate()
    assert found.peak_rss > 64 * MIB
    assert found.written_bytes >= 8 * MIB
    assert found.cpu_seconds > 0.02


def test_a_process_that_is_gone_counts_as_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    found = usage(process.pid)
    assert (found.cpu_seconds, found.read_bytes, found.written_bytes, found.peak_rss) == (0, 0, 0, 0)
    assert usage(os.getpid()).peak_rss > 0
