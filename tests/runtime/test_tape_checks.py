"""The checks that real runs are held to find what they are there to find."""

from __future__ import annotations

import copy
import re

import pytest
import tape_checks

SIZES = (3, 1)
TOKENS_PER_STEP = 8


def part(start: int, end: int, incarnation: int = 1) -> dict:
    return {
        "island": "a",
        "incarnation": incarnation,
        "start": start,
        "end": end,
        "tokens": (end - start) * TOKENS_PER_STEP,
    }


def merged(fragment: int, number: int, *parts: dict) -> dict:
    return {
        "kind": "merged",
        "fragment": fragment,
        "version": [1, number],
        "final": False,
        "contributions": list(parts),
    }


def adopted(fragment: int, number: int, seq: int = 0) -> dict:
    """seq: by default as it is in TAPE."""
    record = {"kind": "adopted", "fragment": fragment, "version": [1, number]}
    record["seq"] = seq or fragment + 1
    return {"kind": "island", "island": "a", "incarnation": 1, "record": record}


def life(kind: str, incarnation: int, **fields) -> dict:
    return {"kind": kind, "island": "a", "incarnation": incarnation, **fields}


TAPE = [
    life("joined", 1, tokens_per_step=TOKENS_PER_STEP),
    merged(0, 1, part(0, 4)),
    adopted(0, 1),
    merged(1, 1, part(0, 5)),
    adopted(1, 1),
    life("left", 1, steps=6),
    {"kind": "recovered", "versions": [[1, 1], [1, 1]], "time": 7.0},
    life("joined", 2, tokens_per_step=TOKENS_PER_STEP),
    merged(0, 2, part(0, 2, incarnation=2)),
    merged(1, 2, part(0, 2, incarnation=2)),
    life("left", 2, steps=2),
]
# Fragment 0 lost steps 4 and 5, fragment 1 lost step 5.
FIELDS = {
    "tokens_computed": 64,
    "tokens_merged": (3 * 6 * 8 + 7 * 8) // 4,
    "tokens_lost": {"died": (3 * 2 * 8 + 8) // 4},
    "tokens_in_flight": 0,
    "tokens_merged_by_fragment": [48, 56],
    "tokens_carried": 0,
}
SUMMARY = {**FIELDS, "islands": {"a": FIELDS}}


def test_a_sound_run_passes():
    assert tape_checks.ledger_problems(SUMMARY, TAPE, SIZES) == []
    assert tape_checks.version_problems(TAPE) == []
    # An island repeats it to a coordinator that came back.
    assert tape_checks.version_problems([*TAPE[:7], adopted(1, 1), *TAPE[7:]]) == []
    assert tape_checks.steps_to_first_merge(TAPE, "a", 2) == 2
    assert tape_checks.steps_to_first_merge(TAPE, "a", 3) == float("inf")


@pytest.mark.parametrize("field", ["tokens_computed", "tokens_merged"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_token_too_many_is_found(field, everywhere):
    summary = copy.deepcopy(SUMMARY)
    summary["islands"]["a"][field] += 1
    if everywhere:  # balanced, but not what the tape says
        summary[field] += 1
        for fields in (summary, summary["islands"]["a"]):
            fields["tokens_lost"]["died"] += 1 if field == "tokens_computed" else -1
    assert tape_checks.ledger_problems(summary, TAPE, SIZES)


def test_a_token_booked_in_another_fragment_is_found():
    summary = copy.deepcopy(SUMMARY)
    summary["islands"]["a"]["tokens_merged_by_fragment"] = [47, 57]
    (problem,) = tape_checks.ledger_problems(summary, TAPE, SIZES)
    assert problem == ("a: tokens_merged_by_fragment [47, 57], by the tape [48, 56]")


def test_open_tokens_of_a_finished_run_are_found():
    fields = {**FIELDS, "tokens_lost": {"died": 12}, "tokens_in_flight": 2}
    summary = {**SUMMARY, **fields, "islands": {"a": fields}}
    assert any(
        "in flight" in line
        for line in tape_checks.ledger_problems(summary, TAPE, SIZES)
    )


def test_steps_merged_twice_are_found():
    assert tape_checks.interval_problems([*TAPE[:4], merged(0, 2, part(3, 6))])
    assert not tape_checks.interval_problems([*TAPE[:4], merged(0, 2, part(4, 6))])


@pytest.mark.parametrize(
    ("at", "record"),
    [
        (6, {"kind": "recovered", "versions": [[1, 0], [1, 1]]}),
        (8, merged(0, 1, part(0, 2, incarnation=2))),
        (4, adopted(0, 1, seq=2)),
        (4, adopted(1, 2)),
    ],
    ids=["recovery", "merge", "adopted twice", "adopted before its merge"],
)
def test_a_version_that_goes_back_is_found(at, record):
    tape = [*TAPE[:at], record, *TAPE[at + 1 :]]
    assert len(tape_checks.version_problems(tape)) == 1


def in_a_new_term(carried):
    """The same, of which a made its first two steps in an earlier term."""
    term = {"kind": "term", "versions": [[2, 0], [2, 0]]}
    told = [life("carried", 1, fragment=f, steps=2) for f in (0, 1)]
    tape = [term, TAPE[0], *told, merged(0, 1, part(2, 4)), life("left", 1, steps=6)]
    tape[4]["version"] = [2, 1]
    fields = {
        "tokens_computed": 48,
        "tokens_merged": 3 * 2 * 8 // 4,
        "tokens_lost": {"died": (3 * 2 * 8 + 4 * 8) // 4},
        "tokens_carried": carried,
        "tokens_in_flight": 48 - 12 - 20 - carried,
        "tokens_merged_by_fragment": [16, 0],
    }
    return {**fields, "islands": {"a": fields}}, tape


def test_what_is_carried_is_counted():
    summary, tape = in_a_new_term(16)
    assert tape_checks.ledger_problems(summary, tape, SIZES) == []
    assert tape_checks.version_problems(tape) == []
    summary, tape = in_a_new_term(15)
    (wrong,) = tape_checks.ledger_problems(summary, tape, SIZES)
    assert "tokens_carried 15, by the tape 16" in wrong
    tape[0]["versions"] = [[2, 1], [2, 0]]
    (wrong,) = tape_checks.version_problems(tape)
    assert "merged [2, 1] after [2, 1]" in wrong


def granted(incarnation, start, stop):
    return life("granted", incarnation, start=start, stop=stop)


LEASED = [
    life("joined", 1, sequences_per_step=2),
    granted(1, 0, 4),
    merged(0, 1, part(0, 1)),
    life("left", 1, in_merges=[[0, 1]]),
    life("joined", 2, sequences_per_step=2),
    granted(2, 2, 4),
    granted(2, 4, 6),
]
"""Positions 2 and 3 are of a step that is in no merge."""


@pytest.mark.parametrize(
    ("at", "record", "problem"),
    [
        (5, granted(2, 4, 6), "position 4 was leased before 2"),
        (5, granted(2, 1, 4), "position 1 was leased before 2"),
        (3, life("left", 1, in_merges=[]), r"\[0, 1\] are in merges, and are free"),
    ],
)
def test_rows_that_are_leased_against_the_rule_are_found(at, record, problem):
    assert tape_checks.row_problems(LEASED) == []
    wrong = tape_checks.row_problems([*LEASED[:at], record, *LEASED[at + 1 :]])
    assert re.search(problem, wrong[0])
