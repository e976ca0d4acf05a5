"""A run that was stopped as a whole goes on: who was in it has ended."""

from kit import Driver, joined, only, persisted

from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.events import RunResumed
from diloco_jax.protocol.coordinator.recovery import recover
from diloco_jax.protocol.messages import Refused, Welcome


def stopped() -> Driver:
    """One step of b and 4 of a are merged into fragment 0; the coordinator is back."""
    d = joined("a", "b", grace=1.0, overlap_steps=10)
    d.reports(b=1, a=4)
    d.take("b", 0, 1)
    d.merge(0, a=4)
    d.crash()
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


def test_steps_that_only_the_roster_knows_are_counted_and_lost() -> None:
    d = stopped()
    known = d.state.islands["b"].steps
    d.feed(RunResumed(steps={("b", 1): known + 5, ("a", 7): 99}))
    assert d.state.islands["b"].steps == known + 5
    # In fragment 1, a quarter of the model, all steps; in fragment 0 all but one.
    assert lost(d, "b") == {"stopped": (known + 5) * 10 - 10 * 3 // 4 - 1}
    assert d.state.islands["a"].steps == 4, "that was another incarnation's"


def test_who_had_left_does_not_leave_again() -> None:
    d = stopped()
    d.goodbye("a")
    before = d.totals("a")
    effects = d.feed(RunResumed(steps={("a", 1): 4}))
    assert [r["island"] for r in persisted(effects, "left")] == ["b"]
    assert d.totals("a") == before


def test_who_made_no_step_has_none_and_loses_none() -> None:
    d = joined("a")
    (left,) = persisted(d.feed(RunResumed()), "left")
    assert (left["steps"], left["lost_tokens_by_fragment"]) == (0, [0, 0])
    assert lost(d, "a") == {}


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


def test_islands_come_back_with_higher_incarnations_only() -> None:
    d = stopped()
    d.feed(RunResumed())
    assert only(d.hello("a", incarnation=1), Refused).code == "fenced"
    assert not only(d.hello("a", incarnation=2), Welcome).resumed
    assert d.state.islands["a"].steps == 0


def test_data_without_effect_is_free_again() -> None:
    d = stopped()
    d.feed(RunResumed())
    assert d.state.free_spans
    assert not any(island.leases for island in d.state.islands.values())


def test_a_run_that_was_ending_ends() -> None:
    d = joined("a", total_tokens=40)
    d.report("a", 4)
    assert d.state.phase == "stopping"
    d.crash(snapshot=d.state, skip=len(d.log))
    effects = d.feed(RunResumed())
    assert persisted(effects, "finished")
    assert d.state.phase == "done"
    assert lost(d, "a") == {"stopped": 40}
