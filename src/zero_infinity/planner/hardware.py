"""Machines as the planner sees them, read from TOML profiles: nodes of equal devices over a list of tiers.

Owns the format of a profile, its checks, and the profiles that come with the package. Every figure in a profile has its
source beside it, `{ value = "32GB", source = "..." }`, because a plan is no better than its figures. An additional tier
(CXL memory, NVMe over fabrics) is one more entry of the list; `bypasses_host` is a path such as GPUDirect Storage.
"""

from __future__ import annotations

import difflib
import enum
import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from zero_infinity.byte_sizes import parse_bytes
from zero_infinity.errors import ConfigError

# Memory moves about twice what updates reach of it: `update_rate` of the profiles is half of the data sheet's figure.
_MEMORY_PER_UPDATE = 2


class TierKind(enum.StrEnum):
    DEVICE = "device"  # memory of one accelerator
    HOST = "host"  # memory of a node
    STORAGE = "storage"  # whatever a node reaches beyond: drives, CXL, fabrics


@dataclass(frozen=True, slots=True)
class HardwareTier:
    """One level of memory. Bandwidths are towards the tier above, all of a node's devices together."""

    name: str
    kind: TierKind
    capacity: int  # of a node; of one device for device memory
    read: float  # bytes a second
    write: float
    one_device: float  # what a single device gets when the others are idle
    latency: float  # seconds
    bypasses_host: bool = False
    endurance: int | None = None  # bytes that may be written in its life
    cpu_seconds_per_byte: float = 0.0  # of one core, for a transfer; counts where the same cores compute


@dataclass(frozen=True, slots=True)
class Hardware:
    """A kind of node. How many of them there are is for the job to say."""

    name: str
    description: str
    devices_per_node: int
    flops: float  # operations a second that one device achieves in training, not the data sheet's peak
    node_link: float  # bytes a second into one device from the others of its node
    cluster_link: float  # the same from devices of other nodes
    link_latency: float  # seconds, of one collective
    update_rate: float  # bytes a second, read and written together, that an update moves in a node's memory
    tiers: tuple[HardwareTier, ...]  # fastest first
    sources: Mapping[str, str]
    # Seconds of one core; they count where the same cores compute. For a byte to another rank and one from it, and for
    # each block that the engine uses, moves or updates.
    link_cpu_seconds_per_byte: float = 0.0
    block_cpu_seconds: float = 0.0
    # Operations a second in float32 of a node's cores, which update by matrix products (Muon); None: nobody knows.
    host_flops: float | None = None
    # What decides how long an operator computes, where it was measured (`roofline.py`): matrix products of cubes, by
    # their side; attention; and bytes a second that memory-bound operators save for backward while they run forward.
    matmul_flops: tuple[tuple[float, float], ...] = ()
    attention_flops: float | None = None
    saved_rate: float | None = None
    price_per_hour: float | None = None  # of a node, in the currency that its source says
    watts: float | None = None  # that a node draws while it trains

    @property
    def device(self) -> HardwareTier | None:
        """None on a machine that computes on its CPU, out of host memory."""
        return next((tier for tier in self.tiers if tier.kind is TierKind.DEVICE), None)

    @property
    def host(self) -> HardwareTier:
        return next(tier for tier in self.tiers if tier.kind is TierKind.HOST)

    @property
    def storage(self) -> tuple[HardwareTier, ...]:
        return tuple(tier for tier in self.tiers if tier.kind is TierKind.STORAGE)

    def gather_link(self, num_nodes: int) -> float:
        """Bytes a second into one device during an all-gather over all devices."""
        return self.node_link if num_nodes == 1 else min(self.node_link, self.cluster_link)

    def with_devices(self, num_devices: int) -> Hardware:
        """A node with more devices than the profile has: an extrapolation.

        Each device has a host link of its own, all together at most what the host's memory moves. Devices without links
        between them go through the host: a byte goes up one link and down another. Drives and cores stay as they are.
        """
        if num_devices <= self.devices_per_node:
            return self
        if self.device is None:
            raise ConfigError(
                f"gpus is {num_devices}, but {self.name} has none: its CPU computes\n"
                f"  fix:   leave out --gpus, or --nodes {num_devices}"
            )
        grown = num_devices / self.devices_per_node
        host = self.host
        most = max(host.read, _MEMORY_PER_UPDATE * self.update_rate)
        wider = replace(host, read=min(host.read * grown, most), write=min(host.write * grown, most))
        return replace(
            self,
            devices_per_node=num_devices,
            node_link=self.node_link if math.isfinite(self.node_link) else min(host.one_device, most / 2),
            tiers=tuple(wider if tier is host else tier for tier in self.tiers),
        )


