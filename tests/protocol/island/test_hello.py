"""A hello says who an incarnation is, and where it is."""

from diloco_jax.protocol.island.reporting import Introduction, Status, hello
from diloco_jax.protocol.messages import Measures
from diloco_jax.protocol.values import Outstanding, Version


def test_it_says_what_it_holds_and_what_is_acknowledged() -> None:
    who = Introduction(
        island="a",
        incarnation=3,
        session="s",
        fingerprint="f",
        tokens_per_step=64,
        sequences_per_step=4,
        lead=2,
        plan="p",
        run={"seed": 1},
        island_config={"batch_size": 4},
        environment={"jax": "0.1"},
    )
    take = Outstanding(fragment=1, tick=9, start=3, end=7, base=Version(1, 2), seq=11)
    status = Status(
        phase="training",
        steps=7,
        outstanding=(take,),
        versions=(Version(1, 3),),
        measures=Measures(median_step_seconds=0.5),
        run_id="r",
        term=2,
        sequences_granted=40,
        records_through=12,
        tokens=900,
        own_tokens=320,
        next_position=64,
    )
    said = hello(who, status)
    for name in who.__struct_fields__:
        assert getattr(said, name) == getattr(who, name)
    for name in set(status.__struct_fields__) - {"measures", "watches"}:
        assert getattr(said, name) == getattr(status, name)
    assert said.step_seconds == 0.5
