"""Adapters over frozen weights, and a mixture of experts: two unlike islands train each
in a real run, which is repeated bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import support
import tape_checks
from runtime_support import PATIENCE_S, await_that, coordinator, make_config, with_run
from safetensors.numpy import load_file
from training_support import slowed, trained

from diloco_jax import cli
from diloco_jax.config import Config
from diloco_jax.evaluation import load_params
from diloco_jax.models.presets import preset
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import read_tape
from diloco_jax.weights import adapted
from diloco_jax.weights.first import started_from
from diloco_jax.weights.tasks import open_model

pytestmark = pytest.mark.dist

WEIGHTS = Path(__file__).parents[1] / "models" / "families" / "smollm2"


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """The summary of a whole run, whose books balance and whose replay has its bits."""
    config = slowed(config.validate(), 0.05)
    with (
        coordinator(config, workdir) as service,
        trained(config, service.address, workdir),
    ):
        await_that(lambda: service.lead.finished, 3 * PATIENCE_S)
    summary = json.loads((workdir / "summary.json").read_bytes())
    tape, sizes = (
        list(read_tape(workdir / "tape.jsonl")),
        support.fragment_sizes(config),
    )
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
    assert tape_checks.version_problems(tape) == []
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert cli.main(["replay", str(workdir), "--json"]) == 0
    replayed = json.loads(told.getvalue())
    assert (replayed["identical"], replayed["merges"]) == (True, summary["merges"])
    return summary


def test_adapters_are_trained_and_leave_with_the_weights_under_them(text, tmp_path):
    config = make_config(text, cycles=2)
    model = dataclasses.replace(config.run.model, lora_rank=2, lora_alpha=4.0)
    config = with_run(config, model=model)
    config = started_from(config, f"hf:{WEIGHTS}")
    run(config, workdir := tmp_path / "run")
    adapters = load_params(workdir)
    assert set(adapters) == {"layers"}
    merged = adapted.merged(config.run, adapters)
    said = open_model(workdir).params
    jax.tree.map(np.testing.assert_array_equal, merged, said)
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(adapters))
    out = tmp_path / "out"
    assert cli.main(["export", str(workdir), str(out), "--merged"]) == 0
    whole = load_file(out / "model.safetensors")
    before = load_file(WEIGHTS / "model.safetensors")
    changed = {n for n, a in before.items() if not np.array_equal(a, whole[n])}
    assert changed
    assert all("_proj." in name for name in changed)


def test_a_mixture_tells_what_its_experts_do(text, tmp_path):
    model = dataclasses.replace(
        preset("0.3m"),
        num_layers=2,
        experts=8,
        experts_per_token=2,
        expert_dim=192,
        balance_loss=0.01,
    )
    config = make_config(text, cycles=2, fragments=3, weights_by_use="rows")
    run(with_run(config, model=model), tmp_path)
    merges = [line for line in read_metrics(tmp_path) if line["kind"] == "merge"]
    told = {name for line in merges for name in line["experts"] or ()}
    assert told == {"router_distance", "overlap", "entropy", "busiest"}
    loads = {
        name: own
        for line in merges
        for name, own in (line["expert_loads"] or {}).items()
    }
    assert {name[-1] for name in loads} == {"0", "1"}
    assert all(sum(own) == pytest.approx(8, abs=0.01) for own in loads.values())
