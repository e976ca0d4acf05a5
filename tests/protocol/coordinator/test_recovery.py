"""A coordinator that died: what comes back, and what happened meanwhile."""

import pytest
from kit import (
    Driver,
    asked,
    begun,
    joined,
    kinds,
    of,
    only,
    persisted,
    scene,
    scenes,
    took,
)
from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.recovery import recover, serving_from
from diloco_jax.protocol.coordinator.state import RunExtended, RunResumed, initial
from diloco_jax.protocol.holding import Drop, Merge
from diloco_jax.protocol.messages import (
    Refused,
    ResendRequest,
    Span,
    Stop,
    TakeRequest,
    Version,
    Welcome,
)


def trained() -> Driver:
    """Both islands merged into fragment 0; a's delta for fragment 1 is on its way."""
    d = joined("a", "b", grace=1.0, overlap_steps=10)
    d.play("b=1 a=2 b/0=1 a/0=2 /0 a=4 a/1~4")
    return d


def test_what_is_durable_comes_back() -> None:
    d = trained()
    before = d.state
    d.crash()
    assert [f.version for f in d.state.fragments] == [Version(1, 1), Version(1, 0)]
    for name in "ab":
        assert d.state.islands[name].status == "absent"
        old, new = before.islands[name], d.state.islands[name]
        assert new.session == old.session
        assert new.sequences_granted == old.sequences_granted
        assert new.leases == old.leases
        account = d.account(name, 0)
        assert account.merged_tokens == before.fragments[0].accounts[name].merged_tokens
        assert account.told == before.fragments[0].accounts[name].told
    assert d.state.next_position == before.next_position
    assert d.account("a", 1).take is None


@scenes(
    """
islands carry on where they are
    joined a b
    a=2 a/0=2 /0 a=4 a/1~4 -> ask 0:ab; merge 0: a 0-2; publish pending:b; ask 1:ab
    crash a.back=30 -> resend 1:a
    a/1 ->
    a=32 -> merge 1: a 0-4
an island that left during a merge that was lost
    joined a fragment_sizes=5,
    a=4 a/0=4 a=5 -> ask 0:a; merge 0: a 0-4
    a.2 -> drop 0:a; out fenced:a1
    crash ->
    lost -> a died 10, a coordinator 40
of a lost merge only what an earlier one does not have is lost: replaced
    joined a fragment_sizes=5,
    a=4 a/0=4 /0 a=8 a/0=8 a.2 crash
    lost -> a coordinator 40
of a lost merge only what an earlier one does not have is lost: left
    joined a fragment_sizes=5,
    a=4 a/0=4 /0 a=8 a/0=8 a.leaves crash
    lost -> a coordinator 40
fencing survives a crash
    joined a b
    a.2 -> out fenced:a1
    crash a.1 -> out fenced:a1
    a.2 b.leaves crash ->
    b.1 -> out fenced:b1
a run that was over stays so
    joined a fragment_sizes=4,4 steps_per_cycle=1000000 total_tokens=100
    a=10 a.stops a/0=10 /0 a/1=10 /1 crash
    a.2 -> out finished:a2
the flush begins anew after a crash
    joined a fragment_sizes=4,4 steps_per_cycle=1000000 total_tokens=100
    a=10 a.stops +7 crash
    deadline -> 50
"""
)
def test_a_scene_of_crashes(first: str, text: str) -> None:
    scene(begun(first, joined=joined), text)


def test_a_merge_in_the_log_settles_its_tick_and_says_nothing_of_deltas() -> None:
    d = joined("a")
    d.play("a=2 a/0=2 /0")
    tick = d.fragment(0).tick
    d.crash()
    assert d.fragment(0).tick == tick > 0
    assert d.state.islands["a"].streak == 0


def test_a_reunion_is_not_measured_by_the_clock_of_another_process() -> None:
    d = joined("a", reunion_s=20.0)
    d.crash(replace(d.state, reunion_until=d.now + 1e6))
    d.join("b")
    assert asked(d.report("b", 2)) == {0: ["b"]}


def test_a_take_is_merged_once_its_record_is_on_the_tape() -> None:
    d = trained()
    held = d.held("a", 1, 0, 4)
    d.crash()
    told_before = {"outstanding": (held,), "records_through": held.seq - 1}
    effects = d.hello("a", steps=4, phase="training", **told_before)
    effects += d.arrive("a", 1, held.tick)
    effects += d.report("a", 8)
    assert not of(effects, Merge)
    assert only(effects, Drop).tick == held.tick
    effects = d.report("a", 8, took(held.seq, 1, held.tick, 0, 4))
    assert only(effects, ResendRequest).tick == held.tick
    contribution = only(d.arrive("a", 1, held.tick), Merge).contributions[0]
    assert (contribution.start, contribution.end) == (0, 4)


