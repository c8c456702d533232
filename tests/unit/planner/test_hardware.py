from __future__ import annotations

from pathlib import Path

import pytest

from zero_infinity.errors import ConfigError
from zero_infinity.planner import hardware

SMALL = """
name = "small"
description = "for tests"
devices_per_node = { value = 2, source = "made up" }
flops = { value = 1e12, source = "made up" }
update_rate = { value = 1e10, source = "made up" }

[[tiers]]
name = "RAM"
kind = "host"
capacity = { value = "4GB", source = "made up" }
read = { value = 1e10, source = "made up" }
"""


@pytest.mark.parametrize("name", hardware.names())
def test_every_profile_is_whole_and_every_figure_has_a_source(name: str) -> None:
    profile = hardware.load(name)
    assert profile.flops > 0
    assert profile.host.capacity > 0
    assert all(source.strip() for source in profile.sources.values())
    assert {"flops", "devices_per_node", "tiers[0].capacity", "tiers[0].read"} <= set(profile.sources)


def test_the_profiles_that_are_promised() -> None:
    promised = {
        "dgx2",
        "dgx2-slides",
        "dgx-a100",
        "dgx-h100",
        "gh200",
        "rtx4090",
        "laptop",
        "summit",
        "v100-10x",
        "v100-100x",
    }
    assert promised <= set(hardware.names())


def test_the_talk_s_figures_differ_from_the_paper_s() -> None:
    paper, talk = hardware.load("dgx2"), hardware.load("dgx2-slides")
    assert [p.host.read / 16 for p in (paper, talk)] == [3e9, 4e9]
    assert [p.storage[0].read / 16 for p in (paper, talk)] == [1.6e9, 1.75e9]


def test_defaults() -> None:
    profile = hardware.parse(SMALL, "small")
    assert profile.device is None
    assert profile.storage == ()
    assert (profile.host.write, profile.host.one_device, profile.host.latency) == (1e10, 1e10, 0.0)


def test_more_tiers_are_more_entries() -> None:
    more = "".join(
        f'\n[[tiers]]\nname = "{name}"\nkind = "storage"\nbypasses_host = {flag}\n'
        'capacity = { value = "1TB", source = "made up" }\nread = { value = 5e9, source = "made up" }\n'
        for name, flag in (("CXL", "false"), ("NVMe over fabrics", "true"))
    )
    profile = hardware.parse(SMALL + more, "small")
    assert [tier.name for tier in profile.storage] == ["CXL", "NVMe over fabrics"]
    assert [tier.bypasses_host for tier in profile.storage] == [False, True]


def test_gathers_go_at_the_slower_link() -> None:
    dgx2 = hardware.load("dgx2")
    assert (dgx2.gather_link(1), dgx2.gather_link(4)) == (150e9, 70e9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("flops = ", "flopps = "), "flops is missing; is flopps meant to be it?"),
        (("name = \"RAM\"", 'name = "RAM"\nspeed = 3'), "tiers[0].speed is not known"),
        (("capacity = { value = \"4GB\"", 'capacity = { value = "4 elephants"'), "tiers[0].capacity: '4 elephants' is not a size"),
        (('read = { value = 1e10, source = "made up" }', "read = 1e10"), 'accepted: { value = ..., source = "where the figure'),
        (("value = 1e12", "value = -1.0"), "flops = -1.0; accepted: a number above zero"),
        (("value = 2,", "value = 0,"), "devices_per_node = 0; accepted: an integer of at least 1"),
        (('kind = "host"', 'kind = "hots"'), "kind = 'hots' is not known; accepted: device, host, storage"),
        (('kind = "host"', 'kind = "storage"'), "exactly one of kind 'host'"),
        (("[[tiers]]", "[[tires]]"), "tiers is missing; is tires meant to be it?"),
        (("name = \"small\"", "name = "), "Invalid value"),
        (("value = 1e10", "value = 0"), "update_rate = 0; accepted: a number above zero"),
        (("value = 1e10", "value = nan"), "update_rate = nan; accepted: a number above zero"),
        (('source = "made up"', "source = 3"), "devices_per_node = {'value': 2, 'source': 3}; accepted: { value"),
        (('kind = "host"', 'kind = "host"\nbypasses_host = "no"'), "bypasses_host = 'no'; accepted: true or false"),
        (('kind = "host"', 'kind = "host"\nlatency = { value = -1, source = "x" }'), "latency = -1; accepted: a number of seconds"),
    ],
)  # fmt: skip
def test_mistakes_are_named(change: tuple[str, str], message: str) -> None:
    assert change[0] in SMALL
    with pytest.raises(ConfigError) as caught:
        hardware.parse(SMALL.replace(*change, 1), "mine.toml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("hardware mine.toml: ")


def test_nothing_may_take_no_time() -> None:
    latency = 'kind = "host"\nlatency = { value = 0, source = "made up" }'
    assert hardware.parse(SMALL.replace('kind = "host"', latency), "small").host.latency == 0.0


def test_tiers_have_names_of_their_own() -> None:
    again = SMALL[SMALL.index("[[tiers]]") :].replace('"host"', '"storage"').replace('"RAM"', '"ram"')
    with pytest.raises(ConfigError, match="two tiers have the name 'ram'"):
        hardware.parse(SMALL + again, "mine.toml")


def test_tiers_go_from_fast_to_slow() -> None:
    device = '\n[[tiers]]\nname = "GPU"\nkind = "device"\ncapacity = { value = "1GB", source = "x" }\nread = { value = 1, source = "x" }\n'
    with pytest.raises(ConfigError, match="from the fastest to the slowest"):
        hardware.parse(SMALL + device, "mine.toml")


def test_unknown_profile_suggests() -> None:
    with pytest.raises(ConfigError, match=r"no hardware profile 'dgx-2'; did you mean 'dgx2'\?"):
        hardware.load("dgx-2")


def test_a_file_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SMALL)
    assert hardware.load(str(tmp_path / "mine.toml")).name == "small"
    with pytest.raises(ConfigError, match="cannot be read"):
        hardware.load(str(tmp_path / "other.toml"))
    (tmp_path / "bytes.toml").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match="is no text"):
        hardware.load(str(tmp_path / "bytes.toml"))


def test_a_node_with_more_devices_than_its_profile() -> None:
    one = hardware.load("rtx4090")
    assert one.with_devices(1) is one
    four = one.with_devices(4)
    assert four.devices_per_node == 4
    assert four.host.one_device == one.host.read
    assert one.host.read < four.host.read <= 2 * one.update_rate
    assert four.node_link == one.host.one_device
    assert (four.storage, four.update_rate) == (one.storage, one.update_rate)
    sixteen = hardware.load("dgx-h100").with_devices(16)
    assert sixteen.node_link == hardware.load("dgx-h100").node_link
    with pytest.raises(ConfigError, match="its CPU computes"):
        hardware.load("laptop").with_devices(2)
