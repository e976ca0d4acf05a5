"""Rates of a coordinator's machine: measured, kept in a file, and planned with."""

import dataclasses
import shutil
from pathlib import Path

import msgspec
import pytest
from config_support import load_config

from diloco_jax import cli
from diloco_jax.config import ConfigError, OuterConfig, RunConfig
from diloco_jax.config.resolving import resolve_outer
from diloco_jax.core.codecs import CODECS
from diloco_jax.hardware.rates import (
    CONSTANTS,
    DiskRates,
    constants_of,
    read_rates,
    write_rates,
)
from diloco_jax.hardware.slices import slice_of
from diloco_jax.merge_route import passes_of
from diloco_jax.planning import measuring, merge_rate, wire_rate
from diloco_jax.planning.checks import refusals
from diloco_jax.planning.merge_rate import ELEMENTS, SIDE, MergeTimes
from diloco_jax.planning.report import fragments_of
from diloco_jax.planning.terms import Terms, needs_of

CONFIG = Path(__file__).parents[2] / "configs" / "four_regions.py"
RUN = RunConfig(
    outer=OuterConfig(optimizer="nesterov", learning_rate=0.4, momentum=0.6)
)


@pytest.fixture(scope="module")
def terms():
    config = resolve_outer(load_config(CONFIG))
    return Terms(
        config=config,
        fragments=fragments_of(config),
        hosts={n: slice_of(n, i).hosts for n, i in config.islands.items()},
        step_seconds=dict.fromkeys(config.islands, 0.95),
        link_gbit_per_s=5.0,
    )


def with_rates(terms, **changes):
    rates = msgspec.structs.replace(CONSTANTS, **changes)
    return dataclasses.replace(terms, rates=rates)


# ---- planned with ----------------------------------------------------------------


def test_measured_rates_stand_in_for_the_constants(terms):
    plain = needs_of(terms).coordinator
    slow = with_rates(
        terms,
        merge_core_seconds={"int8": 2 * CONSTANTS.merging("int8")},
        delta_core_seconds={"int4": 2 * CONSTANTS.per_delta("int4")},
        replay_core_seconds={"int8": 2 * CONSTANTS.replaying("int8")},
        upload_core_seconds=3 * CONSTANTS.upload_core_seconds,
        fetch_core_seconds=3 * CONSTANTS.fetch_core_seconds,
        write_core_seconds=4 * CONSTANTS.write_core_seconds,
    )
    found = needs_of(slow).coordinator
    assert found.merge_cores == pytest.approx(2 * plain.merge_cores)
    assert found.merges.seconds == pytest.approx(2 * plain.merges.seconds)
    assert found.wire_cores == pytest.approx(3 * plain.wire_cores)
    assert found.disk_cores == pytest.approx(4 * plain.disk_cores)
    assert needs_of(slow).restart_seconds > needs_of(terms).restart_seconds


@pytest.mark.parametrize(
    ("setting", "route"), [("auto", "xla"), ("xla", "xla"), ("native", "native")]
)
def test_constants_follow_the_route_that_is_sure(setting, route, capsys):
    """A plan does not know whether there will be a compiler."""
    assert constants_of(setting).merge_route == route
    plan = ["plan", str(CONFIG), "--arithmetic", "--placement.merge_route", setting]
    assert cli.main(plan) == 0
    assert f"route {route}" in capsys.readouterr().err


def test_codecs_that_were_not_measured_count_as_the_dearest():
    some = msgspec.structs.replace(
        CONSTANTS, delta_core_seconds={"f32": 0.9, "int8": 0.4}
    )
    assert some.per_delta("f32") == some.per_delta("int4") == 0.9
    assert some.per_delta("int8") == 0.4


def test_a_slow_disk_is_refused_whatever_its_size_promises(terms):
    slow = DiskRates(write_bytes_per_s=120e6, read_bytes_per_s=1e9)
    found = {r.check: r for r in refusals(with_rates(terms, disk=slow))}
    assert "which takes 120" in found["disk speed"].text
    assert "launch.coordinator_disk_gb" not in found["disk speed"].change


def test_a_restart_reads_at_the_rate_of_reads(terms):
    fast, slow = (
        DiskRates(write_bytes_per_s=1e9, read_bytes_per_s=rate) for rate in (1e9, 1e8)
    )
    times = [
        needs_of(with_rates(terms, disk=disk)).restart_seconds for disk in (fast, slow)
    ]
    assert times[1] > times[0] + 500


# ---- measured --------------------------------------------------------------------


def test_a_line_goes_through_the_merges_of_few_and_of_many_deltas(
    monkeypatch, tmp_path
):
    each = ELEMENTS / 1e9

    def time_merges(run, codec, islands, repetitions, passes, rows=SIDE):
        sort = islands**2 if run.sync.merge == "trimmed_mean" else 0
        merge = (5 + 0.5 * islands + sort) * each * rows / SIDE
        return MergeTimes(copy=0.01, check=0.2 * each, merge=merge, replay=3 * each)

    disk = DiskRates(write_bytes_per_s=1.0, read_bytes_per_s=2.0)
    monkeypatch.setattr(measuring, "time_merges", time_merges)
    monkeypatch.setattr(wire_rate, "core_seconds", lambda size, times: (1.5, 1.25))
    monkeypatch.setattr(measuring, "disk_rates", lambda folder: (disk, 0.25))
    told = []

    def measure(run):
        return measuring.measure_here(
            run, tmp_path, lambda *line: told.append(line), None
        )

    found = measure(RUN)
    assert found.rules == CONSTANTS.rules
    assert set(found.merge_core_seconds) == set(CODECS.table)
    assert found.merging("int4") == pytest.approx(5.0)
    assert found.per_delta("int4") == pytest.approx(0.7)
    assert found.replaying("int4") == pytest.approx(3.0)
    assert found.merge_route == "xla"
    assert (found.upload_core_seconds, found.fetch_core_seconds) == (1.5, 1.25)
    assert found.copy_bytes_per_s == pytest.approx(4 * ELEMENTS / 0.01)
    assert (found.disk, found.merge, found.outer) == (disk, "rda", "nesterov")
    assert "measured: `diloco plan --measure`" in found.merges_from
    assert [done for _, done, _ in told] == list(range(7))
    assert {parts for *_, parts in told} == {7}
    # A rule that is no weighted sum is measured beyond one.
    sync = dataclasses.replace(RUN.sync, merge="trimmed_mean")
    other = measure(dataclasses.replace(RUN, sync=sync))
    assert other.merge == "mean"
    assert other.merge_core_seconds == found.merge_core_seconds
    rates = other.rules["trimmed_mean"]
    assert rates.beyond_core_seconds == tuple(
        (deltas, pytest.approx(deltas**2)) for deltas in (2, 8, 64)
    )
    assert "measured: " in rates.rule_from


