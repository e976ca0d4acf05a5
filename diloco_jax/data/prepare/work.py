"""The whole work: planned, done in parts by several processes, and finished.

Until all parts are done they lie in `OUT.partial`, beside the plan. A command that is
started again there goes on with the parts that are not done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from diloco_jax import files
from diloco_jax.data.corpus import place
from diloco_jax.data.documents import SourceKind
from diloco_jax.data.prepare.examples import Reader
from diloco_jax.data.prepare.parts import (
    PART_BYTES,
    Part,
    SourceFile,
    find_sources,
    make_parts,
)
from diloco_jax.data.prepare.reading import read
from diloco_jax.data.prepare.workers import do_parts
from diloco_jax.data.prepare.writing import PartDone, Recipe, done_path
from diloco_jax.data.prepared.contents import (
    NAME,
    Contents,
    Counts,
    Origin,
    Split,
    Tokens,
)
from diloco_jax.data.tokenizers.opening import kept_name
from diloco_jax.errors import ConfigError
from diloco_jax.files import naming
from diloco_jax.storage import sync_path

PLAN = "plan.json"
PLAN_FORMAT = 2
LOCK = "lock"
Report = Callable[[float], None]
"""Called with the share that is done."""


class WorkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting and source on which the bytes of the result depend."""

    format: int
    tokenizer: Tokens
    sequence_length: int
    validation_fraction: float
    text_field: str
    turn: str
    part_bytes: int
    sources: tuple[SourceFile, ...]


def prepare(
    out: Path,
    paths: tuple[str, ...],
    recipe: Recipe,
    *,
    workers: int,
    report: Report = lambda share: None,
    part_bytes: int = PART_BYTES,
) -> Contents:
    """Make a prepared folder of source files, and return its manifest.

    Args:
      out: the folder, which appears when it is whole.
      paths: files and folders of text, JSON lines and Parquet.
      recipe: how documents become rows.
      workers: processes; they change nothing in the result.
      report: see `Report`.
      part_bytes: bytes of sources that become one file of rows.

    Raises:
      ConfigError: the folder is there; a source is missing or not what its name says;
        another command is at it; or what it began had other options or sources.
    """
    if out.exists():
        raise ConfigError(f"OUT: {out} exists; give the name of a new folder")
    if not out.parent.is_dir():
        raise ConfigError(f"OUT: there is no folder {out.parent}; make it first")
    scratch = out.with_name(f"{out.name}.partial")
    sources = [
        source
        for source in find_sources(paths)
        if not Path(source.path).is_relative_to(scratch)
    ]
    tokenizer = recipe.tokenizer
    plan = WorkPlan(
        format=PLAN_FORMAT,
        tokenizer=Tokens(
            digest=tokenizer.digest,
            vocab_size=tokenizer.vocab_size,
            start=tokenizer.start,
            end=tokenizer.end,
            file=kept_name(tokenizer.files[0]) if tokenizer.files else "",
        ),
        sequence_length=recipe.sequence_length,
        validation_fraction=recipe.validation_fraction,
        text_field=recipe.reader.text_field,
        turn=recipe.reader.writes,
        part_bytes=part_bytes,
        sources=tuple(sources),
    )
    try:
        (scratch / "parts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"OUT: {scratch}, where the work lies until it is done, is no folder and "
            f"cannot be made ({error.strerror}); give another OUT"
        ) from error
    with _alone(scratch):
        try:
            _begin(scratch, plan)
            parts = make_parts(sources, part_bytes)
            _try(sources, parts, recipe.reader)
            recipe = _split(sources, parts, recipe)
            do_parts(scratch, sources, parts, recipe, workers, report)
            return _finish(scratch, out, plan, parts, recipe)
        except BaseException:
            if not _begun(scratch):
                shutil.rmtree(scratch, ignore_errors=True)
            raise


@contextlib.contextmanager
def _alone(scratch: Path) -> Iterator[None]:
    """Let one command at a time work in a folder. Its end, however it comes, frees it.

    Workers do not inherit the lock: they end with the command.
    """
    with (scratch / LOCK).open("w") as file:
        if not files.lock(file, scratch / LOCK):
            raise ConfigError(
                f"OUT: another command works in {scratch}; wait for it, or give "
                f"another folder"
            )
        yield


def _begin(scratch: Path, plan: WorkPlan) -> None:
    """Write the plan; raise ConfigError if what was begun there had another one."""
    path = scratch / PLAN
    if not _begun(scratch):
        files.write_text(msgspec.json.encode(plan).decode(), path)
        return
    try:
        begun = msgspec.json.decode(path.read_bytes(), type=WorkPlan)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"OUT: {path} cannot be read ({error}); delete {scratch} and begin again"
        ) from error
    for name in WorkPlan.__struct_fields__:
        then, now = getattr(begun, name), getattr(plan, name)
        if then != now:
            if name == "sources":
                then, now = _first_difference(then, now)
            raise ConfigError(
                f"OUT: the work in {scratch} began with {name} = {then}, now it is "
                f"{now}; give what it began with, or delete {scratch} and begin again"
            )


def _begun(scratch: Path) -> bool:
    """Tell if a part is done, with which the same command can go on."""
    return any((scratch / "parts").glob("*.json"))


