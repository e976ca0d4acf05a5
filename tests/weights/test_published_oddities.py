"""Folders of weights as they are published and as people mend them by hand: each is
read as other readers do, or refused with both values."""

import json
import shutil

import numpy as np
import pytest
from begin_support import FAMILIES
from safetensors.numpy import load_file, save_file

from diloco_jax.config import Config, ConfigError
from diloco_jax.weights import families, tensor_files
from diloco_jax.weights.first import read_folder, started_from, whole

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.fixture
def folder(request, tmp_path):
    """A copy of a family's folder."""
    shutil.copytree(FAMILIES / getattr(request, "param", "smollm2"), tmp_path / "f")
    return tmp_path / "f"


def settings(folder, **changes):
    path = folder / "config.json"
    found = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(found))
    return found


def tensors(folder, **changes):
    found = {**load_file(folder / tensor_files.SINGLE), **changes}
    save_file(found, folder / tensor_files.SINGLE)
    return found


def params(folder):
    model = started_from(Config(), f"hf:{folder}").run.model
    return model, whole(read_folder(folder, model))


def test_a_copy_of_the_tied_table_counts_as_nothing(folder):
    _, want = params(folder)
    table = load_file(folder / tensor_files.SINGLE)[TABLE]
    tensors(folder, **{HEAD: table})
    model, found = params(folder)
    assert model.tied_embeddings
    np.testing.assert_array_equal(found["embedding"], want["embedding"])


def test_a_table_saved_as_the_head_alone_is_the_table(folder):
    _, want = params(folder)
    there = load_file(folder / tensor_files.SINGLE)
    there[HEAD] = there.pop(TABLE)
    save_file(there, folder / tensor_files.SINGLE)
    np.testing.assert_array_equal(params(folder)[1]["embedding"], want["embedding"])


@pytest.mark.parametrize("change", ["a value", "the shape", "no number"])
def test_a_head_that_differs_from_the_tied_table_is_refused(change, folder):
    head = load_file(folder / tensor_files.SINGLE)[TABLE].copy()
    if change == "a value":
        head[-1, -1] += 1
    elif change == "the shape":
        head = head[:-1]
    else:
        head[0, 0] = np.nan
    tensors(folder, **{HEAD: head})
    with pytest.raises(ConfigError, match=f"{HEAD} and {TABLE} differ.*tie_word_emb"):
        params(folder)
    if change == "a value":
        settings(folder, tie_word_embeddings=False)
        model, found = params(folder)
        assert not model.tied_embeddings
        np.testing.assert_array_equal(found["unembedding"], head.astype(np.float32).T)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [
        ({}, {}, True),
        ({"tie_word_embeddings": False}, {}, False),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
        ({"tie_word_embeddings": None}, {"tie_word_embeddings": False}, False),
        ({}, {"tie_word_embeddings": False}, False),
    ],
)
def test_the_outer_config_of_a_gemma_says_if_it_is_tied(outer, inner, tied):
    text = json.loads((FAMILIES / "gemma3" / "config.json").read_text())
    del text["tie_word_embeddings"]
    found = {"model_type": "gemma3", "text_config": {**text, **inner}, **outer}
    assert families.read(found, "config.json").tied_embeddings is tied


