"""The laboratory: the results of `emulate`, all seeds at once, and what it refuses."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from emulate_support import make_config

from diloco_jax import ConfigError, EmulationOptions, emulate
from diloco_jax.config import IslandConfig
from diloco_jax.simulation import laboratory
from diloco_jax.simulation.mapped import MappedMerges

ROOT = Path(__file__).parents[2]
OPTIONS = EmulationOptions(merge_seconds=1.5, evaluate_every_tokens=400)


def equal_islands(text, **changes):
    config = make_config(text, **changes)
    alike = IslandConfig(batch_size=3, step_seconds=1.0)
    return dataclasses.replace(config, islands=dict.fromkeys("ab", alike))


def with_options(**options):
    return {"options": EmulationOptions(**options)}


RULE = """
import dataclasses
import jax
import jax.numpy as jnp
from diloco_jax.core.families import Whole

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Memory:
    merged: jax.Array

class Slow(Whole):
    def start(self, shape):
        return Memory(jnp.zeros(shape, jnp.float32))

    def merge(self, deltas, weights, share, state):
        mean = jnp.tensordot(weights, deltas, 1) / jnp.sum(weights)
        return share * (mean + 0.1 * state.merged), Memory(mean)

slow = Slow()
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A merge rule whose state is a class of its own."""
    path = tmp_path_factory.mktemp("rule") / "slow.py"
    path.write_text(RULE)
    return f"{path}:slow"


@pytest.fixture(scope="module")
def config(text, slow):
    return equal_islands(text, merge=slow)


@pytest.fixture(scope="module")
def found(config):
    return laboratory.run(config, seeds=(3, 0), options=OPTIONS)


def leaves(run):
    return jax.tree.leaves(run.params)


@pytest.mark.parametrize(
    ("cases", "count"),
    [
        ("rda,int8,int8,keep", 1),
        pytest.param("covering", 5, marks=pytest.mark.nightly),
    ],
)
def test_in_float64_theta_is_that_of_emulate(cases, count):
    command = [sys.executable, "benchmarks/float64.py", cases]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert len(json.loads(done.stdout)) == count


def test_books_and_history_are_those_of_emulate(config, found):
    one, other = emulate(config, options=OPTIONS), found.runs[1]
    assert other.config == one.config
    for key, value in one.summary.items():
        if key not in ("islands", "eval_loss", "eval_bits_per_byte"):
            assert other.summary[key] == value, key
    assert found.losses == pytest.approx(
        [found.runs[0].summary["eval_loss"], one.summary["eval_loss"]], rel=2e-4
    )
    for table in ("steps", "takes", "adoptions", "merges", "lives", "evaluations"):
        here, there = other.history.frame(table), one.history.frame(table)
        assert len(here) == len(there) > 0
        for column in here:
            if column in ("digest", "loss", "norm"):
                continue
            if table == "merges" and here[column].isna().all():
                continue
            assert here[column].tolist() == there[column].tolist(), (table, column)
        for column in {"loss", "norm"} & set(here):
            assert here[column].to_numpy() == pytest.approx(
                there[column].to_numpy(), rel=1e-2
            )


def test_a_seed_does_not_depend_on_the_others(config, found):
    again, _ = laboratory.run(config, seeds=(0, 5), options=OPTIONS).runs
    for here, there in zip(leaves(again), leaves(found.runs[1]), strict=True):
        np.testing.assert_array_equal(here, there)
    assert abs(found.losses[0] - found.losses[1]) > 1e-3


def test_it_goes_on_after_an_interruption_with_the_same_bits(
    config, found, tmp_path, monkeypatch
):
    monkeypatch.setattr(laboratory, "SHOW_EVERY_S", 0.0)
    lines, path = [], tmp_path / "state"

    def show(line):
        lines.append(line)
        if len(lines) == 5:
            raise KeyboardInterrupt

    def run(**changes):
        asked = {"seeds": (3, 0), "options": OPTIONS, **changes}
        return laboratory.run(config, save=path, save_every_merges=2, **asked)

    with pytest.raises(KeyboardInterrupt):
        run(show=show)
    lines.append("")
    again = run(show=lines.append)
    assert lines[4].startswith("merge 5 of ")
    assert lines[6].startswith("merge 5 of ")
    for one, other in zip(found.runs, again.runs, strict=True):
        for here, there in zip(leaves(one), leaves(other), strict=True):
            np.testing.assert_array_equal(here, there)
        assert (
            one.history.steps["loss"].tolist() == other.history.steps["loss"].tolist()
        )
        for table in ("merges", "evaluations"):
            assert one.history.frame(table).equals(other.history.frame(table))
    with pytest.raises(ConfigError, match=r"save = .*state is of another run"):
        run(seeds=(0, 3))


@pytest.mark.parametrize("rule", ["mean", "trimmed_mean", "slow"])
def test_a_share_counts_once(text, rule, slow, monkeypatch):
    merge, norms = MappedMerges.merge, []

    def twice(self, order):
        before = self.fragments[:]
        for share in (1.0, 0.5):
            self.fragments[:] = before
            merge(self, msgspec.structs.replace(order, share=share))
        norms.extend(own for (own,) in self.norms)
        raise KeyboardInterrupt

    monkeypatch.setattr(MappedMerges, "merge", twice)
    config = equal_islands(text, merge=slow if rule == "slow" else rule)
    with pytest.raises(KeyboardInterrupt):
        laboratory.run(config, options=OPTIONS)
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-5)


def test_no_faults_may_be_a_list(text):
    config = equal_islands(text)
    placement = dataclasses.replace(config.placement, faults=[])
    alike = dataclasses.replace(config, placement=placement)
    laboratory.require_equal(alike, OPTIONS)


@pytest.mark.parametrize(
    ("change", "asked", "message"),
    [
        (
            {"islands.b.batch_size": 4},
            {},
            r"islands.b.batch_size = 4, and that of a is 3; .*use emulate",
        ),
        ({"islands.b.step_seconds": 2.0}, {}, "islands.b.step_seconds = 2.0"),
        ({"islands.a.hosts": 2, "islands.b.hosts": 2}, {}, "islands.a.hosts = 2"),
        ({"sync.quorum": 1, "sync.grace": 0.0}, {}, r"sync.quorum and sync.grace"),
        ({"placement.faults": ("a@3:kill",)}, {}, r"faults = \('a@3:kill',\)"),
        ({"sync.delta_bound": 0.9}, {}, r"seed 0: a delta of islands\.[ab] for frag"),
        ({}, {"seeds": (1, 1)}, r"seeds = \[1, 1\]"),
        ({}, {"save_every_merges": 0}, "save_every_merges = 0"),
        ({}, with_options(step_spread=0.1), "step_spread = 0.1, and a laboratory has"),
        ({}, with_options(failure_every_seconds=9.0), "failure_every_seconds = 9.0"),
        ({}, with_options(joins={"a": (1.0, 9.0)}), "joins = "),
    ],
)
def test_it_refuses_what_only_emulate_has_and_senseless_calls(
    text, change, asked, message
):
    config = equal_islands(text).replace(change)
    with pytest.raises(ConfigError, match=message):
        laboratory.run(config, **{"options": OPTIONS, **asked})
