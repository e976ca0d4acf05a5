"""`diloco doctor`: what it says of this machine, and of machines in worse order."""

from __future__ import annotations

import json
import socket
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from diloco_jax import cli
from diloco_jax.doctor import command, devices, packages, system
from diloco_jax.doctor.finding import Level, ok, problem


def named(findings):
    return {finding.what: finding for finding in findings}


def test_it_reports_on_this_machine(tmp_path, capsys):
    assert cli.main(["doctor", "--folder", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    found = {f["what"]: f for f in json.loads(shown.out)["findings"]}
    assert metadata.version("diloco-jax") in found["diloco_jax"]["found"]
    assert metadata.version("jax") in found["jax"]["found"]
    assert str(tmp_path) in found["disk"]["found"]
    assert found["devices"]["found"].endswith("of cpu: cpu")
    for one in found.values():
        assert one["what"] in shown.err


def test_a_problem_is_an_exit_code_and_has_a_remedy(monkeypatch, capsys):
    found = [ok("a", "well"), problem("b", "broken", "mend it")]
    monkeypatch.setattr(command, "examine", lambda folder, report: iter(found))
    assert cli.main(["doctor"]) == 1
    assert "mend it" in capsys.readouterr().err


def test_a_missing_and_an_old_package_are_named(monkeypatch):
    required = [Requirement("no-such-package>=1"), Requirement("numpy>=9999")]
    monkeypatch.setattr(packages, "_requirements", lambda: (required, {}))
    finding = named(packages.check_packages())["packages"]
    assert finding.level is Level.PROBLEM
    assert "no-such-package is missing" in finding.found
    assert f"numpy {metadata.version('numpy')} is not >=9999" in finding.found


def test_an_extra_that_is_half_installed_is_named_and_one_that_is_not_begun_is_not(
    monkeypatch,
):
    extras = {
        "half": [Requirement("pytest"), Requirement("no-such-package")],
        "none": [Requirement("no-such-package")],
        "test": [Requirement("pytest"), Requirement("no-such-package")],
        "whole": [Requirement("pytest")],
    }
    monkeypatch.setattr(packages, "_requirements", lambda: ([], extras))
    found = named(packages.check_packages())
    assert found["extra half"].found == "no-such-package is missing"
    assert not {"extra none", "extra whole", "extra test"} & found.keys()


@pytest.mark.parametrize(
    ("jax", "libtpu", "level"),
    [
        ("0.10.2", "0.0.42.1", Level.OK),
        ("0.12.0.1", "0.0.50.1", Level.OK),
        ("0.12.0.1", "0.0.42.1", Level.NOTE),
        ("0.9.0", "0.0.42.1", Level.NOTE),
    ],
)
def test_jax_and_libtpu_go_together(jax, libtpu, level):
    finding = packages._libtpu(jax, libtpu)
    assert finding.level is level
    assert f"libtpu {libtpu} with jax {jax}" in finding.found


def test_a_jaxlib_of_another_version_is_a_problem(monkeypatch):
    versions = {"jax": "0.10.2", "jaxlib": "0.9.1"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    assert packages._jax().level is Level.PROBLEM


def test_a_bulk_port_that_cannot_be_reached_is_a_problem(monkeypatch):
    reach, reached = socket.create_connection, []

    def refused_beside(address, timeout):
        reached.append(address[1])
        if address[1] == reached[0] + 1:
            raise ConnectionRefusedError("refused")
        return reach(address, timeout)

    assert system._ports().level is Level.OK
    monkeypatch.setattr(system.socket, "create_connection", refused_beside)
    found = system._ports()
    assert (found.level, len(reached)) == (Level.PROBLEM, 2)
    assert "two ports in a row" in found.found


def test_devices_that_do_not_answer_are_a_problem(monkeypatch):
    monkeypatch.setattr(devices, "ASK", "import time; time.sleep(600)")
    (finding,) = devices.check_devices(answers_within_s=0.5)
    assert finding.level is Level.PROBLEM
    assert "within 0.5 s" in finding.found


def test_a_jax_that_ends_is_quoted(monkeypatch):
    monkeypatch.setattr(devices, "ASK", "raise SystemExit('no such platform')")
    (finding,) = devices.check_devices()
    assert finding.level is Level.PROBLEM
    assert "no such platform" in finding.found


def test_a_tpu_that_jax_does_not_find_is_a_problem(monkeypatch):
    monkeypatch.setattr(devices, "generation_here", lambda: "v6e")
    monkeypatch.setattr(devices, "ASK", 'print(\'["cpu", 1, ["cpu"]]\')')
    (finding,) = devices.check_devices()
    assert finding.level is Level.PROBLEM
    assert "v6e" in finding.found


def test_a_folder_that_does_not_exist_yet_is_tried_where_it_would_be(tmp_path):
    finding = named(system.check_system(tmp_path / "runs" / "a"))["disk"]
    assert finding.level is not Level.PROBLEM
    assert finding.found.startswith(f"{tmp_path}: ")


def test_a_disk_that_refuses_writes_is_a_problem(tmp_path, monkeypatch):
    def refused(folder, nbytes):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(system, "_written_per_s", refused)
    finding = named(system.check_system(tmp_path))["disk"]
    assert (finding.level, "Permission denied" in finding.found) == (
        Level.PROBLEM,
        True,
    )


def test_slow_and_full_disks_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "_written_per_s", lambda *_: 1e6)
    assert named(system.check_system(tmp_path))["disk"].level is Level.NOTE
    monkeypatch.setattr(system, "_written_per_s", lambda *_: 1e9)
    monkeypatch.setattr(system, "FREE_BYTES", 1 << 60)
    assert "free some space" in named(system.check_system(tmp_path))["disk"].remedy


def test_a_small_limit_of_open_files_is_noted(monkeypatch):
    monkeypatch.setattr(system.resource, "getrlimit", lambda _: (256, 1024))
    finding = system._open_files()
    assert (finding.level, finding.remedy[:14]) == (Level.NOTE, "ulimit -n 1024")


def test_a_clock_that_nothing_keeps_right_is_noted(monkeypatch):
    monkeypatch.setattr(system, "_clock_state", lambda: system.CLOCK_UNSYNCHRONISED)
    assert system._clock().level is Level.NOTE
    monkeypatch.setattr(system, "_clock_state", lambda: 0)
    assert system._clock().level is Level.OK
