"""Weights of files start a run and come back from it."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
from begin_support import FAMILIES, NAMES, QUICKSTART, begun, keep_cycle
from safetensors.numpy import load_file, save_file

from diloco_jax import cli
from diloco_jax.config import ConfigError
from diloco_jax.core.fragments import get_piece, plan_fragments
from diloco_jax.evaluation import load_params
from diloco_jax.models.build import build, build_plan
from diloco_jax.weights import families, tensor_files
from diloco_jax.weights.export import export
from diloco_jax.weights.first import fill, first_params, started_from
from diloco_jax.workdir import read_config


def in_files(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read by the library."""
    paths = sorted(folder.glob("*.safetensors"))
    return {k: v for path in paths for k, v in load_file(path).items()}


def assert_same(found: dict[str, np.ndarray], there: dict[str, np.ndarray]) -> None:
    assert found.keys() == there.keys()
    for name, array in there.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("fragments", [3, 60])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_starts_from_is_what_it_gives_back(
    name, fragments, config, tmp_path
):
    """Bit for bit, through a coordinator's snapshot, and a second time; with many
    fragments most matrices are in bands."""
    config = config.replace({"sync.fragments": fragments, "sync.merge": "mean"})
    source = FAMILIES / name
    workdir = begun(config, f"hf:{source}", tmp_path / "run")
    run = read_config(workdir).run
    banded = {p.path for p in build_plan(run, build(run)).pieces if p.bands}
    assert ("layers", "mlp", "down") in banded or fragments == 3
    out = tmp_path / "out"
    export(read_config(workdir), workdir, out, dtype="bfloat16")
    assert_same(in_files(out), in_files(source))
    assert families.read(
        tensor_files.read_json(out / "config.json"), ""
    ) == families.read(tensor_files.read_json(source / "config.json"), "")
    again = begun(config, f"hf:{out}", tmp_path / "again")
    exported = tmp_path / "exported"
    export(read_config(again), again, exported, dtype="bfloat16", shard_bytes=30_000)
    assert_same(in_files(exported), in_files(out))
    assert len(list(exported.glob("*.safetensors"))) > 1


def test_a_run_goes_on_from_another_runs_parameters(config, tmp_path):
    first = begun(config, f"hf:{FAMILIES / 'gemma3'}", tmp_path / "first")
    other = config.replace("sync.fragments", 5)
    second = begun(other, f"run:{first}", tmp_path / "second")
    theirs, ours = load_params(first), load_params(second)
    assert_same(flat(ours), flat(theirs))
    run = read_config(second).run
    assert_same(flat(first_params(run, build(run))), flat(theirs))


def flat(params: dict) -> dict[str, np.ndarray]:
    found = {}
    for name, value in params.items():
        inside = flat(value) if isinstance(value, dict) else {"": np.asarray(value)}
        found |= {f"{name}/{key}": array for key, array in inside.items()}
    return found


