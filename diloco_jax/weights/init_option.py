"""Forms in which `--init` names a run's first parameters."""

from __future__ import annotations

from diloco_jax.errors import ConfigError
from diloco_jax.files import absolute

KINDS = ("hf", "run")
FROM_ISLAND = "from-island:"
"""Begins an `--init` that names an island, whose parameters are no files."""


def read_init(weights: str) -> tuple[str, str]:
    """Return the kind and the folder that it names; raise ConfigError if it has another
    form.
    """
    kind, _, folder = weights.partition(":")
    if weights and (kind not in KINDS or not folder or folder.endswith("://")):
        raise ConfigError(
            f"--init {weights}: write hf:DIR for a folder with config.json and "
            f"safetensors, run:WORKDIR for a run's newest snapshot, or "
            f"{FROM_ISLAND}NAME for what that island begins with"
        )
    return kind, absolute(folder)
