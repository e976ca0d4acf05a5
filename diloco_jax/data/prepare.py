"""`diloco data prepare`: files of text, JSON lines and Parquet become packed rows.

The work is planned, done in parts by several processes, and finished. A part is
documents in, one file of rows for each split out. Until all parts are done they lie in
`OUT.partial`, beside the plan. A command that is started again there goes on with the
parts that are not done. The processes end with the command that started them.

Documents are packed into rows of equal length. `T` tokens are predicted of each row,
which has T + 1. A long document is cut into pieces; each begins with the last token of
the piece before, so that every token but the document's first is predicted once. Short
pieces share rows.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import io
import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from diloco_jax import files
from diloco_jax.data.corpus import is_validation, place
from diloco_jax.data.documents import SourceKind
from diloco_jax.data.examples import Reader, Tokenised, tokenise
from diloco_jax.data.pictures import RowPictures, kind_of
from diloco_jax.data.prepare_sources import (
    PART_BYTES,
    PICTURE_PART_BYTES,
    PICTURES_AT_ONCE,
    Document,
    Part,
    SourceFile,
    find_sources,
    make_parts,
    read,
)
from diloco_jax.data.prepared import (
    FORMAT,
    MANIFEST,
    TRAIN,
    VALIDATION,
    WITH_PICTURES,
    Contents,
    Counts,
    Origin,
    RecordFormat,
    Shard,
    Split,
    Tokens,
    shard_of,
)
from diloco_jax.data.tokenizers import Tokenizer, kept_name
from diloco_jax.errors import ConfigError
from diloco_jax.files import naming, sync_path

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
    pictures: RowPictures | None = None


def prepare(
    out: Path,
    paths: tuple[str, ...],
    recipe: Recipe,
    *,
    workers: int,
    report: Report = lambda share: None,
    part_bytes: int = 0,
) -> Contents:
    """Make a prepared folder of source files, and return its manifest.

    Args:
      out: the folder, which appears when it is whole.
      paths: files and folders of text, JSON lines and Parquet.
      recipe: how documents become rows.
      workers: processes; they change nothing in the result.
      report: see `Report`.
      part_bytes: bytes of sources that become one file of rows; 0 = `PART_BYTES`, or
        `PICTURE_PART_BYTES` where pictures are taken.

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
        if not Path(source.path).resolve().is_relative_to(scratch.resolve())
    ]
    tokenizer, pictures = recipe.tokenizer, recipe.reader.pictures
    part_bytes = part_bytes or (PICTURE_PART_BYTES if pictures else PART_BYTES)
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
        pictures=pictures,
    )
    if scratch.is_dir() and not _begun(scratch):
        own = ("parts", LOCK)
        for path in scratch.iterdir():
            if path.name not in own and not path.name.startswith(PLAN):
                raise ConfigError(
                    f"OUT: {scratch}, where the work lies until it is done, has other "
                    f"files ({path.name}); give another OUT, or move them"
                )
    try:
        (scratch / "parts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"OUT: {scratch}, where the work lies until it is done, is no folder and "
            f"cannot be made ({error.strerror}); give another OUT"
        ) from error
    # Workers do not inherit the lock: they end with the command.
    with (scratch / LOCK).open("w") as lock:
        if not files.lock(lock, scratch / LOCK):
            raise ConfigError(
                f"OUT: another command works in {scratch}; wait for it, or give "
                f"another folder"
            )
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
                pairs = zip(then, now, strict=False)
                counts = f"{len(then)} files", f"{len(now)} files"
                then, now = next((pair for pair in pairs if pair[0] != pair[1]), counts)
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
    train = _together([result.train for result in done])
    validation = _together([result.validation for result in done])
    pictures: RowPictures | msgspec.UnsetType = msgspec.UNSET
    most = max(train.most_pictures, validation.most_pictures)
    if plan.pictures is not None and most:
        pictures = msgspec.structs.replace(plan.pictures, most=most)
    prepared = Contents(
        format=WITH_PICTURES if most else FORMAT,
        sequence_length=plan.sequence_length,
        row_bytes=recipe.records.nbytes,
        validation_fraction=recipe.validation_fraction,
        turn=plan.turn,
        ends=(end,) if taught and end is not None else (),
        pictures=pictures,
        tokenizer=plan.tokenizer,
        train=train,
        validation=validation,
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
    if not train.shards or not validation.shards:
        shutil.rmtree(scratch)  # Another fraction is another plan.
        sides = train.counts, validation.counts
        raise ConfigError(
            f"--validation-fraction = {prepared.validation_fraction:g} puts "
            f"{sides[0].documents} documents with {sides[0].rows} rows on the side to "
            f"train on, {sides[1].documents} with {sides[1].rows} on that to validate "
            f"on, and each needs one; give another fraction, or more documents"
        )
    for path in recipe.tokenizer.files:
        with naming(scratch):
            shutil.copyfile(path, scratch / kept_name(path))
    manifest = msgspec.json.format(msgspec.json.encode(prepared), indent=1)
    files.write_text(manifest.decode() + "\n", scratch / MANIFEST)
    sync_path(scratch)
    try:
        scratch.rename(out)
    except OSError as error:
        raise ConfigError(
            f"OUT: {scratch} is done and cannot be renamed to {out} "
            f"({error.strerror}); move away what is there, and give the same command "
            f"again"
        ) from error
    for path in (out / PLAN, out / LOCK):
        path.unlink()
    shutil.rmtree(out / "parts")
    for path in out.glob("*.tmp"):  # Of a command that was killed.
        path.unlink(missing_ok=True)
    sync_path(out)
    sync_path(out.parent)
    return prepared


def _together(splits: Sequence[Split]) -> Split:
    return Split(
        counts=sum((split.counts for split in splits), Counts()),
        shards=tuple(shard for split in splits for shard in split.shards),
        largest=max(split.largest for split in splits),
        pictures=sum(split.pictures for split in splits),
        with_pictures=sum(split.with_pictures for split in splits),
        most_pictures=max(split.most_pictures for split in splits),
        picture_bytes=sum(split.picture_bytes for split in splits),
        largest_picture=max(split.largest_picture for split in splits),
        kinds=_counted(sum((Counter(s.kinds) for s in splits), Counter[str]())),
    )


def _counted(kinds: Counter[str]) -> dict[str, int]:
    """Return the counts, the most frequent first, in one order whoever counted."""
    return dict(sorted(kinds.items(), key=lambda own: (-own[1], own[0])))


SAFE_PATH = "PYTHONSAFEPATH"


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Have children import what is installed, and nothing of the current folder."""
    given = SAFE_PATH in os.environ
    os.environ.setdefault(SAFE_PATH, "1")
    try:
        yield
    finally:
        if not given:
            del os.environ[SAFE_PATH]


@_safe_path()
def do_parts(
    folder: Path,
    sources: Sequence[SourceFile],
    parts: Sequence[Part],
    recipe: Recipe,
    workers: int,
    report: Report,
) -> None:
    """Do the parts that are not done; see `prepare`."""
    sizes = [sum(piece.nbytes for piece in part) for part in parts]
    left = [n for n in range(len(parts)) if not done_path(folder, n).exists()]
    total = sum(sizes)
    done = total - sum(sizes[n] for n in left)
    if workers == 1 or len(left) < 2:
        for number in left:
            ends = done + sizes[number]

            def read_more(nbytes: int, ends: int = ends) -> None:
                # Text of compressed files has more bytes than they.
                nonlocal done
                done = min(done + nbytes, ends)
                report(done / total)

            write_part(folder, number, sources, parts[number], recipe, read_more)
            read_more(ends - done)
        return
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(left)),
        multiprocessing.get_context("spawn"),
        _begin_worker,
        (folder, sources, recipe),
    ) as pool:
        try:
            waiting = {pool.submit(_do_part, n, parts[n]): n for n in left}
            for future in concurrent.futures.as_completed(waiting):
                future.result()
                done += sizes[waiting[future]]
                report(done / total)
        except BrokenProcessPool as error:
            raise ConfigError(
                f"--workers = {workers}: a worker ended, perhaps for want of memory; "
                f"give fewer, and the same command goes on in {folder}"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()


_work: tuple[Path, Sequence[SourceFile], Recipe]


def _begin_worker(*work: Any) -> None:
    """Make this process a worker: it leaves signals of the terminal to the command,
    and ends when that is gone."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Each worker has one core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    command = multiprocessing.parent_process()
    assert command is not None

    def watch() -> None:
        command.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _do_part(number: int, part: Part) -> None:
    folder, sources, recipe = _work
    write_part(folder, number, sources, part, recipe)


SUFFIX = ".arrayrecord"
OPTIONS = "group_size:1"
"""A record is read alone, since rows are drawn one by one."""
AT_ONCE = 256
"""Documents that a tokenizer gets together; with pictures, `PICTURES_AT_ONCE`."""


class PartDone(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a part; its file says that the part is whole."""

    train: Split
    validation: Split
    digests: tuple[str, ...]
    """Digests of what was read from each of its slices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Rules by which documents become rows, the same for every part."""

    tokenizer: Tokenizer
    reader: Reader
    sequence_length: int
    validation_fraction: float

    @property
    def records(self) -> RecordFormat:
        """The format of the records."""
        return RecordFormat(self.sequence_length, self.tokenizer.vocab_size)


def done_path(folder: Path, number: int) -> Path:
    """Return the path of the file that says that a part is done."""
    return folder / "parts" / f"{number:05}.json"


def write_part(
    folder: Path,
    number: int,
    sources: Sequence[SourceFile],
    part: Part,
    recipe: Recipe,
    read_more: Callable[[int], None] = lambda nbytes: None,
) -> PartDone:
    """Make a part's files in a folder, whole or not at all, and note that it is done.
    read_more: called with the bytes of learned text, some documents at a time.

    Raises ConfigError, naming file and place, for sources that cannot be read.
    """
    digests = [hashlib.sha256() for _ in part]
    sides: dict[str, list[Tokenised]] = {TRAIN: [], VALIDATION: []}
    counts = {TRAIN: Counts(), VALIDATION: Counts()}

    def documents() -> Iterator[Document]:
        for piece, digest in zip(part, digests, strict=True):
            source = sources[piece.source]
            for document in read(source, piece, recipe.reader):
                for span in document.example.spans:
                    digest.update(span.text.encode())
                for picture in document.example.pictures:
                    digest.update(hashlib.sha256(picture).digest())
                digest.update(b"\0")
                yield document

    with_pictures = recipe.reader.pictures is not None
    at_once = PICTURES_AT_ONCE if with_pictures else AT_ONCE
    # Until the rows are written: a part's pictures may be more than memory holds.
    with tempfile.TemporaryFile(dir=folder) if with_pictures else io.BytesIO() as kept:
        ahead = documents()
        while some := list(itertools.islice(ahead, at_once)):
            examples = [document.example for document in some]
            found = tokenise(examples, recipe.tokenizer, recipe.reader)
            for document, tokenised in zip(some, found, strict=True):
                held = is_validation(document.key, recipe.validation_fraction)
                side = VALIDATION if held else TRAIN
                spans = document.example.spans
                learned = sum(len(span.text.encode()) for span in spans if span.learned)
                counts[side] += Counts(
                    documents=1,
                    left_out=int(not learned),
                    text_bytes=learned,
                    chats=int(document.example.chat and learned > 0),
                    cut=document.example.cut,
                )
                if learned:
                    with naming(folder):
                        pictures = tuple(
                            (kept.tell(), kept.write(picture))
                            for picture in document.example.pictures
                        )
                    sides[side].append(tokenised._replace(pictures=pictures))
                read_more(learned)
        splits = {
            side: _write(
                folder, f"{side}-{number:05}{SUFFIX}", found, recipe, counts[side], kept
            )
            for side, found in sides.items()
        }
    done = PartDone(
        train=splits[TRAIN],
        validation=splits[VALIDATION],
        digests=tuple(digest.hexdigest()[:16] for digest in digests),
    )
    files.write_text(msgspec.json.encode(done).decode(), done_path(folder, number))
    return done


def _write(
    folder: Path,
    name: str,
    found: list[Tokenised],
    recipe: Recipe,
    counts: Counts,
    kept: IO[bytes],
) -> Split:
    """Write the rows of one side; a side without any has no file. kept: a file of their
    pictures."""
    from array_record.python.array_record_module import ArrayRecordWriter

    scratch = folder / f"{name}.{os.getpid()}.tmp"
    records, rows, tokens, predicted, largest = recipe.records, 0, 0, 0, 0
    pictures, kinds, sizes = Counter[int](), Counter[str](), [0]
    writer = None
    try:
        with naming(scratch):
            for row in pack(found, recipe.sequence_length, recipe.reader.pictures):
                writer = writer or ArrayRecordWriter(str(scratch), OPTIONS)
                parts = [(p.tokens, p.learned) for p in row]
                shown = []
                for start, size in (p for piece in row for p in piece.pictures):
                    kept.seek(start)
                    shown.append(kept.read(size))
                writer.write(records.encode(parts, shown))
                pictures[len(shown)] += 1
                kinds.update(map(kind_of, shown))
                sizes += map(len, shown)
                rows += 1
                tokens += sum(len(piece.tokens) for piece in row)
                largest = max(largest, *(int(piece.tokens.max()) for piece in row))
                predicted += sum(int(piece.learned[1:].sum()) for piece in row)
            if writer is None:
                return Split(counts=counts, shards=(), largest=0)
            writer.close()
            with scratch.open("rb") as file:
                os.fsync(file.fileno())
        shard: Shard = shard_of(scratch, name, rows)
        scratch.replace(folder / name)
    finally:
        scratch.unlink(missing_ok=True)
    more = Counts(rows=rows, tokens=tokens, predicted=predicted)
    return Split(
        counts=counts + more,
        shards=(shard,),
        largest=largest,
        pictures=sum(number * some for number, some in pictures.items()),
        with_pictures=rows - pictures[0],
        most_pictures=max(pictures),
        picture_bytes=sum(sizes),
        largest_picture=max(sizes),
        kinds=_counted(kinds),
    )


def pieces(
    document: Tokenised, sequence_length: int, pictures: RowPictures | None = None
) -> Iterator[Tokenised]:
    """Yield the pieces of a document, at most T + 1 tokens each. Leave out a piece of
    which no prediction counts.

    A piece begins with the last token of the one before. A cut that would be within a
    picture, or right behind it, is before it, since the token that follows is predicted
    from its last placeholder; the next piece then begins with the picture.
    """
    tokens, learned, kept = document
    begins, tokens_each, most = np.zeros(0, np.int64), 0, 0
    if pictures is not None and kept:
        tokens_each, most = pictures.tokens, pictures.most
        begins = np.flatnonzero(tokens == pictures.token)[::tokens_each]
    start = first = 0
    while start < len(tokens) - 1:
        stop = min(start + sequence_length + 1, len(tokens))
        ahead = int(np.searchsorted(begins, stop))
        if stop < len(tokens) and ahead and stop <= begins[ahead - 1] + tokens_each:
            ahead -= 1
            stop = int(begins[ahead])
        if ahead > first + most:
            ahead = first + most
            stop = int(begins[ahead])
        part = slice(start, stop)
        if learned[part][1:].any():
            yield Tokenised(tokens[part], learned[part], kept[first:ahead])
        before_picture = ahead < len(begins) and stop == begins[ahead]
        start, first = stop - (not before_picture), ahead
        if stop == len(tokens):
            return


def pack(
    documents: Iterable[Tokenised],
    sequence_length: int,
    pictures: RowPictures | None = None,
) -> Iterator[Sequence[Tokenised]]:
    """Yield the pieces of one row after the other.

    A piece that fills a row comes at once. All others come at the end: from the longest
    on, each is put into the fullest row with room for it, and for its pictures.
    """
    size, left = sequence_length + 1, list[Tokenised]()
    most = 0 if pictures is None else pictures.most
    for document in documents:
        for piece in pieces(document, sequence_length, pictures):
            if len(piece.tokens) == size:
                yield [piece]
            else:
                left.append(piece)
    left.sort(key=lambda piece: -len(piece.tokens))  # Stable, so it is repeatable.
    # Open rows by the number of their pictures, then by room, which ascends.
    open_rows = [dict[int, list[list[Tokenised]]]() for _ in range(most + 1)]
    rooms = [list[int]() for _ in range(most + 1)]
    for piece in left:
        need, more = len(piece.tokens), len(piece.pictures)
        fit = [
            (rooms[had][at], had, at)
            for had in range(most - more + 1)
            if (at := bisect.bisect_left(rooms[had], need)) < len(rooms[had])
        ]
        if not fit:
            row, room, had = [piece], size - need, 0
        else:
            room, had, at = min(fit)
            row = open_rows[had][room].pop()
            if not open_rows[had][room]:
                del open_rows[had][room], rooms[had][at]
            row.append(piece)
            room -= need
        if room < 2:  # Nothing is predicted in a single token.
            yield row
            continue
        if room not in open_rows[had + more]:
            open_rows[had + more][room] = []
            bisect.insort(rooms[had + more], room)
        open_rows[had + more][room].append(row)
    for number, each in enumerate(rooms):
        for room in each:
            yield from open_rows[number][room]
