"""`diloco manifest PATH`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.config.fields import positional, setting
from diloco_jax.options import parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """The options of `diloco manifest`."""

    path: Path = positional(
        metavar="PATH", help="A file of text or tokens (.npy), or a folder of them."
    )
    missing: bool = setting(
        False, help="Leave files alone that have a manifest of their size."
    )


def manifest_command(arguments: Sequence[str]) -> int:
    """Write the manifests of large files, even if they have one."""
    (options,) = parse(
        [ManifestOptions],
        arguments,
        "diloco manifest",
        "Read large files once, and write beside each what starts compare.",
    )
    from diloco_jax.data import manifest
    from diloco_jax.data.documents import SourceKind, find_documents
    from diloco_jax.data.prepared.contents import is_prepared
    from diloco_jax.data.text import make_text_manifest
    from diloco_jax.data.tokens import make_token_manifest

    small = prepared = 0
    for _, file, kind in find_documents((str(options.path),)):
        if is_prepared(file.parent):
            prepared += 1
            continue
        if kind not in (SourceKind.TEXT, SourceKind.TOKENS):
            continue
        if not manifest.is_large(file):
            small += 1
            continue
        if options.missing and manifest.has_size(file):
            continue
        is_tokens = kind is SourceKind.TOKENS
        made = make_token_manifest(file) if is_tokens else make_text_manifest(file)
        print(
            f"{file}: {made.tokens:,} tokens up to {made.largest}, digest "
            f"{made.digest.hex()[:16]}",
            file=sys.stderr,
        )
    if small:
        print(
            f"{small:,} files below {manifest.MAPPED_FROM >> 20} MB need none: "
            f"every start reads them",
            file=sys.stderr,
        )
    if prepared:
        print(
            f"{prepared:,} files in prepared folders have theirs already",
            file=sys.stderr,
        )
    return 0
