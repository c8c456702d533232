"""`zero-infinity bench`: measurements of this machine. The library's benchmarks are in `benchmarks/`."""

from __future__ import annotations

import argparse

from zero_infinity.cli import bench_device, bench_hardware, bench_io

_EPILOG = """\
examples:
  zero-infinity bench io /mnt/nvme
  zero-infinity bench hardware /mnt/nvme -o this-machine.toml
  zero-infinity bench device /mnt/nvme --out device.json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure this machine: the bandwidth of its drives, a hardware profile for plan and simulate, or training on "
        "its accelerator."
    )
    parser.epilog = _EPILOG
    resources = parser.add_subparsers(dest="resource", metavar="RESOURCE", required=True)
    for name, module, line in (
        ("device", bench_device, "links, overlap and training steps of an accelerator, against plain PyTorch"),
        ("hardware", bench_hardware, "measure this machine into a profile for plan and simulate"),
        ("io", bench_io, "read, write and mixed bandwidth of swap space in a directory"),
    ):
        own = resources.add_parser(name, help=line, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_options(own)
