"""The hosts of an island meet where their environment says."""

import jax
import pytest

from diloco_jax.config import ConfigError
from diloco_jax.island.hosts import world
from diloco_jax.island.hosts.meeting import WorldAddress, find_meeting, first_node
from diloco_jax.island.hosts.world import HostsError, join_world

GKE = {"TPU_WORKER_HOSTNAMES": "pod-0.run,pod-1.run", "TPU_WORKER_ID": "1"}
SLURM = {
    "SLURM_STEP_NODELIST": "tpu[07-09,12]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_JOB_ID": "4097",
}
JOB = {"JAX_COORDINATOR_ADDRESS": "job-0.run:1234", "JOB_COMPLETION_INDEX": "1"}


def metadata(endpoints, number="1"):
    found = {"worker-network-endpoints": endpoints, "agent-worker-number": number}
    return found.__getitem__


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        (GKE, "pod-0.run:8482"),
        (GKE | {"JAX_COORDINATOR_PORT": "99"}, "pod-0.run:99"),
        (GKE | {"TPU_PROCESS_ADDRESSES": "a:8471,b:8471"}, "a:8482"),
        (SLURM, "tpu07:61441"),
        (JOB, "job-0.run:1234"),
        # Of slices that were to be joined, nothing counts.
        (GKE | {"MEGASCALE_COORDINATOR_ADDRESS": "other:8080"}, "pod-0.run:8482"),
    ],
)
def test_each_environment_names_the_meeting_place(environment, address, tmp_path):
    found = find_meeting(2, environment, root=tmp_path)
    assert found == WorldAddress(address=address, index=1)


@pytest.mark.parametrize(
    "endpoints", ["10.0.0.4,10.0.0.5", "n:1:10.0.0.4,n:2:10.0.0.5"]
)
def test_a_tpu_vm_reads_its_metadata(endpoints):
    found = find_meeting(2, {}, metadata(endpoints))
    assert found == WorldAddress(address="10.0.0.4:8482", index=1)


@pytest.mark.parametrize(
    ("count", "environment", "message"),
    [
        (4, GKE, "hosts = 4 .*TPU_WORKER_HOSTNAMES here is of 2; set .*hosts = 2"),
        (2, GKE | {"TPU_WORKER_ID": ""}, "TPU_WORKER_ID = '', .*--host-index"),
        (2, GKE | {"TPU_WORKER_ID": "2"}, "TPU_WORKER_ID = 2, .*hosts = 2"),
        (4, SLURM, "SLURM_STEP_NUM_TASKS here is of 2"),
        (2, {"JAX_COORDINATOR_ADDRESS": "a:1"}, "JOB_COMPLETION_INDEX"),
        (2, {}, "TPU_WORKER_HOSTNAMES .*--world HOST:PORT"),
    ],
)
def test_an_environment_that_does_not_fit_is_named(
    count, environment, message, tmp_path
):
    with pytest.raises(ConfigError, match=message):
        find_meeting(count, environment, root=tmp_path)


def test_metadata_that_do_not_answer_or_do_not_fit_are_named():
    with pytest.raises(ConfigError, match="worker-network-endpoints here is of 3"):
        find_meeting(2, {}, metadata("a,b,c"))

    def away(name):
        raise OSError("timed out")

    with pytest.raises(ConfigError, match=r"agent-worker-number.*timed out.*--world"):
        find_meeting(2, {}, away)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a1,b2", "a1"), ("a[001-9],b", "a001"), ("a[3,5-7]", "a3")],
)
def test_slurm_lists_begin_with_the_first_host(nodes, first):
    assert first_node(nodes) == first


def test_jax_is_told_all_and_waits_as_long_as_starts_differ(monkeypatch):
    told = {}

    def initialize(**given):
        told.update(given)
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: barrier")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(world.jax.config, "update", lambda *_: None)
    for name, value in GKE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        HostsError,
        match=r"2 hosts .* at pod-0\.run:8482 within 1200 s .*hosts_budget_s",
    ):
        join_world(WorldAddress(), 2, budget_s=10.0, meet_s=1200.0)
    assert told == {
        "coordinator_address": "pod-0.run:8482",
        "num_processes": 2,
        "process_id": 1,
        "cluster_detection_method": "deactivate",
        "initialization_timeout": 1200,
        "heartbeat_timeout_seconds": 10,
        "shutdown_timeout_seconds": 10,
    }
