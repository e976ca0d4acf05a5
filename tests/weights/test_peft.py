"""PEFT itself reads an exported adapter, and its logits are those of the merged
weights.

DILOCO_PEFT_PYTHON names a Python that has torch, transformers and peft: the extra
`fixtures`, which no other test needs.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from test_adapted import FAMILIES, NAMES, moved, run_of

from diloco_jax.models.build import build
from diloco_jax.models.generation import Cache, make_decode
from diloco_jax.weights import adapted
from diloco_jax.weights.adapted import write_adapter
from diloco_jax.weights.first import first_params

PYTHON = os.environ.get("DILOCO_PEFT_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="DILOCO_PEFT_PYTHON names no Python that has peft"
)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIMEOUT_S = 300
DIFFERENCE_MAX = 1e-4
READ = """
import sys
from pathlib import Path
import numpy as np
from peft_logits import of_peft
weights, adapter, rows, out = map(Path, sys.argv[1:])
np.save(out, of_peft(weights, adapter, np.load(rows)))
"""


@pytest.mark.parametrize("family", NAMES)
def test_peft_computes_what_the_merged_weights_do(family, tmp_path):
    run = run_of(family)
    params = moved(first_params(run, build(run)), 3)
    adapter, rows, out = (tmp_path / name for name in ("adapter", "rows.npy", "o.npy"))
    adapter.mkdir()
    write_adapter(run.model, params, adapter)
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, run.model.vocab_size, (2, 16)).astype(np.int32)
    np.save(rows, tokens)
    subprocess.run(
        [PYTHON, "-c", READ, *map(str, (FAMILIES / family, adapter, rows, out))],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS), "HF_HUB_OFFLINE": "1"},
        timeout=TIMEOUT_S,
        check=True,
    )
    theirs = np.load(out)
    plain = adapted.base_run(run).model
    greatest = np.abs(theirs).max()

    def off(weights) -> float:
        empty = Cache.empty(plain, *tokens.shape, "float32")
        ours, _ = make_decode(plain)(weights, tokens, empty, jnp.int32(0))
        return float(np.abs(np.asarray(ours) - theirs).max() / greatest)

    assert off(adapted.merged(run, params)) < DIFFERENCE_MAX
    without = dataclasses.replace(run, model=plain)
    assert off(first_params(without, build(without))) > 100 * DIFFERENCE_MAX
