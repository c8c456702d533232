"""Removes every wait, event, record, pin and keep-alive of the device path, one at a time: a test has to fail for each.

    TEST_DEVICE=lag python -m device.mutations        (from the folder tests; some minutes)

Each mutation is one replacement in a copy of the package. A mutation whose text is not found is an error, so this list
follows the code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "src" / "zero_infinity"
TRANSFERS = "tests/device/test_transfers.py"
MEMORY = "tests/device/test_torch_accelerator.py"
RANKS = "tests/device/test_ranks.py"
DIRECT = "tests/device/test_direct_read.py"
HOMES = "tests/device/test_device_homes.py"


@dataclass(frozen=True)
class Mutation:
    """One replacement, and the tests of which one has to fail."""

    what: str
    file: str
    text: str
    instead: str
    tests: str = TRANSFERS
    pins: str = "1"  # "0": the device's runtime cannot register host memory


DEVICE = "tiers/torch_accelerator.py"
MUTATIONS = [
    Mutation(
        "computing waits for an upload",
        DEVICE,
        "        torch.accelerator.current_stream(self._device).wait_event(self._event)",
        "        pass",
    ),
    Mutation("the host waits for a copy", DEVICE, "        self._event.synchronize()", "        pass"),
    Mutation("a copy is done when its event is", DEVICE, "        return self._event.query()", "        return True"),
    Mutation("a download waits for computing", DEVICE, "            self._down.wait_event(computed)\n", ""),
    Mutation(
        "a gradient is kept until it is downloaded",
        DEVICE,
        "        source.record_stream(self._down)",
        "        pass",
    ),
    Mutation("gradients are downloaded into pinned memory", DEVICE, ", pin_memory=True)", ")"),
    Mutation(
        "reused memory waits for its readers",
        DEVICE,
        "                base, events = self._free.pop(found)\n                self._wait_for(events)",
        "                base, events = self._free.pop(found)",
        tests=MEMORY,
    ),
    Mutation(
        "freed memory waits for its readers",
        DEVICE,
        "        base, events = self._free.pop(0)\n        self._wait_for(events)",
        "        base, events = self._free.pop(0)",
        tests=MEMORY,
    ),
    Mutation(
        "streams that use a copy are noted",
        DEVICE,
        "        self._streams[torch.accelerator.current_stream(self._pool.device)] = None",
        "        pass",
        tests=MEMORY,
    ),
    Mutation(
        "memory of a user's tensor is recorded",
        DEVICE,
        "                    base.record_stream(stream)",
        "                    pass",
        tests=MEMORY,
    ),
    Mutation(
        "computing into new memory waits for its earlier upload",
        "tiers/compute_device.py",
        "        device.uploaded().order()",
        "        pass",
        tests=MEMORY,
    ),
    Mutation(
        "a reduction waits for computing", DEVICE, "            self._reduce.wait_event(computed)\n", "", tests=RANKS
    ),
    Mutation(
        "a gradient is kept until it is reduced",
        DEVICE,
        "        gradient.record_stream(self._reduce)",
        "        pass",
        tests=RANKS,
    ),
    Mutation(
        "a buffer of the ring is reused after its copy",
        "tiers/pinned_ring.py",
        "            event.synchronize()",
        "            pass",
        tests=MEMORY,
        pins="0",
    ),
    Mutation("buffers of the ring are pinned", "tiers/pinned_ring.py", ", pin_memory=True)", ")", MEMORY, "0"),
    Mutation(
        "a block is held until the device has read it",
        "tiers/copier.py",
        "            if not transfer.is_done:",
        "            if False:",
    ),
    Mutation(
        "a gathered copy is used after the gather",
        "tiers/copier.py",
        "            gathered = self.device.uploaded()",
        "            gathered = FINISHED",
        tests=RANKS,
    ),
    Mutation(
        "a reduced shard is read after its download",
        "comm/reduce_scatter.py",
        "            self._download.wait()",
        "            pass",
        tests=RANKS,
    ),
    Mutation(
        "a direct read waits for the block's home",
        "tiers/copier.py",
        "        if not self._store.wait_for_home(block, unless=lambda: copy.is_dropped):\n            return\n",
        "",
        tests=DIRECT,
    ),
    Mutation(
        "a direct read waits for the readers of its memory",
        "tiers/copier.py",
        "        self.device.uploaded().wait()",
        "        pass",
        tests=DIRECT,
    ),
    Mutation(
        "a home is current only after its write-back",
        "storage/block_store.py",
        "block.has_content and not block.dirty and block.ticket is None",
        "block.has_content",
        tests=DIRECT,
    ),
    Mutation(
        "a copy of what lives on the device waits for its update",
        DEVICE,
        "                self._up.wait_event(written)",
        "                pass",
        tests=MEMORY,
    ),
    Mutation(
        "a reduced shard that stays is used after its sum",
        "comm/reduce_scatter.py",
        "            self._download.order()\n",
        "",
        tests=RANKS,
    ),
    Mutation(
        "a reduced shard that stays is kept until it is used",
        "comm/reduce_scatter.py",
        "            elements.record_stream(torch.accelerator.current_stream(elements.device))\n",
        "",
        tests=RANKS,
    ),
    Mutation(
        "a save waits for updates on the device",
        "engine.py",
        "            torch.accelerator.synchronize(self._accelerator.device)",
        "            pass",
        tests=HOMES,
    ),
    Mutation(
        "collectives are launched in one order",
        "comm/device_group.py",
        "while self._num_launched != number and not self._is_cut:",
        "while False:",
        tests=RANKS,
    ),
    Mutation(
        "host memory is pinned",
        "engine_builder.py",
        'accelerator_pinning(device) if device.type != "cpu" else None',
        "None",
    ),
]


def is_found(mutation: Mutation, folder: Path) -> bool:
    """Run the tests with the mutation; True if one fails."""
    source = folder / "src"
    shutil.copytree(PROJECT / "src", source)
    file = source / "zero_infinity" / mutation.file
    text = file.read_text()
    if mutation.text not in text:
        raise SystemExit(f"{mutation.what}: {mutation.file} has no {mutation.text!r}")
    mutated = text.replace(mutation.text, mutation.instead)
    if "FINISHED" in mutation.instead:
        mutated = mutated.replace("import ComputeDevice", "import FINISHED, ComputeDevice")
    file.write_text(mutated)
    environment = {
        **os.environ,
        "TEST_DEVICE": "lag",
        "TEST_DEVICE_PINS": mutation.pins,
        "PYTHONPATH": f"{source}{os.pathsep}{PROJECT / 'tests'}",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--timeout", "120", mutation.tests]
    return subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True).returncode != 0


def main() -> None:
    survivors = []
    for mutation in MUTATIONS:
        with tempfile.TemporaryDirectory() as folder:
            found = is_found(mutation, Path(folder))
        print(f"{'found   ' if found else 'SURVIVED'} without: {mutation.what}", flush=True)
        if not found:
            survivors.append(mutation.what)
    print(f"{len(MUTATIONS) - len(survivors)} of {len(MUTATIONS)} found")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
