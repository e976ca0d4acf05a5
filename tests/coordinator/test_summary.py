"""Status and summary of a run, before and after its end."""

from __future__ import annotations

import math

import msgspec
import pytest
from engine_support import AT, run_of
from msgspec.structs import replace

from diloco_jax.config import Config, IslandConfig
from diloco_jax.coordinator import summary
from diloco_jax.hardware.machines import Measurements, read_measurements
from diloco_jax.models.flops import analytic_flops
from diloco_jax.observability import terminal
from diloco_jax.observability.exported import Readings, Snapshot, families
from diloco_jax.protocol.coordinator import state
from diloco_jax.protocol.messages import Measures, Record, Version


@pytest.fixture
def run():
    """A run of one island, which has made three steps."""
    return run_of("a", bytes_up=400, bytes_down=80)


def told(run, phase="running"):
    config, now, roster = run
    now = replace(now, phase=phase)
    return summary.summary(
        config, now, roster, wall_seconds=8.0, alerts=["alone"], now=AT + 8
    )


def status_of(run, phase="running", after_s=8.0, **island):
    """The status in this phase, of an island with these changes."""
    config, now, roster = run
    changed = replace(now.islands["a"], **island)
    now = state.with_island(replace(now, phase=phase), changed)
    at = AT + after_s
    return summary.status(config, now, roster, seconds=8.0, alerts=["alone"], now=at)


def test_the_status_has_all_that_prometheus_collects(run):
    config, now, roster = run
    adopted = Record(kind="adopted", seq=1, step=2, fragment=1, version=Version(1, 0))
    roster.report("a", Measures(steps=3), (adopted,), AT + 8)
    newer = replace(now.fragments[1], version=Version(1, 3))
    status = status_of((config, state.with_fragment(now, newer), roster), after_s=10.0)
    (island,) = status["islands"].values()
    assert (island["lag"], island["silent_seconds"]) == (3, 2.0)
    assert (status["tokens_merged"], status["tokens_lost"]) == (0, {})
    found = {
        sample.name: sample.value
        for family in families(Snapshot("1", status, Readings(), 0, 0, None))
        for sample in family.samples
    }
    assert found["diloco_island_tokens"] == 30
    assert found["diloco_island_lag_versions"] == 3
    assert found["diloco_island_steps_total"] == 3


def test_the_status_says_what_is_left_of_an_island_s_start(run):
    begins = Measures(programs_left=12, fragments_left=7)
    run[2].report("a", begins, (), AT + 8)
    status = status_of(run)
    island = status["islands"]["a"]
    assert (island["programs_left"], island["fragments_left"]) == (12, 7)
    left = "island a: 12 programs left to compile or read, 7 fragments to fetch"
    assert left in terminal.line(status, None)
    away = status_of(run, status="absent")
    assert "left to compile" not in terminal.line(away, None)


@pytest.mark.parametrize("apart", [False, True])
def test_the_status_says_who_is_quarantined(run, apart):
    island = status_of(run, quarantined=apart)["islands"]["a"]
    assert island["state"] == ("quarantined" if apart else "training")


@pytest.mark.parametrize(
    ("phase", "shown"),
    [("running", "stopped"), ("flushing", "stopped"), ("done", "done")],
)
def test_a_summary_has_what_a_status_has_and_whether_the_run_was_over(
    run, phase, shown
):
    left, status = told(run, phase), status_of(run, phase)
    for name in ("run_id", "tokens", "total_tokens", "progress", "versions", "alerts"):
        assert left[name] == status[name], name
    assert (left["phase"], left["alerts"]) == (shown, ["alone"])
    assert (left["tokens"], left["versions"]) == (30, [[1, 0], [1, 0]])
    assert left["tokens_merged_by_fragment"] == [0, 0]
    assert left["islands"]["a"]["tokens_merged_by_fragment"] == [0, 0]