def names() -> list[str]:
    """The profiles that come with the package."""
    folder = resources.files(__package__) / "profiles"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(name_or_path: str) -> Hardware:
    """A profile by its name, or one of the user's own by its path (it ends in .toml)."""
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        try:
            return parse(path.read_text(encoding="utf-8"), name_or_path)
        except OSError as error:
            raise ConfigError(f"hardware: {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(
                f"hardware: {path} is no text\n  fix:   a profile, such as zero-infinity bench hardware writes"
            ) from None
    name = name_or_path.lower()
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"there is no hardware profile {name_or_path!r}; {hint}there are: {', '.join(names())}\n"
            "  fix:   one of these, or the path of a .toml file (zero-infinity bench hardware writes one)"
        )
    text = (resources.files(__package__) / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
    return parse(text, name)


def parse(text: str, where: str) -> Hardware:
    """A profile from its text; `where` names it in errors."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"hardware {where}: {error}") from None
    table = _Table(where, "", content)
    tier_tables = [_Table(where, f"tiers[{n}].", values) for n, values in enumerate(table.tables("tiers"))]
    tiers = tuple(_tier(tier_table) for tier_table in tier_tables)
    hardware = Hardware(
        name=table.text("name"),
        description=table.text("description"),
        devices_per_node=table.count("devices_per_node"),
        flops=table.rate("flops"),
        node_link=table.rate("node_link", default=math.inf),
        cluster_link=table.rate("cluster_link", default=math.inf),
        link_latency=table.seconds("link_latency"),
        update_rate=table.rate("update_rate"),
        tiers=tiers,
        sources={name: source for part in (table, *tier_tables) for name, source in part.sources.items()},
        link_cpu_seconds_per_byte=table.seconds("link_cpu_seconds_per_byte"),
        block_cpu_seconds=table.seconds("block_cpu_seconds"),
        host_flops=table.rate_or_none("host_flops"),
        matmul_flops=table.rates_by_size("matmul_flops"),
        attention_flops=table.rate_or_none("attention_flops"),
        saved_rate=table.rate_or_none("saved_rate"),
        price_per_hour=table.rate_or_none("price_per_hour"),
        watts=table.rate_or_none("watts"),
    )
    table.refuse_unknown()
    _check_tiers(hardware, where)
    return hardware


def _tier(table: _Table) -> HardwareTier:
    kind = table.text("kind")
    if kind not in list(TierKind):
        raise table.error(f"kind = {kind!r} is not known; accepted: {', '.join(TierKind)}")
    read = table.rate("read")
    tier = HardwareTier(
        name=table.text("name"),
        kind=TierKind(kind),
        capacity=table.size("capacity"),
        read=read,
        write=table.rate("write", default=read),
        one_device=table.rate("one_device", default=read),
        latency=table.seconds("latency"),
        bypasses_host=table.flag("bypasses_host"),
        endurance=table.size("endurance") if "endurance" in table.values else None,
        cpu_seconds_per_byte=table.seconds("cpu_seconds_per_byte"),
    )
    table.refuse_unknown()
    return tier


def _check_tiers(hardware: Hardware, where: str) -> None:
    kinds = [tier.kind for tier in hardware.tiers]
    if kinds.count(TierKind.HOST) != 1 or kinds.count(TierKind.DEVICE) > 1:
        raise ConfigError(f"hardware {where}: tiers need exactly one of kind 'host' and at most one of kind 'device'")
    twice = [name for name, number in Counter(tier.name.lower() for tier in hardware.tiers).items() if number > 1]
    if twice:
        raise ConfigError(f"hardware {where}: two tiers have the name {twice[0]!r}; each needs its own")
    order = [list(TierKind).index(kind) for kind in kinds]
    if order != sorted(order):
        raise ConfigError(f"hardware {where}: tiers go from the fastest to the slowest: device, host, storage")


class _Table:
    """One table of a profile: takes fields out with their sources, and knows which were never asked for."""

    def __init__(self, where: str, prefix: str, values: object) -> None:
        self.where = where
        self.prefix = prefix
        if not isinstance(values, dict):
            raise self.error("is no table")
        self.values: dict[str, Any] = values
        self.sources: dict[str, str] = {}
        self._asked: list[str] = []

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"hardware {self.where}: {self.prefix}{message}")

    def raw(self, name: str, **default: object) -> Any:
        self._asked.append(name)
        if name in self.values:
            return self.values[name]
        if "default" in default:
            return default["default"]
        near = difflib.get_close_matches(name, self.values, n=1)
        hint = f"; is {self.prefix}{near[0]} meant to be it?" if near else ""
        raise self.error(f"{name} is missing{hint}")

    def text(self, name: str) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or not value:
            raise self.error(f"{name} = {value!r}; accepted: text")
        return value

    def count(self, name: str) -> int:
        value = self._figure(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{name} = {value!r}; accepted: an integer of at least 1")
        return value

    def size(self, name: str) -> int:
        value = self._figure(name)
        try:
            num_bytes = parse_bytes(value)
        except ConfigError as error:
            raise self.error(f"{name}: {error}") from None
        if not num_bytes:
            raise self.error(f"{name} is 0; accepted: a size above zero")
        return num_bytes

    def rate(self, name: str, default: float | None = None) -> float:
        """A number of things a second."""
        return self._number(name, default, "a number above zero, of bytes or operations a second", zero=False)

    def rate_or_none(self, name: str) -> float | None:
        return self.rate(name) if name in self.values else None

    def rates_by_size(self, name: str) -> tuple[tuple[float, float], ...]:
        """A list of pairs, a size and a rate each, by size."""
        pairs = self._figure(name) if name in self.values else []
        is_list = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
        numbers = [value for pair in pairs for value in pair] if is_list else [None]
        if any(isinstance(n, bool) or not isinstance(n, int | float) or not 0 < n < math.inf for n in numbers):
            raise self.error(f"{name} is to be a list of pairs, a size and a rate above zero each")
        return tuple(sorted((float(size), float(rate)) for size, rate in pairs))

    def seconds(self, name: str) -> float:
        """What something takes: nothing, where the profile does not say."""
        return self._number(name, 0.0, "a number of seconds, zero or more", zero=True)

    def flag(self, name: str) -> bool:
        value = self.raw(name, default=False)
        if not isinstance(value, bool):
            raise self.error(f"{name} = {value!r}; accepted: true or false")
        return value

    def tables(self, name: str) -> list[object]:
        value = self.raw(name)
        if not isinstance(value, list) or not value:
            raise self.error(f"{name} is to be a list of tables, [[{name}]]")
        return value

    def refuse_unknown(self) -> None:
        for name in self.values:
            if name not in self._asked:
                near = difflib.get_close_matches(name, self._asked, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self._asked)}"
                raise self.error(f"{name} is not known; {hint}")

    def _number(self, name: str, default: float | None, accepted: str, *, zero: bool) -> float:
        if default is not None and name not in self.values:
            self._asked.append(name)
            return default
        value = self._figure(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (value == 0 and not zero):
            raise self.error(f"{name} = {value!r}; accepted: {accepted}")
        return float(value)

    def _figure(self, name: str) -> Any:
        value = self.raw(name)
        if not isinstance(value, dict) or set(value) != {"value", "source"} or not isinstance(value["source"], str):
            raise self.error(f'{name} = {value!r}; accepted: {{ value = ..., source = "where the figure is from" }}')
        self.sources[self.prefix + name] = value["source"]
        return value["value"]
