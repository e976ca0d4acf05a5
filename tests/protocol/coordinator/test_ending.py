"""The end of a run, or of an island that has notice: stopping, flushing, done; how many
fragments are open at once; and links that blink or hang meanwhile: nobody's last steps
are lost by it.
"""

from typing import Any

import pytest
from kit import (
    Driver,
    begun,
    joined,
    kinds,
    notes,
    of,
    only,
    persisted,
    scene,
    scenes,
)

from diloco_jax.protocol.coordinator import takes
from diloco_jax.protocol.coordinator.state import Alert, Effect, Persist
from diloco_jax.protocol.messages import (
    Finished,
    MayLeave,
    Progress,
    Stop,
    TakeRequest,
)

ONE = {"fragment_sizes": (4,)}
TICKS = {**ONE, "steps_per_cycle": 4}


def stopping(*names: str, steps: int = 10, **changes: Any) -> Driver:
    """Islands that have done `steps` steps; the last report ended the run."""
    total = len(names) * steps * 10
    d = joined(*names, steps_per_cycle=10**6, total_tokens=total, **changes)
    d.reports(**dict.fromkeys(names, steps))
    assert d.state.phase == "stopping"
    return d


def stop(d: Driver, *names: str) -> list[Effect]:
    return [effect for name in names for effect in d.report(name, phase="stopped")]


def pending(quorum: int) -> Driver:
    """b's delta of 1 step was too late for the merge of the others; all have stopped,
    a and c after 5 steps and b after 3."""
    d = joined("a", "b", "c", total_tokens=130, quorum=quorum, **TICKS)
    d.play("b=1 a=4 c=4 b/0~1 c/0=4")
    d.play("a/0=4" if d.fragment(0).phase == "open" else "a/0~4")
    d.play("/0 b=3 a=5 c=5 a.stops b.stops c.stops")
    assert d.state.phase == "flushing"
    return d


def hanging() -> Driver:
    """a and b were asked before the stop, after 4 steps. The bytes of b, which is
    needed for a quorum, do not come; all have stopped after 5."""
    d = Driver(total_tokens=140, quorum=2, **TICKS)
    d.play("a.joins b.joins a=4 b=4 c.joins a/0=4 b/0~4 a=5 b=5 c=4")
    stop(d, "a", "b", "c")
    assert (d.state.phase, d.fragment(0).phase) == ("flushing", "open")
    return d


