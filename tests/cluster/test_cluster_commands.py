"""Command lines and environment of a run's processes."""

from diloco_jax.cluster import commands


def test_islands_compute_on_the_cpu_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert commands.island_environment()["JAX_PLATFORMS"] == "cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert commands.island_environment()["JAX_PLATFORMS"] == "tpu"
    assert commands.coordinator_environment()["JAX_PLATFORMS"] == "cpu"
