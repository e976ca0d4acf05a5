"""A small model's fragments, and the coordinator's parts around them."""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np
import pytest
from coordinator_support import AXES, PIN_S, SHAPES, make_holder
from engine_support import WAIT_S, Island, Piped, hello, report

from diloco_jax.config import OuterConfig, RunConfig
from diloco_jax.config.resolving import LONG
from diloco_jax.coordinator.holding.fragment_snapshots import KeptCycles
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.journal import RecordLog
from diloco_jax.coordinator.lead import Lead
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.faults import Faults
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol.coordinator.state import PolicyConfig, initial


@pytest.fixture
def run() -> RunConfig:
    return RunConfig(
        outer=OuterConfig(optimizer="nesterov", learning_rate=0.7, momentum=0.9),
        sync=dataclasses.replace(LONG, fragments=2),
    )


@pytest.fixture
def params() -> dict:
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: random.normal(size=shape).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.fixture
def store(run, params) -> Store:
    return Store(run, plan_fragments(SHAPES, AXES, 2), params, PIN_S)


@pytest.fixture
def island(tmp_path):
    return Island(tmp_path / "log")


@pytest.fixture
def make_engine(tmp_path, store, island):
    """An engine whose island does two steps, so that fragment 0 is merged; it runs
    until `done` holds."""
    files = []

    def make(done, log=None, faults=(), slow_s=WAIT_S, write_within_s=WAIT_S):
        def keep_house(engine):
            if done() or time.monotonic() > deadline:
                engine.stop()

        deadline = time.monotonic() + WAIT_S
        config = PolicyConfig(
            run_id="r",
            fingerprint="f",
            fragment_sizes=store.plan.sizes,
            steps_per_cycle=4,
            overlap_steps=1,
            quorum=1,
            grace=0.0,
            grace_window="alike",
            partial_merges="scaled",
            max_staleness=1,
            total_tokens=10**9,
            lease_s=2 * WAIT_S,
            reunion_s=WAIT_S,
            compile_budget_s=2 * WAIT_S,
            outage_budget_s=1.0,
            flush_s=1.0,
        )
        holder = make_holder(
            store,
            tmp_path,
            kept=KeptCycles(tmp_path, 2, {}, store.plan.sizes),
            write_within_s=write_within_s,
        )
        island.inbox, island.store = holder._inbox, store
        log = log or RecordLog(tmp_path / "log")
        files.extend((log, Tape(tmp_path / "tape.jsonl")))
        files.append(Metrics(tmp_path))
        engine = Lead(
            config,
            initial(config),
            holder=Piped(holder),
            log=log,
            tape=files[-2],
            metrics=files[-1],
            sessions=island,
            faults=Faults(tuple(faults)),
            slow_s=slow_s,
            housekeeping=keep_house,
        )
        island.engine = engine
        for event in (hello("a", session="s"), report(0), report(2)):
            engine.post(event)
        return engine

    yield make
    for file in files:
        file.close()
