"""Records in earlier logs and tapes are read as they were written."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import as_written

from diloco_jax.protocol import messages, records
from diloco_jax.protocol.messages import Span

CONTRIBUTION = {
    "island": "a",
    "incarnation": 2,
    "tick": 7,
    "start": 4,
    "end": 12,
    "tokens": 80,
    "base": [1, 5],
}
WHO = {"island": "a", "incarnation": 2}
JOINED = {
    "kind": "joined",
    **WHO,
    "session": "s",
    "tokens_per_step": 10,
    "sequences_per_step": 1,
}
DURABLE = [
    JOINED,
    {**JOINED, "carried": {"steps": 4, "sequences_granted": 8, "counted_tokens": 30}},
    {"kind": "carried", **WHO, "fragment": 1, "steps": 4},
    {"kind": "granted", **WHO, "start": 8, "stop": 16, "offset": 8},
    {
        "kind": "left",
        **WHO,
        "steps": 12,
        "reason": "preempted",
        "said": "bye",
        "settled_steps_by_fragment": [12, 8],
        "in_merges": [[0, 3], [5, 8]],
        "lost_tokens_by_fragment": [0, 40],
        "left_behind": [{"fragment": 1, **CONTRIBUTION}],
    },
    {
        "kind": "merged",
        "fragment": 1,
        "version": [1, 6],
        "tick": 7,
        "final": False,
        "contributions": [CONTRIBUTION, {**CONTRIBUTION, "norm": 0.25}],
        "share": 0.5,
        "verdicts": {"a": [7, "merged", ""], "b": [7, "refused", "stale"]},
        "digest": "feed",
        "payload_bytes": 1,
    },
    {
        "kind": "term_begun",
        **WHO,
        "fragment": 1,
        "version": [2, 6],
        "name": "n",
        "replaced": [1, 6],
        "lost_tokens": {"a": 20},
        "digest": "feed",
    },
    {"kind": "ticks", "through": 30},
    {"kind": "stopping", "tokens": 800},
    {"kind": "finished"},
    {"kind": "extended", "total_tokens": 1600},
    {"kind": "quarantined", **WHO, "refused": 8},
    {"kind": "released", **WHO, "fit": 48},
    {"kind": "released", **WHO, "fit": 0, "asked": True},
    {"kind": "admitted", "island": "c"},
    {"kind": "removed", "island": "c"},
]
FACT = {
    "seq": 3,
    "kind": "took",
    "step": 12,
    "fragment": 1,
    "tick": 7,
    "version": [1, 5],
    "start": 4,
    "stop": 0,
    "value": 0,
    "rate_sum": 0.25,
}
NOTED = {
    records.Fact: {"kind": "island", **WHO, "record": FACT},
    records.Tick: {
        "kind": "tick",
        "tick": 7,
        "fragment": 1,
        "asked": ["a", "b"],
        "final": False,
    },
    records.Skipped: {"kind": "skipped", "tick": 7, "fragment": 1, "why": "open"},
    records.Leaving: {
        "kind": "leaving",
        **WHO,
        "asked": [{"fragment": 1, "tick": 7}],
    },
    records.DeltaRefused: {
        "kind": "refused",
        **WHO,
        "fragment": 1,
        "tick": 7,
        "reason": "stale",
    },
    records.TurnedAway: {
        "kind": "turned_away",
        "island": "a",
        "code": "fenced",
        "message": "stop",
    },
    records.Resumed: {"kind": "resumed", **WHO, "steps": 12},
    records.Absent: {"kind": "absent", **WHO, "why": "silent"},
}


PASSED_ON = {**FACT, "kind": "restored", "unheard": {"incarnation": 1, **FACT}}


def test_every_kind_is_here():
    assert {type(records.from_log(line)) for line in DURABLE} == set(
        records.Durable.__args__
    )
    assert set(NOTED) == set(records.Noted.__args__)


@pytest.mark.parametrize("line", DURABLE, ids=lambda line: line["kind"])
def test_the_log_reads_back(line):
    assert as_written(records.from_log(line)) == line


@pytest.mark.parametrize(("kind", "line"), NOTED.items(), ids=lambda x: str(x)[:20])
def test_the_tape_reads_back(kind, line):
    """Its lines have a time, too."""
    assert as_written(records.from_tape({**line, "time": 1.5}, kind)) == line


def test_what_an_incarnation_passes_on_comes_before_its_own():
    line = {"kind": "island", **WHO, "record": PASSED_ON}
    fact = records.from_tape(line, records.Fact)
    assert as_written(fact) == line
    first, own = as_written(tuple(messages.to_pass_on(2, [fact.record])))
    assert first == PASSED_ON["unheard"]
    assert own == {**FACT, "kind": "restored", "incarnation": 2}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"kind": "other"}, "other"),
        ({**JOINED, "session": None}, "session"),
        ({**JOINED, "more": 1}, "fields that Joined has not"),
        ({**DURABLE[5], "contributions": [{**CONTRIBUTION, "more": 1}]}, "fields"),
        ({**DURABLE[5], "share": None}, "share"),
    ],
)
def test_what_is_none_of_these_is_refused(line, what):
    with pytest.raises(msgspec.ValidationError, match=what):
        records.from_log(line)


def test_a_version_has_a_name() -> None:
    assert messages.Version.named("2-17") == messages.Version(2, 17)


# ---- ranges as sets: the same as sets of numbers ----


RANGES = st.lists(st.builds(Span, st.integers(0, 30), st.integers(0, 30)), max_size=6)


def numbers(found) -> set[int]:
    return {number for span in found for number in range(span.start, span.stop)}


@given(RANGES, RANGES)
def test_they_are_sets_of_numbers(some, others):
    for found, expected in (
        (messages.join_spans(some), numbers(some)),
        (messages.spans_without(some, others), numbers(some) - numbers(others)),
        (messages.common_spans(some, others), numbers(some) & numbers(others)),
    ):
        assert numbers(found) == expected
        assert list(found) == sorted(found)


@given(RANGES)
def test_joined_ranges_do_not_touch(some):
    found = messages.join_spans(some)
    assert all(a.stop < b.start for a, b in itertools.pairwise(found))
    assert all(span.start < span.stop for span in found)
