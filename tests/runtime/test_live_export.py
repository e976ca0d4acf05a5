"""A run that goes on gives the parameters of one cycle, and holds nobody up."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from runtime_support import (
    await_that,
    coordinator,
    diloco,
    make_config,
    placed,
    with_run,
)
from safetensors.numpy import load_file
from training_support import trained

from diloco_jax import cli, files, run_files
from diloco_jax.config import IslandConfig
from diloco_jax.config.loading import read_config_json
from diloco_jax.coordinator.holding import fragment_snapshots
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.core.tiles import digest_arrays
from diloco_jax.evaluation import kept_facts
from diloco_jax.evaluation import run as evaluate
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import read_tape
from diloco_jax.wire.certificates import make_certificates

pytestmark = pytest.mark.dist

TIMEOUT_S = 300.0
NAMES = ("one", "two")
CYCLES = 4
"""Kept before the run is asked to end."""


@pytest.fixture(scope="module")
def over(text, tmp_path_factory):
    """The workdir of a run that was exported while it went on, and the two exports. It
    ends once it has kept enough, and each island has evaluated the merged model."""
    folder = tmp_path_factory.mktemp("live")
    config = make_config(
        text, fragments=3, steps_per_cycle=6, quorum=1, codec_down="f32"
    )
    config = with_run(config, total_tokens=10**9)
    island = IslandConfig(batch_size=1, step_seconds=0.1)
    config = dataclasses.replace(config, islands={"a": island, "b": island})
    config = placed(config, export_every=3, exports_kept=50, checkpoint_every_s=0.0)
    config = placed(config, watch_every=3, evaluate_batches=10**6)
    make_certificates(keys := folder / "keys", [], 1, islands=["a", "b"])
    config = placed(config, certificates=str(keys))
    workdir = folder / "run"
    kept = workdir / run_files.KEPT
    with (
        coordinator(config.validate(), workdir) as service,
        trained(config, service.address, folder),
    ):

        def export(name: str, *options: object, code: int = 0):
            to = (service.address, folder / name, "--certificates", keys)
            return diloco("export", *to, *options, code=code)

        def merges() -> int:
            return sum(f.merges for f in service.lead.state.fragments)

        await_that(lambda: merges() >= 3, TIMEOUT_S)
        with ThreadPoolExecutor(2) as pool:
            done = dict(zip(NAMES, pool.map(export, NAMES), strict=True))
        refused = export("none", "--cycle", 10**6, code=3)
        await_that(
            lambda: (
                len(fragment_snapshots.cycle_numbers(kept)) >= CYCLES
                and len({line["island"] for line in curve_of(workdir)}) == 2
            ),
            TIMEOUT_S,
        )
    return folder, done, refused


def curve_of(workdir):
    return [m for m in read_metrics(workdir) if m["kind"] == "merged_model"]


def of_tape(workdir):
    """Digest of Theta by fragment and version, and the tick of each version."""
    tape = list(read_tape(workdir / "tape.jsonl"))
    digests = {
        (r["fragment"], *r["version"]): r["digest"]
        for r in tape
        if r["kind"] == "digested"
    }
    ticks = {
        (r["fragment"], *r["version"]): r["tick"] for r in tape if r["kind"] == "merged"
    }
    return digests, ticks


def test_kept_cycles_are_of_one_moment_and_have_the_merges_bits(over):
    folder, *_ = over
    workdir = folder / "run"
    run = read_config_json(workdir / "config.json").run
    plan = build_plan(run, build(run))
    store = Store(run, plan, None, 0.0)
    digests, ticks = of_tape(workdir)
    cycles = fragment_snapshots.cycle_numbers(workdir / run_files.KEPT)
    assert len(cycles) >= CYCLES
    checked = 0
    for cycle in cycles:
        for fragment in range(3):
            theta = store.room(fragment)["theta"]
            path = fragment_snapshots.cycle_path(workdir / run_files.KEPT, cycle)
            header, digest = files.read_sealed(
                path / fragment_snapshots.kept_name(fragment), theta
            )
            assert digest_arrays(theta) == f"xxh3-128:{digest}", "one pass is enough"
            term, number = header["version"]
            turn = (cycle - 1) * 3 + fragment + 1
            upto = [
                v for (f, t, v), tick in ticks.items() if f == fragment and tick <= turn
            ]
            assert number == max(upto, default=0)
            if number:
                checked += 1
                assert digest_arrays(theta) == digests[fragment, term, number]
    assert checked > 6
    every_third = [cycle for cycle in cycles if cycle % 3 == 0]
    assert len(every_third) >= len(cycles) - 2


def test_an_export_of_the_live_run_is_that_of_its_cycle(over):
    folder, done, _ = over
    assert not list(folder.glob(".*"))
    for name, found in done.items():
        cycle = int(found.stderr.split(" of cycle ")[1].split(" in ")[0])
        again = folder / f"{name}-again"
        whole = ["export", folder / "run", again, "--cycle", cycle]
        assert cli.main([*map(str, whole)]) == 0
        ours = load_file(again / "model.safetensors")
        theirs = load_file(folder / name / "model.safetensors")
        assert theirs.keys() == ours.keys()
        for tensor, array in ours.items():
            np.testing.assert_array_equal(theirs[tensor], array)
        assert kept_facts(folder / "run", cycle)["merges"] > 0


def test_the_curve_of_the_merged_model_is_that_of_the_kept_cycles(over):
    folder, *_ = over
    workdir = folder / "run"
    config = read_config_json(workdir / "config.json")
    lines = curve_of(workdir)
    curve = {line["cycle"]: line["eval_loss"] for line in lines}
    assert len(curve) == len(lines) >= 2
    assert {line["island"] for line in lines} == {"a", "b"}, "they take turns"
    shared = sorted(
        curve.keys() & set(fragment_snapshots.cycle_numbers(workdir / run_files.KEPT))
    )
    assert len(shared) >= len(curve) - 1, "both are of every third cycle"
    found = {c: evaluate(config, workdir, c)["eval_loss"] for c in shared}
    assert {c: curve[c] for c in shared} == pytest.approx(found, rel=1e-5)
    assert len({round(loss, 4) for loss in found.values()}) == len(shared)
    summary = json.loads((workdir / "summary.json").read_bytes())
    assert summary["merged_model"]["cycle"] == max(curve)
    assert sum(i["eval_seconds"] for i in summary["islands"].values()) > 0


def test_a_cycle_that_cannot_be_had_is_refused_by_name(over, capsys):
    folder, _, refused = over
    assert "cycle 1000000 is not kept" in refused.stderr
    assert not (folder / "none").exists()
    missing = ["export", folder / "run", folder / "none", "--cycle", 10**6]
    assert cli.main([*map(str, missing)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "does not keep it; kept are " in said
    assert not (folder / "none").exists()


def test_the_run_was_not_held_up(over):
    folder, *_ = over
    summary = json.loads((folder / "run" / "summary.json").read_bytes())
    assert summary["phase"] == "stopped"
    assert summary["alerts"] == []
