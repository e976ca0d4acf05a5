"""Outer steps against their formulas, guard, and momentum after a crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.core.outer import OuterSettings, flush_step, make_outer, outer_step

NESTEROV = OuterSettings(optimizer="nesterov", learning_rate=0.7, momentum=0.9)


def fragment(seed: int, scale: float = 1.0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(scale * rng.standard_normal(s), jnp.float32) for s in (3, 4)
    )


def flat(arrays: tuple[jax.Array, ...]) -> np.ndarray:
    return np.concatenate([np.asarray(a, np.float64).ravel() for a in arrays])


def norms(settings: OuterSettings, deltas: list[tuple[jax.Array, ...]]) -> list[float]:
    """Length of the outer step for each delta in turn, from zero parameters."""
    tx, theta, lengths = make_outer(settings), fragment(0, 0.0), []
    state, before = tx.init(theta), flat(theta)
    for delta in deltas:
        theta, state = outer_step(tx, theta, state, delta)
        lengths.append(float(np.linalg.norm(flat(theta) - before)))
        before = flat(theta)
    return lengths


def test_nesterov_is_the_formula() -> None:
    tx, theta = make_outer(NESTEROV), fragment(0)
    state, expected, b = tx.init(theta), flat(theta), 0.0
    for n in range(1, 4):
        delta = fragment(n)
        b = 0.9 * b + flat(delta)
        expected = expected - 0.7 * (flat(delta) + 0.9 * b)
        theta, state = outer_step(tx, theta, state, delta)
        np.testing.assert_allclose(flat(theta), expected, rtol=1e-5, atol=1e-6)


def test_sgd_at_rate_1_goes_to_the_merged_island() -> None:
    settings = OuterSettings(optimizer="sgd", learning_rate=1.0, momentum=0.9)
    tx, theta, delta = make_outer(settings), fragment(0), fragment(1)
    expected = flat(theta) - flat(delta)
    state = tx.init(theta)
    for _ in range(2):
        theta, state = outer_step(tx, theta, state, delta)
    np.testing.assert_allclose(
        flat(theta), expected - flat(delta), rtol=1e-5, atol=1e-6
    )


def test_flush_is_a_full_step() -> None:
    theta, delta = fragment(0), fragment(1)
    expected = flat(theta) - flat(delta)
    np.testing.assert_allclose(flat(flush_step(theta, delta)), expected, rtol=1e-6)


def test_warm_up_rises_to_the_full_rate() -> None:
    settings = OuterSettings(optimizer="sgd", learning_rate=0.8, warmup_merges=3)
    delta = fragment(1)
    lengths = np.array(norms(settings, [delta] * 6)) / np.linalg.norm(flat(delta))
    np.testing.assert_allclose(lengths, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], rtol=1e-5)


def test_guard_cuts_long_deltas_after_three_merges() -> None:
    settings = OuterSettings(optimizer="sgd", learning_rate=1.0, norm_guard=2.0)
    scales = [1.0, 5.0, 3.0, 60.0, 1.0, 8.0, 20.0]
    unit = 1 / np.linalg.norm(flat(fragment(1)))
    lengths = norms(settings, [fragment(1, s * unit) for s in scales])
    # Means before merges 4, 6, 7: 9 / 3, (9 + 6 + 1) / 5, (16 + 6.4) / 6.
    expected = [1.0, 5.0, 3.0, 6.0, 1.0, 6.4, 2 * 22.4 / 6]
    np.testing.assert_allclose(lengths, expected, rtol=1e-5)


def test_guard_measures_the_whole_fragment() -> None:
    settings = OuterSettings(optimizer="sgd", learning_rate=1.0, norm_guard=2.0)
    one, two = fragment(1), fragment(2)
    long = tuple(jnp.concatenate([10 * a]) for a in one)
    tx, theta = make_outer(settings), fragment(0, 0.0)
    state = tx.init(theta)
    for delta in (one, two, one):
        theta, state = outer_step(tx, theta, state, delta)
    before = flat(theta)
    theta, state = outer_step(tx, theta, state, long)
    step = before - flat(theta)
    np.testing.assert_allclose(
        step / np.linalg.norm(step), flat(one) / np.linalg.norm(flat(one)), rtol=1e-4
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("optimizer", "adamm"), ("learning_rate", 0.0), ("momentum", 1.0)],
)
def test_unfit_settings_are_named(field: str, value: object) -> None:
    fields = {"optimizer": "nesterov", "learning_rate": 0.7, field: value}
    with pytest.raises(ValueError, match=f"outer.{field} = {value!r}"):
        OuterSettings(**fields)
