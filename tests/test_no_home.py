"""Users without a home: no cache, no key, and no failure."""

from __future__ import annotations

import pwd
from pathlib import Path

import jax
import pytest

from diloco_jax import compilation
from diloco_jax.cluster import cluster
from diloco_jax.compilation import passes_of
from diloco_jax.config import ConfigError, ModelConfig, RunConfig, loading

VARIABLES = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "JAX_COMPILATION_CACHE_DIR")
RUN = RunConfig(model=ModelConfig(factory="theirs.py:make"))


@pytest.fixture(autouse=True)
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a container whose user has a number alone."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_there_is_no_cache_of_the_user() -> None:
    assert compilation.of_user() is None
    for environment in (
        cluster.coordinator_environment(),
        cluster.island_environment(),
    ):
        assert compilation.VARIABLE not in environment
        assert "JAX_PLATFORMS" in environment


def test_no_cache_is_used(monkeypatch) -> None:
    told: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    compilation.use_cache(compilation.of_user())
    assert "jax_compilation_cache_dir" not in told


def test_merges_go_by_xla(caplog) -> None:
    compilation._passes.cache_clear()
    assert passes_of("auto") is None
    assert "Set HOME or XDG_CACHE_HOME" in caplog.text
    with pytest.raises(ConfigError, match="Set HOME or XDG_CACHE_HOME"):
        passes_of("native")


def test_every_folder_is_foreign(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    loading.seal(RUN, path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"theirs\.py:make.*--trust-code"):
        loading.require_trust(RUN, path, trust_code=False)
