"""Members by name: from the table, from a file, or refused."""

import os
import re
import sys
from pathlib import Path

import pytest

from diloco_jax.config import Config, ConfigError, OuterConfig, RunConfig, SyncConfig
from diloco_jax.core import members
from diloco_jax.core.families import MERGE_RULES, OUTER_OPTIMIZERS
from diloco_jax.core.fragments import Piece
from diloco_jax.core.members import load
from diloco_jax.core.merging import may_cut

OWN = """\
import jax.numpy as jnp

from diloco_jax.core.families import Elementwise


class Sign(Elementwise):
    def merge(self, deltas, weights, share):
        mean = jnp.tensordot(weights, deltas, 1)
        return share * {value}


sign = Sign()
"""


def written(folder: Path, value: str, name: str = "own.py") -> str:
    """Return the config's name of the rule."""
    (folder / name).write_text(OWN.format(value=value))
    return f"{folder / name}:sign"


def refusal(**sync: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Config(run=RunConfig(sync=SyncConfig(**sync))).validate()
    return str(caught.value)


def test_a_member_in_a_file_is_found_once_and_passes(tmp_path: Path) -> None:
    name = written(tmp_path, "mean")
    Config(run=RunConfig(sync=SyncConfig(merge=name))).validate()
    assert MERGE_RULES.find(name) is MERGE_RULES.find(name)
    assert MERGE_RULES.find(name).needs == "elementwise"


def test_a_member_imports_what_lies_beside_its_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_the_rule.py").write_text("HALF = 0.5")
    (tmp_path / "own.py").write_text("from beside_the_rule import HALF")
    assert load(f"{tmp_path / 'own.py'}:HALF") == 0.5


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("jnp.sum(mean)", r"a merge rule made float32\[\] of deltas of float32\["),
        ("jnp.concatenate([mean, mean])", "a merged delta has their shape and dtype"),
        ("mean.astype(jnp.bfloat16)", "a merge rule made bfloat16"),
        ("mean / jnp.sum(mean - mean)", "it made numbers that are not finite"),
        ("mean / share", "a share of 0.5 of all .* multiply it by `share`"),
        ("mean.nothing", "line 9: AttributeError: .* nothing"),
    ],
)
def test_an_unfit_member_is_refused_with_field_and_line(
    tmp_path: Path, value: str, said: str
) -> None:
    name = written(tmp_path, value)
    found = refusal(merge=name)
    assert found.startswith(f"sync.merge = {name!r}: line ")
    assert re.search(said, found), found


def test_a_class_is_refused_with_its_line_and_the_remedy(tmp_path: Path) -> None:
    name = written(tmp_path, "mean").replace(":sign", ":Sign")
    found = refusal(merge=name)
    assert found.startswith(f"sync.merge = {name!r}: line 6: TypeError: ")
    assert found.endswith("; it is a class: name an instance")


CLAIMS = """\
import jax.numpy as jnp

from diloco_jax.core import families
from diloco_jax.core.families import Elementwise, WeightedSum
from diloco_jax.core.merging import Rda


class Lengths(Rda):
    by_element = True


class Blocks(Elementwise):
    def merge(self, deltas, weights, share):
        mean = jnp.tensordot(weights, deltas, 1)
        return share * mean / (1 + jnp.max(jnp.abs(mean)))


class Recovers(families.Whole):
    by_element = True

    def start(self, shape):
        return jnp.ones(())

    def recovered(self, state, change):
        return jnp.max(jnp.abs(change))

    def merge(self, deltas, weights, share, state):
        return share * jnp.tensordot(weights, deltas, 1) * state, state


class Sizes(WeightedSum):
    by_element = True

    def factors(self, weights, squares):
        return weights


class Whole(Blocks):
    by_element = False


lengths, blocks, recovers, sizes, whole = (
    Lengths(), Blocks(), Recovers(), Sizes(), Whole()
)
"""


@pytest.mark.parametrize(
    ("name", "line"), [("lengths", 8), ("blocks", 12), ("recovers", 18)]
)
def test_a_rule_that_is_wrong_of_going_element_by_element_is_refused(
    tmp_path: Path, name: str, line: int
) -> None:
    """By lengths of whole pieces; by a block of tiles; only after a crash."""
    (tmp_path / "own.py").write_text(CLAIMS)
    name = f"{tmp_path / 'own.py'}:{name}"
    said = "it has by_element = True, but what it makes of an element depends on"
    found = refusal(merge=name)
    assert found.startswith(f"sync.merge = {name!r}: line {line}: ValueError: {said}")
    assert "set by_element = False" in found


