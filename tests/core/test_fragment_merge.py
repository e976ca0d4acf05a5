"""A merge has the same bits however it is cut; its memory is that of the fragment."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from diloco_jax.core import tiles
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.core.fragment_merge import FragmentMerge
from diloco_jax.core.fragments import Piece
from diloco_jax.core.outer import OuterSettings

PIECES = (
    Piece(("a",), -1, (256, 512), False),
    Piece(("b",), -1, (33,), False),
    Piece(("c",), -1, (64, 96), True),
)


def merger(rule: str = "rda", optimizer: str = "nesterov") -> FragmentMerge:
    return FragmentMerge(
        pieces=PIECES,
        up=get_codec("int8"),
        down=get_codec("int8"),
        rule=MERGE_RULES.find(rule),
        settings=OuterSettings(
            optimizer=optimizer, learning_rate=0.5, momentum=0.9, norm_guard=1.1
        ),
    )


def merged(merge: FragmentMerge, times: int = 5) -> tuple:
    """State and payload after some merges; the last ones are cut by the guard."""
    rng = np.random.default_rng(0)
    state = merge.begin([rng.standard_normal(p.shape, np.float32) for p in PIECES])
    for number in range(1, times + 1):
        payloads = []
        for _ in range(3):
            arrays = [
                merge.up.encode(rng.standard_normal(p.shape, np.float32) * number)
                for p in PIECES
            ]
            payloads.append(merge.layout_up.pack(arrays))
        squares = [merge.squares(payload) for payload in payloads]
        found = merge.merge(
            state, payloads, squares, [1, 2, 3], share=0.5, final=False, last=()
        )
        state = found.state
    return state, bytes(found.payload), found.norm


def same(one: tuple, other: tuple) -> None:
    jax.tree.map(np.testing.assert_array_equal, one[0], other[0])
    assert one[1:] == other[1:]


@pytest.mark.parametrize("rule", ["rda", "mean", "trimmed_mean"])
@pytest.mark.parametrize("optimizer", ["nesterov", "sgd"])
def test_the_size_of_blocks_changes_no_bit(rule, optimizer, monkeypatch) -> None:
    whole = merged(merger(rule, optimizer))
    for elements in (1, 5000):
        monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", elements)
        same(merged(merger(rule, optimizer)), whole)


def replayed(merge: FragmentMerge) -> tuple:
    """States after some merges that are known by their publishes alone."""
    rng, found = np.random.default_rng(0), []
    state = merge.begin([rng.standard_normal(p.shape, np.float32) for p in PIECES])
    for number in range(1, 6):
        arrays = [
            merge.down.encode(rng.standard_normal(p.shape, np.float32) * number)
            for p in PIECES
        ]
        payload = merge.layout_down.pack(arrays)
        state = merge.replay(state, payload, final=False)
        found.append(state)
    return tuple(found)


@pytest.mark.parametrize("optimizer", ["nesterov", "sgd"])
def test_the_size_of_blocks_changes_no_bit_of_what_recovery_makes(
    optimizer, monkeypatch
) -> None:
    """The guard cuts the later merges."""
    whole = replayed(merger(optimizer=optimizer))
    for elements in (1, 5000):
        monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", elements)
        others = replayed(merger(optimizer=optimizer))
        jax.tree.map(np.testing.assert_array_equal, others, whole)
    guards = [state.outer[0]["guard"] for state in whole]
    assert [int(g.merges) for g in guards] == [1, 2, 3, 4, 5]


def test_an_optimizer_that_sees_whole_fragments_takes_the_same_steps(
    monkeypatch,
) -> None:
    state, _, norm = merged(merger())
    monkeypatch.setattr("diloco_jax.core.outer.Nesterov.elementwise", False)
    other, _, also = merged(merger())
    assert norm == pytest.approx(also, rel=1e-6)
    for one, two in zip(state.theta, other.theta, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)


def test_a_merge_leaves_the_state_that_it_was_given() -> None:
    merge, rng = merger(), np.random.default_rng(1)
    state, *_ = merged(merge)
    before = jax.tree.map(np.array, state)
    arrays = [merge.up.encode(rng.standard_normal(p.shape)) for p in PIECES]
    payload = merge.layout_up.pack(arrays)
    squares = [merge.squares(payload)]
    for _ in range(3):
        merge.merge(state, [payload], squares, [1], share=1.0, final=False, last=())
    jax.tree.map(np.testing.assert_array_equal, state, before)


def test_threads_change_no_bit_and_memory_does_not_follow_the_islands() -> None:
    """In processes of their own, of one core and of all."""
    found = []
    for islands, cores in ((2, 1), (16, 1), (16, os.cpu_count())):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, str(islands), str(cores)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout))
    two, sixteen, others = found
    assert sixteen["digest"] == others["digest"]
    piece = 4 * 1024 * 4096
    # What else a process takes and gives back is a piece or two.
    assert abs(sixteen["grown"] - two["grown"]) < 4 * piece, "16 deltas are 16 pieces"


PROCESS = """
import hashlib, json, os, sys
from pathlib import Path

islands, cores = map(int, sys.argv[1:])
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
import numpy as np
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragment_merge import FragmentMerge
from diloco_jax.core.fragments import Piece
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.core.outer import OuterSettings
from diloco_jax.machine import give_memory_back

shape = (1024, 4096)
merge = FragmentMerge(
    pieces=(Piece(("w",), -1, shape, False),),
    up=get_codec("int8"),
    down=get_codec("int8"),
    rule=MERGE_RULES.find("rda"),
    settings=OuterSettings(optimizer="nesterov", learning_rate=0.5, momentum=0.9),
)
rng = np.random.default_rng(0)
state = merge.begin([rng.standard_normal(shape, np.float32)])
payloads, squares = [], []
for _ in range(islands):
    delta = rng.standard_normal((256, 16384), np.float32)
    payloads.append(bytes(np.asarray(merge.up.encode_tiles(delta))))
    squares.append(merge.squares(payloads[-1]))

def run(state):
    weights = [1.0] * islands
    return merge.merge(
        state, payloads, squares, weights, share=1.0, final=False, last=()
    )

def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(x.split()[1]) for x in lines if x.startswith(what))

state = run(run(state).state).state
give_memory_back()
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
after = run(state)
grown = resident("VmHWM") - before
digest = hashlib.sha256(bytes(after.payload)).hexdigest()
print(json.dumps({"grown": grown, "digest": digest}))
"""
