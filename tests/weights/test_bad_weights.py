"""Bad weights are named before a run begins, and nothing is half-written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from begin_support import FAMILIES, begun
from safetensors.numpy import load_file, save_file

from diloco_jax import cli, run_files
from diloco_jax.config import ConfigError
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator import main
from diloco_jax.files import POINTER, StorageAway
from diloco_jax.weights import tensor_files
from diloco_jax.weights.export import export
from diloco_jax.weights.first import started_from
from diloco_jax.workdir import read_config


def tensors(folder: Path, change) -> None:
    """Change the tensors of a folder."""
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors")


def cast(found, name, to) -> None:
    found[name] = np.ascontiguousarray(to(found[name]))


NORM, QUERY = "model.norm.weight", "model.layers.2.self_attn.q_proj.weight"
UP = "model.layers.{}.mlp.up_proj.weight"


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def change(folder: Path, **settings) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop(UP.format(1)), r"no tensor model\.layers\.1\.mlp\.up_proj\.w"),
        (lambda t: t.update({UP.format(7): t[NORM]}), r"tensor .*\.7\..* and 0 others"),
        (
            lambda t: cast(t, QUERY, np.transpose),
            r"shape \(32, 64\), .* says \(64, 32\)",
        ),
        (
            lambda t: cast(t, NORM, np.int32),
            r"norm\.weight is I32; weights are read as",
        ),
    ],
)
def test_bad_tensors_are_named_before_a_run_begins(spoil, message, config, source):
    tensors(source, spoil)
    with pytest.raises(ConfigError, match=message):
        started_from(config, f"hf:{source}")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncated, r"model\.safetensors is no whole safetensors file \(.*\); copy it"),
        (gone, r"there is no .*model\.safetensors"),
    ],
)
def test_bad_files_are_named_before_a_run_begins(spoil, message, config, source):
    spoil(source)
    with pytest.raises(ConfigError, match=message):
        started_from(config, f"hf:{source}")


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        ("model.safetensors", POINTER, r"model.safetensors is no .*`git lfs pull`"),
        ("config.json", POINTER, r"config.json cannot be read .*`git lfs pull`"),
        ("config.json", b"[" * 200_000, r"config.json cannot be read .*nested too"),
    ],
)
def test_a_file_that_is_not_the_one_it_should_be_is_named(
    name, content, shown, tmp_path
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=shown):
        tensor_files.read_json(
            tmp_path / name
        ) if ".json" in name else tensor_files.read_tensors(tmp_path)


@pytest.fixture
def source(tmp_path):
    """A copy of a family's folder, to be spoilt."""
    return shutil.copytree(FAMILIES / "qwen3", tmp_path / "source")


ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"hidden_size": "64"}, r"hidden_size = '64': Expected `int`, got `str`; copy"),
        ({"hidden_size": 64.5}, r"hidden_size = 64.5: Expected `int`"),
        ({"hidden_size": None}, r"has no hidden_size"),
        ({"num_attention_heads": 0}, r"num_attention_heads = 0: Expected `int` >= 1"),
        ({"rms_norm_eps": "x"}, r"rms_norm_eps = 'x': Expected `float`"),
        ({"rope_theta": -5}, r"rope_theta = -5: Expected `float` > 0"),
        (
            {"tie_word_embeddings": "yes"},
            r"tie_word_embeddings = 'yes': Expected `bool`",
        ),
        ({"layer_types": 3}, r"layer_types = 3: Expected `array`"),
        ({"hidden_act": [1]}, r"hidden_act = \[1\]: Expected `str`"),
        ({"rope_parameters": 3}, r"rope_parameters = 3: Expected `object`"),
        ({"rope_parameters": ROPE}, r"scaling of positions has no low_freq_factor"),
        (
            {"rope_parameters": {**ROPE, "factor": "x"}},
            r"config.json, rope_parameters: factor = 'x': Expected `float`",
        ),
        ({"model_type": "gemma3", "text_config": 3}, r"text_config = 3, but a gemma3"),
        ({"model_type": "quen3"}, r"'quen3' is no known family .did you mean 'qwen3'"),
        ({"final_logit_softcapping": 30.0}, r"softcapping = 30\.0; .* has None"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(settings, shown, config, source):
    change(source, **settings)
    with pytest.raises(ConfigError, match=shown):
        started_from(config, f"hf:{source}")


@pytest.mark.parametrize(
    ("index", "why"),
    [
        *((i, "names no files") for i in ("{}", '{"weight_map": [1]}')),
        ('{"weight_map": {"a": 3}}', "names no files"),
        ('{"weight_map": {"a": "../b"}}', "has a in '../b', which does not lie in"),
    ],
)
def test_an_index_that_names_no_files_is_refused(index, why, config, source):
    gone(source)
    (source / tensor_files.INDEX).write_text(index)
    with pytest.raises(ConfigError, match=f"index.json: weight_map {why}"):
        started_from(config, f"hf:{source}")


def test_a_snapshot_that_is_cut_short_says_what_to_do(config, tmp_path, capsys):
    workdir = begun(config, "", tmp_path / "run")
    for path in (workdir / "checkpoints" / "coordinator").glob("0*/*.snapshot"):
        path.write_bytes(path.read_bytes()[:-50])
    for command in (
        ["export", str(workdir), str(tmp_path / "o")],
        ["eval", str(workdir)],
    ):
        assert cli.main(command) == 2
        said = capsys.readouterr().err
        assert "ends before its last byte; copy the workdir again" in said
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["generate", "FILE/config.json"], "is a file; give its folder, "),
        (["generate", "ENDS", "--prompt", "a"], "eos_token_id = 'x'; it is a number"),
        (["export", "RUN", "/proc/x"], "no file can be made there"),
        (["export", "127.0.0.1:1", "/proc/x"], "no file can be made there"),
    ],
)
def test_a_place_or_file_that_does_not_do_is_named(
    command, said, config, tmp_path, capsys, source
):
    (source / "generation_config.json").write_text('{"eos_token_id": "x"}')
    run = str(begun(config, "", tmp_path / "run")) if "RUN" in command else ""
    places = {
        "FILE/config.json": f"{source}/config.json",
        "ENDS": str(source),
        "RUN": run,
    }
    assert cli.main([places.get(word, word) for word in command]) == 2
    assert said in capsys.readouterr().err


