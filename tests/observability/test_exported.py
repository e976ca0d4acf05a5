"""The table of exported metrics: well named, bounded, and what docs/prometheus.md
has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from goldens import REGENERATE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from diloco_jax.observability import exported
from diloco_jax.observability.exported import (
    GROUPS,
    METRICS,
    MOST_ISLANDS,
    Readings,
    Snapshot,
    families,
)

PAGE = Path(__file__).parents[2] / "docs" / "prometheus.md"
ISLAND = {
    "state": "training",
    "incarnation": 2,
    "steps": 40,
    "tokens": 4000,
    "tokens_merged": 3000,
    "skipped_steps": 1,
    "tokens_per_second": 200.0,
    "median_step_seconds": 0.5,
    "stalled_seconds": 3.0,
    "silent_seconds": 0.25,
    "loss": 2.5,
    "eval_loss": None,
    "learning_rate": 1e-3,
    "participation": 0.75,
    "lag": 1,
    "bytes_up": 70,
    "bytes_down": 80,
}
MERGE = {"seconds": 0.5, "islands": ["a", "b"], "share": 1.0, "norm": 2.0}


def snapshot(islands: dict[str, dict[str, Any]], **changes: Any) -> Snapshot:
    status = {
        "run_id": "r1",
        "phase": "running",
        "term": 1,
        "seconds": 60.0,
        "tokens": 8000,
        "total_tokens": 10_000,
        "tokens_merged": 6000,
        "tokens_lost": {"died": 500},
        "goodput": 0.9,
        "merges": 12,
        "merged_model": None,
        "islands": islands,
        "workers": [
            {"worker": 0, "address": "h:1", "memory_bytes": 9},
            {"worker": 1, "address": "", "memory_bytes": 8},
        ],
        **changes,
    }
    return Snapshot(
        version="1.0",
        status=status,
        machine=Readings(100, 200, 300, {"workdir": 400}),
        alerts_raised=3,
        events_waiting=0,
        merge={**MERGE, "pairwise_cosine": 0.5},
    )


def exposed(of: Snapshot) -> dict[tuple[str, ...], float]:
    """Values that a scraper reads, by name with its labels' values."""

    class Run:
        def collect(self):
            return families(of)

    registry = CollectorRegistry()
    registry.register(Run())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_what_is_exposed_is_what_the_table_says():
    found = exposed(snapshot({"a": ISLAND, "b": {**ISLAND, "state": "absent"}}))
    assert found["diloco_run_info", "r1", "1.0"] == 1
    assert found["diloco_run_phase", "running"] == 1
    assert found["diloco_run_phase", "done"] == 0
    assert found["diloco_run_merges_total",] == 12
    assert found["diloco_run_tokens_lost", "died"] == 500
    assert found["diloco_merge_islands",] == 2
    assert found["diloco_island_state", "b", "absent"] == 1
    assert found["diloco_island_steps_total", "a"] == 40
    assert found["diloco_island_step_seconds", "a"] == 0.5
    assert found["diloco_island_lag_versions", "b"] == 1
    assert found["diloco_machine_disk_free_bytes", "workdir"] == 400
    assert found["diloco_worker_up", "0"] == 1
    assert found["diloco_worker_up", "1"] == 0
    assert ("diloco_island_eval_loss", "a") not in found, "there was none"
    assert ("diloco_merged_model_loss",) not in found, "nobody evaluates it"
    told = {name for name, *_ in found}
    lacking = {m.name for m in METRICS} - told
    assert lacking == {
        "diloco_island_eval_loss",
        "diloco_merged_model_loss",
        "diloco_merged_model_cycle",
    }
    assert told <= {m.name for m in METRICS}


def test_before_the_first_merge_there_is_nothing_of_it():
    found = exposed(snapshot({})._replace(merge=None))
    assert not [name for name, *_ in found if name.startswith("diloco_merge_")]


def test_names_are_as_prometheus_wants_them():
    """Counters end in _total, and a unit that the name has is the one of the table."""
    assert len({m.name for m in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"diloco_[a-z_]+", metric.name), metric
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric
        words = metric.name.removesuffix("_total").split("_")
        of_unit = {"seconds": "s", "bytes": "bytes", "ratio": "0 to 1"}
        if words[-1] in of_unit and words[-2:] != ["per", "second"]:
            assert metric.unit == of_unit[words[-1]], metric
        assert metric.help[0].isupper() or metric.help[0] == "1", metric
        assert not metric.help.endswith("."), metric


def test_the_number_of_series_is_bounded_and_the_ended_go_first():
    gone = {f"gone-{n:03}": {**ISLAND, "state": "gone"} for n in range(200)}
    live = {f"live-{n:03}": ISLAND for n in range(200)}
    of = snapshot({**gone, **live})
    assert len(of.islands) == MOST_ISLANDS
    assert live.keys() <= of.islands.keys()
    found = exposed(of)
    per_island = [m for m in METRICS if "island" in m.labels]
    assert len(found) < MOST_ISLANDS * len(per_island) + 100


def table(metrics):
    rows = ["| name | type | labels | unit | what it is |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        cells = (f"`{metric.name}`", metric.kind, labels, metric.unit, metric.help)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


@pytest.mark.parametrize("group", GROUPS)
def test_the_page_has_the_table(group):
    wanted = f"## {group}\n\n{table(GROUPS[group])}\n"
    text = PAGE.read_text(encoding="utf-8")
    if REGENERATE:
        text = re.sub(
            rf"^## {re.escape(group)}\n\n(?:\|.*\n)*", wanted, text, flags=re.M
        )
        PAGE.write_text(text, encoding="utf-8")
    assert wanted in text, f"REGENERATE=1 pytest {__file__} writes it anew"


def test_the_page_has_no_other_name():
    named = re.findall(rf"\b{exported.PREFIX}[a-z_]+", PAGE.read_text())
    assert set(named) == {m.name for m in METRICS}
