"""Weights of files start a run and come back from it, and bad files are named."""

import dataclasses
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from diloco_jax import checkpoint, cli, run_files
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator import main
from diloco_jax.coordinator.kept import KeptCycles
from diloco_jax.coordinator.store import Store
from diloco_jax.core.fragments import get_piece, plan_fragments
from diloco_jax.evaluation import load_params
from diloco_jax.models.build import build
from diloco_jax.models.plan import build_plan
from diloco_jax.paths import StorageAway
from diloco_jax.protocol.holding import KeepFragment
from diloco_jax.protocol.values import Version
from diloco_jax.weights import families, files
from diloco_jax.weights.export import export
from diloco_jax.weights.first import fill, first_params, first_pieces, started_from
from diloco_jax.workdir import read_config

FAMILIES = Path(__file__).parents[1] / "models" / "families"
NAMES = sorted(path.name for path in FAMILIES.iterdir())
QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.py")


@pytest.fixture
def config(tmp_path) -> Config:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one line of text\n" * 2000)
    run = RunConfig(
        model=tiny.MODEL,
        data=DataConfig(paths=(str(text),)),
        sync=SyncConfig(fragments=3),
        sequence_length=tiny.SEQUENCE_LENGTH,
    )
    return Config(run=run, islands={"a": IslandConfig()})


def begun(config: Config, source: str, workdir: Path) -> Path:
    """The workdir of a run that has begun, and merged nothing."""
    if source:
        config = started_from(config, source)
    coordinator = main.Coordinator(resolve(config.validate()), workdir, init=True)
    try:
        coordinator.start()
    finally:
        coordinator.close()
    return workdir


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
    sync = SyncConfig(fragments=fragments, merge="mean")
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, sync=sync))
    source = FAMILIES / name
    workdir = begun(config, f"hf:{source}", tmp_path / "run")
    run = read_config(workdir).run
    banded = {p.path for p in build_plan(run, build(run)).pieces if p.bands}
    assert ("layers", "mlp", "down") in banded or fragments == 3
    out = tmp_path / "out"
    export(read_config(workdir), workdir, out, dtype="bfloat16")
    assert_same(in_files(out), in_files(source))
    assert families.read(files.read_json(out / "config.json"), "") == families.read(
        files.read_json(source / "config.json"), ""
    )
    again = begun(config, f"hf:{out}", tmp_path / "again")
    exported = tmp_path / "exported"
    export(read_config(again), again, exported, dtype="bfloat16", shard_bytes=30_000)
    assert_same(in_files(exported), in_files(out))
    assert len(list(exported.glob("*.safetensors"))) > 1


def test_a_run_goes_on_from_another_runs_parameters(config, tmp_path):
    first = begun(config, f"hf:{FAMILIES / 'gemma3'}", tmp_path / "first")
    more = dataclasses.replace(config.run.sync, fragments=5)
    other = dataclasses.replace(config, run=dataclasses.replace(config.run, sync=more))
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
    model = families.read(files.read_json(out / "config.json"), "")
    assert model == dataclasses.replace(tiny.MODEL, norm_gain="scale")
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
    written = files.read_json(out / "config.json")
    assert written["eos_token_id"] == 7
    assert written["max_position_embeddings"] == 99
    assert written["torch_dtype"] == "float32"


# ---- bad input -------------------------------------------------------------------


