"""Log-likelihoods of given continuations by the bundled transformer.

`B` rows, `T` tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from diloco_jax.config import ModelConfig
from diloco_jax.models.generation import Cache, make_decode
from diloco_jax.models.model import Params


class Likelihoods(NamedTuple):
    """How likely rows of tokens are, by row."""

    log: jax.Array
    """f32 [B]: sum over the tokens of weight times the log-probability of the token
    after those before it; the first token of a row has none."""
    greedy: jax.Array
    """bool [B]: every token whose weight is not 0 is the likeliest one."""


Likelihood = Callable[[Params, jax.Array, jax.Array], Likelihoods]
"""Function of parameters, tokens int32 [B, T] and weights f32 [B, T]."""


def make_likelihood(config: ModelConfig, dtype: str = "float32") -> Likelihood:
    """Return the function for a model that computes in that dtype."""
    decode = make_decode(config)

    @jax.jit
    def likelihood(
        params: Params, tokens: jax.Array, weights: jax.Array
    ) -> Likelihoods:
        rows, length = tokens.shape
        logits, _ = decode(
            params, tokens, Cache.empty(config, rows, length, dtype), jnp.int32(0)
        )
        of_next = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        found = jnp.take_along_axis(of_next, tokens[:, 1:, None], axis=-1)[..., 0]
        likeliest = jnp.argmax(of_next, axis=-1) == tokens[:, 1:]
        return Likelihoods(
            jnp.sum(found * weights[:, 1:], axis=-1),
            jnp.all(likeliest | (weights[:, 1:] == 0), axis=-1),
        )

    return likelihood
