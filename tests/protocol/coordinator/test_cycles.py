"""Kept and watched cycles: all fragments at the versions of one cycle, nothing waits,
and one island at a time has its turn.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Driver, joined, of
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import schedule
from diloco_jax.protocol.coordinator.recovery import recover
from diloco_jax.protocol.coordinator.state import (
    Effect,
    KeepAsked,
    Persist,
    RunExtended,
    Said,
    initial,
)
from diloco_jax.protocol.holding import CycleKept, KeepFragment, Merge
from diloco_jax.protocol.messages import Report, Version, Watch
from diloco_jax.protocol.records import Merged


def kept(effects: list[Effect]) -> dict[int, tuple[int, Version]]:
    """Cycle and version by fragment."""
    return {e.fragment: (e.cycle, e.version) for e in of(effects, KeepFragment)}


def test_a_fragment_is_kept_as_soon_as_its_version_is_sure() -> None:
    d = joined("a")
    d.play("a=2 a/0=2 /0")
    # The first cycle: fragment 0 had its turn, fragment 1 has not.
    assert kept(d.feed(KeepAsked())) == {0: (1, Version(1, 1))}
    assert kept(d.report("a", 4)) == {}, "fragment 1 is open at a tick of the cycle"
    assert kept(d.take("a", 1, 4)) == {}
    assert kept(d.computed(1)) == {1: (1, Version(1, 1))}
    assert d.state.keeping
    assert d.state.unkept == ()
    d.feed(CycleKept(cycle=1))
    assert not d.state.keeping


def test_a_fragment_whose_turn_is_skipped_is_kept_at_once() -> None:
    """At its tick too few islands can be asked, so that nothing of it changes."""
    d = joined("a", "b", "c", quorum=2)
    for name in ("a", "b", "c"):
        d.report(name, 2)
    for name in ("a", "b", "c"):
        d.report(name, 4)
    d.play("a/1=4 b/1=4 +60 /1 b.leaves a=6 c=6")
    assert kept(d.feed(KeepAsked())) == {}
    d.report("a", 8)
    before = d.fragment(1)
    assert kept(d.report("c", 8)) == {1: (2, Version(1, 1))}
    assert d.fragment(1) == before


def test_every_so_many_cycles_one_is_kept_and_one_at_a_time() -> None:
    d = joined("a", export_every=1)
    d.report("a", 2)
    assert d.state.keeping, "from its first tick on"
    d = joined("a", export_every=2)
    numbers = []
    for step in range(2, 41, 2):
        for e in of(d.report("a", step), KeepFragment):
            numbers.append(e.cycle)
        fragment = (step // 2 - 1) % 2
        for e in of(d.merge(fragment, a=step), KeepFragment):
            numbers.append(e.cycle)
        if d.state.keeping and not d.state.unkept and d.state.kept_cycle != 4:
            d.feed(CycleKept(cycle=d.state.kept_cycle))
    assert numbers == [2, 2, 4, 4], "4 was never finished"
    d.feed(CycleKept(cycle=3))
    assert d.state.keeping, "that was another one"


def test_no_cycle_begins_once_the_run_has_stopped() -> None:
    """The flush gives a fragment a tick after its turn of the cycle that is present."""
    d = joined("a", total_tokens=30, export_every=1)
    d.play("a=2 a/0=2 /0")
    d.feed(CycleKept(cycle=1))
    d.report("a", 3)
    d.report("a", 3, phase="stopped")
    assert [f.phase for f in d.state.fragments] == ["open", "open"]
    assert d.state.tick == 3, "in the next cycle"
    assert (d.state.kept_cycle, d.state.keeping) == (1, False)
    before = len(d.effects)
    d.feed(KeepAsked())
    running, again = d.state, recover(d.config, initial(d.config), d.log, d.now)
    d.state = again
    assert kept(d.feed(KeepAsked())) == {}
    assert not d.state.keeping
    d.state = running
    for fragment in (0, 1):
        d.take("a", fragment, 3)
        d.computed(fragment)
    assert d.state.phase == "done"
    d.feed(KeepAsked())
    assert kept(d.effects[before:]) == {}
    assert not d.state.keeping


def test_a_run_that_is_extended_goes_on_with_a_whole_cycle() -> None:
    """So that no fragment was merged after its turn of the present cycle."""
    d = joined("a", total_tokens=30)
    d.play("a=2 a/0=2 /0 a=3")
    d.report("a", 3, phase="stopped")
    for fragment in (1, 0):
        d.take("a", fragment, 3)
        d.computed(fragment)
    assert d.state.tick == 3
    d.config = replace(d.config, total_tokens=90)
    d.feed(RunExtended())
    assert d.state.tick == 4
    d.feed(KeepAsked())
    for fragment, (cycle, version) in kept(d.effects).items():
        assert version == version_at(d, fragment, cycle)
    again = recover(d.config, initial(d.config), d.log, d.now)
    assert again.tick % d.config.fragments == 0


def test_ticks_of_a_kept_cycle_are_used_in_no_other_life() -> None:
    """A crash may leave an older snapshot, or newer ones, to go on from: they lead to
    different ticks, unless the tick up to which a cycle was kept is on the log."""
    d = joined("a", total_tokens=1000)
    for step, fragment in ((2, 0), (4, 1)):
        d.report("a", step)
        d.merge(fragment, a=step)
    d.crash()
    assert d.state.tick > d.state.ticks_reserved
    before = len(d.effects)
    d.feed(KeepAsked())
    found = [type(e).__name__ for e in d.effects[before:]]
    assert found == ["Persist", "KeepFragment", "KeepFragment"]
    kept_to = d.state.tick
    oldest = recover(d.config, initial(d.config), d.log, d.now)
    assert oldest.tick >= kept_to


def test_so_are_those_up_to_an_extension() -> None:
    d = joined("a", total_tokens=20)
    d.report("a", 2)
    d.report("a", 2, phase="stopped")
    for fragment in (0, 1):
        d.take("a", fragment, 2)
        d.computed(fragment)
    d.config = replace(d.config, total_tokens=90)
    d.crash()
    d.feed(RunExtended())
    assert d.state.ticks_reserved >= d.state.tick
    assert recover(d.config, initial(d.config), d.log, d.now).tick >= d.state.tick


def test_a_crash_forgets_the_cycle_under_way() -> None:
    d = Able(watch_every=1)
    d.join("a")
    d.play("a=2 a/0=2 /0")
    d.feed(KeepAsked())
    assert (d.state.keeping, d.state.unkept, d.state.unwatched) == (True, (1,), (1,))
    d.crash(d.state, len(d.log))
    assert (d.state.keeping, d.state.unkept, d.state.unwatched) == (False, (), ())
    assert schedule.present_cycle(d.config, d.state) > d.state.kept_cycle


def version_at(d: Driver, fragment: int, cycle: int) -> Version:
    """The definition: that of the last merge with a tick up to the fragment's turn."""
    turn = (cycle - 1) * d.config.fragments + fragment + 1
    merged = (e.record for e in d.effects if isinstance(e, Persist))
    return max(
        (
            r.version
            for r in merged
            if isinstance(r, Merged) and r.fragment == fragment and r.tick <= turn
        ),
        default=Version(),
    )


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(["a", "b", "take", "compute", "keep", "wait", "kept", "leave"]),
        max_size=120,
    ),
    st.randoms(use_true_random=False),
    st.integers(0, 3),
)
def test_whatever_happens_a_kept_cycle_is_of_one_moment(moves, draw, every) -> None:
    """Islands step, deliver and leave as they like, and merges end in any order."""
    d = Driver(
        fragment_sizes=(10, 10, 10, 10), export_every=every, total_tokens=400, quorum=1
    )
    d.join("a", "b")
    computing: list[Merge] = []
    for move in moves + ["take", "compute"] * 8:
        before = len(d.effects)
        match move:
            case "a" | "b":
                island = d.state.islands[move]
                if island.status == "live":
                    phase = "training" if d.state.phase == "running" else "stopped"
                    steps = island.steps + (phase == "training") * draw.randint(1, 3)
                    d.report(move, steps, phase=phase)
            case "take":
                waiting = [
                    (name, f.index)
                    for f in d.state.fragments
                    for name, account in sorted(f.accounts.items())
                    if (take := account.take)
                    and take.end is None
                    and d.state.islands[name].status == "live"
                ]
                if waiting:
                    name, fragment = draw.choice(waiting)
                    d.take(name, fragment, d.state.islands[name].steps)
            case "compute":
                if computing:
                    merge = computing.pop(draw.randrange(len(computing)))
                    d.computed(merge.fragment)
            case "keep":
                d.feed(KeepAsked())
            case "kept":
                if d.state.keeping and not d.state.unkept:
                    d.feed(CycleKept(cycle=d.state.kept_cycle))
            case "wait":
                d.wait(draw.choice([1.0, 60.0]))
            case "leave":
                if d.state.islands["b"].status == "live":
                    d.goodbye("b")
        computing += of(d.effects[before:], Merge)
    for effect in of(d.effects, KeepFragment):
        assert effect.version == version_at(d, effect.fragment, effect.cycle)
        assert effect.merges == effect.version.number