# A flush waits 50 s for deltas, half of them for all; a lease is 100 s.
@scenes(
    """
who slept for hardly longer than a lease still hears the last steps
    stopping a b fragment_sizes=4,
    +102 ->
    phases -> flushing idle
    a=11 -> ask 0:a
    b=11 a.stops b.stops ->
    a/0=11 -> flush 0: a 0-11
    /0 -> ask 0:b
    b/0=11 -> flush 0: b 0-11
    /0 -> finished
    lost -> nothing
who is silent for a tenth more than a lease is not awaited
    stopping a b
    +102 ->
    +10 -> finished
    phases -> done done done
the flush merges everything and finishes
    stopping a b quorum=2
    a.stops b.stops -> ask 0:ab; ask 1:ab
    a/0=10 ->
    b/0=10 -> flush 0: a 0-10, b 0-10
    /0 ->
    a/1=10 b/1=10 -> flush 1: a 0-10, b 0-10
    /1 -> finished
    phases -> done done done
    lost -> nothing
the flush waits for all live islands whatever the grace
    stopping a b grace=0.0 fragment_sizes=4,
    a.stops b.stops -> ask 0:ab
    a/0=10 +30 ->
    b/0=10 -> flush 0: a 0-10, b 0-10
at the deadline the flush merges what is here
    stopping a b fragment_sizes=4,4
    a.stops b.stops -> ask 0:ab; ask 1:ab
    a/0=10 ->
    +50 -> flush 0: a 0-10; skip 1: quorum is out of reach
    phases -> flushing merging done
    /0 -> publish pending:b; alert the run ended without all that a, b computed
    ; drop 1:a; drop 0:b; drop 1:b; finished
    lost -> a finished 50, b finished 100
the flush goes on while deltas come
    # A link that carries the model in a cycle need not carry it in a fixed time.
    stopping a fragment_sizes=4,4,4,4
    a.stops -> ask 0:a; ask 1:a; ask 2:a; ask 3:a
    +49 a/0=10 /0 -> flush 0: a 0-10
    +49 a/1=10 /1 -> flush 1: a 0-10
    +49 a/2=10 /2 -> flush 2: a 0-10
    +49 a/3=10 /3 -> flush 3: a 0-10; finished
    lost -> nothing
a tick of before the stop is no flush
    joined a b total_tokens=130 fragment_sizes=4, steps_per_cycle=4
    b=1 a=4 b/0~1 a/0=4 /0 b=4 a=8 a/0~8 b=5 a.stops b.stops
    phases -> flushing open
    b/0 ->
    a/0 -> merge 0: a 4-8, b 0-1
    /0 -> ask 0:b
    b/0=5 -> flush 0: b 1-5
    /0 -> finished
    lost -> nothing
the flush merges a fragment once
    pending quorum=1
    b/0 ->
    a/0 -> merge 0: a 0-4, b 0-1
    /0 -> ask 0:abc
    a/0=5 b/0=3 ->
    c/0=5 -> flush 0: a 4-5, b 1-3, c 4-5
    /0 -> finished
who has not answered a refusal keeps nobody waiting
    joined a b total_tokens=110 fragment_sizes=4, steps_per_cycle=4
    b=1 a=4 b/0~1 a/0=4 /0 b/0! b=5 a=6 a.stops
    b.stops -> ask 0:a
below quorum what is pending enters the flush and the rest follows
    pending quorum=2
    a/0=5 c/0=5 ->
    b/0 -> flush 0: a 4-5, b 0-1, c 4-5
    /0 -> ask 0:b
    b/0=3 -> flush 0: b 1-3
    /0 -> finished
a tick that is given up in the flush leaves its deltas to it
    joined a b quorum=2 total_tokens=90 fragment_sizes=4, steps_per_cycle=4
    a=4 b=4 a/0=4 b=5 a.stops b.stops -> ask 0:ab
    phases -> flushing open
    b.away -> skip 0: quorum is out of reach; flush 0: a 0-4
    /0 -> publish pending:b
    +50 -> drop 0:b; finished
a take refused in the flush is taken once more
    stopping a fragment_sizes=4,
    a.stops a/0~10 -> ask 0:a
    a/0! -> refused non_finite:a; drop 0:a; skip 0: quorum is out of reach
    phases -> flushing idle
    a/0-reopened -> ask 0:a
    a/0=10 -> flush 0: a 0-10
    /0 -> finished
a blink of all links costs nobody its last steps
    # The first that was back opened the fragment again, for itself.
    stopping a b fragment_sizes=4,
    a.stops b.stops a/0~10 b/0~10 -> ask 0:ab
    a.away b.away -> skip 0: quorum is out of reach
    phases -> flushing idle
    +1 a.back b.back -> resend 0:ab
    a/0 -> flush 0: a 0-10
    /0 -> publish pending:b
    b/0 -> flush 0: b 0-10
    /0 -> finished
    lost -> nothing
a blink of one link costs a second merge
    stopping a b fragment_sizes=4,
    a.stops b.stops b/0~10 a/0=10 -> ask 0:ab
    b.away -> flush 0: a 0-10
    /0 -> publish pending:b
    +1 b.back -> pending:b; resend 0:b
    b/0 -> flush 0: b 0-10
    /0 -> finished
    lost -> nothing
one whose steps are all merged is not awaited as its link breaks
    stopping a b fragment_sizes=4,
    a.stops b.stops a/0=10 b/0=10 -> ask 0:ab; flush 0: a 0-10, b 0-10
    b.away ->
    /0 -> finished
what hangs keeps nobody else's last steps out
    # b's delta of before the stop does not come.
    pending quorum=1
    a/0 +24 ->
    +1 -> merge 0: a 0-4
    /0 -> publish refused stale:b; drop 0:b; ask 0:ac
    a/0=5 c/0=5 -> flush 0: a 4-5, c 4-5
    /0 -> publish refused stale:b
    +50 -> alert the run ended without all that b computed; drop 0:b; finished
    lost -> b finished 30
nor if the coordinator slept meanwhile
    # It first listens for a lease; what does not come by then hangs, and the others
    # have as much time after that as ever.
    pending quorum=1
    a/0 +350 ->
    +99 a=5 b=5 c=5 ->
    +1 -> merge 0: a 0-4
    +24 ->
    /0 -> publish refused stale:b; drop 0:b; ask 0:ac
    a/0=5 c/0=5 /0 -> flush 0: a 4-5, c 4-5; publish refused stale:b
    lost -> nothing
a tick of before the stop does not wait for what hangs
    # Nor for the deadline: a's later step, and c, which was not asked, need a merge
    # after it. c would send what the first one does not wait for.
    hanging
    +24 ->
    +1 -> skip 0: quorum is out of reach; flush 0: a 0-4
    /0 -> publish pending:b; ask 0:ac
    a/0=5 c/0=4 ->
    +50 -> flush 0: a 4-5, c 0-4
    /0 -> publish refused stale:b; drop 0:b
    ; alert the run ended without all that b computed; drop 0:b; finished
    lost -> b finished 50
what hangs is waited for where nobody needs another merge
    stopping a b fragment_sizes=4,
    a.stops b.stops a/0=10 b/0~10 +49 -> ask 0:ab
    b/0 -> flush 0: a 0-10, b 0-10
who has not stopped yet has last steps to come
    # A delta of before the stop has all of b's steps, and is merged while b makes more.
    joined a b total_tokens=80 fragment_sizes=4, steps_per_cycle=4
    a=4 b=4 a/0=4 b/0~4 a.stops -> ask 0:ab; merge 0: a 0-4
    +99 a=4 b=4 +1 ->
    phases -> flushing merging
    b/0 ->
    /0 -> publish pending:b; flush 0: b 0-4
    /0 ->
    b=6 b.stops -> ask 0:b
    b/0=6 -> flush 0: b 4-6
    /0 -> finished
    lost -> nothing
who stops before the run is asked for all that is open, once
    # Island a has notice: it stops before the run does, and 2 are a quorum.
    joined a b quorum=2
    a=2 a.stops -> ask 0:a; ask 1:a
    phases -> running idle idle
    a.stops ->
it is let go when all is here
    # The first answer may be lost.
    joined a b quorum=2
    a=2 a.stops -> ask 0:a; ask 1:a
    a/0=2 a/1~2 ->
    a/1 -> may leave:a
    a.stops -> may leave:a
    a.leaves ->
    lost -> nothing
    c.joins b=2 c=2 b/0=2 -> ask 0:bc
    c/0=2 -> merge 0: a 0-2, b 0-2, c 0-2
what is open after an earlier take is not waited for
    joined a b quorum=2 fragment_sizes=4,
    a=2 b=2 a=4 b=4 a/0=4 a=5 -> ask 0:ab
    a.stops -> may leave:a
    a.leaves -> skip 0: quorum is out of reach
    lost -> a stopped 10
a merge about to end is waited for if more is open behind it
    # The merge may end at any time.
    joined a b quorum=2
    a=2 b=2 b/0=2 a/0=2 a=3 -> ask 0:ab; merge 0: a 0-2, b 0-2
    a.stops -> ask 1:a
    a/1=3 ->
    /0 ->
    a.stops -> ask 0:a
    a/0=3 -> may leave:a
    a.leaves ->
    lost -> nothing
who has nothing open may go at once
    joined a b
    a.stops -> may leave:a
at the end of the run nobody leaves early
    joined a b steps_per_cycle=1000000 total_tokens=40
    b=2 a=2 a.stops ->
    phases -> stopping idle idle
nothing new begins once the run stops
    # It has used most of its data, of which it would get more.
    stopping a steps=60
    log
    a=120 ->
    log -> nothing
    b.1 -> out finished:b1
    a.2 -> out finished:a2
who dies in the flush is not waited for beyond its lease
    stopping a b flush_s=200.0 fragment_sizes=4,
    a.stops b.stops a/0=10 b.away -> ask 0:ab; flush 0: a 0-10
    /0 +99 a=10 -> publish pending:b
    deadline -> 1
    +1 -> drop 0:b; finished
    lost -> b absent 100
who is absent may come back until the flush begins
    stopping a b fragment_sizes=4,
    b.away a.stops ->
    b.back b.stops -> ask 0:ab
the flush has its deadlines
    # Bytes that came before are no news; in the end a lease is waited for.
    stopping a b fragment_sizes=4,4
    a.stops b.stops +1 a/0=10
    deadline -> 25
    +1 a/0
    deadline -> 24
    +50
    deadline -> 48
without live islands it ends at its deadlines
    stopping a fragment_sizes=4,
    a.away
    deadline -> 100
    +100 -> finished
    deadline -> none
a run that is over says so
    stopping a fragment_sizes=4,
    a.stops a/0=10 /0
    a=10 +1000 ->
    deadline -> none
    a.1 -> out finished:a1
    a.2 -> out finished:a2
pacing of the others goes on as if nobody had stopped
    joined a b
    b=2 a=1 a.stops -> ask 0:ab; ask 1:a
    b=3 ->
    b=4 -> ask 1:b
a merge that takes long leaves time for the next
    hanging
    +24
    deadline -> 1
    +1 -> skip 0: quorum is out of reach; flush 0: a 0-4
    +24 /0 -> publish pending:b; ask 0:ac
    +2 ->
    a/0=5 c/0=4 +50 /0 -> flush 0: a 4-5, c 0-4; publish refused stale:b; drop 0:bb
    ; finished
    lost -> b absent 50
after a crash the end awaits islands of which no merge tells
    stopping a b fragment_sizes=4,
    crash a.back=10 a.stops a/0=10 /0 -> ask 0:a; flush 0: a 0-10
    b.back=10 b.stops b/0=10 /0 -> ask 0:b; flush 0: b 0-10; finished
    lost -> nothing
a hello that comes late does not hide that an island trains
    # The flush awaits the last step of who trains, not of who joins.
    stopping a b fragment_sizes=4,
    a.stops b.1 +60 a=10 b=10 +40 -> ask 0:ab
    a/0=10 b/0=10 /0 -> flush 0: a 0-10, b 0-10
    b=11 b.stops b/0=11 /0 -> ask 0:b; flush 0: b 10-11; finished
    lost -> nothing
the flush opens what memory has room for
    # Each worker has its own.
    crowded room=2
    phases -> flushing open open idle idle
    a/0=10 b/0=10 -> flush 0: a 0-10, b 0-10
    /0 -> ask 2:ab
    a/1=10 b/1=10 /1 -> flush 1: a 0-10, b 0-10; ask 3:ab
    a/2=10 b/2=10 /2 a/3=10 b/3=10
    /3 -> finished
    lost -> nothing
every worker has its own room
    crowded room=1 workers=2
    phases -> flushing open open idle idle
    a/0=10 b/0=10 -> flush 0: a 0-10, b 0-10
    /0 -> ask 2:ab
an island that hangs keeps no fragment from the others
    # Half of the flush's 50 s is for four fragments.
    crowded room=1
    a/0=10
    deadline -> 6.25
    +6.25 -> ask 1:ab
    a/1=10
    +6.25 -> ask 2:ab
    a/2=10
    +6.25 -> ask 3:ab
    a/3=10 +50 -> flush 0: a 0-10; flush 1: a 0-10; flush 2: a 0-10; flush 3: a 0-10
"""
)
def test_a_scene_of_the_end(first: str, text: str) -> None:
    ways = {"stopping": stopping, "pending": pending, "hanging": hanging}
    d = begun(first, joined=joined, crowded=crowded, **ways)
    scene(d, text)


