"""Measures outlive incarnations and the coordinator."""

import math
from types import SimpleNamespace

import engine_support
import msgspec
import pytest

from diloco_jax.config import Config, IslandConfig
from diloco_jax.coordinator.roster import (
    INTERVALS_KEPT,
    LATE_S,
    OF_SECONDS,
    Roster,
)
from diloco_jax.coordinator.summary import missing
from diloco_jax.observability.measures import goodput, uptime
from diloco_jax.protocol.messages import Measures, Record, Version


def hello(incarnation=1, island="a", tokens_per_step=100):
    return engine_support.hello(
        island, incarnation=incarnation, tokens_per_step=tokens_per_step
    )


def measures(steps, first, last, **fields):
    return Measures(steps=steps, first_step_unix=first, last_step_unix=last, **fields)


@pytest.fixture
def roster(tmp_path):
    return Roster(tmp_path / "roster.msgpack")


MEASURED = (
    *("median_step_seconds", "max_step_gap_seconds", "step_seconds_total"),
    *("stalled_seconds", "eval_seconds", "compile_seconds", "loss"),
    *("bytes_up", "bytes_down", "bytes_join"),
)
LIVES = (
    (1.0, 3.0, 8.0, 0.5, 2.0, 1.5, 3.0, 70, 7, 1),
    (2.0, 2.5, 9.0, 0.25, 0.0, 4.0, 2.5, 30, 3, 1),
)


def two_lives(roster):
    """10 steps in 1000 .. 1010; away until 1030; then 5 steps until 1040."""
    one, two = (dict(zip(MEASURED, life, strict=True)) for life in LIVES)
    roster.hello(hello(1), 1000.0)
    roster.report("a", measures(10, 1002.0, 1010.0, **one), (), 1010.0)
    roster.hello(hello(2), 1025.0)
    roster.report("a", Measures(compile_seconds=4.0), (), 1026.0)
    roster.report("a", measures(5, 1030.0, 1040.0, **two), (), 1040.0)


def test_all_comes_back_from_the_file_losses_that_are_no_numbers_too(roster, tmp_path):
    two_lives(roster)
    roster.hello(hello(island="b"), 1000.0)
    roster.report("b", Measures(), (), 1001.0)
    roster.save()
    again = Roster(tmp_path / "roster.msgpack")
    assert math.isnan(again.members["b"].current.loss)
    # Bytes, because a NaN is not equal to itself.
    assert msgspec.msgpack.encode(again.members) == msgspec.msgpack.encode(
        roster.members
    )
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_that_does_not_read_is_put_aside(roster, tmp_path, caplog):
    two_lives(roster)
    roster.save()
    path = tmp_path / "roster.msgpack"
    damaged = path.read_bytes()[:-5]
    path.write_bytes(damaged)
    again = Roster.begin_from(path)
    assert again.members == {}
    assert "roster.msgpack cannot be read" in caplog.text
    assert "it is" in caplog.text
    assert (tmp_path / "roster.damaged").read_bytes() == damaged
    again.hello(hello(3), 1050.0)
    again.save()
    assert list(Roster.begin_from(path).members) == ["a"]


def test_sums_and_extremes_are_over_all_incarnations(roster):
    two_lives(roster)
    sums = roster.measures("a")
    assert (sums.steps, sums.step_seconds_total) == (15, 17.0)
    assert (sums.stalled_seconds, sums.eval_seconds) == (0.75, 2.0)
    assert (sums.bytes_up, sums.bytes_down, sums.bytes_join) == (100, 10, 2)
    assert sums.max_step_gap_seconds == 3.0
    assert sums.compile_seconds == 5.5
    assert sums.median_step_seconds == 1.0  # of the incarnation with more steps
    assert sums.loss == 2.5
    assert (sums.first_step_unix, sums.last_step_unix) == (1002.0, 1040.0)


def test_bandwidth_is_over_some_seconds_and_of_one_incarnation(roster):
    def told(now, up, down):
        sent = measures(1, 1000.0, now, bytes_up=up, bytes_down=down)
        roster.report("a", sent, (), now)
        return roster.members["a"].bytes_per_second

    roster.hello(hello(1), 1000.0)
    assert told(1001.0, 900, 90) == (0.0, 0.0), "too short to say"
    assert told(1010.0, 1000, 100) == (100.0, 10.0)
    assert told(1012.0, 9000, 900) == (100.0, 10.0)
    assert told(1020.0, 9000, 900) == (800.0, 80.0)
    roster.hello(hello(2), 1030.0)
    assert roster.members["a"].bytes_per_second == (0.0, 0.0)
    assert told(1040.0, 50, 10) == (5.0, 1.0)


