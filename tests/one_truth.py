"""One number, one value: lengths of outages and goodput, wherever a run tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_jax import read_history
from diloco_jax.cluster.status import read_status
from diloco_jax.config import Placement
from diloco_jax.dashboard.app import RunReader
from diloco_jax.observability.terminal import closing_report


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
    assert f"goodput {summary['goodput']:.3f}" in report
    assert page["status"]["goodput"] == summary["goodput"]
    parts = page["goodput"]["parts"]
    assert parts["merged"] == summary["goodput"]
    assert sum(parts.values()) == pytest.approx(1.0)
    return told
