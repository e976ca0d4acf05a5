"""The compilation cache survives killed writers, and does not grow without end; the
merges in C; and users who have no home, or one that is not theirs."""

from __future__ import annotations

import inspect
import logging
import os
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from diloco_jax import compilation
from diloco_jax.cluster import cluster
from diloco_jax.compilation import passes_of, route_of
from diloco_jax.config import ConfigError, ModelConfig, RunConfig, loading

CODE = """
import sys, warnings
from pathlib import Path
import jax
from diloco_jax import compilation
compilation.use_cache(Path(sys.argv[1]))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    jax.jit(lambda x: x * 2 + 1)(1.0).block_until_ready()
print(compilation.counted())
print(len(told))
"""


def compile_something(folder, counted):
    """Return the number of warnings. counted: what it says of compilations."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told, warnings = done.stdout.splitlines()
    assert told == counted
    return int(warnings)


def test_torn_entries_are_compiled_again(tmp_path):
    compiled = "1 programs compiled, 0 read from the cache"
    assert compile_something(tmp_path, compiled) == 0
    (entry,) = tmp_path.iterdir()  # And nothing else: no lock, no time stamps.
    assert (
        compile_something(tmp_path, "0 programs compiled, 1 read from the cache") == 0
    )
    whole = entry.read_bytes()
    entry.write_bytes(b"")
    assert compile_something(tmp_path, compiled) == 0
    assert entry.stat().st_size > 0.9 * len(whole)
    entry.write_bytes(whole[:-100])
    assert compile_something(tmp_path, compiled) == 1


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """Makes entries of a size, used at some second, in the folder of the cache."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(compilation, "MAX_BYTES", 100)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)

    def make(**files):
        for name, (size, read, written) in files.items():
            path = tmp_path / f"{name}-cache"
            path.write_bytes(b"x" * size)
            os.utime(path, (read, written))

    return make


@pytest.mark.parametrize("whose", ["jax-cache", "."])
def test_a_cache_of_another_user_is_not_read(tmp_path, monkeypatch, caplog, whose):
    """An entry is code; and a folder's owner may replace what lies in it."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    told, cache = {}, tmp_path / "jax-cache"
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    cache.mkdir()
    compilation.use_cache(cache)
    assert told.pop("jax_compilation_cache_dir") == str(cache)
    foreign, stat = (tmp_path / whose).resolve(), Path.stat
    monkeypatch.setattr(
        Path,
        "stat",
        lambda path, **how: (
            SimpleNamespace(st_uid=4711) if path == foreign else stat(path, **how)
        ),
    )
    compilation.use_cache(cache)
    assert "jax_compilation_cache_dir" not in told
    assert f"{cache} is not used" in caplog.text
    assert "belongs to user 4711" in caplog.text


def test_a_home_of_another_user_has_no_code_for_this_one(tmp_path, monkeypatch):
    """As under a `sudo` that keeps HOME: neither programs nor the native merge."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilation.of_user() == tmp_path / "diloco_jax" / "jax"
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    monkeypatch.setattr(Path, "stat", lambda path: SimpleNamespace(st_uid=4712))
    assert compilation.of_user() is None
    with pytest.raises(PermissionError, match=r"user 4712, .* 4711.*XDG_CACHE_HOME"):
        compilation.cache_home()


def test_a_cache_that_cannot_be_reached_has_no_owner(monkeypatch, tmp_path):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    assert compilation._other_owners(str(tmp_path)) == set()


@pytest.mark.parametrize(
    ("of_the_user", "left"),
    [(False, {"read", "new"}), (True, {"read", "new", "old"})],
)
def test_torn_entries_go_and_of_ours_those_unused_for_longest(
    entries, tmp_path, monkeypatch, of_the_user, left
):
    """What is no entry stays."""
    if of_the_user:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    (tmp_path / "empty").touch()
    (tmp_path / "folder-cache").mkdir()
    (tmp_path / "large").write_bytes(b"x" * 200)
    entries(old=(40, 10, 10), read=(40, 30, 10), new=(50, 20, 20), torn=(0, 40, 40))
    for _ in range(2):
        compilation.use_cache(tmp_path / "elsewhere" if of_the_user else tmp_path)
        names = {path.name.removesuffix("-cache") for path in tmp_path.iterdir()}
        assert names == {"empty", "folder", "large", *left}


def test_a_file_in_the_place_of_the_cache_is_told_and_not_used(
    tmp_path, monkeypatch, caplog
):
    settings = {}
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file"))
    compilation.use_cache(tmp_path / "own")
    assert "is no folder" in caplog.text
    assert settings["jax_compilation_cache_dir"] == str(tmp_path / "own")


