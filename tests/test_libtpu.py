"""Flags follow the generation of the TPUs and the version of libtpu."""

from importlib import metadata

import pytest

from diloco_jax import libtpu
from diloco_jax.hardware.slices import GENERATIONS
from diloco_jax.libtpu import FLAGS, SOURCES, SPARSE_CORE, flags_of, set_flags


@pytest.fixture
def version(monkeypatch):
    """Installs a version of libtpu, or none."""

    def install(found):
        def version(name):
            if not found:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(libtpu.metadata, "version", version)

    return install


def test_every_generation_that_can_be_launched_has_flags():
    assert set(FLAGS) == set(GENERATIONS)


@pytest.mark.parametrize("version", ["0.0.42.1", "0.0.50.1", "0.1"])
@pytest.mark.parametrize("generation", sorted(FLAGS))
def test_no_known_version_is_told_what_it_refuses(generation, version):
    # "not supported on platforms other than TPU v5e": libtpu 0.0.50.1 of v5p and v6e.
    flags = flags_of(generation, version)
    assert flags[: len(SPARSE_CORE)] == SPARSE_CORE
    assert not any("async_collective_fusion" in flag for flag in flags)
    # Together with fusion reported to give NaN on v6e (jax issue 38741).
    assert not any("overlap_compute_collective_tc" in flag for flag in flags)


def test_every_flag_has_a_source():
    given = {flag for rows in FLAGS.values() for _, flags in rows for flag in flags}
    assert given == set(SOURCES)
    assert all(SOURCES.values())


def test_the_newest_row_that_is_not_too_new_counts(monkeypatch):
    rows = (((0, 0, 50), ("--new",)), ((0, 0, 9), ("--old",)))
    monkeypatch.setitem(FLAGS, "v6e", rows)
    found = [flags_of("v6e", v) for v in ("0.0.8", "0.0.9", "0.0.49.3", "0.0.50.1")]
    assert found == [(), ("--old",), ("--old",), ("--new",)]


def test_what_was_never_tried_gets_no_flags():
    assert flags_of("v4", "0.0.50.1") == flags_of("", "0.0.50.1") == ()
    assert flags_of("v6e", "") == flags_of("v6e", "0.0.41") == ()


def test_flags_that_the_user_sets_win(version):
    version("0.0.50.1")
    flag = SPARSE_CORE[0].replace("=true", "=false")
    environment = {libtpu.VARIABLE: f"{flag} --xla_other=1"}
    set_flags("v6e", environment)
    flags = environment[libtpu.VARIABLE].split()
    assert flags == [flag, "--xla_other=1", *flags_of("v6e", "0.0.50.1")[1:]]
    set_flags("v6e", environment)
    assert environment[libtpu.VARIABLE].split() == flags
    assert libtpu.in_force(environment) == (
        f"libtpu 0.0.50.1, LIBTPU_INIT_ARGS = '{' '.join(flags)}'"
    )


def test_without_libtpu_or_a_generation_nothing_is_set(version):
    version("0.0.50.1")
    set_flags("", environment := {})
    version("")
    set_flags("v6e", environment)
    assert environment == {}
    assert libtpu.in_force(environment) == "libtpu none, LIBTPU_INIT_ARGS = ''"
