"""`diloco doctor`: what it says of this machine, and of machines in worse order, or
with unusual variables, folders, limits or names."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
import threading
import types
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from diloco_jax import before_jax, cli, doctor, files, process
from diloco_jax.doctor import LOOKS, Level, check_surroundings, ok, problem


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
    monkeypatch.setattr(doctor, "examine", lambda folder, report: iter(found))
    assert cli.main(["doctor"]) == 1
    assert "mend it" in capsys.readouterr().err


def test_a_missing_and_an_old_package_are_named(monkeypatch):
    required = [Requirement("no-such-package>=1"), Requirement("numpy>=9999")]
    monkeypatch.setattr(doctor, "_required", lambda: required)
    finding = named(doctor.check_packages())["packages"]
    assert finding.level is Level.PROBLEM
    assert "no-such-package is missing" in finding.found
    assert f"numpy {metadata.version('numpy')} is not >=9999" in finding.found


def test_a_jaxlib_of_another_version_is_a_problem(monkeypatch):
    versions = {"jax": "0.10.2", "jaxlib": "0.9.1"}
    monkeypatch.setattr(doctor, "_required", list)
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name, "1"))
    assert named(doctor.check_packages())["jax"].level is Level.PROBLEM


def test_a_bulk_port_that_cannot_be_reached_is_a_problem(monkeypatch):
    reach, reached = socket.create_connection, []

    def refused_beside(address, timeout):
        reached.append(address[1])
        if address[1] == reached[0] + 1:
            raise ConnectionRefusedError("refused")
        return reach(address, timeout)

    assert doctor._ports().level is Level.OK
    monkeypatch.setattr(doctor.socket, "create_connection", refused_beside)
    found = doctor._ports()
    assert (found.level, len(reached)) == (Level.PROBLEM, 2)
    assert "two ports in a row" in found.found


def test_devices_that_do_not_answer_are_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "ASK", "import time; time.sleep(600)")
    (finding,) = doctor.check_devices(answers_within_s=0.5)
    assert finding.level is Level.PROBLEM
    assert "within 0.5 s" in finding.found


def test_a_jax_that_ends_is_quoted(monkeypatch):
    monkeypatch.setattr(doctor, "ASK", "raise SystemExit('no such platform')")
    (finding,) = doctor.check_devices()
    assert finding.level is Level.PROBLEM
    assert "no such platform" in finding.found


def test_a_tpu_that_jax_does_not_find_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "generation_here", lambda: "v6e")
    monkeypatch.setattr(doctor, "ASK", 'print(\'["cpu", 1, ["cpu"]]\')')
    (finding,) = doctor.check_devices()
    assert finding.level is Level.PROBLEM
    assert "v6e" in finding.found


def test_a_folder_that_does_not_exist_yet_is_tried_where_it_would_be(tmp_path):
    finding = named(doctor.check_system(tmp_path / "runs" / "a"))["disk"]
    assert finding.level is not Level.PROBLEM
    assert finding.found.startswith(f"{tmp_path}: ")


def test_a_disk_that_refuses_writes_is_a_problem(tmp_path, monkeypatch):
    def refused(folder, nbytes):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor, "_written_per_s", refused)
    finding = named(doctor.check_system(tmp_path))["disk"]
    assert (finding.level, "Permission denied" in finding.found) == (
        Level.PROBLEM,
        True,
    )


def test_slow_and_full_disks_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_written_per_s", lambda *_: 1e6)
    assert named(doctor.check_system(tmp_path))["disk"].level is Level.NOTE
    monkeypatch.setattr(doctor, "_written_per_s", lambda *_: 1e9)
    monkeypatch.setattr(doctor, "FREE_BYTES", 1 << 60)
    assert "free some space" in named(doctor.check_system(tmp_path))["disk"].remedy


def test_a_small_limit_of_open_files_is_noted(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 1024))
    finding = doctor._open_files()
    assert (finding.level, finding.remedy[:14]) == (Level.NOTE, "ulimit -n 1024")


@pytest.mark.parametrize(
    ("state", "level"), [(doctor.CLOCK_UNSYNCHRONISED, Level.NOTE), (0, Level.OK)]
)
def test_a_clock_that_nothing_keeps_right_is_noted(monkeypatch, state, level):
    library = types.SimpleNamespace(adjtimex=lambda zeros: state)
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: library)
    assert doctor._clock().level is level


def unlockable(file, how):
    raise OSError(errno.ENOLCK, "No locks available")


def unstartable(self):
    raise RuntimeError("can't start new thread")


def no_home(monkeypatch, folder):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    return "~/.cache"


def locked_home(monkeypatch, folder):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "caches"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    return str(folder / "caches")


def no_tmp(monkeypatch, folder):
    def fail():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    return "No usable temporary directory"


def proxy(monkeypatch, folder):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    return "HTTPS_PROXY=http://proxy:3128"


def loopback(monkeypatch, folder):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    return "127.0.1.1"


def nameless(monkeypatch, folder):
    def fail(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", fail)
    return "Name or service not known"


def shadow(monkeypatch, folder):
    (folder / "random.py").touch()
    monkeypatch.chdir(folder)
    return "random"


def strict(monkeypatch, folder):
    monkeypatch.setattr(process, "variables_set_right", {"COLUMNS": "0"})
    return "COLUMNS=0"


def few_threads(monkeypatch, folder):
    monkeypatch.setattr(threading.Thread, "start", unstartable)
    return "threads could be started"


def no_locks(monkeypatch, folder):
    monkeypatch.setattr(files.fcntl, "flock", unlockable)
    return "No locks available"


@pytest.mark.parametrize(
    ("what", "arrange"),
    [
        ("home", no_home),
        ("home", locked_home),
        ("temporary", no_tmp),
        ("proxies", proxy),
        ("name", loopback),
        ("name", nameless),
        ("modules", shadow),
        ("variables", strict),
        ("threads", few_threads),
        ("locks", no_locks),
    ],
)
def test_it_names_what_is_unusual_and_the_remedy(tmp_path, monkeypatch, what, arrange):
    said = arrange(monkeypatch, tmp_path)
    found = {finding.what: finding for finding in check_surroundings(tmp_path)}
    assert said in found[what].found
    refused = arrange in (no_tmp, few_threads, no_locks)
    assert found[what].level is (Level.PROBLEM if refused else Level.NOTE)
    assert found[what].remedy


def test_nothing_unusual_is_not_mentioned(tmp_path, monkeypatch):
    for name, (_, wrong, remedy) in LOOKS.items():
        monkeypatch.setitem(LOOKS, name, (lambda folder: (), wrong, remedy))
    assert list(check_surroundings(tmp_path)) == []


def test_a_platform_that_jax_has_not_is_named_without_a_process(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpuu")
    monkeypatch.setattr(before_jax, "_plugins", lambda: False)
    monkeypatch.setattr(doctor.subprocess, "run", None)
    (finding,) = doctor.check_devices()
    assert finding.level is Level.PROBLEM
    assert "JAX_PLATFORMS = 'cpuu'" in finding.found
    assert finding.remedy.startswith("unset it")
