"""Noise by blocks: the values of `jax.random.normal`, in less memory."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.models import transformer

PEAK = """
import jax
from diloco_jax.models.transformer import normal

def resident(what):
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(l.split()[1]) for l in lines if l.startswith(what))

draw = jax.jit(normal, static_argnums=1)
draw(jax.random.key(0), 1 << 21).block_until_ready()
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
draw(jax.random.key(0), 1 << 25).block_until_ready()
print((resident("VmHWM") - before) / (4 << 25))
"""


@pytest.mark.parametrize("count", [1, 256, 257, 1000, 4096])
def test_the_values_are_those_of_jax(monkeypatch, count):
    monkeypatch.setattr(transformer, "BLOCK", 256)
    key = jax.random.key(7)
    drawn = jax.jit(transformer.normal, static_argnums=1)(key, count)
    alike = jax.jit(lambda key: jax.random.normal(key, (count,)))(key)
    np.testing.assert_array_equal(drawn, alike)


def test_values_beyond_the_reach_of_32_bits_have_indices_of_their_own():
    blocks = 2**32 // transformer.NOISE_BLOCK
    for index, high in ((blocks - 1, 0), (blocks, 1), (2 * blocks + 3, 2)):
        upper, lower = transformer.counters(jnp.uint32(index))
        assert set(np.unique(upper)) == {high}
        first = index * transformer.NOISE_BLOCK - high * 2**32
        assert (int(lower[0]), int(lower[-1])) == (
            first,
            first + transformer.NOISE_BLOCK - 1,
        )


def test_another_generator_draws_its_own_values(monkeypatch):
    monkeypatch.setattr(transformer, "BLOCK", 256)
    key = jax.random.key(7, impl="rbg")
    np.testing.assert_array_equal(
        transformer.normal(key, 1000), jax.random.normal(key, (1000,))
    )


def test_memory_holds_little_more_than_the_values():
    done = subprocess.run(
        [sys.executable, "-c", PEAK],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert float(done.stdout) < 2.5, "as in jax at once: 4 and more"
