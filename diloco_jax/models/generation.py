"""Continuations of a text by the bundled transformer, one token at a time, and
log-likelihoods of given ones.

Keys and values of earlier positions are kept, so a token costs one position's work.

`B` sequences or rows, `T` tokens, `S` positions that the cache has room for, `L`
layers, `K` key and value heads, `H` head, `V` vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import ConfigError, ModelConfig
from diloco_jax.models import experts, vision
from diloco_jax.models.layers import (
    ACTIVATIONS,
    Rotations,
    frequencies,
    rms_norm,
    rotations,
    run_layers,
)
from diloco_jax.models.model import Layout, Params
from diloco_jax.models.transformer import embedded, layer_of


class Cache(NamedTuple):
    """Keys and values of all layers, [L, B, S, K, H] each, keys rotated."""

    keys: jax.Array
    values: jax.Array

    @staticmethod
    def empty(config: ModelConfig, rows: int, length: int, dtype: str) -> Cache:
        """Return a cache without positions; length: S."""
        shape = (config.num_layers, rows, length, config.num_kv_heads, config.head_dim)
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


Decode = Callable[..., tuple[jax.Array, Cache]]
"""Function of parameters, tokens [B, T], cache and the first token's position, that
returns logits, f32 [B, T, V], and the cache with these positions. A fifth argument, [B,
T, D], stands for what the tokens begin as, where pictures are among them (`begun`)."""


@functools.lru_cache(maxsize=4)
def make_decode(config: ModelConfig) -> Decode:
    """Return the model's decoder; it computes in the dtype of the cache."""
    activation, alone = ACTIVATIONS[config.activation], Layout.of_one_device()

    @jax.jit
    def decode(
        params: Params,
        tokens: jax.Array,
        cache: Cache,
        position: int,
        first: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        dtype, length = cache.keys.dtype, cache.keys.shape[2]
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        count = tokens.shape[1]

        def turned(windowed: bool) -> Rotations:
            """Return the rotations of these positions."""
            cosine, sine = rotations(length, frequencies(config, windowed=windowed))
            here = functools.partial(
                jax.lax.dynamic_slice_in_dim,
                start_index=position,
                slice_size=count,
                axis=1,
            )
            return here(cosine), here(sine)

        turns = {windowed: turned(windowed) for windowed in (False, True)}
        here = position + jnp.arange(count)[:, None]
        there = jnp.arange(length)[None, :]
        seen = {False: there <= here}
        seen[True] = seen[False] & (there > here - config.window)

        def layer(
            x: jax.Array, own: tuple[Params, Cache], windowed: bool
        ) -> tuple[jax.Array, Cache]:
            weights, kept = own

            def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
                nonlocal kept
                kept = Cache(
                    jax.lax.dynamic_update_slice_in_dim(kept.keys, key, position, 1),
                    jax.lax.dynamic_update_slice_in_dim(
                        kept.values, value, position, 1
                    ),
                )
                mask = seen[windowed][None, None]
                return jax.nn.dot_product_attention(
                    query, kept.keys, kept.values, mask=mask
                )

            def send(x: jax.Array, weights: experts.Experts) -> jax.Array:
                return experts.mix(config, activation, alone, x, None, weights)[0]

            module = layer_of(config, weights)
            return module(x, turns[windowed], attend, lambda x, names: x, send), kept

        x = embedded(config, params["embedding"][tokens], dtype)
        x = x if first is None else first.astype(dtype)
        x, cache = run_layers(config, x, (params["layers"], cache), layer)
        x = rms_norm(config, x, params["norm"])
        tied = config.tied_embeddings
        table = params["embedding"].T if tied else params["unembedding"]
        return jnp.matmul(x, table, preferred_element_type=jnp.float32), cache

    return decode


@functools.lru_cache(maxsize=4)
def make_begun(config: ModelConfig, dtype: str) -> Callable[..., jax.Array]:
    """Return the function of parameters, tokens int32 [B, T], pictures uint8 [B, N, S,
    S, 3] and their counts [B] that returns what the tokens begin as, [B, T, D]."""

    @jax.jit
    def begun(
        params: Params, tokens: jax.Array, pictures: jax.Array, counts: jax.Array
    ) -> jax.Array:
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        x = embedded(config, params["embedding"][tokens], dtype)
        layout = Layout.of_one_device()
        found = vision.features(config, params, pictures, layout)
        return vision.placed(config, x, tokens, found, counts)

    return begun


def generate(
    config: ModelConfig,
    params: Params,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    ends: frozenset[int] = frozenset(),
    dtype: str = "float32",
    room: int = 0,
    pictures: np.ndarray | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow the prompt, each as soon as it is drawn.

    Args:
      temperature: divides the logits; 0 = always the likeliest token.
      top_p: draws among the likeliest tokens whose probabilities reach this sum.
      ends: tokens after which the text is over; they are not yielded.
      room: positions of the cache; 0 = as many as prompt and `max_tokens` need. Calls
        of equal room share what is compiled, however long their prompts are.
      pictures: uint8 [N, S, S, 3], whose places the prompt has.

    Raises:
      ConfigError: an empty prompt, or one with tokens beyond the vocabulary.
    """
    beyond = [token for token in prompt if not 0 <= token < config.vocab_size]
    if beyond or not prompt:
        raise ConfigError(
            f"the prompt has the token {beyond[0]}, the model {config.vocab_size} "
            f"tokens; encode it with the model's own tokenizer"
            if beyond
            else "the prompt is empty; give at least one token"
        )
    decode, position = make_decode(config), 0
    params = jax.tree.map(jnp.asarray, params)
    cache = Cache.empty(config, 1, room or len(prompt) + max_tokens, dtype)
    chance, tokens = np.random.default_rng(seed), list(prompt)
    begun = None
    if pictures is not None and len(pictures):
        begun = make_begun(config, dtype)(
            params,
            jnp.asarray([tokens]),
            jnp.asarray(pictures)[None],
            jnp.asarray([len(pictures)]),
        )

    def first(count: int) -> jax.Array | None:
        """Return what the next tokens begin as, where they are of the prompt."""
        if begun is None or position >= len(prompt):
            return None
        return begun[:, position : position + count]

    while room and len(tokens) > 1:
        # Powers of two: few lengths are compiled. The last token's logits are drawn by.
        count = 1 << (len(tokens) - 1).bit_length() - 1
        _, cache = decode(
            params, jnp.asarray([tokens[:count]]), cache, position, first(count)
        )
        position, tokens = position + count, tokens[count:]
    for _ in range(max_tokens):
        logits, cache = decode(
            params, jnp.asarray([tokens]), cache, position, first(len(tokens))
        )
        position += len(tokens)
        token = draw(np.asarray(logits[0, -1]), temperature, top_p, chance)
        if token in ends:
            return
        yield token
        tokens = [token]


def draw(
    logits: np.ndarray, temperature: float, top_p: float, chance: np.random.Generator
) -> int:
    """Draw a token by its logits, f32 [V]: see `generate`."""
    if temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    scaled = (logits[order] - logits[order[0]]).astype(np.float64) / temperature
    likely = np.exp(scaled)
    likely /= likely.sum()
    kept = int(np.searchsorted(np.cumsum(likely), top_p)) + 1
    likely = likely[:kept] / likely[:kept].sum()
    return int(order[chance.choice(len(likely), p=likely)])


class Likelihoods(NamedTuple):
    """How likely rows of tokens are, by row."""

    log: jax.Array
    """f32 [B]: sum over the tokens of weight times the log-probability of the token
    after those before it; the first token of a row has none."""
    greedy: jax.Array
    """bool [B]: every token whose weight is not 0 is the likeliest one."""


Likelihood = Callable[..., Likelihoods]
"""Function of parameters, tokens int32 [B, T] and weights f32 [B, T]; and, where there
are any, pictures uint8 [B, N, S, S, 3] and their counts int32 [B]."""


def make_likelihood(config: ModelConfig, dtype: str = "float32") -> Likelihood:
    """Return the function for a model that computes in that dtype."""
    decode, begun = make_decode(config), make_begun(config, dtype)

    @jax.jit
    def likelihood(
        params: Params, tokens: jax.Array, weights: jax.Array, *pictures: jax.Array
    ) -> Likelihoods:
        rows, length = tokens.shape
        first = begun(params, tokens, *pictures) if pictures else None
        empty = Cache.empty(config, rows, length, dtype)
        logits, _ = decode(params, tokens, empty, jnp.int32(0), first)
        of_next = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        found = jnp.take_along_axis(of_next, tokens[:, 1:, None], axis=-1)[..., 0]
        likeliest = jnp.argmax(of_next, axis=-1) == tokens[:, 1:]
        return Likelihoods(
            jnp.sum(found * weights[:, 1:], axis=-1),
            jnp.all(likeliest | (weights[:, 1:] == 0), axis=-1),
        )

    return likelihood
