"""The first state of a run goes to workers without two of it in memory."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import tiny

from diloco_jax.config import Config, IslandConfig, Placement, RunConfig
from diloco_jax.config.resolving import resolve_outer
from diloco_jax.coordinator import origin
from diloco_jax.coordinator.kept import KeptCycles
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol.values import Version


class Workers:
    """Stands for the workers' processes, which restore what is on disk."""

    def __init__(self, *arguments):
        self.alive_as_they_restore = None
        Workers.last = self

    def restore(self, asked):
        gc.collect()
        self.alive_as_they_restore = Workers.watched() is not None

    def end(self, stop_s):
        pass


@pytest.mark.parametrize("given", [False, True])
def test_workers_restore_once_the_lead_holds_no_array(tmp_path, monkeypatch, given):
    monkeypatch.setattr(origin, "WorkersHolder", Workers)
    run = RunConfig(model=tiny.MODEL, sequence_length=tiny.SEQUENCE_LENGTH)
    config = resolve_outer(
        Config(
            run=run,
            islands={"a": IslandConfig(batch_size=2)},
            placement=Placement(workers=2, insecure=True),
        )
    )
    run = config.run
    model = build(run)
    plan = build_plan(run, model)
    given = origin.first_pieces(run, model, tmp_path) if given else None
    policy = policy_config(run, config.placement, "r", plan.sizes)
    with contextlib.ExitStack() as opened:
        tape = opened.enter_context(contextlib.closing(Tape(tmp_path / "tape")))
        made, state = origin.initialise(
            config, policy, model, plan, tape, tmp_path, given
        )
        assert not given
        kept = KeptCycles(tmp_path, 1, {}, plan.sizes)
        opened.callback(kept.close, 1.0)
        Workers.watched = weakref.ref(made.arrays(0)["theta"][0])
        makes = origin.Holders(config, plan, kept, tmp_path, "r", opened)
        makes.beginning(made, [Version()] * len(state.fragments), state.term)
        assert Workers.last.alive_as_they_restore is False
