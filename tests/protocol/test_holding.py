"""What a worker may take in, and which lead it obeys."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_jax.protocol.holding import (
    AwaitedTakes,
    BeginWorker,
    Obeyed,
    deal,
    encode,
    next_start,
    to_worker,
)
from diloco_jax.protocol.messages import DeltaKey

KEY = DeltaKey("a", 2, 0, 7)


def begin(**fields: Any) -> BeginWorker:
    known: dict[str, Any] = {
        "config": {},
        "run_id": "r",
        "worker": 1,
        "fragments": (1, 3),
        "term": 2,
        "start": 7,
    }
    return BeginWorker(**{**known, **fields})


def test_messages_pass_through_bytes() -> None:
    assert to_worker(encode(begin())) == begin()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, None),
        ({"start": 8}, None),
        ({"term": 3, "start": 1}, None),
        ({"start": 6}, "lead"),
        ({"term": 1, "start": 99}, "lead"),
        ({"run_id": "s", "term": 9}, "run_id"),
    ],
)
def test_the_lead_that_was_started_last_counts(fields, code) -> None:
    lead = begin(**fields)
    refusal = Obeyed("r", 2, 7).refusal(lead, "FILE")
    assert (refusal and refusal[0]) == code
    if code == "lead":
        assert "obeys start 7 of term 2 of run r" in refusal[1]
        assert f"start {lead.start} of term {lead.term}: another" in refusal[1]
        assert "remove FILE" in refusal[1]
    if code == "run_id":
        assert "of run r (FILE), and the lead's run is s" in refusal[1]
    assert Obeyed().refusal(lead, "FILE") is None, "it has obeyed nobody"


@pytest.mark.parametrize(
    ("last", "unix_s", "number"), [(0, 50.5, 50), (50, 50.5, 51), (90, 50.5, 91)]
)
def test_a_later_start_has_a_higher_number(last, unix_s, number) -> None:
    assert next_start(last, unix_s) == number


def test_the_newest_take_alone_is_awaited() -> None:
    awaited = AwaitedTakes()
    assert not awaited.is_awaited(KEY)
    awaited.take(KEY)
    assert awaited.is_awaited(KEY)
    for other in ({"island": "b"}, {"incarnation": 1}, {"fragment": 1}, {"tick": 6}):
        assert not awaited.is_awaited(KEY._replace(**other))
    awaited.take(KEY._replace(tick=9))
    assert not awaited.is_awaited(KEY)
    awaited.drop(KEY)
    assert awaited.is_awaited(KEY._replace(tick=9)), "another one was dropped"
    awaited.drop(KEY._replace(tick=9))
    assert not awaited.is_awaited(KEY._replace(tick=9))


def test_an_incarnation_that_has_ended_has_nothing() -> None:
    awaited, newer = AwaitedTakes(), KEY._replace(incarnation=3, fragment=1)
    awaited.take(KEY)
    awaited.take(newer)
    awaited.forget("a", 3)
    assert not awaited.is_awaited(KEY)
    assert awaited.is_awaited(newer)
    awaited.forget("a", 1)
    assert (awaited.least("a"), awaited.least("b")) == (3, None)


@pytest.mark.parametrize(
    ("sizes", "workers", "dealt"),
    [
        ((5, 5, 5, 5), 2, (0, 1, 0, 1)),
        ((1, 9, 4, 4), 2, (1, 0, 1, 1)),
        ((3, 2), 1, (0, 0)),
        ((3, 2), 3, (0, 1)),
    ],
)
def test_fragments_are_dealt_evenly_by_size(sizes, workers, dealt) -> None:
    assert deal(sizes, workers) == dealt
