"""Traces that come in blocks: stored whole or not at all, one at a time, bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from diloco_jax.coordinator import profiles as profiles_module
from diloco_jax.coordinator.profiles import MOST_BYTES, Profiles
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.messages import ProfileOrder
from diloco_jax.wire.bulk import PROFILE_BLOCK_BYTES, ProfilePart
from diloco_jax.wire.errors import Busy, Refused, RemoteProtocolError

BUDGET_S, PATIENCE_S = 10.0, 60.0
TRACE = bytes(range(256)) * 4
ORDER = ProfileOrder(island="a", steps=2)


class Served:
    """Profiles of a run with islands a and b, and a clock."""

    def __init__(self, workdir) -> None:
        self.now, self.told = 0.0, []
        self.folder = workdir / "profiles"
        self.profiles = Profiles(
            workdir,
            lambda session, message: self.told.append((session, message)),
            budget_s=BUDGET_S,
            patience_s=PATIENCE_S,
            clock=lambda: self.now,
        )
        self.islands = {
            name: SimpleNamespace(
                name=name,
                status="live",
                phase="training",
                incarnation=1,
                session=f"{name}1",
                step_seconds=1.0,
            )
            for name in "ab"
        }

    def order(self, order=ORDER) -> dict[str, Any]:
        state = cast(State, SimpleNamespace(islands=self.islands))
        return self.profiles.order(order, state)

    def ask(self, island="a") -> ProfilePart:
        """Ask; return what the island says of its first block."""
        number = self.order(replace(ORDER, island=island))["number"]
        return ProfilePart(
            run_id="r",
            island=island,
            incarnation=1,
            session=f"{island}1",
            number=number,
            step=40,
            total=len(TRACE),
        )

    def send(self, part: ProfilePart, block=TRACE) -> bool:
        part = replace(part, length=len(block))
        with self.profiles.begin(part) as place:
            place[:] = block
            return self.profiles.end(part, place)

    def how(self, part: ProfilePart) -> dict[str, Any]:
        return self.order(replace(ORDER, number=part.number))

    def files(self):
        found = self.folder.rglob("*") if self.folder.exists() else ()
        return sorted(str(p.relative_to(self.folder)) for p in found if p.is_file())


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path)


def test_a_trace_is_asked_for_and_stored_when_its_last_block_is_there(served):
    part = served.ask()
    ((session, request),) = served.told
    assert session == "a1"
    assert (request.number, request.steps) == (part.number, 2)
    assert request.within_s == 50.0
    assert served.how(part)["phase"] == "tracing"
    assert not served.send(part, TRACE[:300])
    assert served.how(part) == {
        "number": part.number,
        "phase": "sending",
        "share": 300 / 1024,
    }
    assert not (served.folder / "a-40").exists(), "only as a whole"
    assert served.send(replace(part, offset=300), TRACE[300:])
    told = served.how(part)
    assert (told["phase"], told["bytes"], told["step"]) == ("done", 1024, 40)
    assert told["folder"] == str(served.folder / "a-40")
    assert served.files() == ["a-40/plugins/profile/a-40/a.xplane.pb"]
    assert (served.folder / served.files()[0]).read_bytes() == TRACE
    assert bytes(served.profiles.stored(part.number)) == TRACE
    with pytest.raises(Refused, match="is not stored"):
        served.profiles.stored(part.number + 1)


def test_a_block_that_comes_again_is_not_written_twice(served):
    part = served.ask()
    served.send(part, TRACE[:300])
    assert not served.send(part, TRACE[:300])
    served.send(replace(part, offset=300), TRACE[300:])
    assert (served.folder / served.files()[0]).read_bytes() == TRACE


def test_blocks_come_in_order_and_of_one_trace(served):
    part = served.ask()
    with pytest.raises(RemoteProtocolError, match="in their order"):
        served.send(replace(part, offset=300), TRACE[300:])
    served.send(part, TRACE[:300])
    with pytest.raises(RemoteProtocolError, match="in their order"):
        served.send(replace(part, offset=300, total=2000), TRACE[300:])


@pytest.mark.parametrize(
    "changes", [{"number": 1}, {"island": "b"}, {"incarnation": 2}]
)
def test_what_was_not_asked_for_is_refused(served, changes):
    part = served.ask()
    with pytest.raises(Refused, match="is not waited for"):
        served.send(replace(part, **changes))
    assert served.files() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"total": MOST_BYTES + 1, "length": 1},
        {"total": MOST_BYTES, "length": PROFILE_BLOCK_BYTES + 1},
    ],
)
def test_a_trace_or_a_block_that_is_too_large_takes_no_memory(served, changes):
    part = served.ask()
    with pytest.raises(Refused, match="ask for fewer --steps"):
        served.profiles.begin(replace(part, **changes))


def test_one_island_at_a_time(served):
    part = served.ask("a")
    with pytest.raises(Busy, match="'a' is being traced"):
        served.ask("b")
    served.send(part)
    served.send(served.ask("b"))
    assert len(served.files()) == 2


def test_an_island_that_cannot_says_why_and_another_is_asked(served):
    part = served.ask("a")
    served.send(replace(part, failed="ValueError: too large", total=0), b"")
    told = served.how(part)
    assert (told["phase"], told["text"]) == ("failed", "ValueError: too large")
    assert served.send(served.ask("b"))


@pytest.mark.parametrize(
    ("happens", "text"),
    [
        (lambda served: setattr(served, "now", 111.0), "nothing in time"),
        (lambda s: setattr(s.islands["a"], "incarnation", 2), "ended before"),
        (lambda s: setattr(s.islands["a"], "status", "gone"), "left before"),
        (lambda s: s.islands.pop("a"), "ended before"),
    ],
)
def test_a_trace_that_will_not_come_is_given_up(served, happens, text):
    part = served.ask("a")
    served.send(part, TRACE[:300])
    served.now += 1.0
    assert served.how(part)["phase"] == "sending"
    happens(served)
    told = served.how(part)
    assert told["phase"] == "failed"
    assert text in told["text"]
    assert served.files() == [], "the torn one is gone"
    assert served.send(served.ask("b"))


def test_a_full_disk_is_told_to_both(served, monkeypatch):
    def full(folder, nbytes):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(profiles_module, "require_space", full)
    part = served.ask()
    with pytest.raises(Refused, match="No space left"):
        served.send(part)
    assert "No space left" in served.how(part)["text"]
    assert served.files() == []


def test_the_newest_traces_stay(served, monkeypatch):
    monkeypatch.setattr(profiles_module, "MOST_KEPT", 2)
    for step in (1, 2, 3):
        served.send(replace(served.ask(), step=step))
    assert [name.split("/")[0] for name in served.files()] == ["a-2", "a-3"]


def test_an_order_of_another_life_is_not_known(served, tmp_path):
    part = served.ask()
    served.send(part, TRACE[:300])
    again = Served(tmp_path)
    assert again.files() == [], "what was torn is removed"
    with pytest.raises(Refused, match="started again"):
        again.how(part)
