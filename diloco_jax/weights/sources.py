"""Sources of a run's first parameters, as `--init` names them."""

from __future__ import annotations

from diloco_jax.errors import ConfigError
from diloco_jax.paths import absolute

SOURCES = ("hf", "run")


def source_of(weights: str) -> tuple[str, str]:
    """Return kind and folder of a source; raise ConfigError if it is none."""
    kind, _, folder = weights.partition(":")
    if weights and (kind not in SOURCES or not folder):
        raise ConfigError(
            f"--init {weights}: write hf:DIR for a folder with config.json and "
            f"safetensors, or run:WORKDIR for a run's newest snapshot"
        )
    return kind, absolute(folder)
