"""Outer steps against their formulas, and the guard; then the contract of every outer
optimizer, with the momentum after a crash."""

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
    advance,
    flush_step,
    is_invertible,
    make_outer,
    outer_step,
)


def fragment(seed: int, scale: float = 1.0) -> Arrays:
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(scale * rng.standard_normal((1, s)), jnp.float32) for s in (3, 4)
    )


def flat(arrays: Arrays) -> np.ndarray:
    return np.concatenate([np.asarray(a, np.float64).ravel() for a in arrays])


def steps(settings: OuterSettings, deltas: list[Arrays]) -> list[np.ndarray]:
    """The outer step of each delta in turn."""
    tx, theta, found = make_outer(settings), fragment(0), []
    state = tx.init(theta)
    for delta in deltas:
        before = flat(theta)
        theta, state = outer_step(tx, theta, state, delta)
        found.append(flat(theta) - before)
    return found


def test_sgd_nesterov_and_flush_are_the_formulas() -> None:
    deltas = [fragment(n) for n in range(1, 4)]
    plain = OuterSettings(optimizer="sgd", learning_rate=1.0, momentum=0.9)
    fast = OuterSettings(optimizer="nesterov", learning_rate=0.7, momentum=0.9)
    b: Any = 0.0
    for delta, one, other in zip(
        deltas, steps(plain, deltas), steps(fast, deltas), strict=True
    ):
        b = 0.9 * b + flat(delta)
        np.testing.assert_allclose(one, -flat(delta), rtol=1e-5, atol=1e-6)
        expected = -0.7 * (flat(delta) + 0.9 * b)
        np.testing.assert_allclose(other, expected, rtol=1e-5, atol=1e-6)
    theta, delta = fragment(0), fragment(1)
    expected = flat(theta) - flat(delta)
    np.testing.assert_allclose(flat(flush_step(theta, delta)), expected, rtol=1e-6)


def test_warm_up_rises_to_the_full_rate() -> None:
    settings = OuterSettings(optimizer="sgd", learning_rate=0.8, warmup_merges=3)
    delta = fragment(1)
    lengths = [np.linalg.norm(step) for step in steps(settings, [delta] * 6)]
    shares = np.array(lengths) / np.linalg.norm(flat(delta))
    np.testing.assert_allclose(shares, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], rtol=1e-5)


def test_guard_cuts_long_deltas_after_three_merges_and_turns_none() -> None:
    settings = OuterSettings(optimizer="sgd", learning_rate=1.0, norm_guard=2.0)
    scales = [1.0, 5.0, 3.0, 60.0, 1.0, 8.0, 20.0]
    unit = 1 / np.linalg.norm(flat(fragment(1)))
    found = steps(settings, [fragment(1, s * unit) for s in scales])
    # Means before merges 4, 6, 7: 9 / 3, (9 + 6 + 1) / 5, (16 + 6.4) / 6.
    expected = [1.0, 5.0, 3.0, 6.0, 1.0, 6.4, 2 * 22.4 / 6]
    for step, length in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            step, -length * unit * flat(fragment(1)), rtol=1e-4, atol=1e-5
        )


# ---- every outer optimizer ----------------------------------------------------------

GUARDED = {"warmup_merges": 5, "norm_guard": 10.0}


@pytest.fixture(params=[*names(OUTER_OPTIMIZERS, "outer"), "adam"], ids=brief)
def name(request: pytest.FixtureRequest) -> str:
    """Every member, and one of optax."""
    return request.param


def settings_of(name: str, rate: float = 0.5, **more: Any) -> OuterSettings:
    return OuterSettings(optimizer=name, learning_rate=rate, momentum=0.6, **more)


@pytest.mark.parametrize("more", [{}, GUARDED], ids=["plain", "guarded"])
def test_after_a_crash_the_state_is_the_lost_one_or_untouched(name, more) -> None:
    settings = settings_of(name, **more)
    tx, theta = make_outer(settings), fragment(0)
    state = replayed = tx.init(theta)
    first = jax.tree.map(np.asarray, state)
    for n in range(1, 6):
        before = theta
        theta, state = outer_step(tx, theta, state, fragment(n))
        change = tuple(t - b for t, b in zip(theta, before, strict=True))
        (replayed,) = advance(settings, [replayed], [change])
    assert int(replayed["rate"].count) == int(state["rate"].count)
    wanted = state if is_invertible(settings) else {**first, "rate": state["rate"]}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        replayed,
        wanted,
    )


def test_a_step_goes_down_as_far_as_the_learning_rate_says(name: str) -> None:
    delta = fragment(1)
    (half,), (whole,) = (
        steps(settings_of(name, rate), [delta]) for rate in (0.25, 0.5)
    )
    np.testing.assert_allclose(2 * half, whole, rtol=1e-3, atol=1e-5)
    assert float(np.vdot(whole, flat(delta))) < 0


def test_equal_settings_compile_once(name: str) -> None:
    assert make_outer(settings_of(name)) is make_outer(settings_of(name))
