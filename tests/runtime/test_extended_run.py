"""A run that is over is extended, and the whole of it is repeated from its tape."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess

import pytest
import support
import tape_checks
from runtime_support import make_config, placed, with_run
from tiny import SEQUENCE_LENGTH

from diloco_jax.config import InnerConfig, IslandConfig
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.core.learning_rate import learning_rate
from diloco_jax.observability.tape import read_tape
from diloco_jax.simulation.replay.recording import read_recording

pytestmark = pytest.mark.dist

TIMEOUT_S = 240.0
STEPS = 120
"""Sums of both islands, before and after."""


def diloco(*arguments: object) -> str:
    """The output of a command that succeeds."""
    done = subprocess.run(
        [*support.DILOCO, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def extended(text, tmp_path_factory):
    """The workdir of a run that was over and had as many tokens again; and what it
    printed."""
    folder = tmp_path_factory.mktemp("extended")
    config = make_config(text, fragments=3, steps_per_cycle=6, quorum=1)
    inner = InnerConfig(learning_rate=1e-2, warmup_fraction=0.0, rewarm_steps=0)
    config = with_run(config, inner=inner, total_tokens=STEPS * SEQUENCE_LENGTH)
    island = IslandConfig(batch_size=1, step_seconds=0.05)
    config = dataclasses.replace(config, islands={"a": island, "b": island})
    config = placed(config, checkpoint_every_s=0.5)
    write_config_json(config.validate(), folder / "config.json")
    workdir = folder / "run"
    diloco("run", folder / "config.json", "--workdir", workdir)
    first = json.loads((workdir / "summary.json").read_bytes())
    total = 2 * config.run.total_tokens
    shown = diloco("run", "--resume", workdir, "--total-tokens", total)
    return workdir, first, shown


def test_it_ends_with_all_its_tokens_and_balanced_books(extended):
    workdir, first, shown = extended
    config = read_config_json(workdir / "config.json")
    summary = json.loads((workdir / "summary.json").read_bytes())
    assert config.run.total_tokens == 2 * STEPS * SEQUENCE_LENGTH
    assert summary["phase"] == "done"
    assert first["tokens"] < config.run.total_tokens <= summary["tokens"]
    assert summary["merges"] > first["merges"]
    assert math.isfinite(summary["eval_loss"])
    tape = list(read_tape(workdir / "tape.jsonl"))
    sizes = support.fragment_sizes(config)
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
    assert tape_checks.version_problems(tape) == []
    kinds = [r["kind"] for r in tape]
    assert kinds.count("extended") == 1
    assert kinds.count("finished") == 2
    recovered = next(r for r in tape if r["kind"] == "recovered")
    assert recovered["parameters_digest"] == first["parameters_digest"]
    goes_on = learning_rate(config.run.inner, first["tokens"] / config.run.total_tokens)
    assert f"which ended at 0.001, goes on from {goes_on:.3g}\n" in shown
    assert goes_on > 0.005


def test_replay_repeats_both_parts_with_their_learning_rates(extended):
    workdir, *_ = extended
    known = {life.total_tokens for life in read_recording(workdir).lives.values()}
    assert known == {STEPS * SEQUENCE_LENGTH, 2 * STEPS * SEQUENCE_LENGTH}
    found = json.loads(diloco("replay", workdir, "--json").splitlines()[0])
    assert found["identical"]
    assert found["merges"] == found["merges_on_tape"]


def test_a_finished_extension_changes_nothing_more(extended):
    workdir, *_ = extended
    before = (workdir / "summary.json").read_bytes()
    assert "the run in it is finished" in diloco("run", "--resume", workdir)
    assert (workdir / "summary.json").read_bytes() == before
