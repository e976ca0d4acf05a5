"""Mixtures of experts: a router sends each token to a few of a layer's MLPs.

Every device sorts the tokens of its own sequences by expert, so that no sort crosses
the mesh, and multiplies each expert's rows with that expert's weights. Where the mesh
cuts the experts, the rows travel to the device that has theirs, and back. No token is
dropped, however uneven the loads are. Padding goes to no expert, and is not counted.
An expert without a token has a gradient of exactly 0.

`B` sequences, `T` tokens, `n` tokens of a device, `D` model, `E` experts, `e` experts
of a device, `K` experts of a token, `F` expert, `L` layers, `X` devices that share the
experts, `R` = n K rows of a device.

Sources: sparsely gated mixtures arXiv 1701.06538; the loss for balance 2101.03961,
equation 4, with all K experts of a token counted; dropless products 2211.15841.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diloco_jax.config import ModelConfig
from diloco_jax.models.model import Layout


class Experts(NamedTuple):
    """Weights of a layer's mixture."""

    router: jax.Array
    """[D, E]."""
    gate: jax.Array
    """[E, D, F]."""
    up: jax.Array
    """[E, D, F]."""
    down: jax.Array
    """[E, F, D]."""


class Routed(NamedTuple):
    """How a layer's router used its experts, f32 [E]; stacked, [L, E]."""

    tokens: jax.Array
    """Tokens that each expert got; each token counts K times."""
    odds: jax.Array
    """Sum of the probabilities that the router gave each expert."""


Send = Callable[[jax.Array, Experts], jax.Array]
"""Function of activations and a layer's mixture that returns what it adds to them, both
[B, T, D]."""
Activation = Callable[[jax.Array], jax.Array]
# Untyped in jax.
psum: Any = jax.lax.psum
all_to_all: Any = jax.lax.all_to_all
ragged_all_to_all: Any = jax.lax.ragged_all_to_all


def mix(
    config: ModelConfig,
    activation: Activation,
    layout: Layout,
    x: jax.Array,
    real: jax.Array | None,
    weights: Experts,
) -> tuple[jax.Array, Routed]:
    """Return what a layer's mixture adds to activations, [B, T, D], and its use.

    Args:
      layout: the mesh, on which sequences, experts and their width are cut.
      x: normed activations, [B, T, D].
      real: bool [B, T], False for padding, which gets zeros; None = all are text.
      weights: whole but for axes that the layout cuts.
    """
    real = jnp.ones(x.shape[:2], bool) if real is None else real
    here = functools.partial(_of_device, config, activation)
    if layout.mesh.size == 1:
        return here((), (), None, x, real, weights)
    rows = layout.spec(("batch", None, None), x.shape)
    whole: Any = PartitionSpec()  # type: ignore[no-untyped-call]
    inward: Any = layout.spec(("expert", "embed", "mlp"), weights.gate.shape)
    outward: Any = layout.spec(("expert", "mlp", "embed"), weights.down.shape)
    mapped = jax.shard_map(
        functools.partial(
            here,
            layout.rules["batch"] if rows[0] else (),
            layout.rules["mlp"] if outward[1] else (),
            Owners.of(layout) if inward[0] else None,
        ),
        mesh=layout.mesh,
        in_specs=(
            rows,
            layout.spec(("batch", None), real.shape),
            Experts(whole, inward, inward, outward),
        ),
        out_specs=(rows, Routed(whole, whole)),
        check_vma=False,
    )
    mixed: tuple[jax.Array, Routed] = mapped(x, real, weights)
    return mixed


def _of_device(
    config: ModelConfig,
    activation: Activation,
    over_rows: tuple[str, ...],
    over_width: tuple[str, ...],
    owners: Owners | None,
    x: jax.Array,
    real: jax.Array,
    weights: Experts,
) -> tuple[jax.Array, Routed]:
    """Return the result for one device's sequences, and the use of all devices.

    over_rows, over_width: mesh axes that cut sequences, and the width of experts.
    owners: the devices that share the experts; None = each has all.
    """
    flat, real = x.reshape(-1, x.shape[-1]), real.reshape(-1)
    odds, shares, chosen = route(config, flat, real, weights.router)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=config.experts + 1)[:-1]
    rows = _permuted(jnp.repeat(flat, chosen.shape[1], axis=0), order)
    products = functools.partial(_products, activation, weights)
    made = owners.have(products, rows, sizes) if owners else products(rows, sizes)
    back = _permuted(made, jnp.argsort(order)).reshape(*chosen.shape, -1)
    mixed = jnp.sum(shares.astype(x.dtype)[..., None] * back, axis=1).reshape(x.shape)
    use = Routed(sizes.astype(jnp.float32), jnp.sum(odds * real[:, None], axis=0))
    if over_width:
        mixed = psum(mixed, over_width)
    return mixed, psum(use, over_rows) if over_rows else use


