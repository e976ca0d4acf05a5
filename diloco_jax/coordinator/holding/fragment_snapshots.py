"""Fragments on a holder's disk: publishes, snapshots by turns, and kept cycles.

There is a file for each publish, the encoded change from one version to the next. A
merge is *prepared* once its publish is whole on disk, and *committed* by its small
record in the log. A file without a record belongs to a merge that never was, and the
next start deletes it. A record without its file is damage. The files of a fragment go
back to its oldest snapshot, so that each snapshot can be advanced to the present.

A round of all takes `placement.snapshot_every_s`, or longer, so that writing takes at
most a part of the disk's time. Only versions that the lead has committed are in the
store, so each snapshot is of one; publishes that it makes superfluous are deleted.

After a crash a holder makes its fragments of them and the publishes, each by itself
(`restored`); for a new run it makes them of parameters (`load_first`).

A kept cycle is the global parameters of one cycle as a folder of the workdir.
`exports/cycle-N` has a sealed file for each fragment, cycle.json, and the small files
of the weights that the run started from. It gets its name when all of it is on disk.
"""

from __future__ import annotations

import errno
import functools
import logging
import mmap
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from etils.epath import Path as Folder
from rich.console import Console

from diloco_jax import compilation, files, run_files
from diloco_jax.config import Config, Placement
from diloco_jax.coordinator import journal as durable
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.snapshots import (
    Arrays,
    Snapshots,
    SnapshotWriter,
    flat,
    fragment_path,
    versions,
)
from diloco_jax.core.fragments import Buffer, FragmentPlan, Params, get_piece
from diloco_jax.core.tiles import Empty
from diloco_jax.files import is_bucket, sync_path, write_json
from diloco_jax.observability.terminal import bar
from diloco_jax.protocol.holding import (
    Committed,
    CycleKept,
    FromHolder,
    HolderTroubled,
    KeepFragment,
    RestoredFragment,
)
from diloco_jax.protocol.messages import FIRST_VERSION, Prepared, Version
from diloco_jax.wire.errors import Busy, Refused, WireError
from diloco_jax.wire.peers import DaemonPool

logger = logging.getLogger(__name__)


SPARED_BYTES = 64 << 20
"""Bytes that publishes and snapshots leave free on their disk, so that the small
records of log and tape can still be written."""
READ_VALUES = 16 << 20
"""Values of a snapshot that are read before it is asked whether anyone wants more."""


