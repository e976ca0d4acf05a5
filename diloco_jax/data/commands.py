"""`diloco data prepare OUT SOURCES...` and `diloco manifest PATH`."""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_jax import machine
from diloco_jax.config.fields import (
    AT_LEAST_1,
    BETWEEN,
    NOT_NEGATIVE,
    check_utf8,
    positional,
    setting,
)
from diloco_jax.config.options import parse
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from diloco_jax.files import absolute, is_bucket

if TYPE_CHECKING:
    from diloco_jax.data.prepared import Contents


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options of `diloco data prepare`."""

    out: str = positional(metavar="OUT", help="A folder that does not exist yet.")
    sources: tuple[str, ...] = positional(
        metavar="SOURCES",
        help="Files, and folders of them: .parquet; .jsonl and .json, also .gz; any "
        "other file is text, and one document. None = the sources of the Python "
        "standard library.",
    )
    tokenizer: str = setting(
        "",
        help="A tokenizer.json, a .model of SentencePiece, or a folder that has one; "
        "empty = every byte of the text is a token.",
    )
    sequence_length: int = setting(
        1024, AT_LEAST_1, help="Tokens predicted of each row; the run's has to be it."
    )
    validation_fraction: float = setting(
        0.02, BETWEEN, help="Share of the documents held out for validation."
    )
    text_field: str = setting(
        "text", help="Field, or column, with the text of a document."
    )
    turn: str = setting(
        "",
        help="How a turn of a chat is written: chatml, llama3, gemma3, or a text with "
        "{role} and {content}; empty = the chat_template beside the tokenizer, or "
        "else chatml.",
    )
    picture_tokens: int = setting(
        0,
        NOT_NEGATIVE,
        help="Tokens that a picture takes in the model, such as 64 of SmolVLM; 0 = "
        "pictures of JSON and Parquet (image, images) are left out.",
    )
    pictures_per_row: int = setting(
        0, NOT_NEGATIVE, help="Most pictures of a row; 0 = as many as fit."
    )
    workers: int = setting(
        0,
        NOT_NEGATIVE,
        help="Processes; 0 = one for each core. Any number makes the same files.",
    )


def data_command(arguments: Sequence[str]) -> int:
    """Run `diloco data prepare`, the only one of its kind."""
    if arguments[:1] not in (["prepare"], ["-h"], ["--help"]):
        said = f"; found {arguments[0]!r}" if arguments else ""
        raise ConfigError(f"diloco data prepare OUT SOURCES... is what there is{said}")
    (options,) = parse(
        [PrepareOptions],
        arguments[1:] if arguments[0] == "prepare" else arguments,
        "diloco data prepare",
        "Make packed rows of tokens out of text, JSON lines and Parquet, for "
        "data.paths. What is interrupted goes on with the same command.",
    )
    check_utf8("SOURCES", *options.sources)
    check_utf8("--text-field", options.text_field)
    check_utf8("--turn", options.turn)
    if not options.text_field:
        raise ConfigError("--text-field is empty; give the name of a field or column")
    if is_bucket(options.out):
        raise ConfigError(
            f"OUT: {options.out} is a bucket; give a folder of this machine, and copy "
            f"it there once it is whole (`gcloud storage rsync -r`)"
        )
    from rich.console import Console

    from diloco_jax.data.documents import inventory
    from diloco_jax.data.examples import pictures_for, reader_for
    from diloco_jax.data.prepare import Recipe, prepare
    from diloco_jax.data.tokenizers import open_tokenizer
    from diloco_jax.observability.terminal import bar

    tokenizer = open_tokenizer(options.tokenizer, "--tokenizer")
    reader = reader_for(tokenizer, options.text_field, options.turn)
    if options.picture_tokens:
        pictures = pictures_for(
            tokenizer,
            options.picture_tokens,
            options.sequence_length,
            options.pictures_per_row,
        )
        reader = dataclasses.replace(reader, pictures=pictures)
    recipe = Recipe(
        tokenizer=tokenizer,
        reader=reader,
        sequence_length=options.sequence_length,
        validation_fraction=options.validation_fraction,
    )
    began = time.monotonic()
    with bar(Console(stderr=True), "preparing") as report:
        made = prepare(
            Path(absolute(options.out)),
            options.sources,
            recipe,
            workers=options.workers or machine.cores(),
            report=report,
        )
    _describe("", made)
    if reader.unfit and made.train.counts.chats + made.validation.counts.chats:
        print(f"warning: --turn: {reader.unfit}", file=sys.stderr)
    if made.validation_fraction != options.validation_fraction:
        print(
            f"--validation-fraction = {options.validation_fraction:g} by chance left a "
            f"side without a document; the nearest one was moved there",
            file=sys.stderr,
        )
    kinds = inventory((source.name, source, source.kind) for source in made.sources)
    print(f"sources: {kinds}", file=sys.stderr)
    print(
        f"{options.out}: digest {made.digest}, tokenizer {made.tokenizer.digest}, in "
        f"{time.monotonic() - began:.1f} s",
        file=sys.stderr,
    )
    return EXIT_DONE


def _describe(ahead: str, made: Contents) -> None:
    for name, split in (("train", made.train), ("validation", made.validation)):
        said = split.described(made.sequence_length)
        print(f"{ahead}{name}: {said}", file=sys.stderr)


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
        "Read large files once, and write beside each what starts compare; say what "
        "prepared folders have.",
    )
    from diloco_jax.data import documents, manifest
    from diloco_jax.data.documents import SourceKind, find_documents
    from diloco_jax.data.prepared import is_prepared, read_manifest

    small = unwritten = 0
    prepared = collections.Counter[Path]()
    for _, file, kind in find_documents((str(options.path),)):
        if is_prepared(file.parent):
            prepared[file.parent] += 1
            continue
        if kind not in (SourceKind.TEXT, SourceKind.TOKENS):
            continue
        if not documents.is_large(file):
            small += 1
            continue
        found = manifest.find(file) if options.missing else None
        # The time of change may differ, as that of a copy does.
        if found is not None and found.size == file.stat().st_size:
            continue
        made = manifest.make(file, kind)
        unwritten += not manifest.manifest_path(file).exists()
        print(
            f"{file}: {made.tokens:,} tokens up to {made.largest}, digest "
            f"{made.digest.hex()[:16]}",
            file=sys.stderr,
        )
    if small:
        print(
            f"{small:,} files below {documents.MAPPED_FROM >> 20} MB need none: "
            f"every start reads them",
            file=sys.stderr,
        )
    for folder in prepared:
        _describe(f"{folder}: ", read_manifest(folder))
    if count := prepared.total():
        print(
            f"{count:,} files in prepared folders have theirs already", file=sys.stderr
        )
    return EXIT_FAILED if unwritten else EXIT_DONE
