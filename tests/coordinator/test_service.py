"""What islands say reaches the policy as they said it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from diloco_jax.config import RunConfig, shared_fields
from diloco_jax.coordinator.service import Service
from diloco_jax.policy.events import Hello
from diloco_jax.policy.state import Fragment, State
from diloco_jax.policy.values import Outstanding, Version
from diloco_jax.wire import messages
from diloco_jax.wire.errors import Busy


def test_a_hello_reaches_the_policy_with_every_field() -> None:
    posted: list[Any] = []
    nothing: Any = None
    engine = SimpleNamespace(
        post=lambda event, then: posted.append(event),
        state=State(fragments=(Fragment(index=0, version=Version(2, 0)),)),
    )
    service = Service(
        RunConfig(),
        engine=cast(Any, engine),
        store=nothing,
        inbox=nothing,
        sessions=cast(Any, SimpleNamespace(arrived=lambda session: None)),
        roster=nothing,
        metrics=nothing,
        status=nothing,
    )
    take = Outstanding(fragment=1, tick=9, start=3, end=7, base=Version(1, 2), seq=11)
    hello = messages.Hello(
        run_id="r",
        fingerprint=RunConfig().fingerprint(),
        run=shared_fields(RunConfig()),
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
    service.connect(hello, nothing)
    for field in Hello.__struct_fields__:
        assert getattr(posted[0], field) == getattr(hello, field), field
    later = msgspec.structs.replace(hello, term=3)
    with pytest.raises(Busy, match=r"'a' is in term 3.* the newest state"):
        service.connect(later, nothing)
    assert len(posted) == 2, "the hello, and what follows it"
