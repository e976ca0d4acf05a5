"""`diloco manifest PATH...`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.config.fields import positional
from diloco_jax.errors import ConfigError
from diloco_jax.options import parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """The options of `diloco manifest`."""

    path: Path = positional(
        metavar="PATH", help="A .npy file of tokens, or a folder of them."
    )


def manifest_command(arguments: Sequence[str]) -> int:
    """Write the manifests of token files anew."""
    (options,) = parse(
        [ManifestOptions],
        arguments,
        "diloco manifest",
        "Read .npy files of tokens once, and write beside each what starts compare.",
    )
    from diloco_jax.data.tokens import SUFFIX, make_manifest

    path = options.path
    found = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not found:
        raise ConfigError(f"{path} has no {SUFFIX} files of tokens; name their folder")
    for file in found:
        made = make_manifest(file)
        print(
            f"{file}: {len(made.tokens):,} tokens up to {made.largest}, digest "
            f"{made.digest.hex()[:16]}",
            file=sys.stderr,
        )
    return 0
