"""Which islands of a region give a publish to the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from kit import Driver, of

from diloco_jax.protocol.coordinator.state import Said
from diloco_jax.protocol.holding import MergePrepared
from diloco_jax.protocol.messages import (
    DONOR_RESTS,
    DonorFailed,
    Prepared,
    Published,
    Sources,
)

NEAR, FAR = ("a", "b", "c"), ("x", "y")
STRIPES = {"": "d1"}
REGIONS = dict.fromkeys(NEAR, "near") | dict.fromkeys(FAR, "far")


def begun(regions: dict[str, str] = REGIONS, **changes: Any) -> Driver:
    d = Driver(regions=regions, overlap_steps=6, **changes)
    names = (*NEAR, *FAR, "z")
    for name in names:
        d.hello(name, gives_at=(f"{name}:7079",))
    for name in names:
        d.report(name, 0)
    return d


def merge(
    d: Driver, steps: int, stripes: dict[str, str] = STRIPES
) -> dict[str, Sources | None]:
    """The next merge; what it says to each island of where to have it from."""
    live = [n for n, i in d.state.islands.items() if i.status == "live"]
    d.reports(**dict.fromkeys(live, steps))
    (fragment,) = (f.index for f in d.state.fragments if f.phase == "open")
    for name in live:
        d.take(name, fragment, steps)
        d.report(name, step_seconds=2.0)
    version = d.fragment(fragment).version.next()
    prepared = Prepared(digest="d1", payload_bytes=1, stripes=stripes)
    event = MergePrepared(fragment=fragment, version=version, prepared=prepared)
    told = of(d.feed(event), Published)
    return {one.island: one.sources for one in told}


def names_of(sources: Sources | None) -> list[str]:
    assert sources is not None
    return [donor.island for donor in sources.donors]


def complain(d: Driver, of_whom: str, by: str) -> None:
    session = d.state.islands[by].session
    d.feed(Said(island=by, session=session, message=DonorFailed(island=of_whom)))


def test_islands_of_a_region_hear_of_the_same_donors_and_others_of_none():
    d = begun()
    told = merge(d, 2)
    assert told["a"] == told["b"] == told["c"]
    assert told["x"] == told["y"]
    assert told["z"] is None
    near, far = told["a"], told["x"]
    assert set(names_of(near)) < set(NEAR)
    assert set(names_of(far)) == set(FAR)
    assert len(names_of(near)) == 2
    assert near is not None
    assert near.within_s == 6 * 2.0 / 4
    assert near.stripes == STRIPES
    assert near.donors[0].addresses == (f"{near.donors[0].island}:7079",)


def test_publishes_have_their_donors_in_turn():
    d, found = begun(), Counter[str]()
    for number in range(30):
        found[names_of(merge(d, 2 + 2 * number)["a"])[0]] += 1
    assert set(found) == set(NEAR)


@pytest.mark.parametrize(("regions", "stripes"), [({}, STRIPES), (REGIONS, {})])
def test_without_regions_or_digests_nothing_is_said(regions, stripes):
    assert set(merge(begun(regions), 2, stripes).values()) == {None}


def test_an_island_that_is_away_gives_nothing_and_moves_no_other_publish():
    whole, without = begun(), begun()
    without.disconnect("b")
    for number in range(20):
        before, after = (
            names_of(merge(d, 2 + 2 * number)["a"])[0] for d in (whole, without)
        )
        assert after != "b"
        assert after == before or before == "b"


def test_one_that_is_left_alone_has_no_donors():
    d = begun()
    d.disconnect("y")
    assert merge(d, 2)["x"] is None


def test_an_island_without_an_address_gives_nothing():
    d = begun()
    d.hello("a", gives_at=(), phase="training")
    for number in range(10):
        assert "a" not in names_of(merge(d, 2 + 2 * number)["b"])


def test_an_island_has_no_more_addresses_than_hosts():
    """Every publish tells all islands of its region of them."""
    d = begun()
    many = tuple(f"host-{n}:7079" for n in range(1000))
    d.hello("a", gives_at=many, phase="training")
    assert d.state.islands["a"].gives_at == many[:1], "its session resumed"
    d.hello("new", gives_at=many)
    assert d.state.islands["new"].gives_at == many[:1]


def test_an_island_that_failed_two_others_rests_for_a_while():
    d = begun(REGIONS | {"d": "near"})
    d.hello("d", gives_at=("d:7079",))
    d.report("d", 0)
    for other in ("a", "c"):
        complain(d, of_whom="b", by=other)
    give = {n for k in range(1, 9) for n in names_of(merge(d, 2 * k)["c"])}
    assert give == {"a", "c", "d"}
    d.crash()  # Whoever comes back knows nothing of it.
    assert not any(i.complaints for i in d.state.islands.values())


@pytest.mark.parametrize("leaves", [False, True])
def test_one_island_alone_takes_no_donor_from_the_others(leaves):
    """It complains of all, twice, and is one: each publish has the donors it had."""
    whole, d = begun(), begun()
    for accused in (*NEAR, *NEAR):
        complain(d, accused, by="a")
    for one in (whole, d) if leaves else ():
        one.disconnect("a")  # Two are left, and its word is neither's.
    for number in range(10):
        assert merge(d, 2 + 2 * number) == merge(whole, 2 + 2 * number)


def test_of_two_islands_one_is_enough():
    d = begun()
    complain(d, of_whom="y", by="x")
    assert {tuple(names_of(merge(d, 2 * k)["x"])) for k in range(1, 9)} == {("x",)}
    complain(d, of_whom="x", by="y")
    assert merge(d, 18)["x"] is None


def test_rests_end():
    d = begun(lease_s=1e4)
    for other in ("a", "c"):
        complain(d, of_whom="b", by=other)
    d.now += DONOR_RESTS * 1e4 - 1
    for name in d.state.islands:
        d.report(name, 0)
    assert "b" not in names_of(merge(d, 2)["c"])
    d.now += 2
    assert "b" in {n for k in range(2, 20) for n in names_of(merge(d, 2 * k)["c"])}


@pytest.mark.parametrize(("accused", "by"), [("b", "x"), ("z", "a"), ("b", "z")])
def test_only_its_own_region_may_complain(accused, by):
    d = begun()
    complain(d, accused, by)
    assert not any(i.complaints for i in d.state.islands.values())


def test_an_ended_session_may_not_complain():
    d = begun()
    message = DonorFailed(island="b")
    d.feed(Said(island="a", session="another", message=message))
    assert not d.state.islands["b"].complaints
    assert [(i.message, i.expected) for i in d.ignored] == [("failed donor", True)]
