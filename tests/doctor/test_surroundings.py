"""`diloco doctor` on machines whose variables, folders, limits or names are unusual."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading

import pytest

from diloco_jax import before_jax, files, shell_variables
from diloco_jax.doctor import devices
from diloco_jax.doctor.finding import Level
from diloco_jax.doctor.surroundings import LOOKS, check_surroundings
from diloco_jax.errors import ConfigError


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


def long_tmp(monkeypatch, folder):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp/" + "x" * 100)
    return "x" * 100


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
    monkeypatch.setattr(shell_variables, "set_right", {"COLUMNS": "0"})
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
        ("temporary", long_tmp),
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
    monkeypatch.setattr(devices.subprocess, "run", None)
    (finding,) = devices.check_devices()
    assert finding.level is Level.PROBLEM
    assert "JAX_PLATFORMS = 'cpuu'" in finding.found
    assert finding.remedy.startswith("unset it")


def test_a_file_that_another_holds_is_no_error(tmp_path):
    path = tmp_path / "lock"
    with path.open("w") as one, path.open("w") as other:
        assert files.lock(one, path)
        assert not files.lock(other, path)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files.fcntl, "flock", unlockable)
    with (
        (tmp_path / "lock").open("w") as file,
        pytest.raises(ConfigError, match=r"lock cannot be locked .*local disk"),
    ):
        files.lock(file, tmp_path / "lock")
