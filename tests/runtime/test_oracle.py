"""With scripted events the runtime reproduces `tests/oracle.py`, bit for bit."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from oracle_support import expected_history
from runtime_support import make_config, run_scripted

from diloco_jax import load_params
from diloco_jax.core.fragments import get_piece
from diloco_jax.core.tiles import TileGrid, digest_arrays
from diloco_jax.models.build import build, build_plan

pytestmark = [pytest.mark.dist, pytest.mark.optimized]

CYCLES = 3


def positions_by_island(tape) -> dict[str, np.ndarray]:
    found: dict[str, list[int]] = {}
    for record in tape:
        if record["kind"] == "granted":
            spans = found.setdefault(record["island"], [])
            assert record["offset"] == len(spans)
            spans += range(record["start"], record["stop"])
    return {name: np.array(spans) for name, spans in found.items()}


@pytest.mark.parametrize(
    "sync",
    [
        # "rebase": test_joined.py, where another loop trains beside the product's.
        {"codec_up": "f32", "codec_down": "f32", "adopt": "overwrite"},
        {"codec_up": "int4", "codec_down": "bf16", "adopt": "blend", "merge": "mean"},
        # Both embeddings are cut into bands.
        {"codec_up": "int8", "codec_down": "int8", "adopt": "keep", "fragments": 8},
        {
            "codec_up": "int8",
            "codec_down": "int8",
            "adopt": "overwrite",
            "fragments": 8,
            "weights_by_use": "rows",
        },
    ],
    ids=lambda sync: f"{sync['adopt']}-{sync['codec_up']}-{sync['codec_down']}",
)
def test_the_runtime_gives_the_oracles_bits(sync, text, tmp_path):
    fragments = sync.get("fragments", 2)
    steps = 2 * fragments
    cycles = CYCLES * steps // 4  # Of which each has 4 steps there.
    config = make_config(text, cycles=cycles, **{**sync, "steps_per_cycle": steps})
    plan = build_plan(config.run, build(config.run))
    assert any(piece.bands for piece in plan.pieces) == (fragments == 8)
    tape = run_scripted(config, tmp_path)
    merges = [r for r in tape if r["kind"] == "merged" and not r["final"]]
    expected = expected_history(config, positions_by_island(tape), CYCLES * fragments)
    assert len(merges) >= len(expected) == CYCLES * fragments
    for merge, wanted in zip(merges, expected, strict=False):
        assert (merge["tick"], merge["fragment"]) == (wanted.tick, wanted.fragment)
        assert [c["island"] for c in merge["contributions"]] == ["a", "b"]
        assert merge["digest"] == wanted.digest, f"tick {wanted.tick} differs"

    # And what is loaded from its last snapshot is what the last merges made.
    params = load_params(tmp_path)
    digests = "".join(
        digest_arrays(
            TileGrid.of(piece.shape).to_tiles(get_piece(params, piece))
            for piece in pieces
        )
        for pieces in plan.fragments
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    wanted = hashlib.sha256(digests.encode()).hexdigest()[:16]
    assert summary["parameters_digest"] == wanted
