"""Command lines and environment of a run's processes."""

from diloco_jax import before_jax
from diloco_jax.cluster import cluster
from diloco_jax.wire import addresses


def test_islands_compute_on_the_cpu_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert cluster.island_environment()["JAX_PLATFORMS"] == "cpu"
    monkeypatch.setattr(before_jax, "libtpu_version", lambda: "0.0.44")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert cluster.island_environment()["JAX_PLATFORMS"] == "tpu"
    assert cluster.coordinator_environment()["JAX_PLATFORMS"] == "cpu"


def test_ports_that_are_asked_for_together_differ(monkeypatch):
    """Each has the one beside it, too: workers of one machine need both."""
    first = cluster.free_port()
    offered = [first, first + 1, first - 1, *addresses.PORTS]
    monkeypatch.setattr(addresses.secrets, "choice", lambda _: offered.pop(0))
    second = cluster.free_port()
    assert not {first, first + 1} & {second, second + 1}