def test_what_the_outer_config_says_of_tokens_and_quantizing_counts():
    text = json.loads((FAMILIES / "gemma3" / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    assert families.text_config(outer)["eos_token_id"] == [1, 106]
    outer["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(ConfigError, match="quantization_config"):
        families.read(outer, "config.json")


@pytest.mark.parametrize(
    ("new", "old", "kind"),
    [
        (None, LINEAR, "linear"),
        (None, {"type": "linear", "factor": 2.0}, "linear"),
        ({"rope_theta": 10_000.0, **LINEAR}, None, "linear"),
        ({"rope_theta": 10_000.0, **LINEAR}, LINEAR, "linear"),
        ({"rope_theta": 1e4, **LINEAR}, {"type": "linear", "factor": 2.0}, "linear"),
        ({"rope_theta": 1e4, "type": "linear", "factor": 2.0}, LINEAR, "linear"),
        ({"rope_theta": 10_000.0, "rope_type": "default"}, {}, "none"),
        ({"rope_theta": 10_000.0, **LLAMA3}, LLAMA3, "llama3"),
        ({}, LLAMA3, "llama3"),
    ],
)
def test_both_names_of_the_scaling_may_say_the_same(new, old, kind, folder):
    found = settings(folder, rope_parameters=new, rope_scaling=old)
    model = families.read(found, "config.json")
    assert model.rope_scaling == kind
    assert model.rope_factor == {"linear": 2.0, "llama3": 8.0}.get(kind, 1.0)


@pytest.mark.parametrize("folder", ["smollm2", "gemma3"], indirect=True)
@pytest.mark.parametrize(
    "old",
    [
        LINEAR,
        LLAMA3,
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "yarn", "factor": 4.0},
        {"rope_theta": 5.0},
    ],
)
def test_a_scaling_that_only_one_name_has_is_refused_with_both(old, folder):
    found = settings(folder, rope_scaling=old)
    own = found["rope_parameters"]
    theta = str(own.get("full_attention", own)["rope_theta"])
    match = rf"rope_parameters has .*{theta}.* rope_scaling .*{next(iter(old))}"
    with pytest.raises(ConfigError, match=match):
        families.read(found, "config.json")


def test_part_of_the_rotations_alone_is_refused(folder):
    for found in (
        settings(folder, partial_rotary_factor=0.5),
        settings(
            folder,
            partial_rotary_factor=1.0,
            rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5},
        ),
    ):
        with pytest.raises(ConfigError, match=r"partial_rotary_factor = 0\.5"):
            families.read(found, "config.json")


@pytest.mark.parametrize("shards", [True, False], ids=["whole", "gone"])
def test_one_file_counts_before_an_index_that_is_older(shards, tmp_path):
    """As `save_pretrained` leaves it over a folder of shards."""
    source = tmp_path / "source"
    shutil.copytree(FAMILIES / "llama3", source)
    newer = {
        name: array + 1 for name, array in tensor_files.read_tensors(source).items()
    }
    save_file(newer, source / tensor_files.SINGLE)
    if not shards:
        for path in source.glob("model-*.safetensors"):
            path.unlink()
    found = tensor_files.read_tensors(source)
    assert found.keys() == newer.keys()
    for name, array in newer.items():
        np.testing.assert_array_equal(found[name], array)


def sharded(folder, extra):
    """Make an index of a folder's one file that has entries of more."""
    there = load_file(folder / tensor_files.SINGLE)
    name = "model-00001-of-00001.safetensors"
    (folder / tensor_files.SINGLE).rename(folder / name)
    index = {"weight_map": {**dict.fromkeys(there, name), **extra(name)}}
    (folder / tensor_files.INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("name", [HEAD, "vision.weight", "a.rotary_emb.inv_freq"])
@pytest.mark.parametrize("file", ["", "model-00002-of-00002.safetensors"])
def test_an_entry_of_the_index_that_the_model_does_not_need_is_none(name, file, folder):
    _, want = params(folder)
    sharded(folder, lambda whole: {name: file or whole})
    np.testing.assert_array_equal(params(folder)[1]["embedding"], want["embedding"])


@pytest.mark.parametrize(
    ("file", "match"),
    [
        ("", "says that model-00001.* has lm_head.weight, but it has not"),
        ("model-00002-of-00002.safetensors", "there is no .*model-00002"),
    ],
)
def test_an_entry_that_it_needs_is_missed(file, match, folder):
    settings(folder, tie_word_embeddings=False)
    sharded(folder, lambda whole: {HEAD: file or whole})
    with pytest.raises(ConfigError, match=match):
        params(folder)


MISTRAL = {"model_type": "mistral", "hidden_act": "silu", "rms_norm_eps": 1e-5}


def test_a_mistral_without_a_window_is_read_and_leaves_as_a_llama(folder):
    found = settings(folder, **MISTRAL, sliding_window=None)
    model = families.read(found, "config.json")
    assert families.write(model, 16)["model_type"] == "llama"


@pytest.mark.parametrize("window", [{}, {"sliding_window": 4096}])
def test_a_mistral_with_a_window_is_refused(window, folder):
    found = settings(folder, **MISTRAL, **window)
    with pytest.raises(ConfigError, match="sliding_window = 4096"):
        families.read(found, "config.json")


def test_a_scale_of_attention_that_is_left_out_is_that_of_transformers():
    found = {"model_type": "gemma3_text", "head_dim": 128, "hidden_size": 640}
    found |= {"num_hidden_layers": 2, "intermediate_size": 64}
    with pytest.raises(ConfigError, match="query_pre_attn_scalar = 256"):
        families.read(found, "config.json")
