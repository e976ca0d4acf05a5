"""Conclusions of the benchmark from the tapes of two coordinators."""

from __future__ import annotations

import dataclasses
import math

import soak
from coordinator_pair import NODES, Pair
from standby_kills import Kill, Look, facts_of, gap_rows, going_back, outcomes

from diloco_jax.coordinator.standby.name import node_of


def adopted(version, at=0.0, island="a"):
    seq = 10 * version[0] + version[1]
    record = {"seq": seq, "kind": "adopted", "fragment": 0, "version": version}
    return {
        "kind": "island",
        "time": at,
        "island": island,
        "incarnation": 1,
        "record": record,
    }


def merged(version, at=0.0):
    return {"kind": "merged", "time": at, "fragment": 0, "version": version}


def recovered(version, at=0.0):
    return {"kind": "recovered", "time": at, "versions": [version]}


def term(version, at=0.0):
    return {"kind": "term", "time": at, "versions": [version]}


def kill(at, *, in_step=True, reign=1):
    return Kill(time=at, who="one", in_step=in_step, reign=reign)


FIRST = [merged([1, 1], 1.0), adopted([1, 1], 1.5), merged([1, 2], 2.0)]


def test_what_nobody_adopted_may_go_and_what_somebody_did_may_not():
    before = Look.at(FIRST)
    after = Look.at([merged([1, 1], 1.0), recovered([1, 1], 9.0)])
    assert going_back([before, after]) == []
    seen = Look.at([*FIRST, adopted([1, 2], 2.5, "b")])
    (wrong,) = going_back([seen, after])
    assert wrong == "leader 1: fragment 0 is at [1, 1], and [1, 2] was adopted"
    assert going_back([seen, Look.at([term([2, 0], 9.0)])]) == []
    # One that was killed before it had a tape says nothing.
    assert going_back([seen, Look.at([])]) == []


def test_what_goes_back_on_one_tape_is_found():
    (wrong,) = going_back([Look.at([*FIRST, recovered([1, 1], 9.0)])])
    assert "recovered [1, 1] after [1, 2]" in wrong


def test_a_kill_before_the_recovery_from_the_one_before_is_told_apart():
    kills = [kill(10.0), kill(20.0, in_step=False, reign=2), kill(22.0, reign=2)]
    looks = [
        Look.at(FIRST),
        Look.at([*FIRST, recovered([1, 2], 14.0), merged([1, 3], 15.0)]),
        Look.at([term([2, 0], 30.0), merged([2, 1], 32.0)]),
    ]
    found = outcomes(kills, looks, 4.0)
    assert [outcome.recovered for outcome in found] == [True, False, True]
    assert [outcome.gap for outcome in found] == [1.25, 3.0, 2.5]
    island = {"tokens_lost": {"stale": 7}}
    summary = {"term": 2, "merges": 4, "goodput": 0.5, "islands": {"a": island}}
    facts = facts_of(found, [1, 2, 2, 3], summary, [])
    assert facts["killed before it had recovered"] == 1
    assert facts["the other one took over"] == 2
    assert facts["tokens lost"] == 7
    rows = {row["standby"]: row for row in gap_rows(found)}
    assert rows["in step"]["kills"] == 2
    assert rows["in step"]["longest"] == "2.50"
    assert rows["not in step"]["gap, mandates: median"] == "3.00"


def test_a_run_that_never_merges_again_has_no_finite_gap():
    (outcome,) = outcomes([kill(10.0)], [Look.at(FIRST)], 4.0)
    assert not outcome.recovered
    assert dataclasses.astuple(outcome)[-1] == math.inf


def test_a_coordinator_is_known_by_the_name_that_its_workdir_has(tmp_path):
    pair = Pair(soak.soak_config(60.0), tmp_path)
    for name in NODES:
        pair.workdir(name).mkdir()
    assert pair.named(node_of(pair.workdir("two"))) == "two"
    assert pair.named("") == ""