class Publishes:
    """The publishes of one run. Each file is written once, by any thread."""

    def __init__(self, folder: Path, fragments: Iterable[int] | None = None) -> None:
        """Open the folder, and make it if it is missing. fragments: those that are
        written here, if not all are; others' files are left alone."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        files.sync_path(folder.parent)
        torn, own = f"*{files.TEMPORARY}", [folder]
        if fragments is not None:
            own = [self.path(f, Version()).parent for f in fragments]
        for path in [path for below in own for path in below.rglob(torn)]:
            path.unlink()

    def write(
        self,
        fragment: int,
        version: Version,
        payload: Buffer,
        *,
        final: bool,
        unused: Mapping[int, bytes] = MappingProxyType({}),
    ) -> Prepared:
        """Write a publish; it is on disk when this returns. final: it belongs to the
        flush. unused: `MergeResult.unused`. Raises OSError if the disk is full."""
        path = self.path(fragment, version)
        if not path.parent.is_dir():
            path.parent.mkdir(exist_ok=True)
            files.sync_path(self._folder)
        require_space(self._folder, len(payload))
        header = {
            "fragment": fragment,
            "version": list(version),
            "final": final,
            "bytes": len(payload),
            "unused": {number: bits.hex() for number, bits in unused.items()},
        }
        digest = files.write_sealed(path, header, [payload])
        return Prepared(digest=digest, payload_bytes=len(payload))

    def read(
        self,
        fragment: int,
        version: Version,
        wanted: str | None,
        empty: Empty = np.empty,
    ) -> tuple[Buffer, dict[str, Any]]:
        """Return a publish, and of its header what `Store.replay` needs besides.
        wanted: its digest, if the log still has the record. empty: makes its memory.
        Raises DurableError if the file is missing or is not what the record says."""
        path = self.path(fragment, version)
        made = []

        def make(header: dict[str, Any]) -> npt.NDArray[Any]:
            made.append(empty((header["bytes"],), np.uint8))
            return made[0]

        try:
            header, found = files.read_sealed(path, make)
        except files.SealedError as error:
            raise _damaged(fragment, version, str(error)) from error
        if wanted is not None and found != wanted:
            what = f"{path} has digest {found}, its record says {wanted}"
            raise _damaged(fragment, version, what)
        noted = header.get("unused", {})
        unused = {int(number): bytes.fromhex(bits) for number, bits in noted.items()}
        return made[0].data, {"final": bool(header["final"]), "unused": unused}

    def require(self, fragment: int, version: Version) -> None:
        """Raise DurableError unless a committed publish is there, by its header."""
        try:
            files.read_sealed_header(self.path(fragment, version))
        except files.SealedError as error:
            raise _damaged(fragment, version, str(error)) from error

    def mapped(self, fragment: int, version: Version) -> Buffer | None:
        """Return a publish as mapped from the disk; None if it was deleted since it was
        read or written, or was cut off.
        """
        path = self.path(fragment, version)
        try:
            header, found = files.map_sealed(path)
        except files.SealedError:
            return None
        if len(found) != header["bytes"]:
            logger.error(
                "%s has %d bytes of %d: it is not served, and islands fetch the whole "
                "fragment; look at that disk",
                path,
                len(found),
                header["bytes"],
            )
            return None
        return found

    def versions(self, fragment: int) -> list[Version]:
        """Return the versions that are on disk, oldest first."""
        found = self.path(fragment, Version()).parent.glob("*.publish")
        return sorted(Version.named(path.stem) for path in found)

    def forget(self, fragment: int, through: Version) -> None:
        """Delete the publishes up to a version: that of the oldest kept snapshot."""
        for version in self.versions(fragment):
            if version <= through:
                self.path(fragment, version).unlink()

    def discard(self, committed: Mapping[int, Version]) -> int:
        """Delete publishes above the committed versions, by fragment: their merges
        were prepared and never committed. Return their number."""
        count = 0
        for fragment, newest in committed.items():
            for version in self.versions(fragment):
                if version > newest:
                    self.path(fragment, version).unlink()
                    count += 1
        return count

    def path(self, fragment: int, version: Version) -> Path:
        """Return the path of a publish."""
        return self._folder / f"{fragment:05d}" / f"{version.name}.publish"


def require_space(folder: Path, nbytes: int) -> None:
    """Raise OSError unless the disk of a folder has room for `nbytes` beside
    `SPARED_BYTES`.

    The error names the folder, the bytes that are needed and the free ones.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes + SPARED_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"{nbytes + SPARED_BYTES:,} bytes are needed and {free:,} are free",
            str(folder),
        )


def _damaged(fragment: int, version: Version, what: str) -> durable.DurableError:
    return durable.DurableError(
        f"the publish of fragment {fragment}, version {tuple(version)}, was committed "
        f"and cannot be read: {what}; restore the workdir from a copy"
    )


WRITE_AGAIN_S = 2.0
"""Pause before what could not be written is tried again, in seconds."""
T = TypeVar("T")


def repeat(
    write: Callable[[], T],
    trouble: Callable[[OSError], str],
    ends: Callable[[float], bool],
    tell: Callable[[HolderTroubled], None],
) -> T | None:
    """Return the result of a write, which is repeated while it raises OSError.

    trouble: says to people what is wrong, once; raises an error to give up. ends:
    pauses for some seconds; True: nobody wants it any more, and None is returned.
    """
    told = False
    while True:
        try:
            return write()
        except OSError as error:
            text = trouble(error)
            if not told:
                tell(HolderTroubled(text=text))
            told = True
        if ends(WRITE_AGAIN_S):
            return None