def test_the_user_s_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "named"))
    assert compilation.of_user() == tmp_path / "named"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compilation.of_user() == tmp_path / "xdg" / "diloco_jax" / "jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compilation.of_user() == tmp_path / "home" / ".cache" / "diloco_jax" / "jax"


@pytest.fixture
def cache_of_jax(monkeypatch):
    """jax's own function for entries, put back afterwards, in a process that is not an
    island's first; and what is written."""
    from jax._src import compilation_cache, compiler, distributed

    written = []
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    monkeypatch.setattr(
        compilation_cache, "put_executable_and_time", lambda *of: written.append(of)
    )
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)
    return compiler, written


def test_every_host_writes_what_it_compiles(cache_of_jax):
    compiler, written = cache_of_jax
    of_callbacks = [()] * (len(inspect.signature(compiler._cache_write).parameters) - 5)
    compilation._have_every_host_write.__wrapped__()
    compiler._cache_write("key", 2.5, "name", "backend", "made", *of_callbacks)
    assert written == [("key", "name", "made", "backend", 2)]


def test_a_jax_that_writes_otherwise_is_left_alone(cache_of_jax, monkeypatch, caplog):
    compiler, _ = cache_of_jax

    def another(entry):
        """Stand for a jax to come."""

    monkeypatch.setattr(compiler, "_cache_write", another)
    compilation._have_every_host_write.__wrapped__()
    assert compiler._cache_write is another
    assert "hosts other than an island's first compile anew" in caplog.text


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compilation._passes.cache_clear()
    yield
    compilation._passes.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_auto_is_native_and_needs_a_compiler_once(tmp_path, monkeypatch) -> None:
    """A library that was cut off by a crash is compiled anew."""
    folder = tmp_path / "diloco_jax" / "merge"
    folder.mkdir(parents=True)
    library = folder / f"{compilation._key()}.so"
    library.write_bytes(b"\x7fELF\x02\x01\x01")
    assert route_of(passes_of("auto")) == "native"
    assert library.stat().st_size > 1000
    assert list(folder.iterdir()) == [library]
    compilation._passes.cache_clear()
    monkeypatch.setattr(compilation, "COMPILERS", ("no-such-compiler",))
    assert route_of(passes_of("native")) == "native"


@pytest.mark.usefixtures("fresh")
def test_xla_compiles_nothing(tmp_path) -> None:
    assert route_of(passes_of("xla")) == "xla"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_auto_warns_and_native_is_refused(
    monkeypatch, caplog
) -> None:
    monkeypatch.setattr(compilation, "COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        assert route_of(passes_of("auto")) == "xla"
    (record,) = caplog.records
    assert "no-such-compiler" in record.getMessage()
    assert "placement.merge_route" in record.getMessage()
    with pytest.raises(ConfigError, match=r'"native".*"xla".*no-such-compiler.*insta'):
        passes_of("native")


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho the source is wrong >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ConfigError, match="refused the source: the source is wrong"):
        passes_of("native")
    assert not list((tmp_path / "diloco_jax" / "merge").iterdir())


@pytest.mark.usefixtures("fresh")
def test_source_flags_and_processor_name_the_library(monkeypatch) -> None:
    names = [compilation._key()]
    monkeypatch.setattr("diloco_jax.machine.instructions", lambda: "fpu vme")
    names.append(compilation._key())
    monkeypatch.setattr("diloco_jax.core.tiles.FLAGS", ("-O1",))
    names.append(compilation._key())
    assert len(set(names)) == 3


VARIABLES = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "JAX_COMPILATION_CACHE_DIR")
RUN = RunConfig(model=ModelConfig(factory="theirs.py:make"))


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a container whose user has a number alone."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_home")
def test_there_is_no_cache_of_the_user() -> None:
    assert compilation.of_user() is None
    for environment in (
        cluster.coordinator_environment(),
        cluster.island_environment(),
    ):
        assert compilation.VARIABLE not in environment
        assert "JAX_PLATFORMS" in environment


@pytest.mark.usefixtures("no_home")
def test_no_cache_is_used(monkeypatch) -> None:
    told: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    compilation.use_cache(compilation.of_user())
    assert "jax_compilation_cache_dir" not in told


@pytest.mark.usefixtures("no_home")
def test_merges_go_by_xla(caplog) -> None:
    compilation._passes.cache_clear()
    assert passes_of("auto") is None
    assert "Set HOME or XDG_CACHE_HOME" in caplog.text
    with pytest.raises(ConfigError, match="Set HOME or XDG_CACHE_HOME"):
        passes_of("native")


@pytest.mark.usefixtures("no_home")
def test_every_folder_is_foreign(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    loading.seal(RUN, path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"theirs\.py:make.*--trust-code"):
        loading.require_trust(RUN, path, trust_code=False)
