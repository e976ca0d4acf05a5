"""An island traces the steps that its loop makes, and says why if it cannot."""

from __future__ import annotations

import logging
import threading

import jax
import jax.numpy as jnp

from diloco_jax.island.mailbox import Mailbox
from diloco_jax.island.watches import trace_steps
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import ProfileRequest

WAIT_S = 60.0


class Island:
    """A loop's mailbox, and what its profiler says in the log."""

    def __init__(self, folder, caplog) -> None:
        caplog.set_level(logging.INFO)
        self.mailbox, self._caplog, self._folder = Mailbox(), caplog, folder

    def trace(self, steps, within_s=WAIT_S) -> threading.Thread:
        asked = ProfileRequest(steps=steps, within_s=within_s)
        return trace_steps(self.mailbox, "a", self._folder, asked)

    def said(self) -> list[str]:
        return [m for m in self._caplog.messages if "trace of" in m]

    def steps_until_said(self, start=40) -> str:
        """Make steps until the log says what became of the trace; return that."""
        twice = jax.jit(lambda x: x @ x)
        for step in range(start, start + 100_000):
            self.mailbox.post(Status(phase="training", steps=step))
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                twice(jnp.ones((8, 8))).block_until_ready()
            if said := self.said():
                return said[0]
        raise AssertionError("nothing was said")


def test_whole_steps_are_in_the_trace_and_the_log_says_where_it_is(tmp_path, caplog):
    island = Island(tmp_path / "profiles", caplog)
    island.mailbox.post(Status(phase="training", steps=40))
    island.trace(2)
    said = island.steps_until_said()
    (folder,) = (tmp_path / "profiles").iterdir()
    assert folder.name.startswith("a-4")
    assert f"the trace of 2 steps is in {folder};" in said
    (file,) = folder.rglob("*.xplane.pb")
    found = jax.profiler.ProfileData.from_file(str(file))
    names = {e.name for p in found.planes for line in p.lines for e in line.events}
    assert any(name.startswith("train") for name in names), sorted(names)[:40]


def test_why_there_is_no_trace_is_said(tmp_path, caplog):
    island = Island(tmp_path, caplog)
    island.trace(10**6, within_s=0.2)
    assert "has to come to step" in island.steps_until_said()


def test_a_folder_that_cannot_be_made_is_said(tmp_path, caplog):
    (tmp_path / "profiles").write_text("a file in its place")
    island = Island(tmp_path / "profiles", caplog)
    island.trace(2)
    assert island.steps_until_said().startswith("no trace of 2 steps: ")


def test_an_island_that_ends_says_so(tmp_path, caplog):
    island = Island(tmp_path, caplog)
    tracing = island.trace(2)
    island.mailbox.end(0, "asked to end")
    tracing.join(WAIT_S)
    assert "the island ends" in island.said()[0]