def test_a_byte_model_leaves_as_a_llama_with_plain_norms(config, tmp_path):
    workdir = begun(config, "", tmp_path / "run")
    out = tmp_path / "out"
    assert cli.main(["export", str(workdir), str(out)]) == 0
    model = families.read(tensor_files.read_json(out / "config.json"), "")
    assert model == dataclasses.replace(tiny.UNLIKE, norm_gain="scale")
    found = in_files(out)
    np.testing.assert_array_equal(found["model.norm.weight"], np.ones(32, np.float32))
    query = load_params(workdir)["layers"]["attention"]["query"][1]
    by_hand = np.asarray(query).transpose(1, 2, 0).reshape(-1, 32)
    there = found["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(there, by_hand)


def test_the_tokenizer_travels_with_the_weights(config, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FAMILIES / "qwen3", source)
    (source / "tokenizer.json").write_text("{}")
    (source / "README.md").write_text("not ours")
    settings = json.loads((source / "config.json").read_text())
    settings |= {"eos_token_id": 7, "max_position_embeddings": 99}
    (source / "config.json").write_text(json.dumps(settings))
    workdir = begun(config, f"hf:{source}", tmp_path / "run")
    shutil.rmtree(source)
    out = tmp_path / "out"
    export(read_config(workdir), workdir, out)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (out / "README.md").exists()
    written = tensor_files.read_json(out / "config.json")
    assert written["eos_token_id"] == 7
    assert written["max_position_embeddings"] == 99
    assert written["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        (["run"], "diloco_jax.cluster.run.run"),
        (
            ["coordinator", "--workdir", "w", "--init"],
            "diloco_jax.coordinator.main.run",
        ),
        (["emulate"], "diloco_jax.simulation.emulate.run"),
    ],
    ids=["run", "coordinator", "emulate"],
)
def test_commands_take_over_the_model_of_the_weights(command, runs, monkeypatch):
    begun = []
    answers = {"run": (0, {}), "coordinator": 0, "emulate": {}}

    def started(config, *rest, **options):
        begun.append((config, options))
        return answers[command[0]]

    monkeypatch.setattr(runs, started)
    source = f"hf:{FAMILIES / 'qwen3'}"
    init = [] if "--init" in command else ["--init"]
    name, *options = command
    arguments = [name, QUICKSTART, *options, *init, source]
    assert cli.main(arguments) == 0
    ((config, options),) = begun
    assert config.run.model.qk_norm
    assert config.run.model.weights == source
    assert options.get("init", True)


def test_a_run_that_goes_on_takes_no_weights(capsys):
    assert cli.main(["run", QUICKSTART, "--resume", "w", "--init", "hf:d"]) == 2
    assert "leave one of them out" in capsys.readouterr().err


def test_a_piece_in_stripes_is_written_in_place():
    """Into a transposed view, as an export's is."""
    values = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
    plan = plan_fragments(
        {"w": values}, {"w": ("mlp", "embed")}, 4, may_cut=lambda piece: True
    )
    assert max(piece.bands.stripes for piece in plan.pieces) > 1
    array = np.zeros((16, 512), np.float32)
    for piece in plan.pieces:
        fill({"w": array.T}, piece, get_piece({"w": values}, piece))
    np.testing.assert_array_equal(array.T, values)


def test_a_kept_cycle_leaves_as_a_snapshot_of_the_same_versions_does(config, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FAMILIES / "gemma3", source)
    (source / "tokenizer.json").write_text("{}")
    workdir = begun(config, f"hf:{source}", tmp_path / "run")
    keep_cycle(workdir, 7)
    export(read_config(workdir), workdir, tmp_path / "snapshot")
    export(read_config(workdir), workdir, tmp_path / "kept", cycle=7)
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "snapshot").iterdir())
    assert "tokenizer.json" in names
    for name in names:
        kept = (tmp_path / "kept" / name).read_bytes()
        assert kept == (tmp_path / "snapshot" / name).read_bytes()
    with pytest.raises(ConfigError, match=r"--cycle 8: .* kept are 7"):
        export(read_config(workdir), workdir, tmp_path / "none", cycle=8)
    other = read_config(workdir).replace("sync.fragments", 5)
    with pytest.raises(ConfigError, match="does not fit"):
        export(other, workdir, tmp_path / "o", cycle=7)
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "o").exists()


def test_a_picture_encoder_is_left_out(config, tmp_path):
    """The decoder of a Gemma 3 with pictures, under the names of old and new files."""
    source = FAMILIES / "gemma3"
    settings = json.loads((source / "config.json").read_text())
    for prefix in ("language_model.", "model.language_model."):
        folder = tmp_path / prefix
        folder.mkdir()
        outer = {"model_type": "gemma3", "text_config": settings}
        (folder / "config.json").write_text(json.dumps(outer))
        cut = "model." if prefix.startswith("model.") else ""
        renamed = {
            prefix + name.removeprefix(cut): array
            for name, array in in_files(source).items()
        }
        renamed["vision_tower.weight"] = np.ones(3, np.float32)
        save_file(renamed, folder / "model.safetensors")
        theirs = started_from(config, f"hf:{source}").run
        ours = started_from(config, f"hf:{folder}").run
        assert_same(
            flat(first_params(ours, build(ours))),
            flat(first_params(theirs, build(theirs))),
        )
