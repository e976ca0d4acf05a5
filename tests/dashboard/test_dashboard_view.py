"""Data of the page: right, and small and quick enough at 64 islands."""

from __future__ import annotations

import re
import time

import msgspec
import pytest
from made_runs import BEGIN, COMPILE_S, TOKENS_PER_STEP, MadeRun, Outage

from diloco_jax.dashboard.timeline import Timeline
from diloco_jax.dashboard.view import (
    MERGED_LOSSES_SHOWN,
    Window,
    find_events,
    view,
)

MOST_BYTES = 200_000
MOST_SECONDS = 0.1
HOUR_S = 3600
DEAD = Outage(island=7, at_s=600, seconds=45)
HOUR = MadeRun(
    islands=64,
    seconds=HOUR_S,
    every_s=4,
    tick_s=4,
    outages=(
        DEAD,
        Outage(island=12, at_s=2000, seconds=400),
        *(Outage(island=20 + n % 40, at_s=60 + 12 * n, seconds=10) for n in range(280)),
    ),
    coordinator_away=(1800, 1830),
)
WINDOWS = [(0, HOUR_S), (1700, 2000), (590, 650), (3595, 3600), (-500, 5000)]


def read(run: MadeRun) -> Timeline:
    timeline = Timeline()
    for which, line in run.lines():
        getattr(timeline, which)(line)
    return timeline


@pytest.fixture(scope="module")
def hour():
    return read(HOUR)


@pytest.fixture(scope="module")
def short():
    return read(
        MadeRun(
            islands=3, seconds=200, outages=(Outage(island=1, at_s=100, seconds=9),)
        )
    )


def seen(
    timeline: Timeline,
    start: float,
    stop: float,
    columns: int = 720,
    flops: float | None = None,
):
    window = Window(start=BEGIN + start, stop=BEGIN + stop, columns=columns)
    return msgspec.json.decode(msgspec.json.encode(view(timeline, window, flops)))


def lengths(states: str) -> list[tuple[str, int]]:
    return [(s, int(n)) for s, n in re.findall(r"([a-z.])(\d+)", states)]


@pytest.mark.parametrize(("start", "stop"), WINDOWS)
def test_an_update_of_64_islands_is_at_most_200_kb(hour, start, stop):
    window = Window(start=BEGIN + start, stop=BEGIN + stop, columns=10_000)
    encoded = msgspec.json.encode(view(hour, window))
    assert len(encoded) <= MOST_BYTES
    events = find_events(hour, "", BEGIN + start, BEGIN + stop, 200)
    assert len(encoded) + len(msgspec.json.encode(events)) <= MOST_BYTES


@pytest.mark.timing
@pytest.mark.parametrize(("start", "stop"), WINDOWS)
def test_an_update_of_64_islands_takes_at_most_100_ms(hour, start, stop):
    window = Window(start=BEGIN + start, stop=BEGIN + stop, columns=720)
    took = []
    for _ in range(7):
        began = time.perf_counter()
        msgspec.json.encode(view(hour, window))
        took.append(time.perf_counter() - began)
    assert sorted(took)[3] <= MOST_SECONDS


def test_an_hour_with_a_failure_every_12_s_is_listed_whole(hour):
    failures = seen(hour, 0, HOUR_S)["failures"]
    assert failures["count"] == len(failures["shown"]) >= 280


def test_lanes_have_a_state_for_every_column(hour):
    found = seen(hour, 0, HOUR_S)
    assert len(found["lanes"]) == 65
    for lane in found["lanes"]:
        assert sum(n for _, n in lengths(lane["states"])) == found["columns"]
        for marks in ("out", "marks"):
            assert re.fullmatch(rf"\d{{{found['columns']}}}", lane[marks])


def test_a_short_absence_is_seen_however_long_the_window(hour):
    found = seen(hour, 0, HOUR_S, 100)
    dead = found["lanes"][1 + sorted(HOUR.names).index(HOUR.names[DEAD.island])]
    assert "a" in dead["states"]
    # Until its next life's first step.
    assert dead["away_s"] == pytest.approx(DEAD.seconds + COMPILE_S, abs=1)
    assert dead["lost_tokens"] == 2 * 4096
    assert all("a" not in lane["states"] for lane in found["lanes"][2:4])
    assert "a" in found["lanes"][0]["states"]


def test_curves_are_those_of_the_run(short):
    found = seen(short, 50, 90)
    curves = found["curves"]
    assert curves["computed"] == pytest.approx(
        [3 * 4096] * len(curves["times"]), rel=0.1
    )
    middle = curves["loss"][found["lanes"][1]["name"]]
    assert all(8 < value < 10.5 for value in middle if value is not None)
    assert curves["times"][0] > BEGIN + 50
    assert curves["times"][-1] < BEGIN + 90


def test_the_merged_model_s_curve_spans_the_window_however_many_points_it_has():
    timeline = Timeline()
    for cycle in range(1000):
        point = {"time": BEGIN + cycle, "cycle": cycle, "eval_loss": 9.0}
        timeline.metrics({"kind": "merged_model", **point})
    drawn = seen(timeline, 0, 1000)["curves"]["merged_loss"]
    assert len(drawn) <= MERGED_LOSSES_SHOWN
    assert drawn[0][1] < 5
    assert drawn[-1][1] == 999