def test_a_snapshot_and_the_records_after_it_make_the_same_state() -> None:
    d = joined("a", "b")
    points = [(len(d.log), d.state)]
    for step in (2, 4, 6, 8):
        d.reports(a=step, b=step)
        index = d.state.tick % 2 ^ 1
        d.takes(index, a=step, b=step)
        points.append((len(d.log), d.state))
        d.computed(index)
        points.append((len(d.log), d.state))
    d.hello("b", 2)
    from_nothing = recover(d.config, initial(d.config), d.log, d.now)
    for skip, snapshot in points:
        state = recover(d.config, snapshot, d.log[skip:], d.now)
        for mine, theirs in zip(state.fragments, from_nothing.fragments, strict=True):
            assert mine.version == theirs.version
            for name in "ab":
                a, b = mine.accounts[name], theirs.accounts[name]
                assert (a.start, a.merged_tokens) == (b.start, b.merged_tokens)
                assert a.lost_tokens == b.lost_tokens
        assert state.free_spans == from_nothing.free_spans
        assert state.next_position == from_nothing.next_position
        assert state.tick == from_nothing.tick


@pytest.mark.parametrize("rejoined", [False, True])
def test_an_island_that_left_during_a_merge_that_became_durable(rejoined: bool) -> None:
    d = joined("a")
    d.play("a=2 a/0=2 a=5")
    if rejoined:
        d.hello("a", 2)
    else:
        d.goodbye("a", "died")
    snapshots = [None, d.state]
    skips = [0, len(d.log)]
    d.computed(0)
    expected = d.totals("a")
    for snapshot, skip in zip(snapshots, skips, strict=True):
        d.crash(snapshot, skip)
        assert d.totals("a") == expected


def ending(phase: str) -> Driver:
    """A run in a phase of its end; a has done all its steps, nothing is merged."""
    d = joined("a", fragment_sizes=(4, 4), steps_per_cycle=10**6, total_tokens=100)
    d.report("a", 10)
    if phase != "stopping":
        d.report("a", phase="stopped")
    if phase == "merging":
        d.take("a", 0, 10)
    if phase == "half":
        d.merge(0, a=10)
    return d


@pytest.mark.parametrize("phase", ["stopping", "flushing", "merging", "half"])
@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_crash_at_the_end_of_a_run(phase: str, with_snapshot: bool) -> None:
    d = ending(phase)
    takes = [f.accounts["a"].take for f in d.state.fragments]
    held = tuple(
        d.held("a", i, 0, 10) for i, take in enumerate(takes) if take and take.end
    )
    if with_snapshot:
        d.crash(d.state, len(d.log))
    else:
        d.crash()
    effects = d.hello("a", steps=10, phase="stopped", outstanding=held)
    assert only(effects, Stop).island == "a"
    for take in held:
        effects += d.arrive("a", take.fragment, take.tick)
        effects += d.computed(take.fragment)
    for fragment, names in asked(effects).items():
        assert names == ["a"]
        effects += d.take("a", fragment, 10)
        effects += d.computed(fragment)
    assert len(persisted(effects, "finished")) == 1
    assert d.totals("a").merged == 100
    assert len(of(effects, TakeRequest)) + len(held) == 2 - (phase == "half")


def test_a_grant_takes_its_own_positions_of_what_is_free_and_no_others() -> None:
    d = Driver()
    d.hello("a")
    free = (Span(900, 905), Span(910, 950), Span(955, 960), Span(990, 999))
    snapshot = replace(d.state, free_spans=free, next_position=999)
    for start, stop, left in (
        (910, 950, [(900, 905), (955, 960)]),
        (910, 930, [(900, 905), (930, 950), (955, 960)]),
        (920, 950, [(900, 905), (910, 920), (955, 960)]),
    ):
        record = records.Granted(
            island="a", incarnation=1, start=start, stop=stop, offset=0
        )
        state = recover(d.config, snapshot, [record], d.now)
        assert [tuple(span) for span in state.free_spans] == [*left, (990, 999)]


# ---- a run that was stopped as a whole goes on: who was in it has ----


def stopped() -> Driver:
    """One step of b and 4 of a are merged into fragment 0; the coordinator is back."""
    d = joined("a", "b", grace=1.0, overlap_steps=10)
    d.play("b=1 a=4 b/0=1 a/0=4 /0 crash")
    return d


def lost(d: Driver, name: str) -> dict[str, int]:
    return ledger.island_totals(d.config, d.state, name).lost


def test_every_incarnation_ends_and_its_open_steps_are_lost() -> None:
    d = stopped()
    merged = ledger.run_totals(d.config, d.state).merged
    effects = d.feed(RunResumed())
    assert [r["island"] for r in persisted(effects, "left")] == ["a", "b"]
    assert {r["reason"] for r in persisted(effects, "left")} == {"stopped"}
    assert {i.status for i in d.state.islands.values()} == {"gone"}
    totals = ledger.run_totals(d.config, d.state)
    assert totals.merged == merged
    rounded_down = totals.computed - totals.merged - totals.lost["stopped"]
    assert 0 <= rounded_down == totals.in_flight <= 2
    assert only(d.hello("a", incarnation=1), Refused).code == "fenced"
    assert not only(d.hello("a", incarnation=2), Welcome).resumed
    assert d.state.islands["a"].steps == 0


