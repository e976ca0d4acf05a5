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

from diloco_jax import before_jax, cli, doctor, files
from diloco_jax.doctor import CHECKS, Finding, Level, examine, look

OK, NOTE, PROBLEM = Level.OK, Level.NOTE, Level.PROBLEM


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
    found = [
        Finding(what="a", level=OK, found="well"),
        Finding(what="b", level=PROBLEM, found="broken", remedy="mend it"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda folder, report: iter(found))
    assert cli.main(["doctor"]) == 1
    assert "mend it" in capsys.readouterr().err


def raises(error):
    def fail(*arguments):
        raise error

    return fail


def packages(monkeypatch, folder):
    required = ["no-such-package>=1", "numpy>=9999", 'other; extra == "test"']
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    numpy = metadata.version("numpy")
    return f"no-such-package is missing, numpy {numpy} is not >=9999"


def jaxlib(monkeypatch, folder):
    versions = {"jax": "0.10.2", "jaxlib": "0.9.1"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    return "jax 0.10.2 beside jaxlib 0.9.1"


def no_libtpu(monkeypatch, folder):
    monkeypatch.setattr(before_jax, "libtpu_version", lambda: "")
    return "not installed"


def other_libtpu(monkeypatch, folder):
    versions = {"jax": "0.10.2", "libtpu": "0.0.17"}
    asked = ['libtpu==0.0.42.*; extra == "tpu"', "numpy>=9999"]
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    monkeypatch.setattr(metadata, "requires", {"jax": asked}.__getitem__)
    return "libtpu 0.0.17 is not ==0.0.42.*, which jax 0.10.2 asks for"


def bulk_port(monkeypatch, folder):
    reach, reached = socket.create_connection, []

    def refused_beside(address, timeout):
        reached.append(address[1])
        if address[1] == reached[0] + 1:
            raise ConnectionRefusedError("refused")
        return reach(address, timeout)

    monkeypatch.setattr(doctor.socket, "create_connection", refused_beside)
    return "two ports in a row"


def silent(monkeypatch, folder):
    monkeypatch.setattr(doctor, "ANSWERS_WITHIN_S", 0.5)
    monkeypatch.setattr(doctor, "ASK", "import time; time.sleep(600)")
    return "within 0.5 s"


def ends(monkeypatch, folder):
    monkeypatch.setattr(doctor, "ASK", "raise SystemExit('no such platform')")
    return "no such platform"


def unseen_tpu(monkeypatch, folder):
    monkeypatch.setattr(doctor, "generation_here", lambda: "v6e")
    monkeypatch.setattr(doctor, "ASK", 'print(\'["cpu", 1, ["cpu"]]\')')
    return "this machine has a TPU v6e"


def platform(monkeypatch, folder):
    """It is named without a process."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpuu")
    monkeypatch.setattr(before_jax, "_plugins", lambda: False)
    monkeypatch.setattr(doctor.subprocess, "run", None)
    return "JAX_PLATFORMS = 'cpuu'"


def read_only(monkeypatch, folder):
    refused = PermissionError(13, "Permission denied")
    monkeypatch.setattr(doctor, "written_per_s", raises(refused))
    return "Permission denied"


def slow(monkeypatch, folder):
    monkeypatch.setattr(doctor, "written_per_s", lambda *_: 1e6)
    return f"{folder}: 1 MB/s"


def full(monkeypatch, folder):
    monkeypatch.setattr(doctor, "written_per_s", lambda *_: 1e9)
    monkeypatch.setattr(doctor, "FREE_BYTES", 1 << 60)
    return "GiB free"


def few_files(monkeypatch, folder):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 1024))
    return "256 at once"


def no_time(monkeypatch, folder):
    library = types.SimpleNamespace(adjtimex=lambda zeros: doctor.CLOCK_UNSYNCHRONISED)
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: library)
    return "nothing keeps it right"


def no_home(monkeypatch, folder):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    return "~/.cache"


def locked_home(monkeypatch, folder):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "caches"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    return str(folder / "caches")


def no_tmp(monkeypatch, folder):
    missing = FileNotFoundError(errno.ENOENT, "No usable temporary directory found")
    monkeypatch.setattr(tempfile, "gettempdir", raises(missing))
    return "No usable temporary directory"


def proxy(monkeypatch, folder):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    return "HTTPS_PROXY=http://proxy:3128"


def loopback(monkeypatch, folder):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    return "127.0.1.1"


def nameless(monkeypatch, folder):
    unknown = socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(socket, "gethostbyname", raises(unknown))
    return "Name or service not known"


def shadow(monkeypatch, folder):
    (folder / "random.py").touch()
    monkeypatch.chdir(folder)
    return "random"


def few_threads(monkeypatch, folder):
    shortage = RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", raises(shortage))
    return "threads could be started"


def no_locks(monkeypatch, folder):
    lacking = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(files.fcntl, "flock", raises(lacking))
    return "No locks available"


def broken_tool(monkeypatch, folder):
    (folder / "sky").write_text("#!/bin/sh\nexit 7\n")
    (folder / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return "returned non-zero exit status 7"


def test_it_tells_which_tools_of_the_cloud_are_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\n[ "$1 $2" = "version --client" ] && echo v1.33\n')
    kubectl.chmod(0o755)
    assert look("kubectl", tmp_path).found == "v1.33, for diloco launch --on gke"
    assert look("sky", tmp_path).found == "not found; diloco launch --on sky needs it"


@pytest.mark.parametrize(
    ("what", "arrange", "level", "remedy"),
    [
        ("packages", packages, PROBLEM, "pip install --upgrade diloco-jax"),
        ("jax", jaxlib, PROBLEM, "pip install --upgrade jax==0.10.2"),
        ("libtpu", no_libtpu, NOTE, "diloco-jax[tpu]"),
        ("libtpu", other_libtpu, NOTE, "pip install --upgrade 'jax[tpu]==0.10.2'"),
        ("ports", bulk_port, PROBLEM, "loopback"),
        ("devices", silent, PROBLEM, "end other processes"),
        ("devices", ends, PROBLEM, "line of packages"),
        ("devices", unseen_tpu, PROBLEM, "unset JAX_PLATFORMS"),
        ("devices", platform, PROBLEM, "unset it"),
        ("disk", read_only, PROBLEM, "--workdir"),
        ("disk", slow, NOTE, "a faster disk"),
        ("disk", full, NOTE, "free some space"),
        ("open files", few_files, NOTE, "ulimit -n 1024"),
        ("clock", no_time, NOTE, "NTP"),
        ("home", no_home, NOTE, "set HOME"),
        ("home", locked_home, NOTE, "set HOME"),
        ("temporary", no_tmp, PROBLEM, "set TMPDIR"),
        ("proxies", proxy, NOTE, "no_proxy"),
        ("name", loopback, NOTE, "/etc/hosts"),
        ("name", nameless, NOTE, "/etc/hosts"),
        ("modules", shadow, NOTE, "rename"),
        ("threads", few_threads, PROBLEM, "ulimit -u"),
        ("locks", no_locks, PROBLEM, "local disk"),
        ("sky", broken_tool, NOTE, "diloco launch --on sky needs it"),
    ],
)
def test_it_names_what_is_wrong_and_the_remedy(
    tmp_path, monkeypatch, what, arrange, level, remedy
):
    said = arrange(monkeypatch, tmp_path)
    found = look(what, tmp_path)
    assert found.level is level
    assert said in found.found
    assert remedy in found.remedy


def test_nothing_unusual_is_not_mentioned(tmp_path, monkeypatch):
    for name in CHECKS:
        monkeypatch.setitem(CHECKS, name, lambda folder: None)
    assert [finding.what for finding in examine(tmp_path)] == ["diloco_jax"]


def test_a_folder_that_does_not_exist_yet_is_tried_where_it_would_be(tmp_path):
    found = look("disk", tmp_path / "runs" / "a")
    assert found.level is not PROBLEM
    assert found.found.startswith(f"{tmp_path}: ")