def _try(sources: Sequence[SourceFile], parts: Sequence[Part], reader: Reader) -> None:
    """Read one document of each kind of source, so that an option that fits none is
    refused before the work."""
    tried = set[SourceKind]()
    for piece in (piece for part in parts for piece in part):
        source = sources[piece.source]
        if source.kind not in tried:
            tried.add(source.kind)
            next(read(source, piece, reader), None)


def _split(
    sources: Sequence[SourceFile], parts: Sequence[Part], recipe: Recipe
) -> Recipe:
    """Return the recipe by which each side gets a document: where chance leaves one
    without any, as it does with few documents, the nearest one is moved there.

    Reads until both sides have one. Raises ConfigError if there are not two documents.
    """
    places, roles, count = list[int](), set[str](), 0
    border = recipe.validation_fraction * 2**64
    for piece in itertools.chain.from_iterable(parts):
        for document in read(sources[piece.source], piece, recipe.reader):
            count += 1
            roles |= set(document.roles)
            if any(span.learned and span.text for span in document.example.spans):
                places = sorted({*places, place(document.key)})
                places = sorted({*places[:2], *places[-2:]})
                if places[0] < border <= places[-1]:
                    return recipe
    if not places:
        why = "each is empty, or null where its text belongs; give --text-field"
        if roles and "assistant" not in roles:
            why = (
                f"only what 'assistant' says is learned, and their messages have "
                f"the roles {', '.join(map(repr, sorted(roles)))}; rename it"
            )
        raise ConfigError(f"SOURCES: {count:,} documents, and nothing to learn: {why}")
    if len(places) == 1:
        raise ConfigError(
            f"SOURCES: {count:,} documents with one text, which cannot be on both "
            f"sides, to train on and to validate on; cut it into several documents, "
            f"or give a file of text as data.paths as it is: its end is held out then"
        )
    apart = places[:2] if border <= places[0] else places[-2:]
    return dataclasses.replace(recipe, validation_fraction=sum(apart) / 2**65)


def _first_difference(
    then: Sequence[SourceFile], now: Sequence[SourceFile]
) -> tuple[object, object]:
    for before, after in zip(then, now, strict=False):
        if before != after:
            return before, after
    return f"{len(then)} files", f"{len(now)} files"


def _finish(
    scratch: Path, out: Path, plan: WorkPlan, parts: Sequence[Part], recipe: Recipe
) -> Contents:
    """Write the manifest of the parts, leave out what was needed for the work alone,
    and give the folder its name."""
    done = [
        msgspec.json.decode(done_path(scratch, n).read_bytes(), type=PartDone)
        for n in range(len(parts))
    ]
    digests = [hashlib.sha256() for _ in plan.sources]
    for part, result in zip(parts, done, strict=True):
        for piece, digest in zip(part, result.digests, strict=True):
            digests[piece.source].update(digest.encode())
    end = recipe.reader.turn_end
    taught = any(result.train.counts.chats for result in done)
    prepared = Contents(
        sequence_length=plan.sequence_length,
        row_bytes=recipe.records.nbytes,
        validation_fraction=recipe.validation_fraction,
        turn=plan.turn,
        ends=(end,) if taught and end is not None else (),
        tokenizer=plan.tokenizer,
        train=_together([result.train for result in done]),
        validation=_together([result.validation for result in done]),
        sources=tuple(
            Origin(
                name=source.name,
                size=source.size,
                digest=digest.hexdigest()[:16],
                kind=source.kind,
            )
            for source, digest in zip(plan.sources, digests, strict=True)
        ),
    )
    _require_both_sides(scratch, prepared)
    for path in recipe.tokenizer.files:
        with naming(scratch):
            shutil.copyfile(path, scratch / kept_name(path))
    manifest = msgspec.json.format(msgspec.json.encode(prepared), indent=1)
    files.write_text(manifest.decode() + "\n", scratch / NAME)
    for path in (scratch / PLAN, scratch / LOCK):
        path.unlink()
    shutil.rmtree(scratch / "parts")
    for path in scratch.glob("*.tmp"):  # Of a command that was killed.
        path.unlink(missing_ok=True)
    sync_path(scratch)
    scratch.rename(out)
    sync_path(out.parent)
    return prepared


def _require_both_sides(scratch: Path, prepared: Contents) -> None:
    """Raise ConfigError, and leave nothing, if a side has no row: another fraction is
    another plan."""
    train, validation = prepared.train.counts, prepared.validation.counts
    if not train.rows or not validation.rows:
        shutil.rmtree(scratch)
        raise ConfigError(
            f"--validation-fraction = {prepared.validation_fraction:g} puts "
            f"{train.documents} documents with {train.rows} rows on the side to train "
            f"on, {validation.documents} with {validation.rows} on that to validate "
            f"on, and each needs one; give another fraction, or more documents"
        )


def _together(splits: Sequence[Split]) -> Split:
    noted = [split.largest for split in splits]
    return Split(
        counts=sum((split.counts for split in splits), Counts()),
        shards=tuple(shard for split in splits for shard in split.shards),
        largest=max(noted) if min(noted) >= 0 else -1,
    )