def test_the_run_stops_when_it_has_its_tokens() -> None:
    d = joined("a", "b", total_tokens=100)
    d.report("a", 5)
    assert d.state.phase == "running"
    effects = d.report("b", 5)
    assert only(effects, Progress).tokens == 100
    order = kinds(effects)
    assert order.index(Persist) < order.index(Stop)
    assert [e.island for e in of(effects, Stop)] == ["a", "b"]
    assert persisted(effects, "stopping") == [{"kind": "stopping", "tokens": 100}]


def test_silent_and_compiling_islands_are_told_to_stop_too() -> None:
    d = joined("a", "b", total_tokens=100)
    d.hello("c")
    d.now += 60
    d.play("a=4 +50")
    assert d.state.islands["b"].status == "absent"
    told = {e.island for e in of(d.report("a", 10), Stop)}
    assert told == {"a", "b", "c"}


def test_what_the_flush_writes_is_final_and_every_incarnation_ends() -> None:
    d = stopping("a", **ONE)
    stop(d, "a")
    d.take("a", 0, 10)
    effects = d.computed(0)
    assert persisted(effects, "merged")[0]["final"]
    (left,) = persisted(effects, "left")
    assert (left["island"], left["reason"]) == ("a", "finished")
    assert persisted(effects, "finished")
    assert kinds(effects)[-1] is Finished
    totals = d.totals("a")
    assert (totals.merged, totals.lost, totals.in_flight) == (100, {}, 0)
    assert of(d.effects, Alert) == []


