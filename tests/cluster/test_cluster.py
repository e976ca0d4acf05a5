"""The processes of a run together: their commands and environment, who is alive, and
how long all have to end."""

import dataclasses
import errno
from types import SimpleNamespace

import pytest

from diloco_jax import before_jax
from diloco_jax.cluster import cluster
from diloco_jax.cluster.cluster import Cluster
from diloco_jax.cluster.processes import noted
from diloco_jax.config import Config, IslandConfig, Placement, RunConfig
from diloco_jax.files import write_json
from diloco_jax.process import Interrupt
from diloco_jax.wire import addresses


@pytest.fixture
def config():
    return Config(
        run=RunConfig(),
        islands={"a": IslandConfig()},
        placement=Placement(time_budget_s=5.0),
    )


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "run"


def test_what_the_launcher_knows_goes_before_what_the_coordinator_knew(config, workdir):
    cluster = Cluster(config, workdir)
    cluster.islands["a"] = cluster.coordinator
    cluster.islands["a"].state = "restarting"
    status = {"islands": {"a": {"state": "training", "steps": 3}}}
    shown = cluster.overlay(status)
    assert shown["islands"] == {"a": {"state": "restarting", "steps": 3}}
    assert status["islands"]["a"]["state"] == "training"
    assert cluster.overlay({})["islands"] == {"a": {"state": "restarting"}}


@pytest.mark.parametrize(
    ("phase", "process", "shown"),
    [
        ("running", "running", "starting"),
        ("running", "done", "gone"),
        ("flushing", "running", "gone"),
    ],
)
def test_an_island_of_a_run_that_goes_on_starts_until_it_says_hello(
    config, workdir, phase, process, shown
):
    cluster = Cluster(config, workdir)
    cluster.islands["a"] = cluster.coordinator
    cluster.islands["a"].state = process
    status = {"phase": phase, "islands": {"a": {"state": "gone", "steps": 3}}}
    assert cluster.overlay(status)["islands"]["a"] == {"state": shown, "steps": 3}


@pytest.mark.parametrize(("measured", "granted"), [(20.0, 40.0), (2.0, 10.0)])
def test_who_is_to_end_has_two_steps_of_the_slowest_more(
    config, workdir, measured, granted
):
    """It ends at a step boundary, with a goodbye and a checkpoint."""
    islands = {"a": dataclasses.replace(config.islands["a"], step_seconds=5.0)}
    cluster = Cluster(dataclasses.replace(config, islands=islands), workdir)
    cluster.observe({"islands": {"a": {"median_step_seconds": measured}}})
    asked = []
    with Interrupt() as interrupt:
        cluster.islands["a"] = Asked(asked)
        cluster.coordinator = Asked(asked)
        cluster.stop(interrupt)
    assert asked == [granted, 0.0]


class Asked:
    """A process that is gone at once."""

    state = "stopped"

    def __init__(self, asked):
        self._asked = asked

    def stop(self, more_s):
        self._asked.append(more_s)

    def poll(self):
        return self.state


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


def test_a_full_disk_ends_no_run_as_a_child_comes_or_goes(config, workdir, monkeypatch):
    """The note of process ids is written again at the next look."""
    cluster = Cluster(config, workdir)
    running = SimpleNamespace(poll=lambda: "running", pids=[7])
    cluster.coordinator, cluster.islands = running, {}
    full = [OSError(errno.ENOSPC, "No space left on device")]

    def write(pids, path):
        if full:
            raise full.pop()
        write_json(pids, path)

    monkeypatch.setattr("diloco_jax.cluster.cluster.write_json", write)
    workdir.mkdir()
    assert cluster.poll()
    assert cluster.poll()
    assert noted(workdir) == {"coordinator": [7]}