def test_steps_that_only_the_roster_knows_are_counted_and_lost() -> None:
    d = stopped()
    known = d.state.islands["b"].steps
    d.feed(RunResumed(steps={("b", 1): known + 5, ("a", 7): 99}))
    assert d.state.islands["b"].steps == known + 5
    # In fragment 1, a quarter of the model, all steps; in fragment 0 all but one.
    assert lost(d, "b") == {"stopped": (known + 5) * 10 - 10 * 3 // 4 - 1}
    assert d.state.islands["a"].steps == 4, "that was another incarnation's"


def test_no_more_steps_are_believed_than_there_was_data_for() -> None:
    """What the roster has is a figure that nothing checked."""
    d = stopped()
    island = d.state.islands["b"]
    d.feed(RunResumed(steps={("b", 1): 2**52}))
    steps = d.state.islands["b"].steps
    assert steps == island.sequences_granted // island.sequences_per_step


def test_who_had_left_does_not_leave_again() -> None:
    d = stopped()
    d.goodbye("a")
    before = d.totals("a")
    effects = d.feed(RunResumed(steps={("a", 1): 4}))
    assert [r["island"] for r in persisted(effects, "left")] == ["b"]
    assert d.totals("a") == before


def test_the_end_of_all_incarnations_survives_a_crash() -> None:
    d = stopped()
    before, logged = d.state, len(d.log)
    d.feed(RunResumed(steps={("b", 1): 8}))
    again = recover(d.config, before, d.log[logged:], d.now)
    for name in "ab":
        assert again.islands[name].status == "gone"
        assert ledger.island_totals(d.config, again, name) == ledger.island_totals(
            d.config, d.state, name
        )


def test_a_run_that_was_ending_ends() -> None:
    d = joined("a", total_tokens=40)
    d.report("a", 4)
    assert d.state.phase == "stopping"
    d.crash(snapshot=d.state, skip=len(d.log))
    effects = d.feed(RunResumed())
    assert persisted(effects, "finished")
    assert d.state.phase == "done"
    assert lost(d, "a") == {"stopped": 40}


# ---- a run that is over goes on to more tokens ----


def over(**changes: int) -> Driver:
    """Island a has made the 10 steps of the run, all of which are merged."""
    d = joined("a", total_tokens=100, **changes)
    d.play("a=10 a.stops")
    for fragment in (0, 1):
        d.take("a", fragment, 10)
        d.computed(fragment)
    assert d.state.phase == "done"
    return d


def extended(tokens: int = 200) -> Driver:
    """The coordinator is back with a config of more tokens."""
    d = over()
    d.config = replace(d.config, total_tokens=tokens)
    d.crash()
    d.feed(RunExtended())
    return d


def test_it_runs_again_and_the_log_says_to_which_tokens() -> None:
    d = over()
    versions = [f.version for f in d.state.fragments]
    d.config = replace(d.config, total_tokens=200)
    effects = d.feed(RunExtended())
    assert persisted(effects, "extended") == [{"kind": "extended", "total_tokens": 200}]
    assert d.state.phase == "running"
    assert [f.phase for f in d.state.fragments] == ["idle", "idle"]
    assert not any(f.final for f in d.state.fragments)
    assert [f.version for f in d.state.fragments] == versions


def test_what_was_done_counts_and_the_rest_is_trained() -> None:
    d = extended()
    assert only(d.hello("a", 1), Refused).code == "fenced"
    welcome = only(d.hello("a", 2), Welcome)
    assert not welcome.resumed
    assert asked(d.report("a", 2)) == {0: ["a"]}
    merge = only(d.take("a", 0, 2), Merge)
    assert (merge.version, merge.final) == (Version(1, 2), False)
    d.computed(0)
    assert d.state.progress_tokens == 120
    d.report("a", 10)
    assert d.state.phase == "stopping"
    totals = ledger.run_totals(d.config, d.state)
    assert totals.computed == 200


def test_an_extension_survives_a_crash() -> None:
    """From the snapshot of before the end, and from that of the end."""
    d = extended()
    for snapshot, after in ((initial(d.config), 0), (d.state, len(d.log))):
        again = recover(d.config, snapshot, d.log[after:], d.now)
        assert again.phase == "running"
        assert [f.phase for f in again.fragments] == ["idle", "idle"]
        assert not any(f.final for f in again.fragments)
        assert again.progress_tokens == 100


def test_nothing_runs_out_while_fragments_are_restored() -> None:
    """Their islands could not come before."""
    d = joined("a", "b", total_tokens=100)
    d.play("a=10")
    assert d.state.phase == "stopping"
    state = recover(d.config, initial(d.config), d.log, 100.0)
    later = recover(d.config, initial(d.config), d.log, 900.0)
    assert later != state
    assert serving_from(d.config, state, 900.0) == later


def test_a_run_with_its_tokens_or_on_its_way_is_left_as_it_is() -> None:
    d = over()
    before = d.state
    assert d.feed(RunExtended()) == []
    assert d.state == before
    running = joined("a", total_tokens=100)
    before = running.state
    assert kinds(running.feed(RunExtended())) == []
    assert running.state == before