OPTIMIZER_CLAIMS = """\
import jax
import optax


class Claims:
    elementwise = True

    def __init__(self, make):
        self.make = make

    def __call__(self, momentum):
        return self.make()


class Recovers(Claims):
    def delta_of(self, updates, state, momentum):
        return jax.tree.map(lambda u: -u / abs(u).max(), updates)


def by_shape():
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -g / g.ndim, grads), state

    return optax.GradientTransformation(lambda params: (), update)


trust = Claims(lambda: optax.lamb(1.0))
clipped = Claims(lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.scale(-1.0)))
factored = Claims(lambda: optax.adafactor(1.0, min_dim_size_to_factor=4))
recovers = Recovers(lambda: optax.scale(-1.0))
shape = Claims(by_shape)
adam = Claims(lambda: optax.adam(1.0))
"""


@pytest.mark.parametrize("name", ["trust", "clipped", "factored", "recovers", "shape"])
def test_an_optimizer_that_is_wrong_of_going_element_by_element_is_refused(
    tmp_path: Path, name: str
) -> None:
    """By lengths of tensors, of the fragment; by rows; after a crash; by the shape."""
    (tmp_path / "own.py").write_text(OPTIMIZER_CLAIMS)
    with pytest.raises(ValueError, match="leave elementwise out") as refused:
        OUTER_OPTIMIZERS.check(f"{tmp_path / 'own.py'}:{name}")
    said = "it has elementwise = True, but its update of an element depends on other"
    assert re.match(rf"line (5|15): ValueError: {said}", str(refused.value))


def test_an_optimizer_that_is_right_of_it_passes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OPTIMIZER_CLAIMS)
    OUTER_OPTIMIZERS.check(f"{tmp_path / 'own.py'}:adam")


@pytest.mark.parametrize(("name", "is_cut"), [("sizes", True), ("whole", False)])
def test_a_rule_says_if_its_pieces_may_be_cut(
    tmp_path: Path, name: str, is_cut: bool
) -> None:
    (tmp_path / "own.py").write_text(CLAIMS)
    merge = f"{tmp_path / 'own.py'}:{name}"
    MERGE_RULES.check(merge)
    assert may_cut(Piece(("w",), -1, (8, 4), False), MERGE_RULES.find(merge)) == is_cut


def test_a_file_that_cannot_be_executed_is_refused_with_its_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text("x = 1\nimport nothing_of_that_name\n")
    found = refusal(codec_up=f"{tmp_path}/own.py:x")
    assert "cannot be executed: line 2: ModuleNotFoundError" in found
    (tmp_path / "other.py").write_text("x = 1\ny = (\n")
    found = refusal(adopt=f"{tmp_path}/other.py:x")
    assert "cannot be executed: line 2: SyntaxError" in found


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nowhere_xyz:make", "No module named 'nowhere_xyz'; install it"),
        ("nowhere.py:make", "there is no file .*nowhere.py; correct the path"),
        ("json:dump_s", "json has no 'dump_s' .did you mean 'dumps'"),
        ("json", "it names nothing; write 'package.module:name' or"),
    ],
)
def test_what_is_not_there_is_named(reference: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(reference)


@pytest.mark.parametrize("field", ["merge", "adopt", "weighting", "codec_down"])
def test_what_is_no_member_of_the_family_is_refused(field: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def nonsense():\n    pass\n")
    name = f"{tmp_path}/own.py:nonsense"
    assert refusal(**{field: name}).startswith(f"sync.{field} = {name!r}: line 1: ")


def test_an_outer_optimizer_may_be_one_of_optax_or_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import optax\nmake = optax.adam\nbad = optax.apply_updates\n"
    )
    for name in ("lamb", f"{tmp_path}/own.py:make"):
        Config(run=RunConfig(outer=OuterConfig(optimizer=name))).validate()
    config = Config(
        run=RunConfig(outer=OuterConfig(optimizer=f"{tmp_path}/own.py:bad"))
    )
    with pytest.raises(ConfigError, match=r"outer.optimizer = .*own.py:bad'"):
        config.validate()


def test_one_fingerprint_wherever_the_file_lies() -> None:
    here, there, other = (
        RunConfig(sync=SyncConfig(merge=name)).fingerprint()
        for name in ("/a/own.py:sign", "b/own.py:sign", "own.py:other")
    )
    assert here == there != other


def test_a_child_finds_members_where_its_parent_does(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    given = members.importable()
    (tmp_path / "rules_of_the_parent.py").write_text("HALF = 0.5")
    (tmp_path / "random.py").write_text("raise RuntimeError('of the folder')")
    monkeypatch.setattr(sys, "path", sys.path[1:])
    with pytest.raises(ValueError, match="rules_of_the_parent"):
        load("rules_of_the_parent:HALF")
    monkeypatch.setenv(*next(iter(given.items())))
    assert load("rules_of_the_parent:HALF") == 0.5
    assert sys.path[-1] == str(tmp_path), "what is installed comes first"
    monkeypatch.delitem(sys.modules, "rules_of_the_parent")
    assert members.importable() == {
        members.PATH: os.pathsep.join(map(os.path.abspath, sys.path))
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    here = members.importable()[members.PATH]
    assert here.startswith(f"{tmp_path}{os.pathsep}"), "of a notebook"
