"""What islands say reaches the policy as they said it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from diloco_jax.config import RunConfig, shared_fields
from diloco_jax.coordinator.likeness import Likeness
from diloco_jax.coordinator.service import Service
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator.state import Fragment, State
from diloco_jax.protocol.values import Outstanding, Version
from diloco_jax.wire.errors import Busy, Refused

PLAN = plan_fragments({"w": (4, 4)}, {"w": ("embed", "mlp")}, 1)


def serve(posted: list[Any]) -> Service:
    """One whose lead only keeps what is posted."""
    nothing: Any = None
    lead = SimpleNamespace(
        post=lambda event, then: posted.append(event),
        state=State(fragments=(Fragment(index=0, version=Version(2, 0)),)),
    )
    return Service(
        Likeness(RunConfig(), PLAN),
        lead=cast(Any, lead),
        store=nothing,
        inbox=nothing,
        sessions=cast(Any, SimpleNamespace(arrived=lambda session: None)),
        roster=nothing,
        metrics=nothing,
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
        lead=2,
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
    assert not posted