def test_weights_that_go_bad_later_begin_no_run(config, tmp_path, source):
    ready = resolve(started_from(config, f"hf:{source}").validate())
    truncated(source)
    with pytest.raises(ConfigError, match="no whole safetensors file"):
        main.Coordinator(ready, tmp_path / "run", init=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("source", ["hf:", "hub:x/y", "somewhere", "hf:gs://"])
def test_a_source_is_of_a_known_kind(source, config):
    with pytest.raises(ConfigError, match=f"--init {source}: write hf:DIR"):
        started_from(config, source)
    with pytest.raises(ConfigError, match="write from-island:NAME, one of a"):
        started_from(config, "from-island:")


def test_a_bucket_that_does_not_answer_is_no_failure_of_the_disk(config, monkeypatch):
    class UnreachableError(OSError):
        """As that of the library of buckets, which has an errno too."""

    UnreachableError.__module__ = "aiohttp.client"

    def files_of(*arguments, **options):
        raise UnreachableError(-2, "no such host")

    monkeypatch.setattr("diloco_jax.weights.first._files", files_of)
    with pytest.raises(StorageAway, match=r"gs://b/w does not answer: .*no such host"):
        started_from(config, "hf:gs://b/w")


def test_an_export_leaves_nothing_half_written(config, tmp_path, monkeypatch):
    workdir = begun(config, "", tmp_path / "run")
    before = sorted(tmp_path.iterdir())

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diloco_jax.weights.export.fill", full)
    with pytest.raises(OSError, match="No space"):
        export(read_config(workdir), workdir, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(ConfigError, match="text exists; give the name of a new"):
        export(read_config(workdir), workdir, tmp_path / "text")


def test_a_workdir_keeps_the_source_where_a_run_keeps_its_files():
    assert run_files.SOURCE in run_files.NAMES
