"""The environment that jax finds when a process imports it."""

import subprocess
import sys

import pytest

from diloco_jax import before_jax, machine
from diloco_jax.before_jax import (
    dial_directly,
    prepare_environment,
    skip_absent_tpu,
)
from diloco_jax.errors import ConfigError


def chosen(root, **environment):
    """The platform that is chosen on a machine whose files are in `root`."""
    skip_absent_tpu(environment, root)
    return environment.get("JAX_PLATFORMS")


@pytest.fixture
def no_plugins(monkeypatch):
    monkeypatch.setattr(before_jax, "_plugins", lambda: False)


@pytest.mark.usefixtures("no_plugins")
def test_libtpu_is_not_asked_where_nothing_can_be_a_tpu(tmp_path):
    card = tmp_path / "sys/bus/pci/devices/0000:00:03.0/vendor"
    card.parent.mkdir(parents=True)
    card.write_text("0x10de\n")
    assert chosen(tmp_path, PATH="/bin") == "cpu"


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sys/bus/pci/devices/0000:00:05.0/vendor", "0x1ae0\n"),
        ("dev/accel0", ""),
        ("dev/vfio/0", ""),
    ],
)
def test_what_may_be_a_tpu_is_left_to_jax(tmp_path, path, text):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert chosen(tmp_path) is None


def test_who_chose_or_has_an_accelerator_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(before_jax, "_plugins", lambda: True)
    assert chosen(tmp_path) is None
    monkeypatch.setattr(before_jax, "_plugins", lambda: False)
    assert chosen(tmp_path, TPU_WORKER_ID="0") is None
    assert chosen(tmp_path, JAX_PLATFORMS="") == ""
    monkeypatch.setattr(before_jax.libtpu, "installed_version", lambda: "0.0.44")
    given = {"JAX_PLATFORMS": "tpu", "TPU_WORKER_ID": "0"}
    assert chosen(tmp_path, **given) == "tpu"


@pytest.mark.parametrize("value", ["cuda", "cpuu", "tpu", "cpu,rocm"])
def test_a_platform_that_cannot_be_here_is_refused(tmp_path, monkeypatch, value):
    """jax ends with a bare AssertionError for some."""
    monkeypatch.setattr(before_jax, "_plugins", lambda: False)
    monkeypatch.setattr(before_jax.libtpu, "installed_version", lambda: "0.0.44")
    with pytest.raises(ConfigError, match=rf"JAX_PLATFORMS = '{value}'.*cpu.*unset"):
        chosen(tmp_path, JAX_PLATFORMS=value)
    assert chosen(tmp_path, JAX_PLATFORMS="cpu") == "cpu"


def test_flags_that_xla_does_not_take_are_refused():
    """In a process that has not imported jax: XLA ends the one that reads them."""
    script = (
        "from diloco_jax.before_jax import require_flags\n"
        "require_flags({'XLA_FLAGS': '--xla_force_host_platform_device_count=4'})\n"
        "require_flags({'XLA_FLAGS': '--xla_backend_optimization_level=0'})\n"
        "require_flags({'XLA_FLAGS': '--xla_no_such_flag=1'})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert "ConfigError: XLA_FLAGS = '--xla_no_such_flag=1'" in done.stderr
    assert "xla_no_such_flag" in done.stderr.rpartition("': ")[2]


def test_a_process_forgets_the_multi_slice_job_it_was_started_in():
    environment = {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1:8080",
        "MEGASCALE_NUM_SLICES": "4",
        "TPU_WORKER_ID": "1",
    }
    prepare_environment(1, environment)
    assert not any(name.startswith("MEGASCALE") for name in environment)
    assert environment["TPU_WORKER_ID"] == "1"


def test_the_environment_is_set_once():
    environment = {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=2"}
    prepare_environment(4, environment)
    prepare_environment(4, environment)
    flags = "--a=1 --xla_force_host_platform_device_count=4"
    assert environment["XLA_FLAGS"] == flags
    assert environment["NPROC"] == "16"
    prepare_environment(2, environment := {"NPROC": "32"})
    assert environment["NPROC"] == "32"
    prepare_environment(1, environment := {})
    assert "NPROC" not in environment


@pytest.mark.parametrize(
    ("allowed", "there", "devices", "threads"),
    [
        (208, 208, 4, None),
        (2, 208, 1, "2"),
        (2, 208, 4, "16"),
        (2, 2, 1, None),
        (2, 2, 4, "16"),
    ],
)
def test_threads_follow_what_the_process_may_use(
    monkeypatch, allowed, there, devices, threads
):
    monkeypatch.setattr(machine, "cores", lambda: allowed)
    monkeypatch.setattr(machine, "schedulable", lambda: there)
    prepare_environment(devices, environment := {})
    assert environment.get("NPROC") == threads


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "10.0.0.1"),
        ({"no_proxy": "localhost"}, "localhost,10.0.0.1"),
        ({"NO_PROXY": "localhost"}, "localhost,10.0.0.1"),
        ({"no_grpc_proxy": "other", "no_proxy": "localhost"}, "other,10.0.0.1"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": ""}, "10.0.0.1"),
    ],
)
def test_a_world_is_dialled_without_a_proxy(given, expected):
    environment = dict(given)
    dial_directly("10.0.0.1", environment)
    assert environment == {**given, "no_grpc_proxy": expected}