def test_what_the_flush_did_not_wait_for_is_told() -> None:
    d = stopping("a", "b", fragment_sizes=(4, 4))
    d.play("a.stops b.stops a/0=10 a/1=10 b/1=10 /1")
    d.wait(d.config.flush_s)
    told = only(d.computed(0), Alert)
    assert "all that b computed" in told.text
    assert f"{d.config.flush_s:g} s" in told.text


def test_ticks_of_who_leaves_are_no_ones_else() -> None:
    d = joined("a", "b", quorum=2)
    d.play("a=2 a.stops")
    (note,) = notes(d.effects, "leaving")
    assert (note["island"], note["incarnation"]) == ("a", 1)
    theirs = {ask["tick"] for ask in note["asked"]}
    assert theirs == {ask.tick for ask in of(d.effects, TakeRequest)}
    (reserved,) = persisted(d.effects, "ticks")
    assert max(theirs) <= reserved["through"], "before any other tick"
    d.play("c.joins b=2 c=2 b=4 c=4 b=6 c=6")
    regular = {ask.tick for ask in of(d.effects, TakeRequest) if ask.island != "a"}
    assert len(theirs) == 2
    assert regular
    assert not theirs & regular


def test_what_arrived_of_who_left_is_kept_for_its_merges() -> None:
    d = joined("a", "b", quorum=2)
    d.play("a=2 a.stops a/0=2")
    assert of(d.arrive("a", 0), MayLeave) == []
    assert of(d.take("a", 1, 2), MayLeave)
    (left,) = persisted(d.goodbye("a", "preempted"), "left")
    assert [kept["fragment"] for kept in left["left_behind"]] == [0, 1]
    assert (d.totals("a").in_flight, d.totals("a").lost) == (20, {})


