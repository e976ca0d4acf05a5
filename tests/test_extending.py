"""docs/extending.md: its examples are whole, short, and run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from config_support import load_config
from pieces import merge_deltas
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax import cli
from diloco_jax.config import ConfigError
from diloco_jax.config.config import FIELDS
from diloco_jax.config.loading import read_config
from diloco_jax.core.codecs import Codec, encode_with_feedback
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.planning.coordinator import plan_coordinator
from diloco_jax.planning.plan import fragments_of
from diloco_jax.planning.terms import terms_of

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
EXAMPLES = dict(
    re.findall(
        r"^`(\w+)\.py`:.*?^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    )
)
MOST_LINES = 40
SHAPE = ("d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
TINY = [
    *(f"--model.{name.replace('_', '-')}={getattr(MODEL, name)}" for name in SHAPE),
    f"--sequence-length={SEQUENCE_LENGTH}",
    *("--sync.steps-per-cycle=4", "--sync.fragments=2", "--sync.overlap-steps=1"),
]


def small(text: Path, steps: int, islands: int) -> list[str]:
    """Options for a run of about so many steps of every island, of batches of 8."""
    tokens = steps * islands * 8 * SEQUENCE_LENGTH
    return [
        *TINY,
        f"--data.paths={text}",
        "--data.validation-fraction=0.3",
        f"--total-tokens={tokens}",
    ]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Something to train on."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(5):
        (folder / f"{index}.txt").write_text("abcdefgh, 01234567. " * 200)
    return folder


@pytest.fixture
def written(tmp_path: Path):
    """The file of an example."""

    def written(name: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(EXAMPLES[name])
        return path

    return written


def test_there_is_one_example_of_each_family(written) -> None:
    assert max(len(block.splitlines()) for block in EXAMPLES.values()) <= MOST_LINES
    named = set()
    for name in EXAMPLES:
        run = read_config(written(name)).run
        for field, family in FIELDS.items():
            section, attribute = field.split(".")
            if (getattr(getattr(run, section), attribute) or "").endswith(f":{name}"):
                named.add(family.kind)
    assert named == {family.kind for family in FIELDS.values()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(name: str, written, text: Path, capsys) -> None:
    path = written(name)
    options = [*small(text, 24, 2), "--inner.learning-rate=1e-2"]
    assert cli.main(["emulate", str(path), *options, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["merges"] >= 6
    assert summary["eval_loss"] < np.log(256) - 0.3


def test_the_sign_of_the_majority_decides(written) -> None:
    rule = MERGE_RULES.find(f"{written('sign_consensus')}:sign_consensus")
    deltas = [np.float32([[1.0, 2.0, -3.0, 0.0]])] * 2 + [
        np.float32([[4.0, -9.0, 5.0, 0.0]])
    ]
    found = merge_deltas(deltas, [1, 1, 1], rule, 0.5)
    np.testing.assert_allclose(found, [[1.0, 1.0, -1.5, 0.0]], rtol=1e-6)


def test_one_bit_per_element_and_a_scale_are_sent(written) -> None:
    codec = Codec(f"{written('one_bit')}:one_bit")
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    encoded, residual = encode_with_feedback(codec, x, np.zeros_like(x))
    assert encoded.nbytes == 4 * (1024 // 8 + 2)
    decoded = np.asarray(codec.decode(encoded, x.shape))
    np.testing.assert_array_equal(np.sign(decoded), np.sign(x))
    np.testing.assert_array_equal(residual, x - decoded)


def test_a_plan_counts_what_the_members_say(written) -> None:
    """Bytes of the codec, memory of the rule."""
    plans = {}
    for name in ("one_bit", "sign_consensus"):
        config = load_config(written(name))
        (one, *_) = config.islands.values()
        config = config.replace("islands", {f"island-{n}": one for n in range(8)})
        steps = dict.fromkeys(config.islands, 1.0)
        plans[name] = plan_coordinator(terms_of(config, fragments_of(config), steps))
    up, plain = plans["one_bit"], plans["sign_consensus"]
    assert up.merge_buffer < plain.merge_buffer / 7
    assert plain.merging > up.merging, "all deltas at once"


def broken(path: Path) -> Path:
    """The rule, with another shape."""
    text = path.read_text()
    assert "return share * total /" in text
    path.write_text(text.replace("return share * total /", "return total[:, :1]  #"))
    return path


def test_a_file_that_has_changed_is_read_again(written) -> None:
    """In a notebook: a rule that is edited, or one that is mended."""
    path = written("sign_consensus")
    config, text = read_config(path).validate(), path.read_text()
    before = MERGE_RULES.find(config.run.sync.merge)
    broken(path)
    with pytest.raises(ConfigError, match="a merged delta has their shape"):
        config.validate()
    path.write_text(text + "\n")
    assert MERGE_RULES.find(config.validate().run.sync.merge) is not before


@pytest.mark.parametrize("command", ["run", "emulate", "plan"])
def test_a_broken_member_is_refused_before_anything_starts(
    command: str, written, tmp_path: Path, capfd
) -> None:
    path = broken(written("sign_consensus"))
    options = ["--workdir", str(tmp_path / "run")] if command == "run" else []
    assert cli.main([command, str(path), *options]) == 2
    error = capfd.readouterr().err
    assert f"sync.merge = '{path}:sign_consensus': line 7: " in error
    assert "a merged delta has their shape and dtype" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.dist
def test_a_strangers_rule_goes_through_a_run_and_its_replay(
    written, text: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    path, workdir = written("sign_consensus"), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    config = path.read_text().replace("{__file__}", "sign_consensus.py")
    path.write_text(config.replace('"abc"', '"ab"'))
    options = [*small(text, 16, 2), "--workdir", str(workdir), "--json"]
    assert cli.main(["run", path.name, *options]) == 0
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert summary["merges"] >= 4
    named = json.loads((workdir / "config.json").read_text())["run"]["sync"]["merge"]
    assert named == f"{path}:sign_consensus"
    monkeypatch.chdir("/")
    assert cli.main(["replay", str(workdir), "--json"]) == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert told["merges"] == summary["merges"]
