"""The environment that jax finds when a process imports it; libtpu's flags by the
generation of the TPUs and its version; what a replay must find again."""

import subprocess
import sys
from importlib import metadata

import jax
import pytest

from diloco_jax import before_jax, machine
from diloco_jax.before_jax import (
    LIBTPU_FLAGS,
    SPARSE_CORE,
    dial_directly,
    libtpu_flags,
    prepare_environment,
    set_libtpu_flags,
    skip_absent_tpu,
)
from diloco_jax.errors import ConfigError
from diloco_jax.hardware.tpus import GENERATIONS


def chosen(root, **environment):
    """The platform that is chosen on a machine whose files are in `root`."""
    skip_absent_tpu(environment, root)
    return environment.get("JAX_PLATFORMS")


CARD = "sys/bus/pci/devices/0000:00:03.0/vendor"
HOST = {"JAX_PLATFORMS": "tpu", "TPU_WORKER_ID": "0"}


@pytest.mark.parametrize(
    ("there", "text", "environment", "plugins", "platform"),
    [
        # libtpu is not asked where nothing can be a TPU.
        (CARD, "0x10de\n", {"PATH": "/bin"}, False, "cpu"),
        # What may be one is left to jax.
        (CARD, "0x1ae0\n", {}, False, None),
        ("dev/accel0", "", {}, False, None),
        ("dev/vfio/0", "", {}, False, None),
        # Who chose or has an accelerator is left alone.
        ("none", "", {}, True, None),
        ("none", "", {"TPU_WORKER_ID": "0"}, False, None),
        ("none", "", {"JAX_PLATFORMS": ""}, False, ""),
        ("none", "", HOST, False, "tpu"),
    ],
)
def test_the_cpu_is_chosen_where_nothing_else_can_be(
    tmp_path, monkeypatch, there, text, environment, plugins, platform
):
    monkeypatch.setattr(before_jax, "_plugins", lambda: plugins)
    monkeypatch.setattr(before_jax, "libtpu_version", lambda: "0.0.44")
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text(text)
    assert chosen(tmp_path, **environment) == platform


@pytest.mark.parametrize("value", ["cuda", "cpuu", "tpu", "cpu,rocm"])
def test_a_platform_that_cannot_be_here_is_refused(tmp_path, monkeypatch, value):
    """jax ends with a bare AssertionError for some."""
    monkeypatch.setattr(before_jax, "_plugins", lambda: False)
    monkeypatch.setattr(before_jax, "libtpu_version", lambda: "0.0.44")
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


@pytest.fixture
def version(monkeypatch):
    """Installs a version of libtpu, or none."""

    def install(found):
        def version(name):
            if not found:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(before_jax.metadata, "version", version)

    return install


@pytest.mark.parametrize("version", ["0.0.42.1", "0.0.50.1", "0.1"])
@pytest.mark.parametrize("generation", sorted(LIBTPU_FLAGS))
def test_no_known_version_is_told_what_it_refuses(generation, version):
    # "not supported on platforms other than TPU v5e": libtpu 0.0.50.1 of v5p and v6e.
    flags = libtpu_flags(generation, version)
    assert flags[: len(SPARSE_CORE)] == SPARSE_CORE
    assert not any("async_collective_fusion" in flag for flag in flags)
    # Together with fusion reported to give NaN on v6e (jax issue 38741).
    assert not any("overlap_compute_collective_tc" in flag for flag in flags)


def test_what_was_never_tried_gets_no_flags(version):
    assert {"v5p", "v6e"} == set(LIBTPU_FLAGS) < set(GENERATIONS)
    for generation in {"", *GENERATIONS} - set(LIBTPU_FLAGS):
        assert libtpu_flags(generation, "0.0.50.1") == ()
    assert libtpu_flags("v6e", "0.0.41") == ()
    version("")
    set_libtpu_flags("v6e", environment := {})
    assert environment == {}


def test_flags_that_the_user_sets_win(version):
    version("0.0.50.1")
    flag = SPARSE_CORE[0].replace("=true", "=false")
    environment = {before_jax.LIBTPU_VARIABLE: f"{flag} --xla_other=1"}
    set_libtpu_flags("v6e", environment)
    flags = environment[before_jax.LIBTPU_VARIABLE].split()
    assert flags == [flag, "--xla_other=1", *libtpu_flags("v6e", "0.0.50.1")[1:]]
    set_libtpu_flags("v6e", environment)
    assert environment[before_jax.LIBTPU_VARIABLE].split() == flags
    assert before_jax.libtpu_flags_in_force(environment) == (
        f"libtpu 0.0.50.1, LIBTPU_INIT_ARGS = '{' '.join(flags)}'"
    )


def test_facts_are_those_of_this_process(monkeypatch):
    monkeypatch.setenv("NPROC", "5")  # Threads of XLA's pool.
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_two=2")
    monkeypatch.setattr(before_jax, "libtpu_version", lambda: "0.0.50.1")
    facts = before_jax.describe_environment()
    assert facts["jax"] == jax.__version__
    assert (facts["devices"], facts["threads"]) == (jax.device_count(), 5)
    assert facts["xla_flags"] == "--xla_one=1"
    assert (facts["libtpu"], facts["libtpu_flags"]) == ("0.0.50.1", "--xla_tpu_two=2")
    assert facts["cpu"]


def test_variables_that_steer_jax_are_on_the_tape(monkeypatch):
    given = {
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "TPU_VISIBLE_DEVICES": "0,1",
        # A host's place, a fact of its own, and none of jax's.
        "TPU_WORKER_HOSTNAMES": "a,b",
        "XLA_FLAGS": "--xla_one=1",
        "HF_TOKEN": "a secret",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    told = str(before_jax.describe_environment()["variables"])
    assert "JAX_DEFAULT_MATMUL_PRECISION=highest" in told.split()
    assert "TPU_VISIBLE_DEVICES=0,1" in told.split()
    assert not any(text in told for text in ("a,b", "xla_one", "secret"))
    monkeypatch.setenv("TPU_LONG", "x" * 20_000)
    assert (
        len(str(before_jax.describe_environment()["variables"]))
        == before_jax.LONGEST_FACT
    )