def _products(
    activation: Activation, weights: Experts, rows: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Return the MLPs' results for rows, sorted by expert, and 0 for those after the
    last group. sizes: rows of each expert, int32 [e]."""
    gate, up = (jax.lax.ragged_dot(rows, w, sizes) for w in weights[1:3])
    made = jax.lax.ragged_dot(activation(gate) * up, weights.down, sizes)
    # These are of no expert, and a device may leave anything there.
    return jnp.where(jnp.arange(len(rows))[:, None] < jnp.sum(sizes), made, 0)


Products = Callable[[jax.Array, jax.Array], jax.Array]
"""`_products` of rows and sizes, for the experts of a device."""


class Owners(NamedTuple):
    """Devices that share the experts, each with as many, in their order."""

    axis: str
    """Mesh axis."""
    number: int
    """X."""
    exchange: Exchange

    @classmethod
    def of(cls, layout: Layout) -> Owners:
        """Return those along the mesh axis that cuts the experts."""
        (axis,) = layout.rules["expert"]
        body = ragged if layout.platform == "tpu" else padded
        return cls(axis, layout.mesh.shape[axis], body)

    def have(self, products: Products, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """Have the owners make the products of each expert's rows, and send them back.

        rows: sorted by expert, [R, D], those of none last. sizes: rows of each expert,
        int32 [E].
        """
        most, places = len(rows), jnp.arange(len(rows))
        own = sizes.reshape(self.number, -1)  # X e
        theirs = all_to_all(own, self.axis, 0, 0, tiled=True)  # X e
        sent, coming = jnp.sum(own, axis=1), jnp.sum(theirs, axis=1)
        starts = jnp.cumsum(sent) - sent
        came = self.exchange(self.axis, rows, most, starts, sent, coming)
        # Of each device's rows the experts by number, e where nothing came.
        of_expert = jax.vmap(_place_in, (0, None))(jnp.cumsum(theirs, axis=1), places)
        order = jnp.argsort(of_expert.reshape(-1), stable=True)
        made = products(_permuted(came, order), jnp.sum(theirs, axis=0))
        made = _permuted(made, jnp.argsort(order))
        begin = most * jnp.arange(self.number)
        back = self.exchange(self.axis, made, most, begin, coming, sent)
        # Row p of all is row p - starts[j] of those that device j has sent back.
        owner = jnp.minimum(_place_in(jnp.cumsum(sent), places), self.number - 1)
        found = back.at[owner * most + places - starts[owner]].get(mode="clip")
        return jnp.where(places[:, None] < jnp.sum(sent), found, 0)


def _place_in(ends: jax.Array, places: jax.Array) -> jax.Array:
    """Return in which of consecutive groups, by their ends, each place is; the number
    of groups for places after the last."""
    return jnp.searchsorted(ends, places, side="right")


Exchange = Callable[[str, jax.Array, int, jax.Array, jax.Array, jax.Array], jax.Array]
"""Function of a mesh axis, rows [N, D], a number R, and int32 [X] each: where the rows
begin that go to each device, their numbers, and the numbers of those that come, of
which none is above R. It returns the rows that came, [X R, D], those of device s from
s R on; the values between them mean nothing."""


def ragged(
    axis: str,
    rows: jax.Array,
    most: int,
    starts: jax.Array,
    sent: jax.Array,
    coming: jax.Array,
) -> jax.Array:
    """Exchange rows by the collective of TPUs, which moves no more than there is."""
    room = jnp.zeros((len(sent) * most, rows.shape[1]), rows.dtype)
    there = jnp.full_like(starts, jax.lax.axis_index(axis) * most)
    came: jax.Array = ragged_all_to_all(
        rows, room, starts, sent, there, coming, axis_name=axis
    )
    return came


def padded(
    axis: str,
    rows: jax.Array,
    most: int,
    starts: jax.Array,
    sent: jax.Array,
    coming: jax.Array,
) -> jax.Array:
    """Exchange R rows with every device, with zeros after those that are meant."""
    places = jnp.arange(most)
    chosen = rows.at[starts[:, None] + places].get(mode="clip")
    chosen = jnp.where((places < sent[:, None])[..., None], chosen, 0)
    flat = chosen.reshape(-1, rows.shape[1])
    came: jax.Array = all_to_all(flat, axis, 0, 0, tiled=True)
    return came


def route(
    config: ModelConfig, x: jax.Array, real: jax.Array, router: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the probabilities of all experts, f32 [n, E], and of each token's experts
    their factors, f32 [n, K], and numbers, int32 [n, K], E for padding."""
    exact = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.matmul(x, router, preferred_element_type=exact)
    odds = jax.nn.softmax(logits)
    shares, chosen = jax.lax.top_k(odds, config.experts_per_token)
    if config.experts_renormalised:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return odds, shares, jnp.where(real[:, None], chosen, config.experts)


def balance_loss(use: Routed) -> jax.Array:
    """Return the mean over layers of E times the sum over experts of the share of
    tokens times the mean probability: 1 if all loads are equal, E if one expert has
    all; 0 without tokens. Its gradient goes by the probabilities.

    use: of all layers, [L, E].
    """
    loads, odds = (
        part / jnp.maximum(jnp.sum(part, axis=1, keepdims=True), 1.0) for part in use
    )
    return use.tokens.shape[1] * jnp.mean(jnp.sum(loads * odds, axis=1))


def _permuted(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Return the rows in another order; the gradient adds nothing up."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
