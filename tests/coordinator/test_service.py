"""Messages of islands reach the policy unchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from diloco_jax.config import RunConfig, shared_fields
from diloco_jax.coordinator.service import Likeness, Service
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator.state import Fragment, SaidAhead, State
from diloco_jax.protocol.messages import Outstanding, Version
from diloco_jax.wire.errors import Busy, Refused, RemoteProtocolError

PLAN = plan_fragments({"w": (4, 4)}, {"w": ("embed", "mlp")}, 1)


def serve(posted: list[Any]) -> Service:
    """One whose lead only keeps what is posted."""
    nothing: Any = None
    lead = SimpleNamespace(
        post=lambda event, then=None, peer=None: posted.append(event),
        after_shown=lambda do, peer=None: posted.append(None),
        config=SimpleNamespace(fragments=1, run_id="r", admitted=None),
        state=State(fragments=(Fragment(index=0, version=Version(2, 0)),)),
    )
    sessions = SimpleNamespace(
        arrived=lambda session: None, serves=lambda session: True
    )
    return Service(
        Likeness(RunConfig(), PLAN),
        lead=cast(Any, lead),
        holder=nothing,
        sessions=cast(Any, sessions),
        roster=nothing,
        metrics=nothing,
        kept=nothing,
        time_budget_s=1.0,
        status=nothing,
    )


def hello(**changes: Any) -> messages.Hello:
    take = Outstanding(fragment=1, tick=9, start=3, end=7, base=Version(1, 2), seq=11)
    whole = messages.Hello(
        run_id="r",
        fingerprint=RunConfig().fingerprint(),
        run=shared_fields(RunConfig()),
        plan=PLAN.digest(),
        island="a",
        island_config={},
        incarnation=3,
        session="s",
        environment={},
        tokens_per_step=80,
        sequences_per_step=5,
        phase="training",
        steps=7,
        step_seconds=0.25,
        outstanding=(take,),
        sequences_granted=40,
        records_through=12,
        term=1,
        lookahead=2,
    )
    return msgspec.structs.replace(whole, **changes)


def test_what_an_island_says_is_the_event() -> None:
    posted: list[Any] = []
    said = hello()
    serve(posted).connect(said, cast(Any, None))
    assert posted[0] is said


def test_an_island_of_another_config_or_model_is_refused() -> None:
    posted: list[Any] = []
    other = RunConfig(seed=5)
    fields = {"fingerprint": other.fingerprint(), "run": shared_fields(other)}
    with pytest.raises(Refused, match=r"island 'a' .* seed: 0 here, 5 there.*\(here"):
        serve(posted).connect(hello(**fields), cast(Any, None))
    wanted = rf"parameters: .* is {PLAN.digest()} here, abc there; the code of model"
    with pytest.raises(Refused, match=wanted):
        serve(posted).connect(hello(plan="abc"), cast(Any, None))
    assert not posted


def test_an_island_of_a_later_term_is_to_come_again() -> None:
    posted: list[Any] = []
    with pytest.raises(Busy, match=r"'a' is in term 3.* the newest state"):
        serve(posted).connect(hello(term=3), cast(Any, None))
    (event,) = posted
    assert isinstance(event, SaidAhead)
    assert (event.island, "term 3" in event.how) == ("a", True)


def test_absurd_products_are_turned_away_at_the_door() -> None:
    posted: list[Any] = []
    service = serve(posted)
    for wrong, shown in (
        (hello(steps=2**30, tokens_per_step=2**30), "1073741824 steps of 1073741824"),
        (hello(versions=(Version(0, 1),)), r"version \(0, 1\), and terms count"),
    ):
        with pytest.raises(RemoteProtocolError, match=shown):
            service.connect(wrong, cast(Any, None))
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
    assert not posted
