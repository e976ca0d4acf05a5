"""A cycle is gathered from a coordinator that goes away and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from diloco_jax.weights import export
from diloco_jax.wire.errors import Busy, ConnectionLost

FILES = {"facts.json": b"{}", "fragments/0": b"abcdef", "fragments/1": b"ghi"}
BUDGET_S = 5.0


class Served:
    """A coordinator, as far as a gathering asks it; it fails where the test says."""

    address = "coordinator:7000"

    def __init__(self, failures: dict[str, list[Exception]]) -> None:
        self._failures = failures
        self.asked: list[str] = []

    def keep(self, cycle: int, timeout_s: float) -> dict[str, Any]:
        if self._failures.get("keep"):
            raise self._failures["keep"].pop()
        return {"cycle": cycle or 4, "files": list(FILES), "share": 1.0}

    def kept(self, cycle: int, name: str) -> Iterator[bytes]:
        self.asked.append(name)
        yield FILES[name][:1]
        if self._failures.get(name):
            raise self._failures[name].pop()
        yield FILES[name][1:]


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the gathering waits, and then alone."""
    now = [0.0]
    monkeypatch.setattr(export.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(export.time, "sleep", sleep)
    return now


def gather(served: Served, folder: Path) -> int:
    run = export.LiveRun(cast(Any, served), BUDGET_S)
    return run.gather(0, folder, lambda what, share: None)


def test_a_file_that_breaks_off_is_begun_again(clock, tmp_path):
    lost = [ConnectionLost("by the test"), Busy("by the test")]
    served = Served({"keep": lost[:], "fragments/0": lost[:]})
    assert gather(served, tmp_path) == 4
    (folder,) = (tmp_path / "exports").iterdir()
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert served.asked == ["facts.json", *["fragments/0"] * 3, "fragments/1"]


def test_a_coordinator_that_stays_away_ends_it(clock, tmp_path):
    always = [ConnectionLost("by the test") for _ in range(100)]
    with pytest.raises(ConnectionLost):
        gather(Served({"fragments/1": always}), tmp_path)
    assert BUDGET_S < clock[0] <= BUDGET_S + export.POLL_S