def test_a_reconnection_of_the_same_incarnation_keeps_its_steps(roster):
    roster.hello(hello(1), 1000.0)
    roster.report("a", measures(10, 1002.0, 1010.0), (), 1011.0)
    roster.hello(hello(1), 1020.0)
    roster.report("a", measures(12, 1002.0, 1021.0), (), 1021.0)
    assert roster.measures("a").steps == 12


def test_goodput_counts_outages_but_neither_first_compilation_nor_evaluation(roster):
    two_lives(roster)
    measure = roster.measure("a", computed=1500, merged=1200, now=1050.0)
    assert measure.provisioned_seconds == 50.0 - 1.5 - 2.0
    assert measure.active == ((1002.0, 1010.0), (1030.0, 1040.0))
    roster.left("a", 1045.0)
    gone = roster.measure("a", computed=1500, merged=1200, now=9999.0)
    assert gone.provisioned_seconds == 45.0 - 1.5 - 2.0
    assert (gone.computed_tokens, gone.merged_tokens) == (1500, 1200)


@pytest.mark.parametrize("batches", [(800, 100), (100, 800)])
def test_goodput_of_one_that_goes_on_with_another_batch(roster, batches):
    """A step takes as long as its batch is large; half of the time it makes none."""
    for life, tokens in enumerate(batches, start=1):
        step_s, began = tokens / 100, 1000.0 * life
        roster.hello(hello(life, tokens_per_step=tokens), began)
        steps = int(500 / step_s)
        told = measures(steps, began, began + 500, median_step_seconds=step_s)
        roster.report("a", told, (), began + 1000)
    measure = roster.measure("a", computed=100_000, merged=90_000, now=3000.0)
    assert measure.undisturbed_tokens == pytest.approx(2000 * 100, rel=0.01)
    assert goodput([measure]) == pytest.approx(0.45, rel=0.01)


def test_adopted_versions_are_those_of_the_current_incarnation(roster):
    roster.hello(hello(1), 1000.0)
    records = tuple(
        Record(seq=n, kind="adopted", step=n, fragment=1, version=Version(1, n))
        for n in (1, 2)
    )
    roster.report("a", measures(3, 1.0, 2.0), records, 1001.0)
    assert roster.members["a"].adopted == {1: 2}
    roster.hello(hello(2), 1002.0)
    assert roster.members["a"].adopted == {}


def test_many_incarnations_stay_bounded_and_keep_their_time(roster):
    lives = 2 * INTERVALS_KEPT
    for life in range(1, lives + 1):
        roster.hello(hello(life), 100.0 * life)
        seen = measures(1, 100.0 * life, 100.0 * life + 10)
        roster.report("a", seen, (), 100.0 * life + 10)
    active = roster.measure("a", 0, 0, now=1e6).active
    assert len(active) <= INTERVALS_KEPT + 1
    assert (active[0][0], active[-1][1]) == (100.0, 100.0 * lives + 10)
    assert roster.measures("a").steps == lives


def test_the_time_for_which_the_run_was_stopped_does_not_count(roster):
    """As two_lives, with 1000 seconds of nothing in between."""
    roster.hello(hello(1), 1000.0)
    roster.report("a", measures(10, 1002.0, 1010.0), (), 1010.0)
    assert roster.resume(1000.0) == {("a", 1): 10}
    gone = roster.measure("a", 0, 0, 9000.0)
    assert gone.provisioned_seconds == 10.0, (
        "one that does not come was there till then"
    )
    assert roster.members["a"].last_sign == 2010.0
    roster.hello(hello(2), 2025.0)
    roster.report("a", measures(5, 2030.0, 2040.0), (), 2040.0)
    member, measure = roster.members["a"], roster.measure("a", 0, 0, 2040.0)
    assert measure.provisioned_seconds == 40.0
    assert measure.active == ((2002.0, 2010.0), (2030.0, 2040.0))
    assert member.resumed == 1
    roster.hello(hello(3), 2050.0)
    assert member.resumed == 1, "this time it alone had ended"


