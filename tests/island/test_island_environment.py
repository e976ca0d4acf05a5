"""What jax finds when an island imports it."""

from diloco_jax.island.environment import LIBTPU_FLAGS, prepare_environment


def test_an_island_forgets_the_multi_slice_job_it_was_started_in():
    environment = {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1:8080",
        "MEGASCALE_NUM_SLICES": "4",
        "TPU_WORKER_ID": "1",
    }
    prepare_environment(1, environment)
    assert not any(name.startswith("MEGASCALE") for name in environment)
    assert environment["TPU_WORKER_ID"] == "1"


def test_libtpu_is_told_to_overlap_unless_the_user_says_otherwise():
    flag = LIBTPU_FLAGS[0].replace("=true", "=false")
    environment = {"LIBTPU_INIT_ARGS": f"{flag} --xla_other=1"}
    prepare_environment(1, environment)
    flags = environment["LIBTPU_INIT_ARGS"].split()
    assert flags == [flag, "--xla_other=1", *LIBTPU_FLAGS[1:]]
    prepare_environment(1, environment)
    assert environment["LIBTPU_INIT_ARGS"].split() == flags


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