def test_where_the_time_went_adds_up(short):
    before = seen(short, 50, 90)["goodput"]
    across = seen(short, 95, 135)["goodput"]
    for found in (before, across):
        assert sum(found["parts"].values()) == pytest.approx(1.0)
    assert before["parts"]["away"] == 0
    # 9 of 40 seconds of one of three islands, and its compilation after that.
    assert across["parts"]["away"] == pytest.approx(29 / 120, rel=0.1)
    assert across["lost"] == {"died": 2 * 4096}


def test_merges_have_weights_and_cosines(short):
    found = seen(short, 40, 95)["merges"]
    assert 20 < len(found) <= 60
    assert found[0]["time"] < found[-1]["time"]
    assert found[-1]["weights"] == [333, 333, 333]
    assert found[-1]["pairwise_cosine"] > 0.2


def test_model_flops_utilisation_is_against_each_device_s_peak(short):
    flops = 5e10
    found = seen(short, 50, 90, flops=flops)
    of_v6e, of_v5p = 4096 * flops / 918e12, 4096 * flops / 459e12
    for lane in found["lanes"][1:]:
        peak = of_v6e if lane["name"].startswith("v6e") else of_v5p
        assert lane["mfu"] == pytest.approx(peak, rel=0.05), lane["name"]
    together = 3 * 4096 * flops / (918e12 + 2 * 459e12)
    values = found["curves"]["mfu"]
    assert values == pytest.approx([together] * len(values), rel=0.1)


def test_it_is_not_known_without_a_formula_or_a_peak(short):
    found = seen(short, 50, 90)
    assert {lane["mfu"] for lane in found["lanes"]} == {None}
    assert set(found["curves"]["mfu"]) == {None}
    for lane in short.lanes.values():
        assert lane.peak_flops_per_s > 0
    unknown = read(MadeRun(islands=3, seconds=60))
    for lane in unknown.lanes.values():
        lane.peak_flops_per_s = 0.0
    assert set(seen(unknown, 40, 60, flops=1e9)["curves"]["mfu"]) == {None}


def test_memory_and_disk_are_those_of_their_time(short):
    curves = seen(short, 50, 90)["curves"]
    memory = [value for value in curves["memory_bytes"] if value is not None]
    assert len(memory) >= 7
    assert all(140e9 < value < 160e9 for value in memory)
    disk = [value for value in curves["disk_free_bytes"] if value is not None]
    assert disk == sorted(disk, reverse=True)
    assert disk[0] > disk[-1]


def failures_of(found) -> list[dict]:
    fields, whys = found["failures"]["fields"], found["failures"]["whys"]
    rows = [dict(zip(fields, row, strict=True)) for row in found["failures"]["shown"]]
    return [{**row, "why": whys[row["why"]]} for row in rows]


def test_failures_have_times_of_the_run_and_their_cost(short):
    (one,) = failures_of(seen(short, 0, 200))
    assert (one["who"], one["began"]) == ("v5p-01", 100)
    assert one["ended"] == pytest.approx(129, abs=1.5)
    assert one["lost_tokens"] == 2 * 4096
    assert one["idle_tokens"] == pytest.approx(29 * 4096, rel=0.1)
    assert one["without"] > 3
    assert one["merged"] > one["ended"]
    assert one["why"].startswith("its process ended")
    assert failures_of(seen(short, 0, 90)) == []
    assert seen(short, 110, 120)["failures"]["count"] == 1


def test_a_window_before_the_run_is_empty(short):
    found = seen(short, -100, -50)
    assert found["merges"] == []
    assert found["goodput"]["parts"]["merged"] == 0
    assert {letter for letter, _ in lengths(found["lanes"][1]["states"])} == {"."}
    assert seen(Timeline(), 0, 1)["lanes"][0]["name"] == "coordinator"


def test_events_are_found_by_their_words(short):
    def texts(words: str, stop: float = 1000.0) -> list[str]:
        found = find_events(short, words, BEGIN, BEGIN + stop, 200)["events"]
        return [text for *_, text in found]

    name = short.events[0]
    assert name.kind == "begun"
    assert [t for t in texts("LEFT died") if "8,192 tokens are lost" in t] == texts(
        "died"
    )
    assert len(texts("joins")) == 4
    assert texts("joins", stop=0.05) == []
    assert texts("nothing has such words") == []
    most = find_events(short, "", BEGIN, BEGIN + 1000, 2)
    assert len(most["events"]) == 2
    assert most["more"]


def test_the_time_left_follows_from_the_newest_speed_whatever_is_shown(short):
    """Island 1 died at 100 s and is back: all three make a step a second."""
    for window in ((0, 200), (90, 120), (-100, -50)):
        speed = seen(short, *window)["tokens_per_s"]
        assert speed == pytest.approx(3 * TOKENS_PER_STEP, rel=0.05)


@pytest.mark.parametrize("days", [0.001, 1, 60])
def test_the_newest_speed_of_a_steady_run_is_that_speed(days):
    """Wherever the newest bin, which is half an hour after 60 days, is broken off."""
    timeline = Timeline()
    row = timeline.grid.new_row()
    timeline.newest = BEGIN
    for later_s in (86_400 * days, *[60] * 40):
        before = timeline.newest
        timeline.newest += later_s
        at = (before, timeline.newest)
        timeline.grid.spread("tokens", row, *at, TOKENS_PER_STEP * later_s)
        speed = seen(timeline, 0, 60)["tokens_per_s"]
        assert speed == pytest.approx(TOKENS_PER_STEP, rel=1e-3)