def test_participation_is_the_share_of_the_merges_in_an_island_s_life(run):
    config, now, roster = run
    fragment = state.booked(now.fragments[0], "a", merges_in=1, merges_alive=4)
    now = state.with_fragment(now, fragment)
    left = told((config, now, roster))["islands"]["a"]
    assert (left["participation"], left["contributions"]) == (0.25, 1)
    seen = summary.status(config, now, roster, seconds=8.0, alerts=[], now=AT + 8)
    assert seen["islands"]["a"]["participation"] == 0.25


def test_a_status_has_the_bandwidth_of_live_islands(run):
    shown = status_of(run)
    for part in (shown, shown["islands"]["a"]):
        rates = part["bytes_up_per_second"], part["bytes_down_per_second"]
        assert rates == (50.0, 10.0)
    assert status_of(run, status="absent")["bytes_up_per_second"] == 0.0


@pytest.mark.parametrize(
    ("phase", "status", "waits"),
    [
        ("stopping", "absent", True),
        ("stopping", "gone", False),
        ("stopping", "live", False),
        ("running", "absent", False),
    ],
)
def test_a_status_says_for_whom_the_end_waits(run, phase, status, waits):
    alerts = status_of(run, phase, status=status)["alerts"]
    assert any("waits for a, away" in alert for alert in alerts) == waits


def test_a_status_waits_for_islands_of_the_term_before(run):
    """Which this term has not seen: a spot machine that never comes back."""
    config, now, roster = run
    now = replace(now, phase="stopping", returning=("c",))
    shown = summary.status(config, now, roster, seconds=8.0, alerts=[], now=AT + 8)
    assert any("waits for c, away" in alert for alert in shown["alerts"])


@pytest.mark.parametrize(("predicted", "shown"), [(1234, 1234), (0, None)])
def test_predictions_are_told_where_somebody_counts_them(run, predicted, shown):
    run[2].report("a", Measures(steps=30, tokens_predicted=predicted), (), AT + 8)
    left = told(run)
    for found in (left, left["islands"]["a"], status_of(run)["islands"]["a"]):
        assert found["tokens_predicted"] == shown


@pytest.mark.parametrize(
    ("skipped", "loss", "says"),
    [
        (summary.SKIPPED_STEPS, math.nan, True),
        (summary.SKIPPED_STEPS, 2.5, False),
        (summary.SKIPPED_STEPS - 1, math.nan, False),
    ],
)
def test_a_status_says_whose_steps_change_nothing(run, skipped, loss, says):
    measures = Measures(steps=30, skipped_steps=skipped, loss=loss)
    run[2].report("a", measures, (), AT + 8)
    alerts = status_of(run)["alerts"]
    named = [alert.split()[1] for alert in alerts if "change nothing" in alert]
    assert named == ["a"] * says


def test_a_run_leaves_what_a_plan_takes(tmp_path, run):
    """Its median steps, the share of a slice's peak that they are, and the longest
    first compilation; of islands that the config has."""
    _, _, roster = run
    found = summary.measurements(Config(), roster, "r")
    assert found == Measurements()
    here = IslandConfig(topology="v5e:1x1")
    own = Config(islands={"a": here, "away": here})
    roster.members["a"].first_compile_seconds = 12.0
    roster.members["a"].current = Measures(steps=3, median_step_seconds=0.5)
    found = summary.measurements(own, roster, "r")
    assert found.step_seconds["a"].value == 0.5
    assert found.step_seconds["a"].origin == "run r, 3 steps of a"
    assert found.compile_seconds.value == 12.0
    length = own.run.sequence_length
    flops = 10 / length * analytic_flops(own.run.model, length)
    share = found.share_of_peak["v5e"].value
    assert share == pytest.approx(flops / 0.5 / 197e12)
    path = tmp_path / "measured.json"
    path.write_bytes(msgspec.json.encode(found))
    assert read_measurements(str(path), own) == found
