"""An island traces the steps that its loop makes, and says why if it cannot."""

from __future__ import annotations

import queue

import jax
import jax.numpy as jnp
import pytest

from diloco_jax.deadlines import Deadlines
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.island.profiling import Profiler
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import ProfileRequest
from diloco_jax.wire import bulk
from diloco_jax.wire.errors import ConnectionLost

WAIT_S = 60.0
WHO = bulk.Identity(run_id="r", island="a", incarnation=3, session="s")


def request(**changes) -> ProfileRequest:
    asked = {"number": 7, "steps": 2, "within_s": WAIT_S, "max_bytes": 1 << 28}
    return ProfileRequest(**{**asked, **changes})


class Island:
    """A loop's mailbox, and what its profiler sends."""

    def __init__(self) -> None:
        self.mailbox, self.sent = Mailbox(), queue.Queue()
        self.lost = 0
        self.profiler = Profiler(self.mailbox, WHO, self._send, Deadlines(1.0))

    def _send(self, part, block) -> int:
        if self.lost:
            self.lost -= 1
            raise ConnectionLost("the coordinator is away")
        self.sent.put((part, bytes(block)))
        return len(block)

    def steps_until_sent(self, start=40):
        """Make steps until something was sent; return that."""
        twice = jax.jit(lambda x: x @ x)
        for step in range(start, start + 100_000):
            self.mailbox.post(Status(phase="training", steps=step))
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                twice(jnp.ones((8, 8))).block_until_ready()
            try:
                return self.sent.get(timeout=0.005)
            except queue.Empty:
                continue
        raise AssertionError("nothing was sent")


def test_whole_steps_are_in_the_trace_that_is_sent(monkeypatch, tmp_path):
    monkeypatch.setattr("diloco_jax.island.profiling.PROFILE_BLOCK_BYTES", 1 << 10)
    island = Island()
    island.lost = 1
    island.profiler.ask(request())
    part, block = island.steps_until_sent()
    assert (part.run_id, part.island, part.incarnation) == ("r", "a", 3)
    assert (part.number, part.failed, part.offset) == (7, "", 0)
    trace = block
    while len(trace) < part.total:
        following, block = island.sent.get(timeout=WAIT_S)
        assert (following.offset, following.total) == (len(trace), part.total)
        assert following.length == len(block) <= 1 << 10
        trace += block
    (tmp_path / "a.xplane.pb").write_bytes(trace)
    found = jax.profiler.ProfileData.from_file(str(tmp_path / "a.xplane.pb"))
    names = {e.name for p in found.planes for line in p.lines for e in line.events}
    assert any(name.startswith("train") for name in names), sorted(names)[:40]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_bytes": 10}, "at most 10 are sent; ask for fewer --steps"),
        ({"steps": 10**6, "within_s": 0.2}, "has to come to step"),
    ],
)
def test_why_there_is_no_trace_is_told(changes, why):
    island = Island()
    island.profiler.ask(request(**changes))
    part, block = island.steps_until_sent()
    assert why in part.failed
    assert (block, part.total) == (b"", 0)


def test_an_island_that_ends_says_so():
    island = Island()
    island.profiler.ask(request())
    island.mailbox.end(0, "asked to end")
    part, _ = island.sent.get(timeout=WAIT_S)
    assert "the island ends" in part.failed