def crowded(room: int, **changes: Any) -> Driver:
    """A flush of two islands; memory has room for the deltas of few fragments."""
    memory = {"room_each": 10, "merge_buffer_bytes": 20 * room + 19}
    d = stopping("a", "b", fragment_sizes=(4,) * 4, **memory, **changes)
    stop(d, "a", "b")
    return d


def test_one_that_is_quarantined_opens_nothing_while_its_delta_is_awaited() -> None:
    d = stopping("a", "b", "c", **ONE)
    d.state = takes.quarantine_moved(d.state, "c", quarantined=True)
    d.play("a.stops b.stops c.stops a/0=10 b/0=10 /0")
    assert d.state.phase == "flushing"
    tick = d.state.tick
    for name in "aba":
        assert notes(d.report(name, 10), "tick") == []
    assert d.state.tick == tick


def test_an_outage_is_no_transfer() -> None:
    """Later merges would wait for slow transfers of that length."""
    d = joined("a", **TICKS)
    d.play("a=4 a/0~4 a.away")
    d.now += 600
    d.play("a.back")
    d.now += 1
    d.arrive("a", 0)
    assert d.fragment(0).transfer_seconds == 0.0


@pytest.mark.parametrize("stopped", ["a", "ab"])
def test_a_coordinator_that_was_stopped_itself_listens_first(stopped: str) -> None:
    """As it wakes, its timer may fire before it hears what has come meanwhile."""
    d = stopping("a", "b", **ONE)
    stop(d, *stopped)
    effects = d.wait(5 * d.config.lease_s)
    assert not persisted(effects, "finished")
    assert notes(effects, "absent") == []
    listens_to = d.state.deadline if stopped == "a" else d.state.hangs_at
    assert listens_to == d.now + d.config.lease_s
    stop(d, "b")
    scene(d, "b/0=10 a/0=10 /0 -> flush 0: a 0-10, b 0-10; finished")
    scene(d, "lost -> nothing")


def test_silence_that_is_noticed_in_time_is_the_islands() -> None:
    d = stopping("a", "b", **ONE)
    d.now = d.state.islands["b"].lease_until - 1
    stop(d, "a")
    (absent,) = notes(d.wait(2), "absent")
    assert (absent["island"], absent["why"]) == ("b", "silent")
