"""The hello of a process that has been in the run before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from diloco_jax.config import Config
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.island.mailbox import Status
from diloco_jax.island.main import Island
from diloco_jax.protocol.values import Outstanding, Version

PLAN = plan_fragments({"w": (4, 4)}, {"w": ("embed", "mlp")}, 1)


def test_it_says_what_it_holds_and_what_is_acknowledged() -> None:
    config = Config()
    island = SimpleNamespace(
        _config=config,
        _name="a",
        _incarnation=3,
        _session="s",
        _host=SimpleNamespace(island=config.island("a"), plan=PLAN),
        _link=SimpleNamespace(run_id="r", term=2),
    )
    take = Outstanding(fragment=1, tick=9, start=3, end=7, base=Version(1, 2), seq=11)
    status = Status(
        phase="training",
        steps=7,
        outstanding=(take,),
        versions=(Version(1, 3),),
        records_through=12,
        tokens=900,
        next_position=64,
    )
    hello = Island._hello(cast(Any, island), status, 40)
    assert (hello.run_id, hello.island, hello.incarnation) == ("r", "a", 3)
    assert (hello.phase, hello.steps) == ("training", 7)
    assert hello.outstanding == (take,)
    assert (hello.sequences_granted, hello.records_through) == (40, 12)
    assert (hello.term, hello.versions) == (2, (Version(1, 3),))
    assert (hello.tokens, hello.next_position) == (900, 64)
