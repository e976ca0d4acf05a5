"""Text is drawn from the probabilities that were asked for, and repeatably."""

import math

import jax
import numpy as np
import pytest
import tiny

from diloco_jax.config import ConfigError
from diloco_jax.models import transformer
from diloco_jax.models.generation import draw, generate

SHARES = np.array([0.3, 0.05, 0.5, 0.15])
LOGITS = np.log(SHARES).astype(np.float32) + 3
DRAWS = 20_000


def drawn(temperature: float, top_p: float) -> np.ndarray:
    """How often each token is drawn."""
    chance = np.random.default_rng(0)
    found = [draw(LOGITS, temperature, top_p, chance) for _ in range(DRAWS)]
    return np.bincount(found, minlength=len(SHARES)) / DRAWS


@pytest.mark.parametrize(
    ("temperature", "top_p", "kept"),
    [
        (1.0, 1.0, [0, 1, 2, 3]),
        (1.0, 0.7, [0, 2]),
        (1.0, 0.81, [0, 2, 3]),
        (1.0, 1e-9, [2]),
        (2.0, 1.0, [0, 1, 2, 3]),
        (0.5, 0.9, [0, 2]),
    ],
)
def test_tokens_come_as_often_as_they_are_likely(temperature, top_p, kept):
    """top_p is a sum of the probabilities at that temperature."""
    expected = np.zeros(len(SHARES))
    expected[kept] = SHARES[kept] ** (1 / temperature)
    expected /= expected.sum()
    found = drawn(temperature, top_p)
    assert np.flatnonzero(found).tolist() == kept
    # Five standard errors of a share.
    np.testing.assert_allclose(found, expected, atol=5 * math.sqrt(0.25 / DRAWS))


def test_without_temperature_the_likeliest_is_taken():
    chance = np.random.default_rng(0)
    assert {draw(LOGITS, 0.0, 1.0, chance) for _ in range(9)} == {2}


@pytest.fixture(scope="module")
def params():
    return jax.jit(transformer.build(tiny.UNLIKE).init)(jax.random.key(0))


def text(params, **options) -> list[int]:
    return list(generate(tiny.UNLIKE, params, [1, 2, 3], 12, **options))


def test_a_seed_gives_its_text(params):
    hot = {"temperature": 5.0}
    assert text(params, **hot, seed=1) == text(params, **hot, seed=1)
    assert text(params, **hot, seed=1) != text(params, **hot, seed=2)
    assert text(params) == text(params, seed=2)
    assert text(params) == text(params, **hot, top_p=1e-9)
    assert text(params, room=64) == text(params)


def test_a_text_ends_before_its_end(params):
    whole = text(params, temperature=5.0, seed=1)
    assert len(whole) == 12
    end = whole[5]
    before = whole[: whole.index(end)]
    assert text(params, temperature=5.0, seed=1, ends=frozenset([end])) == before


def test_a_prompt_that_is_none_is_named(params):
    for prompt, shown in (
        ([], "the prompt is empty"),
        ([1, 999], "the token 999, the"),
    ):
        with pytest.raises(ConfigError, match=shown):
            next(generate(tiny.UNLIKE, params, prompt, 1))