def test_islands_that_never_made_a_step_are_named(roster):
    two_lives(roster)
    roster.hello(hello(island="b"), 1000.0)
    islands = {name: IslandConfig() for name in ("a", "b", "c")}
    told = missing(Config(islands=islands), roster)
    assert told == [
        f"island {name} never made a step: see its log" for name in ("b", "c")
    ]


def test_time_before_the_coordinator_lost_its_state_does_not_count():
    roster = Roster()
    roster.hello(hello(), 100.0, steps_before=40)
    told = measures(50, 20.0, 110.0, compile_seconds=30.0, median_step_seconds=0.5)
    roster.report("a", told, (), 110.0)
    measure = roster.measure("a", 0, 0, 110.0)
    assert measure.provisioned_seconds == 10.0 + 40 * 0.5
    assert roster.measure("a", 0, 0, 110.0, 3600).provisioned_seconds == 10.0 + 4 * 0.5
    assert measure.active == ((100.0, 110.0),)


def test_tokens_from_before_the_roster_began_are_in_no_measure(roster):
    two_lives(roster)
    roster.before = {"a": SimpleNamespace(computed=700, merged=600)}
    measure = roster.measure("a", 1000, 900, 1040.0)
    assert (measure.computed_tokens, measure.merged_tokens) == (300, 300)


def test_sums_over_many_incarnations_stay_numbers_that_the_file_holds(roster):
    most = Measures(steps=2**48, bytes_up=2**56, stalled_seconds=1e9)
    for incarnation in range(1, 600):
        roster.hello(hello(incarnation, tokens_per_step=2**8), 1000.0)
        roster.report("a", most, (), 2e9)
    roster.save()
    sums = Roster(roster._path).measures("a")
    assert (sums.steps, sums.bytes_up, sums.stalled_seconds) == (2**48, 2**56, 1e9)


def test_lost_tokens_of_large_models_are_numbers_that_the_file_holds(roster):
    """Times the parameters of a trillion, those of one death are beyond 64 bits."""
    lost = roster.failures.kept.lost
    lost.take({"kind": "begun", "fragment_parameters": [10**12 // 48] * 47 + [7]})
    death = {"kind": "left", "island": "a", "reason": "died"}
    told = [
        lost.take({**death, "lost_tokens_by_fragment": [20_000_001] * 47 + [3]})
        for _ in range(3)
    ]
    roster.save()
    assert told == [20_000_000, 20_000_001, 20_000_001]


def test_an_evaluation_counts_of_cycles_that_the_island_was_to_evaluate(roster):
    """Otherwise one claim would hide all that come after it."""
    for name in "ab":
        roster.hello(hello(island=name), 1000.0)

    def says(name, cycle, loss, asked):
        measured = Measures(watched_cycle=cycle, watched_loss=loss)
        roster.report(name, measured, (), 1001.0, asked)
        point = roster.watched()
        return point and (point["island"], point["cycle"], point["eval_loss"])

    assert says("a", 2**48, 9.0, 0) is None
    assert says("b", 3, 2.0, 3) == ("b", 3, 2.0)
    assert says("a", 2**48, 9.0, 2) == ("b", 3, 2.0)
    assert says("a", 4, 1.5, 4) == ("a", 4, 1.5)
    assert says("a", 4, 9.0, 4) == ("a", 4, 1.5), "once"
    assert says("a", 2, 9.0, 4) == ("a", 4, 1.5)
    assert says("b", 5, 1.0, 5) == ("b", 5, 1.0)


def test_times_later_or_longer_than_can_be_do_not_spoil_the_runs_figures(roster):
    roster.hello(hello(), 1000.0)
    seconds = dict.fromkeys(OF_SECONDS, 1000000000.0)
    most = Measures(steps=9, first_step_unix=1e11, last_step_unix=1e11, **seconds)
    roster.report("a", most, (), 1010.0)
    found = roster.measures("a")
    assert (found.first_step_unix, found.last_step_unix) == (1010.0, 1010.0)
    assert {getattr(found, name) for name in OF_SECONDS} == {10.0 + LATE_S}
    assert uptime([roster.measure("a", 0, 0, 1010.0)], 10.0) <= 1
