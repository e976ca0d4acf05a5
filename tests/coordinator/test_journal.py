"""The alerts that the coordinator keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.coordinator.journal import ALERTS_EACH, ALERTS_KEPT, Journal, Note
from diloco_jax.faults import Faults
from diloco_jax.protocol import records


@pytest.fixture
def journal() -> Journal:
    nothing: Any = SimpleNamespace(append=lambda line: None)
    return Journal(nothing, nothing, faults=Faults(()), merges=0, slow_s=1.0)


def test_one_island_does_not_push_out_what_is_said_of_others(journal: Journal) -> None:
    journal.alert("the disk is full")
    journal.alert("b is quarantined", "b")
    for number in range(30):
        journal.alert(f"a failed {number}", "a")
    last = [f"a failed {number}" for number in range(30 - ALERTS_EACH, 30)]
    assert journal.alerts == ["the disk is full", "b is quarantined", *last]
    assert journal.alerts_raised == 32
    assert len(journal.untold) == 32, "all are delivered"


def test_the_last_alerts_of_the_run_are_kept(journal: Journal) -> None:
    for number in range(200):
        journal.alert(str(number))
    assert journal.alerts == [str(n) for n in range(200 - ALERTS_KEPT, 200)]
    assert len(journal.untold) == 100


def test_no_line_of_the_coordinators_has_a_kind_of_the_policys() -> None:
    theirs = {*records.Durable.__args__, *records.Noted.__args__}
    lines = (*theirs, *Note.__args__)
    assert len({line.__struct_config__.tag for line in lines}) == len(lines)
