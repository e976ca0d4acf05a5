"""One number, one value: lengths of outages, tokens that they cost, and goodput,
wherever a run tells them."""

from __future__ import annotations

import re
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from diloco_jax import read_history
from diloco_jax.cluster.status import read_status
from diloco_jax.config import Placement
from diloco_jax.dashboard.app import RunReader
from diloco_jax.observability.failures import ENDS
from diloco_jax.observability.terminal import closing_report
from diloco_jax.protocol.messages import EndReason


def check(workdir: Path) -> dict[str, list[float | None]]:
    """Compare the summary of a run that is over, the report of it, what `diloco status`
    and the dashboard show, and the history in Python; return the seconds by name."""
    summary = read_status(str(workdir), Placement())
    report, history = closing_report(summary), read_history(workdir)
    reader = RunReader(workdir, Placement())
    reader.ask()
    reader.read()
    page = reader.view(None, None, 720)
    places = {name: n for n, name in enumerate(page["failures"]["fields"])}
    lanes = {lane["name"]: lane for lane in page["lanes"]}
    told: dict[str, list[float | None]] = {"coordinator": []}
    for failure in summary["failures"]:
        told.setdefault(failure["who"], []).append(failure["seconds"])
        if (seconds := failure["seconds"]) is not None:
            assert f"{failure['who']} failed for {seconds:.1f} s: " in report
    for name, lengths in told.items():
        rows = [r for r in page["failures"]["shown"] if r[places["who"]] == name]
        assert [r[places["ended"]] - r[places["began"]] for r in rows] == pytest.approx(
            lengths, abs=0.11
        )
        assert lanes[name]["away_s"] == pytest.approx(sum(lengths), abs=0.06)
        if name != "coordinator":
            found = [seconds for _, seconds in history.absences(name)]
            assert found == pytest.approx(lengths, abs=1e-3)
            own = summary["islands"][name]["away_seconds"]
            assert own == pytest.approx(sum(lengths), abs=1e-3)
    check_lost(summary, report, page, reader.events("ended after", None, None))
    assert f"goodput {summary['goodput']:.3f}" in report
    assert page["status"]["goodput"] == summary["goodput"]
    parts = page["goodput"]["parts"]
    assert parts["merged"] == summary["goodput"]
    assert sum(parts.values()) == pytest.approx(1.0)
    return told


def check_lost(
    summary: dict[str, Any], report: str, page: dict[str, Any], events: dict[str, Any]
) -> None:
    """Compare the tokens that ended incarnations lost, of fragments of any sizes."""
    ends = typing.get_args(EndReason)
    by_reason, by_island, failed = Counter[str](), Counter[str](), Counter[str]()
    for name, island in summary["islands"].items():
        for reason, tokens in island["tokens_lost"].items():
            if reason in ends:
                by_reason[reason] += tokens
                by_island[name] += tokens
                failed[name] += tokens if reason in ENDS else 0
    assert by_reason.total()
    assert page["goodput"]["lost"] == {r: n for r, n in by_reason.items() if n}
    lanes = {lane["name"]: lane["lost_tokens"] for lane in page["lanes"]}
    told = Counter[str]()
    for _, _, name, text in events["events"]:
        if found := re.search(r"([\d,]+) tokens are lost", text):
            told[name] += int(found[1].replace(",", ""))
    rows, places = Counter[str](), page["failures"]["fields"]
    for row in page["failures"]["shown"]:
        rows[row[places.index("who")]] += row[places.index("lost_tokens")]
    for name, tokens in by_island.items():
        assert lanes[name] == told[name] == tokens
        assert rows[name] == failed[name]
    for failure in summary["failures"]:
        if tokens := failure["tokens_lost"]:
            assert f"{tokens:,} tokens lost" in report
