"""The hosts of an island meet where their environment says, and begin together; those
that are missing are named."""

import contextlib
import functools
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import pytest
from jax._src import xla_bridge

from diloco_jax.config import ConfigError
from diloco_jax.island import world
from diloco_jax.island.world import (
    GREETING,
    HERE,
    HostsError,
    WorldAddress,
    await_all,
    find_meeting,
    first_node,
    join_world,
)
from diloco_jax.wire.addresses import parse_address, reserve

JOB = {"JAX_COORDINATOR_ADDRESS": "job-0.run:1234", "JOB_COMPLETION_INDEX": "1"}
POD = {
    "JOB_COMPLETION_INDEX": "1",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOSTNAME": "run-hosts-0-1",
}
"""Variables of every pod of an indexed Job on Kubernetes, such as a JobSet's."""
GKE = {
    **POD,
    "TPU_WORKER_HOSTNAMES": "pod-0.run,pod-1.run",
    "TPU_WORKER_ID": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_TOPOLOGY": "2x4",
    "TPU_SKIP_MDS_QUERY": "true",
}
"""Variables that GKE adds in pods that ask for TPUs of a slice with several hosts."""
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_JOB_NODELIST": "tpu[01-12]",
    "SLURM_STEP_NODELIST": "tpu[07-09,12]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
"""Variables that `srun` gives to each task of a step."""


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        (GKE, "pod-0.run:8482"),
        (GKE | {"JAX_COORDINATOR_PORT": "99"}, "pod-0.run:99"),
        (GKE | {"TPU_PROCESS_ADDRESSES": "a:8471,b:8471"}, "a:8482"),
        (SLURM, "tpu07:61441"),
        (SLURM | {"SLURM_STEP_NODELIST": "a1,b2"}, "a1:61441"),
        (SLURM | {"SLURM_JOB_ID": "123456789"}, "tpu07:64789"),
        (JOB, "job-0.run:1234"),
        # Of slices that were to be joined, nothing counts.
        (GKE | {"MEGASCALE_COORDINATOR_ADDRESS": "other:8080"}, "pod-0.run:8482"),
    ],
)
def test_each_environment_names_the_meeting_place(environment, address, tmp_path):
    found = find_meeting(2, environment, tmp_path)
    assert found == WorldAddress(address=address, index=1)


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
        find_meeting(count, environment, tmp_path)


@pytest.fixture
def tpu_vm(tmp_path, monkeypatch):
    """The root of the files of a machine with a v6e's card, which asks soon again."""
    monkeypatch.setattr(world, "METADATA_AGAIN_S", 0.01)
    card = tmp_path / "sys/bus/pci/devices/0000:00:05.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x1ae0\n")
    (card / "device").write_text("0x006f\n")
    return tmp_path


@pytest.mark.parametrize(
    ("variable", "endpoints"),
    [
        ("GCE_METADATA_HOST", "10.0.0.4,10.0.0.5"),
        ("GCE_METADATA_IP", "n:1:10.0.0.4,n:2:10.0.0.5"),
    ],
)
def test_a_booting_machines_server_is_asked_again(
    variable, endpoints, tpu_vm, server, monkeypatch
):
    monkeypatch.delenv("GCE_METADATA_HOST")
    monkeypatch.setenv(variable, server.address)
    server.answers = [(503, ""), (500, ""), (200, "1"), (503, ""), (200, endpoints)]
    found = find_meeting(2, {}, tpu_vm)
    assert found == WorldAddress(address="10.0.0.4:8482", index=1)
    asked = ["agent-worker-number"] * 3 + ["worker-network-endpoints"] * 2
    assert [path.rpartition("/")[2] for path in server.paths] == asked


@pytest.mark.parametrize(
    ("answer", "times", "environment", "message"),
    [
        ((404, ""), 1, {}, r"agent-worker-number.*404.*--world"),
        ((503, ""), world.TRIES, {}, r"agent-worker-number.*503.*--world"),
        ((200, "1,2,3"), 2, {}, "worker-network-endpoints here is of 3"),
        ((404, ""), 0, {"TPU_SKIP_MDS_QUERY": "true"}, "TPU_WORKER_HOSTNAMES nor"),
    ],
)
def test_metadata_that_are_not_there_or_do_not_fit_are_named(
    answer, times, environment, message, tpu_vm, server
):
    server.answers = [answer] * (times or 1)
    with pytest.raises(ConfigError, match=message):
        find_meeting(2, environment, tpu_vm)
    assert len(server.paths) == times


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a1,b2", "a1"), ("a[001-9],b", "a001"), ("a[3,5-7]", "a3")],
)
def test_slurm_lists_begin_with_the_first_host(nodes, first):
    assert first_node(nodes) == first


def test_jax_is_told_all_once_every_host_is_there(monkeypatch):
    done = []
    monkeypatch.setattr(world, "await_all", lambda *asked: done.append(asked))
    monkeypatch.setattr(jax.distributed, "initialize", lambda **told: done.append(told))
    monkeypatch.setattr(world.jax.config, "update", lambda *_: None)
    for name, value in {**GKE, "no_grpc_proxy": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"hosts = 2 .* this slice has 1"):
        join_world(WorldAddress(), 2, budget_s=10.0, meet_s=1200.0)
    assert dict(os.environ)["no_grpc_proxy"] == "localhost,pod-0.run"
    assert done == [
        (WorldAddress(address="pod-0.run:8482", index=1), 2, 1200.0),
        {
            "coordinator_address": "pod-0.run:8482",
            "num_processes": 2,
            "process_id": 1,
            "cluster_detection_method": "deactivate",
            "initialization_timeout": 60,
            "heartbeat_timeout_seconds": 10,
            "shutdown_timeout_seconds": 30,
        },
    ]


