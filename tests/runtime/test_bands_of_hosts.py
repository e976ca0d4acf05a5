"""Tensors in bands, in runs of real processes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
import support
import tape_checks
from hosts_support import TIMEOUT_S, fetched_bytes, patient_config, run_processes
from runtime_support import make_config, placed, with_run
from tiny import SEQUENCE_LENGTH

from diloco_jax.config import Config, IslandConfig
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.payload import PayloadLayout
from diloco_jax.models.build import build, build_plan

pytestmark = pytest.mark.dist

FRAGMENTS = 8
SYNC = {"fragments": FRAGMENTS, "steps_per_cycle": FRAGMENTS}
"""Both embeddings are larger than a fragment."""
BATCH = 4


def planned(config: Config):
    plan = build_plan(config.run, build(config.run))
    cut = {piece.path for piece in plan.pieces if piece.bands}
    assert cut == {("embedding",), ("unembedding",)}
    return plan


def test_hosts_of_an_island_fetch_each_byte_of_a_band_once(text, tmp_path):
    """Two hosts that cut every tensor, inside tiles too. A band is one tile here, which
    one of them fetches."""
    config = patient_config(text, codec_up="int8", codec_down="int8", **SYNC)
    tokens = 2 * BATCH * (2 * FRAGMENTS + 2) * SEQUENCE_LENGTH
    islands = {
        "many": IslandConfig(batch_size=BATCH, hosts=2, mesh_fsdp=4),
        "one": IslandConfig(batch_size=BATCH),
    }
    config = dataclasses.replace(config, islands=islands).validate()
    config = with_run(config, total_tokens=tokens)
    plan, codec = planned(config), get_codec("int8")
    run_processes(config, tmp_path, how="cut")
    many, one = (
        fetched_bytes(tmp_path, name, island.hosts) for name, island in islands.items()
    )
    assert {fragment for fragment, _ in many} == set(range(FRAGMENTS))
    for fragment, pieces in enumerate(plan.fragments):
        layout = PayloadLayout.of(codec, pieces)
        anchor, publish = 4 * plan.sizes[fragment], layout.total_bytes
        # And some bytes around each host's part.
        for found in (many, one):
            assert anchor <= found[fragment, 0] <= 1.05 * anchor + 200
            assert publish <= found[fragment, 1] <= 1.05 * publish + 200


@pytest.fixture(scope="module")
def killed(text: Path, tmp_path_factory) -> support.Run:
    """Done; an island was killed, and the coordinator between prepared and
    committed."""
    config = make_config(text, quorum=1, codec_up="int8", codec_down="int8", **SYNC)
    config = with_run(config, total_tokens=2 * 70 * BATCH * SEQUENCE_LENGTH)
    island = IslandConfig(batch_size=BATCH, step_seconds=0.25)
    config = dataclasses.replace(config, islands={"a": island, "b": island})
    config = placed(
        config,
        faults=("b@12:kill", "coordinator@40:kill-prepared"),
        snapshot_every_s=4.0,
        checkpoint_every_s=1.0,
    )
    planned(config)
    return support.run_in(config.validate(), tmp_path_factory.mktemp("run"), TIMEOUT_S)


def test_a_run_of_bands_survives_its_faults_with_its_ledger_whole(killed):
    assert len(tape_checks.outage_seconds(killed.tape)) == 1
    assert killed.summary["islands"]["b"]["joins"] == 2
    assert {r["fragment"] for r in killed.tape if r["kind"] == "merged"} == set(
        range(FRAGMENTS)
    )
    sizes = support.fragment_sizes(killed.config)
    assert tape_checks.ledger_problems(killed.summary, killed.tape, sizes) == []
    assert tape_checks.version_problems(killed.tape) == []


def test_a_run_of_bands_is_replayed_bit_for_bit(killed):
    command = [*support.DILOCO, "replay", str(killed.workdir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["identical"]
    assert outcome["merges"] == outcome["merges_on_tape"] > 4 * FRAGMENTS