class Able(Driver):
    """Its islands can evaluate, but for those in `busy`. Two fragments with a tick
    every two steps."""

    busy: frozenset[str] = frozenset()

    def feed(self, event: Any) -> list[Effect]:
        if isinstance(event, Said) and isinstance(event.message, Report):
            able = event.island not in self.busy
            message = Report(**{**_fields(event.message), "watches": able})
            event = Said(island=event.island, session=event.session, message=message)
        return super().feed(event)


def _fields(report: Report) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__struct_fields__}


def told(effects: list[Effect]) -> list[tuple[str, int, int, int]]:
    """Island, cycle, fragment and version number of what is to be watched."""
    return [
        (w.island, w.cycle, w.fragment, w.version.number) for w in of(effects, Watch)
    ]


def run(d: Driver, steps: int, name: str = "a") -> list[tuple[str, int, int, int]]:
    """Let one of the islands train alone up to that step."""
    before = len(d.effects)
    for step in range(d.state.islands[name].steps + 2, steps + 1, 2):
        d.report(name, step)
        d.merge((step // 2 - 1) % 2, **{name: step})
    return told(d.effects[before:])


def test_the_versions_of_a_due_cycle_are_told_and_no_others() -> None:
    d = Able(watch_every=2)
    d.join("a")
    assert run(d, 4) == [], "cycle 1"
    assert run(d, 8) == [("a", 2, 0, 2), ("a", 2, 1, 2)]
    assert run(d, 12) == []
    assert run(d, 16) == [("a", 4, 0, 4), ("a", 4, 1, 4)]


def test_they_are_the_versions_that_an_export_of_the_cycle_has() -> None:
    """Fragment 1 is slow: fragment 0 is merged in the next cycle before it is told."""
    d = Able(watch_every=1)
    d.play("a.joins a=2")
    d.feed(KeepAsked())
    d.play("a/0=2 /0 a=4 a=6 a/0=6 /0 a/1=6 /1")
    kept = {e.fragment: (e.cycle, e.version) for e in of(d.effects, KeepFragment)}
    watched = {w.fragment: (w.cycle, w.version) for w in of(d.effects, Watch)}
    assert kept == watched == {0: (1, Version(1, 1)), 1: (1, Version(1, 1))}


def test_islands_take_turns_and_busy_or_slow_ones_are_passed_over() -> None:
    d = Able(watch_every=1)
    d.join("a", "b")
    d.join("slow", step_seconds=50.0)
    turns = []
    for cycle in range(1, 5):
        turns += run(d, 4 * cycle)
        if cycle == 3:
            d.busy = frozenset("b")
            d.report("b")
    assert [t[:2] for t in turns[::2]] == [("a", 1), ("b", 2), ("a", 3), ("a", 4)]
    d.busy = frozenset({"a", "b"})
    for name in "ab":
        d.report(name)
    assert run(d, 24) == []
    d.busy = frozenset("a")
    d.report("b")
    assert [t[:2] for t in run(d, 28)] == [("b", 7), ("b", 7)], (
        "no cycle is made up for"
    )
    asked = {name: island.watched_cycle for name, island in d.state.islands.items()}
    assert asked == {"a": 4, "b": 7, "slow": 0}


def test_an_island_that_is_away_ends_its_turn() -> None:
    d = Able(watch_every=1)
    d.join("a", "b")
    assert told(d.report("b", 2)) == []
    assert [t[0] for t in told(d.merge(0, b=2))] == ["a"]
    d.disconnect("a")
    later = run(d, 8, "b")
    assert {t for t in later if t[0] == "b"} == {("b", 2, 0, 2), ("b", 2, 1, 2)}


def test_a_turn_that_nobody_takes_over_is_over() -> None:
    d = Able(watch_every=1)
    d.join("a", "b")
    d.busy = frozenset("b")
    d.play("b=2 b/0=2 /0 a.away b=4 b=6")
    before = len(d.effects)
    d.play("b/1=6 /1")
    assert told(d.effects[before:]) == []


def test_no_turn_begins_once_the_run_has_stopped() -> None:
    """The flush's ticks come out of turn; b is in a long step all the while."""
    d = Able(watch_every=1, total_tokens=50)
    d.join("a")
    run(d, 4)
    d.play("b.joins a=5")
    assert d.state.phase == "stopping"
    d.now = d.state.deadline - 1.0
    d.report("a", phase="stopped")
    d.report("b", phase="training")
    assert (d.state.tick, d.state.watched_cycle) == (2, 1)
    d.wait(1.0)
    assert d.state.tick > 2, "of the next cycle"
    assert d.state.islands["b"].counted
    assert d.state.watched_cycle == 1
