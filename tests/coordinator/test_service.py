"""Messages of islands reach the policy unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from door_support import PLAN, RUN, Coordinator, Stream, hello_fields, raw
from msgspec.structs import replace

from diloco_jax.config import shared_fields
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator.state import SaidAhead
from diloco_jax.protocol.messages import Version
from diloco_jax.wire import bulk
from diloco_jax.wire.errors import Busy, Refused, RemoteProtocolError


@pytest.fixture
def made(tmp_path) -> Iterator[Coordinator]:
    made = Coordinator(tmp_path)
    yield made
    made.tape.close()


def posted(made: Coordinator) -> list[Any]:
    return [event for event, *_ in made.lead._queue.queue if event is not None]


def hello(**changes: Any) -> messages.Hello:
    said = bulk.from_island(raw("Hello", hello_fields("a", run_id="r", term=1)))
    return replace(cast(messages.Hello, said), **changes)


def connect(made: Coordinator, **changes: Any) -> messages.Hello:
    said = hello(**changes)
    made.handlers.connect(said, cast(Any, Stream(said)))
    return said


def test_what_an_island_says_is_the_event(made) -> None:
    said = connect(made)
    assert posted(made)[0] is said


def test_an_island_of_another_config_or_model_is_refused(made) -> None:
    other = dataclasses.replace(RUN, seed=5)
    fields = {"fingerprint": other.fingerprint(), "run": shared_fields(other)}
    with pytest.raises(Refused, match=r"island 'a' .* seed: 0 here, 5 there.*\(here"):
        connect(made, **fields)
    wanted = rf"parameters: .* is {PLAN.digest()} here, abc there; the code of model"
    with pytest.raises(Refused, match=wanted):
        connect(made, plan="abc")
    assert not posted(made)


def test_an_island_of_a_later_term_is_to_come_again(made) -> None:
    with pytest.raises(Busy, match=r"'a' is in term 3.* the newest state"):
        connect(made, term=3)
    (event,) = posted(made)
    assert isinstance(event, SaidAhead)
    assert (event.island, "term 3" in event.how) == ("a", True)


def test_absurd_products_are_turned_away_at_the_door(made) -> None:
    service = made.handlers
    service.sessions.serves = lambda stream: True
    large = {"steps": 2**30, "tokens_per_step": 2**30}
    for wrong, shown in (
        (large, "1073741824 steps of 1073741824"),
        ({"versions": (Version(0, 1),)}, r"version \(0, 1\), and terms count"),
    ):
        with pytest.raises(RemoteProtocolError, match=shown):
            connect(made, **wrong)
    session = SimpleNamespace(hello=hello(tokens_per_step=2**30))
    measures = messages.Measures(steps=2**30)
    for steps, measured in ((2**30, messages.Measures()), (1, measures)):
        report = messages.Report(
            phase="training", steps=steps, step_seconds=1.0, measures=measured
        )
        with pytest.raises(RemoteProtocolError, match="1073741824 steps of"):
            service.receive(cast(Any, session), report)
    fast = messages.Measures(steps=1, median_step_seconds=5e-324)
    report = messages.Report(phase="training", steps=1, step_seconds=1.0, measures=fast)
    with pytest.raises(RemoteProtocolError, match="take 5e-324 s, no step takes less"):
        service.receive(cast(Any, session), report)
    assert not posted(made)
