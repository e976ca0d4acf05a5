"""Publishes that islands of a region give each other: what is had, and from whom."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.core.fragments import Box
from diloco_jax.core.tiles import sha256_arrays
from diloco_jax.island.region import KEPT, Region
from diloco_jax.protocol.messages import Donor, Sources, Version
from diloco_jax.wire import bulk
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.errors import Busy, Refused, VersionGone

NAMES, RUN_ID = ("a", "b", "c"), "run"
SIZE = 5 << 20
PAYLOAD = bytes(range(256)) * (SIZE // 256)
PART = (Box(0, (0,), (4,)),)
COORDINATOR = "127.0.0.1:9"


@pytest.fixture
def config(tmp_path):
    islands = {name: IslandConfig(region="near") for name in NAMES}
    config = Config(islands=islands | {"z": IslandConfig()})
    make_certificates(tmp_path, [], 1, islands=NAMES)
    config = config.replace("time_budget_s", 4.0)
    return config.replace("certificates", str(tmp_path))


@pytest.fixture
def regions(config):
    found = {name: Region(config, name, 0, COORDINATOR, "") for name in NAMES}
    for region in found.values():
        region.begin(RUN_ID)
    yield found
    for region in found.values():
        region.close()


def request_of(island, number=4, part=()):
    return bulk.FetchRequest(
        run_id=RUN_ID,
        island=island,
        incarnation=1,
        session=island,
        fragment=0,
        want=Version(1, number),
        have=Version(1, number - 1),
        part=part,
    )


def sources_of(regions, *names, part=(), within_s=3.0):
    donors = (Donor(island=n, addresses=(regions[n].address,)) for n in names)
    stripes = {bulk.part_name(part): sha256_arrays([memoryview(PAYLOAD)])}
    return Sources(donors=tuple(donors), within_s=within_s, stripes=stripes)


def have(region, *payloads, name="a", number=4, part=()):
    region.got(request_of(name, number, part), Version(1, number), payloads)


def fetched(regions, *donors, number=4, within_s=3.0):
    """What b is given, None if nothing, and the donors that failed."""
    sources = sources_of(regions, *donors, within_s=within_s)
    found, failed = regions["b"].fetch_from(request_of("b", number), sources, SIZE)
    return found and bytes(found.payload), failed


def test_a_publish_is_given_as_it_was_announced(regions):
    have(regions["a"], PAYLOAD)
    for name in ("b", "c"):
        sources = sources_of(regions, "a")
        found, failed = regions[name].fetch_from(request_of(name), sources, SIZE)
        assert (bytes(found.payload), failed) == (PAYLOAD, [])
    deadline = time.monotonic() + 10.0
    while regions["a"]._kept:  # It may not have counted the last bytes yet.
        assert time.monotonic() < deadline, "all others have it"
        time.sleep(0.01)


def test_each_of_a_chain_is_given(regions):
    have(regions["a"], bytes(SIZE), PAYLOAD, number=5)
    assert fetched(regions, "a", number=5) == (PAYLOAD, [])
    assert (0, Version(1, 4)) in regions["a"]._kept


def test_who_asks_too_early_waits(regions):
    later = threading.Timer(0.6, lambda: have(regions["a"], PAYLOAD))
    later.start()
    assert fetched(regions, "a") == (PAYLOAD, [])


@pytest.mark.parametrize(
    "lie", [bytes(SIZE), PAYLOAD[:-1], PAYLOAD + b"!", PAYLOAD[:-1] + b"\0"]
)
def test_what_was_not_announced_is_dropped(regions, lie):
    have(regions["a"], lie)
    have(regions["c"], PAYLOAD)
    assert fetched(regions, "a", "c") == (PAYLOAD, ["a"])


def test_a_donor_that_is_dead_or_slow_is_left_in_time(regions):
    have(regions["c"], PAYLOAD)
    began = time.monotonic()
    found = fetched(regions, "a", "c", within_s=1.0)
    assert found == (PAYLOAD, ["a"]), "it has it not"
    regions["a"].close()
    assert fetched(regions, "a", "c", within_s=1.0) == (PAYLOAD, ["a"])
    assert time.monotonic() - began < 4 * 1.0


@pytest.mark.parametrize(("within_s", "failed"), [(10.0, []), (1.0, ["a"])])
def test_one_that_gives_a_publish_up_has_failed_if_that_comes_late(
    regions, within_s, failed
):
    later = threading.Timer(0.7, lambda: have(regions["a"]))  # It has the anchor.
    later.start()
    assert fetched(regions, "a", within_s=within_s) == (None, failed)


def test_one_that_stops_in_the_middle_is_left_in_time(regions, monkeypatch):
    have(regions["a"], PAYLOAD)
    sent = bulk.BulkConnection.send_payload
    stopped = threading.Event()

    def stops(self, buffers, offset, length, guard, begin=0):
        sent(self, buffers, offset, min(length, 1 << 20), guard, begin)
        stopped.wait(20)
        return False

    monkeypatch.setattr(bulk.BulkConnection, "send_payload", stops)
    began = time.monotonic()
    found = fetched(regions, "a", within_s=1.0)
    stopped.set()
    assert found == (None, ["a"])
    assert time.monotonic() - began < 3.0


def test_what_is_gone_or_another_part_is_nobodys_fault(regions):
    have(regions["a"], number=5)
    have(regions["c"], PAYLOAD, part=PART)
    assert fetched(regions, "a", "c") == (None, [])


def test_of_a_part_without_a_digest_nobody_is_asked(regions):
    have(regions["a"], PAYLOAD, part=PART)
    sources = sources_of(regions, "a")
    found, failed = regions["b"].fetch_from(request_of("b", part=PART), sources, SIZE)
    assert (found, failed) == (None, [])
    sources = sources_of(regions, "a", part=PART)
    found, _ = regions["b"].fetch_from(request_of("b", part=PART), sources, SIZE)
    assert bytes(found.payload) == PAYLOAD


def test_a_host_that_its_donor_has_not_asks_the_coordinator(config, regions):
    have(regions["a"], PAYLOAD)
    second = Region(config, "b", 1, COORDINATOR, "")
    try:
        sources = sources_of(regions, "a")
        assert second.fetch_from(request_of("b"), sources, SIZE) == (None, [])
    finally:
        second.close()


def test_few_publishes_are_kept_and_not_for_long(regions, monkeypatch):
    region = regions["a"]
    for number in range(1, KEPT + 3):
        have(region, PAYLOAD, number=number)
    assert [v.number for _, v in region._kept] == list(range(3, KEPT + 3))
    with pytest.raises(VersionGone):
        region.fetch(request_of("b", 2))
    later = time.monotonic() + region._deadlines.pin_s + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(VersionGone):
        region.fetch(request_of("b", KEPT + 2))
    assert not region._kept


def test_others_have_nothing(regions):
    have(regions["a"], PAYLOAD)
    with pytest.raises(Refused, match="region"):
        regions["a"].fetch(request_of("z"))
    with pytest.raises(Refused, match="serves run"):
        regions["a"].fetch(replace(request_of("b"), run_id="another"))
    with pytest.raises(Busy):
        regions["a"].fetch(request_of("b", 9))


def test_who_says_it_is_another_one_has_nothing(regions):
    have(regions["a"], PAYLOAD)
    sources = sources_of(regions, "a", within_s=1.0)
    assert regions["b"].fetch_from(request_of("c"), sources, SIZE) == (None, ["a"])
    # Nor does one that answers as another one.
    posing = Donor(island="c", addresses=(regions["a"].address,))
    sources = Sources(donors=(posing,), within_s=1.0, stripes=sources.stripes)
    assert regions["b"].fetch_from(request_of("b"), sources, SIZE) == (None, ["c"])


@pytest.mark.parametrize("count", [0, 2])
def test_a_donor_that_calls_a_publish_something_else_is_one_that_failed(
    regions, monkeypatch, count
):
    have(regions["a"], PAYLOAD)
    fetch = regions["a"].fetch

    def lies(request):
        return replace(fetch(request), count=count)

    monkeypatch.setattr(regions["a"], "fetch", lies)
    assert fetched(regions, "a") == (None, ["a"])


@pytest.mark.parametrize("host", ["a" * 70, "a..b", "a\0b", "\u00e9" * 60])
def test_a_donor_with_an_impossible_address_is_one_that_failed(regions, host):
    have(regions["c"], PAYLOAD)
    sources = sources_of(regions, "a", "c")
    impossible = Donor(island="a", addresses=(f"{host}:80",))
    sources = replace(sources, donors=(impossible, sources.donors[1]))
    found, failed = regions["b"].fetch_from(request_of("b"), sources, SIZE)
    assert (bytes(found.payload), failed) == (PAYLOAD, ["a"])


def test_a_donor_that_moves_leaves_no_threads(regions, config):
    have(regions["a"], PAYLOAD)
    assert fetched(regions, "a") == (PAYLOAD, [])
    (lane,) = regions["b"]._lanes
    regions["a"].close()
    regions["a"] = Region(config, "a", 0, COORDINATOR, "")
    regions["a"].begin(RUN_ID)
    have(regions["a"], PAYLOAD)
    assert fetched(regions, "a") == (PAYLOAD, [])
    for thread in lane.transfers._fetch_pool._threads:
        thread.join(10.0)
        assert not thread.is_alive()


def test_a_donor_has_the_time_of_each_publish_to_answer_a_connection(regions):
    def connect_s(within_s):
        with regions["b"]._lane_to("a", regions["a"].address, within_s) as lane:
            return lane, lane._connections._deadlines.connect_s

    first, short_s = connect_s(0.1)
    assert connect_s(0.15) == (first, short_s), "not anew for a little more"
    assert short_s <= 0.1
    _, longer_s = connect_s(1.0)
    assert longer_s == 1.0
    assert connect_s(0.1)[1] == short_s


def test_a_call_of_little_time_ends_none_of_more_that_is_under_way(config, regions):
    have(regions["a"], PAYLOAD)
    region = Region(config.replace("time_budget_s", 24.0), "b", 0, COORDINATOR, "")
    with contextlib.closing(region), ThreadPoolExecutor(1) as pool:
        sources = sources_of(regions, "a", within_s=12.0)
        longer = pool.submit(region.fetch_from, request_of("b", 5), sources, SIZE)
        while not region._lanes or not region._lanes[0].transfers._open:
            assert not longer.done(), longer.result()
            time.sleep(0.01)
        sources = sources_of(regions, "a", within_s=2.0)
        found, failed = region.fetch_from(request_of("b"), sources, SIZE)
        assert (bytes(found.payload), failed) == (PAYLOAD, [])
        assert [lane.users for lane in region._lanes] == [1, 0]
        have(regions["a"], PAYLOAD, number=5)
        found, failed = longer.result()
        assert (bytes(found.payload), failed) == (PAYLOAD, [])
        assert len(region._lanes) == 1, "one that nobody uses is kept"


@pytest.mark.parametrize("serve", ["", "0.0.0.0:0"])
def test_a_host_that_cannot_find_the_coordinator_yet_gives_nothing(config, serve):
    region = Region(config, "a", 0, "nowhere.invalid:9", serve)
    try:
        region.begin(RUN_ID)
        assert region.address == ""
    finally:
        region.close()


def test_an_address_beyond_this_machine_needs_tls():
    islands = {name: IslandConfig(region="near") for name in NAMES}
    with pytest.raises(ConfigError, match="is not loopback"):
        Region(Config(islands=islands), "a", 0, COORDINATOR, "0.0.0.0:0")


def test_regions_are_those_of_fields_or_zones():
    islands = {name: IslandConfig() for name in ("a", "b", "c", "d", "e")}
    islands["e"] = IslandConfig(region="elsewhere")
    assert Config(islands=islands).regions() == {}
    zones = {"a": "us-east5-a", "b": "us-east5-b,us-east5-c", "c": "europe-west4-a"}
    zones |= {"d": "us-east5-a,us-central1-a", "e": "us-east5-a"}
    config = Config(islands=islands).replace("launch.zones", zones)
    assert config.regions() == {"a": "us-east5", "b": "us-east5"}
