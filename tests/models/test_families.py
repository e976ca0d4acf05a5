"""Every family is the published one: its sizes, and its results on random weights.

`families/` is of `make_families.py`; `reference_forward.py` computes in float64.
"""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_forward as reference

from diloco_jax.config import ModelConfig
from diloco_jax.models import transformer
from diloco_jax.models.generation import Cache, make_decode
from diloco_jax.models.presets import PRESETS, preset
from diloco_jax.weights import families
from diloco_jax.weights.first import read_folder, whole
from diloco_jax.weights.tensor_files import read_json

FOLDER = Path(__file__).with_name("families")
NAMES = sorted(path.name for path in FOLDER.iterdir())
PUBLISHED = {
    "smollm2_135m": 134_515_008,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "olmoe_1b_7b": 6_919_161_856,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "smolvlm_256m": 256_484_928,
    # 12,187,325,040 less the picture encoder and its projector.
    "gemma3_12b": 12_187_325_040 - 421_290_864,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_as_many_parameters_as_its_files(name):
    shapes = jax.tree.leaves(transformer.build(preset(name)).shapes())
    assert sum(math.prod(leaf.shape) for leaf in shapes) == PUBLISHED[name]


def loaded(name: str) -> tuple[ModelConfig, dict, dict]:
    """A tiny model, its parameters, and what transformers says about it."""
    model = families.read(read_json(FOLDER / name / "config.json"), name)
    params = whole(read_folder(FOLDER / name, model))
    return model, params, dict(np.load(FOLDER / name / "logits.npz"))


def decoded(model: ModelConfig, params, tokens, *cuts: int) -> np.ndarray:
    """Logits, [T, V], by as many calls of the decoder as there are parts."""
    decode, found, begin = make_decode(model), [], 0
    cache = Cache.empty(model, 1, tokens.shape[1], "float32")
    for end in (*cuts, tokens.shape[1]):
        logits, cache = decode(params, jnp.asarray(tokens[:, begin:end]), cache, begin)
        found.append(np.asarray(logits[0]))
        begin = end
    return np.concatenate(found)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_formulas_and_of_transformers(name):
    model, params, there = loaded(name)
    found = decoded(model, params, there["tokens"])
    formulas = reference.logits(*reference.load(FOLDER / name), there["tokens"][0])
    largest = np.abs(formulas).max()
    assert largest > 1
    np.testing.assert_allclose(there["logits"], formulas, atol=1e-5 * largest)
    np.testing.assert_allclose(found, formulas, atol=1e-5 * largest)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_is_what_is_decoded(name):
    """The loss is that of the logits; a decoder in parts is the same decoder."""
    model, params, there = loaded(name)
    tokens = there["tokens"]
    built = transformer.build(model, remat="full")
    _, metrics = jax.jit(built.loss)(params, {"tokens": jnp.asarray(tokens)})
    logits = decoded(model, params, tokens[:, :-1])
    shares = jax.nn.log_softmax(logits)
    expected = -np.mean(np.asarray(shares)[np.arange(23), tokens[0, 1:]])
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    in_parts = decoded(model, params, tokens[:, :-1], 9, 10)
    np.testing.assert_allclose(in_parts, logits, atol=1e-4)


@pytest.mark.parametrize("name", [n for n in PRESETS if not n[0].isdigit()])
def test_a_published_config_reads_as_it_is_written(name):
    if name in ("tiny", "tiny_experts"):
        return
    model = preset(name)
    written = families.write(model, 4096)
    assert families.read(written, name) == families.as_written(model, model)