class FragmentSnapshots(Snapshots):
    """Snapshots of the fragments of one run."""

    def __init__(
        self,
        folder: Folder,
        placement: Placement,
        fragments: Sequence[int],
        whose: dict[str, Any],
    ) -> None:
        """fragments: those that are written here; others' files are left alone. See
        `Snapshots`."""
        super().__init__(folder, placement, whose)
        self.fragments = tuple(fragments)
        self._versions = {f: versions(folder, f) for f in fragments}
        for fragment in fragments:
            self._remove_torn(fragment_path(folder, fragment, Version()).parent)
        self.lost: set[int] = set()
        """Fragments without arrays, which are not written."""
        self.away: set[int] = set()
        """Fragments that are being restored, which are not written either."""
        self._next = 0
        """Place in `fragments` of the next one."""
        turns = len(fragments)
        self.writer = SnapshotWriter(
            folder, placement.snapshot_every_s, turns, "folder of publishes"
        )

    def require_here(self, fragment: int) -> None:
        """Raise Busy for a fragment that is lost, or being restored."""
        if fragment in self.away:
            raise Busy(f"fragment {fragment} is being restored here; come again")
        if fragment in self.lost:
            raise Busy(
                f"fragment {fragment} was lost here, and is gathered from islands; "
                f"come again"
            )

    def require_no_delta(self, fragment: int) -> None:
        """Raise Refused for a fragment that is lost. No delta that islands have now can
        enter its next term, and anchors must not wait for them."""
        if fragment in self.lost:
            raise Refused(
                "lost",
                f"fragment {fragment} was lost here, and begins a new term; the "
                f"coordinator asks for deltas in that term",
            )

    def find(
        self,
        fragment: int,
        through: Version,
        into: Arrays | None = None,
        ended: Callable[[], bool] = lambda: False,
    ) -> Version:
        """Return the version of a fragment's newest snapshot of which the header can be
        read; with arrays, of which all can be read, into them.

        Remove those after it then: torn ones, and those beyond the committed version,
        whose numbers other merges will have. Its later publishes must be there: they
        are kept from the oldest snapshot on.

        through: the committed version. Raises ConfigError: no snapshot can be read, or
        it is of another run; CancelledError: `ended`.
        """
        known = [v for v in self._versions[fragment] if v <= through]
        failure = f"there is none up to version {tuple(through)}"
        for version in reversed(known):
            path = fragment_path(self._folder, fragment, version)
            try:
                parts = None if into is None else _until(ended, flat(into))
                header = self._read(path, parts)
            except files.SealedError as error:
                failure = str(error)
                if into is not None:
                    logger.warning("%s; the one before it is tried", error)
                continue
            self._refuse_other(version.number, header)
            own = self._versions[fragment]
            for unfit in own[own.index(version) + 1 :] if into is not None else ():
                self._remove(fragment_path(self._folder, fragment, unfit))
                own.remove(unfit)
            return version
        raise files.SealedError(
            f"fragment {fragment} cannot be loaded from the snapshots in "
            f"{self._folder}: {failure}; restore the folder from a copy"
        )

    def save(self, fragment: int, version: Version, arrays: Arrays) -> None:
        """Write a snapshot of a fragment; it is durable when this returns."""
        path = fragment_path(self._folder, fragment, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffers = flat(arrays)
        if not is_bucket(str(self._folder)):
            require_space(Path(self._folder), sum(buffer.nbytes for buffer in buffers))
        facts = {**self._whose, "fragment": fragment, "version": list(version)}
        files.write_sealed(path, facts, buffers)
        of_version = functools.partial(fragment_path, self._folder, fragment)
        known = [*self._versions[fragment], version]
        self._versions[fragment] = self._without_old(known, of_version)

    def save_first(self, fragment: int, version: Version, arrays: Arrays) -> None:
        """Write the first snapshot of a fragment in a run or a term; remove all
        others."""
        for old in self._versions[fragment]:
            self._remove(fragment_path(self._folder, fragment, old))
        self._versions[fragment] = []
        self.save(fragment, version, arrays)

    def begin(
        self, fragment: int, version: Version, arrays: Arrays, publishes: Publishes
    ) -> None:
        """Write the first snapshot of a fragment in a run or a term; delete all its
        older ones, and its publishes.

        Raises OSError if the disk is full, ConfigError if a bucket refuses a snapshot,
        and StorageAway if it does not answer.
        """
        with self.beginning():
            self.save_first(fragment, version, arrays)
        publishes.discard({fragment: FIRST_VERSION})

    def write_due(self, now: float, store: Store, publishes: Publishes) -> None:
        """Begin to write the fragment whose turn it is, if it is time for one."""
        if not self.writer.due(now):
            return
        for fragment in self._unsaved(store)[:1]:
            self._next = (self.fragments.index(fragment) + 1) % len(self.fragments)
            self.writer.write(now, self._writes(fragment, store, publishes))

    def write_last(
        self, within_s: float | None, store: Store, publishes: Publishes
    ) -> None:
        """Write every fragment whose version is in no snapshot yet; it is durable when
        this returns. within_s: seconds after which no other fragment is begun: its
        publishes are on disk, and a restart goes on from them."""
        began, unsaved = time.monotonic(), self._unsaved(store)
        for written, fragment in enumerate(unsaved):
            if within_s is not None and time.monotonic() - began >= within_s:
                logger.info(
                    "%d of %d fragments are in no snapshot of their newest version: "
                    "they go on from what was published of them",
                    len(unsaved) - written,
                    len(self.fragments),
                )
                return
            self._writes(fragment, store, publishes)()

    def _unsaved(self, store: Store) -> list[int]:
        """Return the fragments whose current version no snapshot has, in the order of
        turns."""
        current = store.versions()
        turns = self.fragments[self._next :] + self.fragments[: self._next]
        return [
            f
            for f in turns
            if f not in self.lost | self.away and self._versions[f][-1:] != [current[f]]
        ]

    def _writes(
        self, fragment: int, store: Store, publishes: Publishes
    ) -> Callable[[], None]:
        """Return a function that writes a fragment as it is now, then deletes the
        publishes that are superfluous."""
        version, arrays = store.current(fragment)

        def save() -> None:
            self.save(fragment, version, arrays)
            publishes.forget(fragment, self._versions[fragment][-self._keep :][0])

        return save


def make_store(config: Config, plan: FragmentPlan) -> Store:
    """Return the store of a coordinator's holder, without arrays; see `Store`."""
    placement = config.placement
    passes = compilation.passes_of(placement.merge_route)
    return Store(config.run, plan, None, placement.deadlines.reunion_s, passes)


def _until(ended: Callable[[], bool], arrays: list[Any]) -> Iterator[Any]:
    """Yield the arrays in parts, to be read into. Raises CancelledError: `ended`."""
    for values in (array.ravel() for array in arrays):
        for start in range(0, values.size, READ_VALUES):
            if ended():
                raise CancelledError
            yield values[start : start + READ_VALUES]


def load_first(store: Store, params: Params, fragments: Sequence[int]) -> None:
    """Load the first parameters of these fragments. Most are drawn or read here, by all
    cores and a piece at a time, which the progress shows."""

    def load(fragment: int) -> None:
        pieces = store.plan.fragments[fragment]
        values = map(functools.partial(get_piece, params), pieces)
        store.load(fragment, store.first(fragment, values), Version())

    with (
        bar(Console(stderr=True), "drawing or reading the first parameters") as report,
        ThreadPoolExecutor() as pool,
    ):
        for done, _ in enumerate(pool.map(load, fragments), start=1):
            report(done / len(fragments))


def require(
    committed: Committed, snapshots: FragmentSnapshots, publishes: Publishes
) -> Version:
    """Return the version of the snapshot from which a fragment can be restored, as far
    as the names and headers of its files tell.

    Raises SealedError or DurableError if it is lost: no snapshot reads, or a committed
    publish is missing; ConfigError for a snapshot of another run, and StorageAway if a
    bucket does not answer.
    """
    fragment, through = committed.fragment, committed.version
    version = begin = snapshots.find(fragment, through)
    if begin.term != through.term:
        raise durable.DurableError(
            f"the newest snapshot of fragment {fragment} is of version {tuple(begin)}, "
            f"the log is at {tuple(through)}: it is of another term; restore the "
            f"workdir from a copy"
        )
    while version < through:
        version = version.next()
        publishes.require(fragment, version)
    return begin


def restored(
    committed: Committed,
    store: Store,
    snapshots: FragmentSnapshots,
    publishes: Publishes,
    ended: Callable[[], bool] = lambda: False,
) -> RestoredFragment | None:
    """Bring a fragment to the version that the lead's log has committed: load its
    newest snapshot that can be read, and apply its later publishes. None: `ended`.
    Raises as `require` does, which comes first.
    """
    fragment, through = committed.fragment, committed.version
    if ended():
        return None
    arrays = store.room(fragment)
    try:
        version = begin = snapshots.find(fragment, through, arrays, ended)
    except CancelledError:
        return None
    store.load(fragment, arrays, begin)
    arrays.clear()  # The store has them, and frees those that a publish replaces.
    moved = False
    while version < through:
        if ended():
            return None
        version = version.next()
        payload, how = publishes.read(
            fragment, version, committed.digests.get(version.number), store.empty
        )
        store.replay(fragment, version, payload, digested=version == through, **how)
        store.put_aside(fragment, publishes.mapped)
        moved |= not how["final"]
    if untouched := moved and not store.infers_momentum:
        logger.warning(
            "the momentum of the outer optimizer is that of fragment %d's snapshot: it "
            "cannot be inferred from the changes that were published since",
            fragment,
        )
    return RestoredFragment(
        fragment=fragment,
        version=through,
        snapshot=begin,
        momentum_untouched=untouched,
        digest=store.digest_of(fragment),
    )


NAME, TEMPORARY = "cycle-", ".tmp"
CYCLE_FACTS = "cycle.json"
KEPT_SUFFIX = ".fragment"

Tell = Callable[[FromHolder], None]
Theta = Callable[[], list[Any]]
"""Returns the arrays of a fragment, on the writer's thread; a worker's are fetched."""


class KeptCycles:
    """The kept cycles of one run. They are written on a thread of their own, one at a
    time; a fragment's arrays are held until they are on disk."""

    def __init__(
        self, workdir: Path, keep: int, whose: dict[str, Any], sizes: Sequence[int]
    ) -> None:
        """keep: newest cycles that are kept. whose: facts of the run, see `checkpoint`.
        sizes: parameters by fragment."""
        self._folder = workdir / run_files.KEPT
        self._source = workdir / run_files.SOURCE
        self._keep, self._whose, self._sizes = keep, whose, sizes
        # A coordinator that has ended must not stay for a disk that hangs.
        self._writer = DaemonPool(1, "diloco-keep")
        self._cycle, self._given_up = -1, False
        """The cycle that is being written."""
        self._written: dict[int, KeepFragment] = {}
        """Its fragments that are on disk."""
        self._remove_torn()

    def keep(
        self,
        keep: KeepFragment,
        theta: Theta,
        tell: Tell,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a fragment of a cycle, later; after its last one the lead is told, on
        the writer's thread, that the cycle is kept or given up. done: called there once
        nobody needs the fragment any more."""

        def write() -> None:
            try:
                self._write(keep, theta, tell)
            finally:
                done()

        self._writer.submit(write)

    def numbers(self) -> list[int]:
        """Return the cycles that are kept, oldest first."""
        return cycle_numbers(self._folder)

    def files(self, cycle: int) -> list[str]:
        """Return the names of a kept cycle's files, below its folder."""
        folder = cycle_path(self._folder, cycle)
        found = (path for path in folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(folder)) for path in found)

    def path(self, cycle: int, name: str) -> Path | None:
        """Return the path of one of the files; None if there is no such file."""
        if cycle not in self.numbers() or name not in self.files(cycle):
            return None
        return cycle_path(self._folder, cycle) / name

    def close(self, patience_s: float) -> None:
        """Accept no more fragments, and wait at most `patience_s` for those under
        way.
        """
        self._writer.close(patience_s)

    def _write(self, keep: KeepFragment, theta: Theta, tell: Tell) -> None:
        if keep.cycle > self._cycle:
            self._remove_torn()
            self._cycle, self._given_up, self._written = keep.cycle, False, {}
        if self._given_up or keep.cycle < self._cycle:
            return
        scratch = cycle_path(self._folder, keep.cycle, TEMPORARY)
        try:
            self._write_fragment(scratch, keep, theta)
            self._written[keep.fragment] = keep
            if len(self._written) < len(self._sizes):
                return
            self._finish(scratch)
        except Exception as error:
            # Not the run's business: it goes on, and somebody is told.
            self._given_up = True
            shutil.rmtree(scratch, ignore_errors=True)
            if isinstance(error, WireError):
                why = f"fragment {keep.fragment} did not come from its worker: {error}"
            else:
                where = f"{self._folder} ({error})"
                why = f"it cannot be written to {where}; free some space there"
            logger.error("cycle %d is not kept: %s", keep.cycle, why)
            tell(HolderTroubled(text=f"cycle {keep.cycle} is not kept: {why}"))
        else:
            logger.info("cycle %d is kept", keep.cycle)
        tell(CycleKept(cycle=keep.cycle))

    def _write_fragment(self, scratch: Path, keep: KeepFragment, theta: Theta) -> None:
        arrays = [np.asarray(array) for array in theta()]
        scratch.mkdir(parents=True, exist_ok=True)
        require_space(scratch, sum(array.nbytes for array in arrays))
        facts = {
            **self._whose,
            "cycle": keep.cycle,
            "fragment": keep.fragment,
            "version": list(keep.version),
        }
        files.write_sealed(scratch / kept_name(keep.fragment), facts, arrays)

    def _finish(self, scratch: Path) -> None:
        if self._source.is_dir():
            (scratch / run_files.SOURCE).mkdir(exist_ok=True)
            for path in self._source.iterdir():
                shutil.copyfile(path, scratch / run_files.SOURCE / path.name)
        kept = self._written.values()
        tokens = sum(k.tokens * self._sizes[k.fragment] for k in kept)
        facts = {
            **self._whose,
            "cycle": self._cycle,
            "merges": sum(k.merges for k in kept),
            "tokens": tokens // sum(self._sizes),
        }
        write_json(facts, scratch / CYCLE_FACTS)
        final = cycle_path(self._folder, self._cycle)
        if final.exists():  # After a crash ticks, and with them cycles, go on later.
            shutil.rmtree(final)
        scratch.rename(final)
        sync_path(self._folder)
        for old in self.numbers()[: -self._keep]:
            shutil.rmtree(cycle_path(self._folder, old), ignore_errors=True)

    def _remove_torn(self) -> None:
        for torn in self._folder.glob(f"{NAME}*{TEMPORARY}"):
            shutil.rmtree(torn, ignore_errors=True)


def cycle_numbers(folder: Path) -> list[int]:
    """Return the cycles that are kept in a folder, oldest first."""
    names = (path.name.removeprefix(NAME) for path in folder.glob(f"{NAME}*"))
    return sorted(int(name) for name in names if name.isdecimal())


def cycle_path(folder: Path, cycle: int, suffix: str = "") -> Path:
    """Return the folder of a cycle. suffix: of one that is not whole."""
    return folder / f"{NAME}{cycle:06d}{suffix}"


def kept_name(fragment: int) -> str:
    """Return the name of a fragment's file."""
    return f"{fragment:05d}{KEPT_SUFFIX}"


def mapped(path: Path) -> memoryview:
    """Map a file; its bytes stay readable after the file is deleted."""
    if not path.stat().st_size:
        return memoryview(b"")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def describe_cycles(cycles: Iterable[int]) -> str:
    """Return the numbers of cycles for people."""
    return ", ".join(map(str, cycles)) or "none"
