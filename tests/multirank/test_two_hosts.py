"""Two hosts as network namespaces: torchrun's rendezvous over their link, a swap directory each.

The interface's own byte counters are what the engine's counters are held against.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.rank_command import SECONDS, Running

MODEL = ["--layers", "2", "--hidden", "128", "--heads", "2", "--seq", "32", "--batch", "2", "--warmup", "2"]
STEPS = 8
# What may be on the wire beside the payload: TCP/IP/Ethernet headers and acknowledgements (under 1% with the large
# segments of a virtual link), and for each exchange gloo's headers and the agreement that precedes it.
HEADERS = 1.01
BYTES_AN_EXCHANGE = 1024
# Rendezvous, store, process groups (several sockets each), and agreements on settings.
START_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace."""

    name: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def bytes_sent(self) -> int:
        shown = subprocess.run(
            ["ip", "-n", self.name, "-s", "-j", "link", "show", self.interface],
            capture_output=True,
            text=True,
            check=True,
        )
        return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command here")
    number = os.getpid() % 250
    pair = tuple(
        Host(f"zi-{os.getpid()}-{side}", f"zi{os.getpid()}{side}", f"10.219.{number}.{position}")
        for position, side in enumerate("ab", start=1)
    )
    try:
        try:
            for host in pair:
                _ip("netns", "add", host.name)
            _ip("link", "add", pair[0].interface, "netns", pair[0].name, "type", "veth",
                "peer", "name", pair[1].interface, "netns", pair[1].name)  # fmt: skip
            for host in pair:
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
                _ip("-n", host.name, "link", "set", host.interface, "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield pair[0], pair[1]
    finally:
        for host in pair:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def _start(host: Host, number: int, rendezvous: Host, swap: Path, options: list[str]) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"{rendezvous.address}:29400", "--rdzv-conf", f"is_host={int(number == 0)}",
                "--local-addr", host.address]  # fmt: skip
    return subprocess.Popen(
        host.command(sys.executable, *launcher, "-m", "zero_infinity", "train", *options, "--nvme", str(swap)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": host.interface},
    )


def _train(hosts: tuple[Host, Host], folder: Path, options: list[str]) -> list[dict[str, Any]]:
    """What the first rank prints; which host that is, the rendezvous decides."""
    running = []
    for number, host in enumerate(hosts):
        swap = folder / f"swap-{host.name}"
        swap.mkdir()
        running.append(_start(host, number, hosts[0], swap, options))
    outputs = []
    try:
        for process in running:
            output, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors
            outputs.append(output)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    for host in hosts:
        assert os.listdir(folder / f"swap-{host.name}") == []
    assert "" in outputs
    return [json.loads(line) for line in "".join(outputs).splitlines()]


def test_two_hosts(hosts: tuple[Host, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("to be or not to be, that is the question; " * 200)
    options = [*MODEL, "--data", "text", "--steps", str(STEPS), "--memory", "4MiB", "--stage", "3", "--json"]
    before = [host.bytes_sent() for host in hosts]
    *steps, summary = _train(hosts, tmp_path, options)
    on_the_wire = [host.bytes_sent() - bytes_ for host, bytes_ in zip(hosts, before, strict=True)]

    (tmp_path / "one").mkdir()
    first, _ = Running(tmp_path, 2, *options, "--nvme", "one").end()
    *one_host, alone = map(json.loads, first.out.splitlines())
    assert [step["loss"] for step in steps] == [step["loss"] for step in one_host]
    assert summary["ranks"] == alone["ranks"] == 2

    for figures in summary["by_rank"]:
        sent = sum(figures["sent_bytes"].values())
        exchanges = sum(figures["exchanges"].values())
        assert figures["read_bytes"] > 0
        most = sent * HEADERS + BYTES_AN_EXCHANGE * exchanges + START_BYTES
        print(f"rank {figures['rank']}: {sent:,.0f} sent, at most {most:,.0f}; the interfaces: {on_the_wire}")
        assert all(sent <= counted <= most for counted in on_the_wire), (sent, most, on_the_wire)
