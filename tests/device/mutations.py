"""Removes every wait, event, record, pin and keep-alive of the device path, one at a time: a test has to fail for each.

    TEST_DEVICE=lag python -m device.mutations        (from the folder tests; some minutes)

Each mutation is one replacement in a copy of the package. A mutation whose text is not found is an error, so this list
follows the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "src" / "zero_infinity"
TRANSFERS = "tests/device/test_transfers.py"
MEMORY = "tests/device/test_torch_accelerator.py"
RANKS = "tests/device/test_ranks.py"
DIRECT = "tests/device/test_direct_read.py"
HOMES = "tests/device/test_device_homes.py"
ACTIVATIONS = "tests/device/test_activations.py"
ARENA = "tests/unit/storage/test_arena.py"


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
        "        if event is not None:\n            event.synchronize()",
        "        if event is not None:\n            pass",
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
    # Copies of parameters.
    Mutation(
        "only pinned memory is copied without the ring",
        DEVICE,
        " and source.is_pinned()",
        "",
        tests=f"{TRANSFERS}::test_no_asynchronous_copy_from_unpinned_memory",
        pins="0",
    ),
    Mutation(
        "a copy is used after it is made", "tiers/copier.py", "            self._transfer.order()", "            pass"
    ),
    Mutation("a copy notes who uses it", "tiers/copier.py", "            self.memory.used()", "            pass"),
    Mutation(
        "the source of a copy is released after it",
        "tiers/copier.py",
        "        with reading:\n            transfer.wait()",
        "        with reading:\n            pass",
    ),
    Mutation(
        "a block stays in host memory for its copy",
        "tiers/device_cache.py",
        "        self._host_cache.store.hold_to_read(block)\n",
        "",
    ),
    Mutation(
        "a changed copy is written home after its download",
        "tiers/device_cache.py",
        "            transfer.wait()\n",
        "",
        tests=HOMES,
    ),
    Mutation(
        "a copy within the device is made after the last update of its source",
        "tiers/device_cache.py",
        "written=self._copier.device.computed()",
        "written=None",
        tests=HOMES,
    ),
    Mutation(
        "a copy within the device is used after it is made",
        DEVICE,
        "            target.copy_(source)\n            return StreamTransfer(self._device, self._up.record_event())",
        "            target.copy_(source)\n            return FINISHED",
        tests=MEMORY,
    ),
    Mutation(
        "a tensor over a copy keeps its memory",
        DEVICE,
        "leased = num_storage_uses(base) > self._own_uses",
        "leased = False",
        tests=MEMORY,
    ),
    Mutation(
        "memory belongs to the stream of uploads",
        DEVICE,
        "with self._lock, self._stream:",
        "with self._lock:",
        tests=MEMORY,
    ),
    Mutation(
        "memory of a model that is gone is kept for its last kernels",
        DEVICE,
        "                self._base.record_stream(stream)",
        "                pass",
        tests=MEMORY,
    ),
    Mutation(
        "weights that are made whole note who uses them",
        "tiling/materialize.py",
        "        memory.used()",
        "        pass",
        tests=TRANSFERS,
    ),
    # Gradients.
    Mutation(
        "a gradient is used after its download",
        "optim/flat_gradient.py",
        "        self._transfer.wait()\n",
        "",
    ),
    Mutation(
        "what another rank asks for is sent after its update",
        "tiers/unit_gather.py",
        "torch.accelerator.synchronize(block.on_device.device)",
        "pass",
        tests=MEMORY,
    ),
    # Saved tensors.
    Mutation(
        "a saved tensor goes down after it is computed",
        "tiers/link.py",
        "            self._down.wait_event(computed)\n",
        "",
        tests=ACTIVATIONS,
    ),
    Mutation(
        "a saved tensor is kept until it is down",
        "tiers/link.py",
        "                self._down.record_event().synchronize()",
        "                pass",
        tests=ACTIVATIONS,
    ),
    Mutation(
        "a buffer of the ring is emptied after its copy",
        "tiers/pinned_ring.py",
        "            target, staged, event = filling\n            event.synchronize()",
        "            target, staged, event = filling",
        tests=ACTIVATIONS,
        pins="0",
    ),
    Mutation(
        "only pinned memory takes a saved tensor without the ring",
        "tiers/link.py",
        "if target.is_pinned():",
        "if True:",
        tests=ACTIVATIONS,
        pins="0",
    ),
    Mutation(
        "only pinned memory gives a saved tensor without the ring",
        "tiers/link.py",
        "if source.is_pinned():",
        "if True:",
        tests=ACTIVATIONS,
        pins="0",
    ),
    Mutation(
        "a saved tensor is used after it is up",
        "activations/device_activation_storage.py",
        "        transfer.order()\n",
        "",
        tests=ACTIVATIONS,
    ),
    Mutation(
        "memory of a saved tensor is recorded",
        "activations/device_activation_storage.py",
        "        memory.record_stream(torch.accelerator.current_stream(device))",
        "        pass",
        tests=ACTIVATIONS,
    ),
    Mutation(
        "the block of a saved tensor is released after it is up",
        "activations/device_activation_storage.py",
        "                    uploaded[1].wait()",
        "                    pass",
        tests=ACTIVATIONS,
    ),
    Mutation(
        "the block of a saved tensor stays in host memory until it is up",
        "activations/device_activation_storage.py",
        "        self._blocks.host_cache.store.hold_to_read(slot.block)\n",
        "",
        tests=ACTIVATIONS,
    ),
    # Memory that is given back.
    Mutation(
        "a device is done before its engine ends",
        DEVICE,
        "    def close(self) -> None:\n        torch.accelerator.synchronize(self._device)",
        "    def close(self) -> None:\n        pass",
        tests=MEMORY,
    ),
    Mutation(
        "free host memory is unpinned when no copy reads it",
        "storage/arena.py",
        "            self._pinning.synchronize()\n            for start",
        "            for start",
        tests=ARENA,
    ),
    Mutation(
        "host memory is unpinned when no copy reads it",
        "storage/arena.py",
        "            self._pinning.synchronize()\n            self._pinning.unregister(region)",
        "            self._pinning.unregister(region)",
        tests=ARENA,
    ),
    # The probe of direct reads.
    Mutation(
        "the probe reads after its memory is cleared",
        "tiers/direct_read.py",
        "    torch.accelerator.synchronize(device)\n    reader =",
        "    reader =",
        tests=DIRECT,
    ),
]


def failed_test(mutation: Mutation, folder: Path) -> str | None:
    """Run the tests with the mutation; returns the first one that fails."""
    source = folder / "src"
    shutil.copytree(PROJECT / "src", source)
    file = source / "zero_infinity" / mutation.file
    text = file.read_text()
    if mutation.text not in text:
        raise SystemExit(f"{mutation.what}: {mutation.file} has no {mutation.text!r}")
    mutated = text.replace(mutation.text, mutation.instead)
    if "FINISHED" in mutation.instead:
        for name in ("ComputeDevice", "DeviceTransfer"):
            mutated = mutated.replace(f"import {name}\n", f"import FINISHED, {name}\n")
    file.write_text(mutated)
    environment = {
        **os.environ,
        "TEST_DEVICE": "lag",
        "TEST_DEVICE_PINS": mutation.pins,
        "PYTHONPATH": f"{source}{os.pathsep}{PROJECT / 'tests'}",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--timeout", "120", *mutation.tests.split()]
    run = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    if run.returncode not in (0, 1, 2) or "error" in run.stdout.splitlines()[-1]:
        raise SystemExit(f"{mutation.what}: the tests did not run\n{run.stdout[-4000:]}{run.stderr[-4000:]}")
    failed = [line.split("FAILED ")[1].split(" - ")[0] for line in run.stdout.splitlines() if "FAILED " in line]
    return (failed or ["a test"])[0] if run.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="mutations whose text contains one of these")
    only = parser.parse_args().only
    chosen = [mutation for mutation in MUTATIONS if any(text in mutation.what for text in only)]
    # Without a mutation, all of these tests pass.
    nothing = {(m.tests, m.pins): replace(m, what="nothing", text="import", instead="import") for m in chosen}
    survivors = []
    for mutation in [*nothing.values(), *chosen]:
        with tempfile.TemporaryDirectory() as folder:
            failed = failed_test(mutation, Path(folder))
        if mutation.what == "nothing":
            if failed is not None:
                raise SystemExit(f"{failed} fails without a mutation")
            continue
        print(f"{'SURVIVED' if failed is None else 'found   '} without: {mutation.what} ({failed})", flush=True)
        if failed is None:
            survivors.append(mutation.what)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} found")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
