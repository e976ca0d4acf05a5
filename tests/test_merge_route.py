"""Where the native route is not to be had, a process says so, or ends."""

import logging

import pytest

from diloco_jax import compilation
from diloco_jax.compilation import passes_of, route_of
from diloco_jax.errors import ConfigError


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """An empty cache, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compilation._passes.cache_clear()
    yield
    compilation._passes.cache_clear()


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


def test_xla_compiles_nothing(tmp_path) -> None:
    assert route_of(passes_of("xla")) == "xla"
    assert list(tmp_path.iterdir()) == []


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


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho the source is wrong >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ConfigError, match="refused the source: the source is wrong"):
        passes_of("native")
    assert not list((tmp_path / "diloco_jax" / "merge").iterdir())


def test_source_flags_and_processor_name_the_library(monkeypatch) -> None:
    names = [compilation._key()]
    monkeypatch.setattr("diloco_jax.machine.instructions", lambda: "fpu vme")
    names.append(compilation._key())
    monkeypatch.setattr("diloco_jax.core.tiles.FLAGS", ("-O1",))
    names.append(compilation._key())
    assert len(set(names)) == 3
