"""Requests of an operator while the run goes on: who is let in, who is released, and
of whom steps are traced.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
from bounds_support import give_up, patient, together
from kit import (
    TOKENS_PER_STEP,
    Driver,
    make_config,
    merged_islands,
    of,
    only,
    persisted,
)
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import steering
from diloco_jax.protocol.coordinator.state import (
    Alert,
    Effect,
    State,
    initial,
    with_island,
)
from diloco_jax.protocol.holding import Forget, Merge
from diloco_jax.protocol.messages import ProfileOrder, Refused, Steer, Welcome


def only_named(*names: str, **changes: Any) -> Driver:
    admitted: dict[str, int | None] = dict.fromkeys(names, 1)
    config = make_config(admitted=admitted, sequence_length=TOKENS_PER_STEP, **changes)
    return Driver(config)


def steer(
    d: Driver, how: Literal["admit", "remove", "release"], name: str
) -> list[Effect]:
    return d.feed(Steer(how=how, island=name))


def test_an_admitted_island_joins_and_is_merged() -> None:
    d = only_named("a")
    d.join("a")
    assert only(d.hello("c"), Refused).code == "unknown_island"
    assert persisted(steer(d, "admit", "c"), "admitted") == [
        {"kind": "admitted", "island": "c"}
    ]
    assert steer(d, "admit", "c") == [], "it is done already"
    assert steer(d, "admit", "a") == []
    d.play("c.joins a=2 c=2 a/0=2 /0 a=6 c=6")
    assert "c" in d.fragment(0).accounts
    assert d.state.islands["c"].status == "live"
    other = only(d.hello("e"), Refused)
    for text in ("only 'a', 'c'", "diloco admit e --coordinator"):
        assert text in other.message


def test_an_admitted_island_may_have_any_batch() -> None:
    d = only_named("a")
    steer(d, "admit", "c")
    wrong = d.hello("c", sequences_per_step=3, tokens_per_step=31)
    assert only(wrong, Refused).code == "config"
    only(d.hello("c", sequences_per_step=3, tokens_per_step=30), Welcome)


def test_who_was_admitted_is_so_after_a_crash() -> None:
    d = only_named("a")
    steer(d, "admit", "c")
    steer(d, "admit", "e")
    steer(d, "remove", "e")
    d.crash()
    assert d.state.admitted == ("c",)
    only(d.hello("c"), Welcome)
    assert only(d.hello("e"), Refused).code == "unknown_island"
    snapshot, written = d.state, len(d.log)
    d.crash(snapshot, skip=written)
    assert d.state.admitted == ("c",)


def test_a_removed_island_is_put_out_and_stays_out() -> None:
    d = only_named("a")
    steer(d, "admit", "c")
    d.join("a", "c")
    d.report("c", 3)
    effects = steer(d, "remove", "c")
    assert [r["kind"] for r in map(as_line, effects) if r] == ["left", "removed"]
    refused = only(effects, Refused)
    assert (refused.island, refused.code) == ("c", "removed")
    assert "an operator removed island 'c'" in refused.message
    assert d.totals("c").lost == {"refused": 3 * TOKENS_PER_STEP}
    (forget,) = of(effects, Forget)
    assert (forget.island, forget.before) == ("c", 2), "holders give it nothing more"
    assert d.state.islands["c"].status == "gone"
    assert only(d.hello("c", 2), Refused).code == "unknown_island"
    d.crash()
    assert only(d.hello("c", 3), Refused).code == "unknown_island"
    assert d.state.islands["c"].status == "gone"
    steer(d, "admit", "c")
    only(d.hello("c", 4), Welcome)


def as_line(effect: Effect) -> dict[str, Any]:
    """The durable record in an effect; {} if it is another one."""
    found = [persisted([effect], kind) for kind in ("removed", "left")]
    return next((lines[0] for lines in found if lines), {})


def test_islands_of_the_config_are_not_removed() -> None:
    d = only_named("a")
    d.join("a")
    assert steer(d, "remove", "a") == []
    assert d.state.islands["a"].status == "live"
    wrong = steering.refusal(d.config, d.state, Steer(how="remove", island="a"))
    assert "diloco certs DIR --revoke island.a" in wrong
    nobody = Steer(how="remove", island="x")
    assert steering.refusal(d.config, d.state, nobody) == "", "it is out already"


def test_no_more_are_admitted_than_there_are_places_for() -> None:
    d = only_named("a")
    for number in range(steering.MOST_ADMITTED):
        steer(d, "admit", f"x{number}")
    more = Steer(how="admit", island="c")
    assert "no more can be; remove one" in steering.refusal(d.config, d.state, more)
    assert d.feed(more) == []
    steer(d, "remove", "x0")
    assert persisted(d.feed(more), "admitted")


def test_no_more_are_admitted_than_the_merge_buffer_has_room_for() -> None:
    """The flush takes the deltas of all islands: one that was let in was not counted,
    and theirs came late."""
    d = only_named("a", merge_buffer_bytes=299, room_each=100)
    steer(d, "admit", "c")
    assert d.state.admitted == ("c",)
    more = Steer(how="admit", island="e")
    refusal = steering.refusal(d.config, d.state, more)
    assert "placement.merge_buffer_bytes = 299, but with 'c', 'e', which the" in refusal
    assert "there are 3 islands" in refusal
    assert "the largest fragment take 300; start the coordinator again" in refusal
    assert d.feed(more) == []
    assert steering.refusal(d.config, d.state, Steer(how="admit", island="c")) == ""
    steer(d, "remove", "c")
    assert persisted(d.feed(more), "admitted")
    d.crash()
    assert d.state.admitted == ("e",)


def test_without_a_list_of_names_everyone_is_in_already() -> None:
    d = Driver()
    assert steer(d, "admit", "c") == []
    assert d.state == initial(d.config)


# ---- quarantine --------------------------------------------------------------------


def quarantined() -> Driver:
    """c sent two long deltas in a row."""
    d = patient("a", "b", "c", quarantine_after=2, release_cycles=5)
    for _ in range(2):
        together(d, a=1.0, b=1.0, c=10.0)
        give_up(d, "c")
    assert d.state.islands["c"].quarantined
    return d


def test_a_person_releases_an_island_from_quarantine() -> None:
    d = quarantined()
    effects = steer(d, "release", "c")
    (record,) = persisted(effects, "released")
    assert (record["island"], record["fit"], record["asked"]) == ("c", 0, True)
    assert "'c' is out of quarantine" in only(effects, Alert).text
    assert not d.state.islands["c"].quarantined
    assert steer(d, "release", "c") == [], "it is done already"
    merge = only(together(d, a=1.0, b=1.0, c=1.0), Merge)
    assert merged_islands(merge) == ["a", "b", "c"]


def test_a_release_survives_a_crash_and_holds_nobody_from_lying_again() -> None:
    d = quarantined()
    steer(d, "release", "c")
    d.crash()
    assert not d.state.islands["c"].quarantined
    for name in "abc":
        d.hello(name, 2)
        d.report(name, 0)
    for _ in range(2):
        assert of(together(d, a=1.0, b=1.0, c=10.0), Merge)
        give_up(d, "c")
    assert d.state.islands["c"].quarantined


def test_a_release_of_a_stranger_says_who_was_in_the_run() -> None:
    d = quarantined()
    wrong = steering.refusal(d.config, d.state, Steer(how="release", island="x"))
    assert "no island 'x' was ever in the run; there were 'a', 'b', 'c'" in wrong
    assert steer(d, "release", "x") == []


ORDER = ProfileOrder(island="a", steps=8)


def state_of(**changes: object) -> State:
    d = Driver(make_config())
    d.play("a.joins a=2")
    island = replace(d.state.islands["a"], **changes)
    return with_island(d.state, island)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"status": "absent"}, "'a' is absent, and makes no steps"),
        ({"status": "gone"}, "'a' is gone"),
        ({"phase": "compiling"}, "'a' is compiling, not training"),
        ({"phase": "stopped"}, "'a' is stopped, not training"),
    ],
)
def test_an_island_that_trains_is_asked_and_no_other(
    changes: dict[str, str], why: str
) -> None:
    state = state_of(**changes)
    wrong = steering.trace_refusal(state, ORDER)
    assert why in wrong
    assert bool(wrong) == bool(changes)
    unknown = steering.trace_refusal(state, ProfileOrder(island="x"))
    assert "no island 'x' was ever in the run; there were 'a'" in unknown


def test_slower_islands_have_more_time() -> None:
    assert steering.trace_within_s(state_of(step_seconds=2.0), ORDER, 10.0) == 210.0
