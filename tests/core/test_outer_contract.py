"""The contract of every outer optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_members import brief, names

from diloco_jax.core.families import OUTER_OPTIMIZERS
from diloco_jax.core.outer import (
    Arrays,
    OuterSettings,
    advance_over_publish,
    is_invertible,
    make_outer,
    outer_step,
)

NAMES = [*names(OUTER_OPTIMIZERS, "outer"), "adam"]
GUARDED = {"warmup_merges": 5, "norm_guard": 10.0}
PLAIN: dict[str, Any] = {}


@pytest.fixture(params=NAMES, ids=brief)
def name(request: pytest.FixtureRequest) -> str:
    """Every member, and one of optax."""
    return request.param


def settings_of(name: str, **more: Any) -> OuterSettings:
    return OuterSettings(optimizer=name, learning_rate=0.5, momentum=0.6, **more)


def fragment(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (3, 4))


def close(one: Any, other: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, other
    )


@pytest.mark.parametrize("more", [PLAIN, GUARDED], ids=["plain", "guarded"])
def test_after_a_crash_the_state_is_the_lost_one_or_untouched(name, more) -> None:
    settings = settings_of(name, **more)
    tx, theta = make_outer(settings), fragment(0)
    state = replayed = first = tx.init(theta)
    first = jax.tree.map(np.asarray, first)
    for n in range(1, 6):
        kept, before = jax.tree.map(jnp.copy, (state, theta))
        theta, state = outer_step(tx, theta, kept, fragment(n))
        change = tuple(t - b for t, b in zip(theta, before, strict=True))
        replayed = advance_over_publish(settings, replayed, change)
    if is_invertible(settings):
        close(replayed, state)
    else:
        assert int(replayed["rate"].count) == int(state["rate"].count)
        close({**replayed, "rate": 0}, {**first, "rate": 0})


def test_a_step_is_as_long_as_the_learning_rate_says(name: str) -> None:
    delta, moved = fragment(1), []
    for rate in (0.25, 0.5):
        settings = OuterSettings(optimizer=name, learning_rate=rate, momentum=0.6)
        tx, theta = make_outer(settings), fragment(0)
        before = jax.tree.map(np.asarray, theta)
        theta, _ = outer_step(tx, theta, tx.init(theta), delta)
        moved.append([t - b for t, b in zip(theta, before, strict=True)])
    for half, whole in zip(*moved, strict=True):
        np.testing.assert_allclose(2 * half, whole, rtol=1e-3, atol=1e-5)


def test_the_first_step_goes_down_along_the_merged_delta(name: str) -> None:
    settings, delta = settings_of(name), fragment(1)
    tx, theta = make_outer(settings), fragment(0)
    before = jax.tree.map(np.asarray, theta)
    theta, _ = outer_step(tx, theta, tx.init(theta), delta)
    steps = [t - b for t, b in zip(theta, before, strict=True)]
    assert sum(float(np.vdot(s, d)) for s, d in zip(steps, delta, strict=True)) < 0


def test_equal_settings_compile_once(name: str) -> None:
    assert make_outer(settings_of(name)) is make_outer(settings_of(name))