@pytest.mark.parametrize(("codec", "route"), [("f32", "xla"), ("int4", "native")])
def test_merges_are_those_of_the_coordinators_store(monkeypatch, codec, route):
    monkeypatch.setattr(merge_rate, "SIDE", 256)
    found = merge_rate.time_merges(RUN, codec, 3, 1, passes_of(route))
    assert 0 < found.merge < 10
    assert 0 < found.replay < 10
    assert 0 <= found.check < 10


def test_the_wire_is_that_of_the_product():
    up, down = wire_rate.core_seconds(4 << 20, 2)
    assert 0 < up < 100
    assert 0 < down < 100


def test_the_disk_is_written_and_read_and_left_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "DISK_BYTES", 1 << 20)
    found, core_seconds = measuring.disk_rates(tmp_path)
    assert 0 < core_seconds < 100
    assert found.write_bytes_per_s > 1e5
    assert found.read_bytes_per_s > 1e5
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_to_be_one(monkeypatch, tmp_path):
    nearly = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(measuring.shutil, "disk_usage", lambda folder: nearly)
    with pytest.raises(ConfigError, match=r"MB free, and measuring its disk takes"):
        measuring.disk_rates(tmp_path)


def test_a_measurement_that_fails_is_quoted(monkeypatch, tmp_path):
    (tmp_path / "fake.py").write_text("raise SystemExit('the wire is cut')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(measuring, "WORKER", "fake")
    with pytest.raises(ConfigError, match=r"code 1 and no result.*\n?.*wire is cut"):
        measuring.measure(load_config(CONFIG), str(tmp_path), lambda *told: None)


# ---- the command -----------------------------------------------------------------


def test_a_machine_is_measured_once_and_planned_with_elsewhere(
    monkeypatch, tmp_path, capsys
):
    folders = []

    def measure(config, folder, progress):
        folders.append(folder)
        progress("merges", 0.5)
        return msgspec.structs.replace(
            CONSTANTS,
            upload_core_seconds=0.123,
            merges_from="measured: here",
            wire_from="measured: here",
        )

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.chdir(tmp_path)
    file, plan = str(tmp_path / "machine.json"), ["plan", str(CONFIG), "--arithmetic"]
    workdir = str(tmp_path / "runs" / "not-yet")
    measured = ["--measure", "--machine", file, "--workdir", workdir]
    assert cli.main([*plan, *measured]) == 0
    first = capsys.readouterr().err.splitlines()
    assert folders == [str(tmp_path)]
    assert any("0.123 up" in line and "[measured: here]" in line for line in first)
    assert "this plan took" in first[-1]
    assert cli.main([*plan, "--machine", file]) == 0
    assert capsys.readouterr().err.splitlines()[:-1] == first[:-1]
    assert cli.main(plan) == 0
    assert "0.73 up, 0.44 down [constant: `python benchmarks/wire.py`" in (
        capsys.readouterr().err
    )
    assert cli.main([*plan, "--machine", file, "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert found["rates"]["upload_core_seconds"] == 0.123


@pytest.mark.parametrize("text", [None, "{}", '{"merge_core_seconds": 3}', "not JSON"])
def test_a_file_that_holds_no_rates_is_refused(tmp_path, text):
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="--measure --machine FILE"):
        read_rates(str(path))


@pytest.mark.parametrize(
    "points", [[], [[2, 1.0]], [[8, 1.0], [2, 2.0]], [[2, 0.0], [8, 1.0]]]
)
def test_points_between_which_nothing_can_be_known_are_refused(tmp_path, points):
    rates = msgspec.to_builtins(CONSTANTS)
    rates["rules"]["trimmed_mean"]["beyond_core_seconds"] = points
    path = tmp_path / "machine.json"
    path.write_bytes(msgspec.json.encode(rates))
    with pytest.raises(ConfigError, match="two points or more, of rising numbers"):
        read_rates(str(path))


def test_a_file_reads_as_it_was_written(tmp_path):
    disk = DiskRates(write_bytes_per_s=1.5e8, read_bytes_per_s=3e8)
    rates = msgspec.structs.replace(CONSTANTS, disk=disk, disk_from="there")
    write_rates(rates, path := str(tmp_path / "machine.json"))
    assert read_rates(path) == rates
    lines = "\n".join(rates.lines("rda"))
    assert "0.15 GB/s written, 0.3 GB/s read [there]" in lines
    assert "trimmed_mean" not in lines
    assert "rule trimmed_mean, core seconds" in "\n".join(rates.lines("trimmed_mean"))
