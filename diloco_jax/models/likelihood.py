"""Log-likelihoods of given continuations by the bundled transformer.

`B` rows, `T` tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from diloco_jax.config import ModelConfig
from diloco_jax.models.generation import Cache, make_decode
from diloco_jax.models.model import Params

Likelihood = Callable[[Params, jax.Array, jax.Array], jax.Array]
"""Function of parameters, tokens int32 [B, T] and weights f32 [B, T] that returns, f32
[B], the sum over the tokens of weight times the log-probability of the token after
those before it; the first token of a row has none."""


def make_likelihood(config: ModelConfig, dtype: str = "float32") -> Likelihood:
    """Return the function for a model that computes in that dtype."""
    decode = make_decode(config)

    @jax.jit
    def likelihood(params: Params, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        rows, length = tokens.shape
        logits, _ = decode(
            params, tokens, Cache.empty(config, rows, length, dtype), jnp.int32(0)
        )
        of_next = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        found = jnp.take_along_axis(of_next, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(found * weights[:, 1:], axis=-1)

    return likelihood