def without(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    del found["model.layers.1.mlp.up_proj.weight"]
    save_file(found, folder / "model.safetensors")


def surplus(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    found["model.layers.7.mlp.up_proj.weight"] = found["model.norm.weight"]
    save_file(found, folder / "model.safetensors")


def misshapen(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    name = "model.layers.2.self_attn.q_proj.weight"
    found[name] = np.ascontiguousarray(found[name].T)
    save_file(found, folder / "model.safetensors")


def integers(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    found["model.norm.weight"] = found["model.norm.weight"].astype(np.int32)
    save_file(found, folder / "model.safetensors")


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def unknown(folder: Path) -> None:
    change(folder, model_type="quen3")


def capped(folder: Path) -> None:
    change(folder, final_logit_softcapping=30.0)


def change(folder: Path, **settings) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (surplus, r"the tensor model\.layers\.7\.mlp\.up_proj\.weight and 0 others"),
        (misshapen, r"q_proj\.weight has shape \(32, 64\), .* says \(64, 32\)"),
        (integers, r"model\.norm\.weight is I32; weights are read as F32, BF16"),
        (truncated, r"model\.safetensors is no whole safetensors file \(.*\); copy it"),
        (gone, r"there is no .*model\.safetensors"),
        (unknown, r"'quen3' is no known family; did you mean 'qwen3'"),
        (capped, r"final_logit_softcapping = 30\.0; .* has None"),
    ],
)
def test_bad_weights_are_named_before_a_run_begins(
    spoil, message, config, tmp_path, capsys
):
    source = tmp_path / "source"
    shutil.copytree(FAMILIES / "qwen3", source)
    spoil(source)
    with pytest.raises(ConfigError, match=message):
        started_from(config, f"hf:{source}")


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
        ({"rope_parameters": ROPE}, r"scaling of positions has no original_max_posi"),
        (
            {"rope_parameters": {**ROPE, "factor": "x"}},
            r"config.json, rope_parameters: factor = 'x': Expected `float`",
        ),
        ({"model_type": "gemma3", "text_config": 3}, r"text_config = 3, but a gemma3"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(settings, shown, config, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FAMILIES / "qwen3", source)
    change(source, **settings)
    with pytest.raises(ConfigError, match=shown):
        started_from(config, f"hf:{source}")


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}']
)
def test_an_index_that_names_no_files_is_refused(index, config, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FAMILIES / "qwen3", source)
    (source / files.INDEX).write_text(index)
    with pytest.raises(ConfigError, match=r"index.json: weight_map names no files"):
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
    command, said, config, tmp_path, capsys
):
    source = tmp_path / "source"
    shutil.copytree(FAMILIES / "qwen3", source)
    (source / "generation_config.json").write_text('{"eos_token_id": "x"}')
    run = str(begun(config, "", tmp_path / "run")) if "RUN" in command else ""
    places = {
        "FILE/config.json": f"{source}/config.json",
        "ENDS": str(source),
        "RUN": run,
    }
    assert cli.main([places.get(word, word) for word in command]) == 2
    assert said in capsys.readouterr().err


def test_weights_that_go_bad_later_begin_no_run(config, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FAMILIES / "qwen3", source)
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

    monkeypatch.setattr("diloco_jax.weights.buckets._files", files_of)
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


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"post_norms": True}, "model.post_norms = True"),
        ({"window": 8}, "model.window = 8"),
        ({"attention_bias": "qkv", "qk_norm": True}, "model.qk_norm = True"),
    ],
)
def test_a_model_of_no_family_is_refused_with_what_is_lacking(changes, lacking):
    model = dataclasses.replace(tiny.MODEL, **changes)
    with pytest.raises(ConfigError, match=f"the nearest lacks {lacking}"):
        families.write(model, 16)


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


def test_a_workdir_keeps_the_source_where_a_run_keeps_its_files():
    assert run_files.SOURCE in run_files.NAMES


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        (["run"], "diloco_jax.cluster.run.run"),
        (
            ["coordinator", "--workdir", "w", "--init"],
            "diloco_jax.coordinator.main.run",
        ),
        (["emulate"], "diloco_jax.simulation.emulation.emulate.run"),
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
    run = read_config(workdir).run
    plan = build_plan(run, build(run))
    store = Store(run, plan, first_pieces(run, build(run)), 0.0)
    ended = threading.Event()
    cycles = KeptCycles(workdir, 2, checkpoint.whose(run, "r", plan), plan.sizes)
    for fragment in range(len(plan.fragments)):
        keep = KeepFragment(
            cycle=7, fragment=fragment, version=Version(), merges=0, tokens=0
        )
        theta = store.arrays(fragment)["theta"]
        cycles.keep(keep, theta, lambda cycle, trouble: ended.set())
    assert ended.wait(60)
    cycles.close(60.0)
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
    other = dataclasses.replace(run, sync=SyncConfig(fragments=5))
    with pytest.raises(ConfigError, match="does not fit"):
        export(
            Config(run=other, islands=config.islands), workdir, tmp_path / "o", cycle=7
        )
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "o").exists()