def test_hosts_that_do_not_come_end_the_island_before_jax_aborts_it(monkeypatch):
    def initialize(**_):
        raise AssertionError("jax would end this process with SIGABRT")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    place = WorldAddress(address="nohost.invalid:8482", index=1)
    with pytest.raises(
        HostsError, match=r"2 hosts .* let host 1 in .*within 0\.1 s; .*hosts_budget_s"
    ):
        join_world(place, 2, budget_s=10.0, meet_s=0.1)


@pytest.mark.parametrize(
    ("knows", "given"), [("hostname: str | None", {"hostname": "10.0.0.7"}), ("", {})]
)
def test_gloo_listens_where_the_hosts_met(monkeypatch, knows, given):
    """By itself it takes the address of this machine's name, often 127.0.1.1."""

    def make(**arguments):
        return arguments

    make.__doc__ = knows
    module = xla_bridge._jax
    monkeypatch.setattr(module, "make_gloo_tcp_collectives", make)
    world._have_gloo_listen("10.0.0.7")
    made = module.make_gloo_tcp_collectives
    assert made() == given
    assert isinstance(made, functools.partial) == bool(given)


def test_this_jax_can_be_told_where_gloo_listens():
    make = xla_bridge._jax.make_gloo_tcp_collectives
    assert "hostname" in getattr(make, "func", make).__doc__


WAIT_S = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(world, "AGAIN_S", 0.05)


@pytest.fixture
def port():
    """None that a connection may be given before host 0 listens there."""
    address, beside = reserve("127.0.0.1:0")
    beside.close()
    return parse_address(address)[1]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def at(port, index):
    return WorldAddress(address=f"127.0.0.1:{port}", index=index)


def come(port, index):
    """Says a number as a host does; returns the connection."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            peer = socket.create_connection(("127.0.0.1", port), WAIT_S)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            peer.sendall(HERE.pack(GREETING, index))
            return peer


def test_hosts_begin_together_whoever_comes_first(port, pool):
    first = [pool.submit(await_all, at(port, index), 3, WAIT_S) for index in (2, 1)]
    time.sleep(0.2)
    assert not any(one.done() for one in first)
    await_all(at(port, 0), 3, WAIT_S)
    for one in first:
        one.result(WAIT_S)
    # The port is free again: jax listens there next.
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_host_0_names_those_that_are_missing(port, pool, monkeypatch):
    now, number = [0.0], world._number_of

    def numbered(peer):
        now[0] = 1.0  # Time is over once host 2 is here.
        return number(peer)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(world, "time", clock)
    monkeypatch.setattr(world, "_number_of", numbered)
    here = pool.submit(await_all, at(port, 2), 4, WAIT_S)
    with pytest.raises(
        TimeoutError,
        match=rf"hosts 1, 3 .* did not come at 127\.0\.0\.1:{port} within 1 s; .*log",
    ):
        await_all(at(port, 0), 4, 1.0)
    now[0] = WAIT_S
    with pytest.raises(TimeoutError, match=r"did not let host 2 in .*hosts_budget_s"):
        here.result(WAIT_S)


def test_who_died_meanwhile_has_to_come_again(port, pool):
    lead = pool.submit(await_all, at(port, 0), 3, WAIT_S)
    come(port, 1).close()
    with come(port, 2):
        time.sleep(0.3)
        assert not lead.done()
        await_all(at(port, 1), 3, WAIT_S)
    lead.result(WAIT_S)


def test_what_is_no_host_is_not_counted(port, pool):
    lead = pool.submit(await_all, at(port, 0), 2, WAIT_S)
    with come(port, 7), come(port, 0):
        pass
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
        assert not lead.done()
    await_all(at(port, 1), 2, WAIT_S)
    lead.result(WAIT_S)


def test_a_port_that_is_taken_is_an_error(port):
    with socket.create_server(("", port)), pytest.raises(OSError, match="in use"):
        await_all(at(port, 0), 2, 1.0)


def test_a_name_that_is_not_known_yet_is_no_error(monkeypatch):
    """A pod has one once it runs."""
    tries = []

    def resolve(*given):
        tries.append(given)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(world.socket, "create_connection", resolve)
    with pytest.raises(TimeoutError, match=r"let host 1 in .*service not known"):
        await_all(WorldAddress(address="pod-0.run:9", index=1), 2, 0.5)
    assert len(tries) > 1


def test_each_host_learns_the_address_at_which_it_was_met(port, pool):
    """gloo listens there, whatever the machine's own name resolves to."""
    hosts = [pool.submit(await_all, at(port, index), 2, WAIT_S) for index in (1, 0)]
    assert [host.result(WAIT_S) for host in hosts] == ["127.0.0.1"] * 2
    near, far = SimpleNamespace(), SimpleNamespace()
    near.getsockname = lambda: ("127.0.0.1", 1)
    far.getsockname = lambda: ("::ffff:10.0.0.7", 1, 0, 0)
    assert world._address_here(near, far) == "10.0.0.7"
