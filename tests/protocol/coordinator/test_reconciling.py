"""Takes in a hello, and what the coordinator makes of them."""

from kit import Driver, of, only

from diloco_jax.protocol.messages import ResendRequest, TakeVerdict, Welcome
from diloco_jax.protocol.values import Outstanding, Version


def test_a_take_from_before_the_last_verdict_is_neither_judged_nor_asked_for() -> None:
    """A late hello tells it: it was judged, and so was a later one."""
    d = Driver(fragment_sizes=(5,), steps_per_cycle=2)
    d.join("a")
    d.report("a", 2)
    first = d.tick_of("a", 0)
    d.merge(0, a=2)
    d.report("a", 4)
    d.merge(0, a=4)
    told = d.account("a", 0).told
    assert told is not None
    assert told.tick > first
    assert d.account("a", 0).take is None
    held = Outstanding(fragment=0, tick=first, start=0, end=2, base=Version(), seq=0)
    d.disconnect("a")
    effects = d.hello("a", steps=4, phase="training", outstanding=(held,))
    assert only(effects, Welcome).resumed
    assert not of(effects, ResendRequest)
    assert not of(effects, TakeVerdict)
    assert d.account("a", 0).take is None
