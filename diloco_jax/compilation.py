"""What is compiled once for all processes: XLA's programs, and the merges in C.

jax's persistent compilation cache has the programs. An entry is code that its readers
run, so a cache has one owner: the islands that a launch or `diloco run` starts share
one, and an island that is started by itself has its own.

Merges go by a route: "native", functions in C, or "xla". The source is compiled once
per machine, at first use, into the user's cache folder; that takes a C compiler and two
seconds. Both routes make the same bits, and the native one takes about a third of the
time. What the native route lacks, such as rules of your own, is always computed by the
other one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import platform
import shutil
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from diloco_jax import files, machine, run_files
from diloco_jax.config.placement import MergeRoute, Placement
from diloco_jax.errors import ConfigError
from diloco_jax.files import is_bucket, of_home

if TYPE_CHECKING:  # It imports jax, which commands that only start processes lack.
    from diloco_jax.core.tiles import Each, Passes

logger = logging.getLogger(__name__)

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
OF_ISLANDS = "islands/_jax-cache"
"""Folder of islands' caches below their checkpoints; no island has such a name."""
MAX_BYTES = 2 << 30
"""Bytes of our cache that a starting process keeps: the entries used last."""
ENTRY = "-cache"
"""Ending of an entry's name in jax."""
_OF_WRITES = (
    *("cache_key", "compile_time_secs", "module_name"),
    *("backend", "executable"),
)
"""First arguments of the function of jax that writes an entry."""
ASKED = "/jax/core/compile/backend_compile_duration"
READ = "/jax/compilation_cache/cache_hits"
"""jax's events of a program that is asked for, and of one that the cache has."""
_seen: Counter[str] = Counter()
"""How often this process saw each of jax's events."""


def of_user() -> Path | None:
    """Return the cache that a user's commands share on this machine; None if the user
    has no home, or one that belongs to somebody else."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else _ours()


def of_run(workdir: Path) -> Path:
    """Return the cache that belongs to a run's folder."""
    return workdir / run_files.CACHE


def of_island(placement: Placement, workdir: Path, name: str) -> str:
    """Return the cache of an island that shares it with no other."""
    if where := placement.islands_checkpoints:
        return f"{where}/{OF_ISLANDS}/{name}"
    return str(of_run(workdir))


def of_launch(placement: Placement) -> str:
    """Return the cache that the islands of a launch share; "" if they have no bucket
    for it."""
    where = placement.islands_checkpoints
    return f"{where}/{OF_ISLANDS}/_shared" if is_bucket(where) else ""


def use_cache(root: str | Path | None, kind: str = "") -> None:
    """Cache every compilation in `JAX_COMPILATION_CACHE_DIR`, or in this folder, which
    may be in a bucket; None: nowhere else.

    kind: name of a folder in it, for programs of one kind (`before_jax.programs_kind`).
    """
    import jax  # Late: a launcher that asks where the cache is needs no jax.

    settings: dict[str, int | str | None] = {
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # With a bound, jax looks at every entry before it writes one, under a lock
        # that all processes wait for: 0.2 s for each write with 2400 entries.
        "jax_compilation_cache_max_size": -1,
    }
    named = os.environ.get(VARIABLE, "")
    if named and not is_bucket(named):
        try:
            Path(named).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning(
                "%s = %s is not used: it is no folder (%s)", VARIABLE, named, error
            )
            named, settings["jax_compilation_cache_dir"] = "", None
    if root is not None and not named and (owners := _other_owners(str(root))):
        logger.warning(
            "%s is not used, since an entry is code: it or its folder belongs to user "
            "%s, and this is user %d; delete it, or give both to this user",
            root,
            " and ".join(map(str, sorted(owners))),
            os.getuid(),
        )
        root = None
    if named:
        root = named
    elif root is not None:
        folder = f"{root}/{kind}" if kind else str(root)
        settings["jax_compilation_cache_dir"] = folder
    if root is not None and not is_bucket(str(root)):
        # Others may share a folder that the user named: whole entries stay there.
        ours = not named or Path(named) == _ours()
        _tidy(Path(root), MAX_BYTES if ours else None)
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    if not is_bucket(str(root)):
        _have_every_host_write()
    _count()


def counted() -> str:
    """Return how many programs this process compiled since `use_cache`, and how many it
    read from the cache, for a log."""
    compiled = _seen[ASKED] - _seen[READ]
    return f"{compiled} programs compiled, {_seen[READ]} read from the cache"


def cache_home() -> Path:
    """Return the folder of all that a user's commands share on this machine, code among
    it; raise FileNotFoundError if the user has no home, PermissionError if it is
    another user's, as under a `sudo` that keeps HOME."""
    home = of_home("XDG_CACHE_HOME", "~/.cache") / "diloco_jax"
    if owners := _other_owners(str(home)):
        raise PermissionError(
            f"{home} or its folder belongs to user {' and '.join(map(str, owners))}, "
            f"and this is user {os.getuid()}. Set HOME or XDG_CACHE_HOME."
        )
    return home


@functools.cache
def _count() -> None:
    from jax import monitoring

    def see(event: str, *seconds: float, **about: Any) -> None:
        _seen[event] += 1

    monitoring.register_event_duration_secs_listener(see)
    monitoring.register_event_listener(see)


@functools.cache
def _have_every_host_write() -> None:
    """Have every host of an island write what it compiles, over an entry that it could
    not read.

    jax has host 0 alone write (https://github.com/jax-ml/jax/issues/18819), which does
    for a bucket: hosts of a TPU slice ask for the same entries. On disks of their own,
    and on CPUs, where each host's entries have other names, the others would compile
    everything at every start. So would all for a torn entry: jax writes none that is
    there.
    """
    import jax
    from jax._src import compilation_cache, compiler, distributed

    first_writes = getattr(compiler, "_cache_write", None)
    if first_writes is None or (
        tuple(inspect.signature(first_writes).parameters)[: len(_OF_WRITES)]
        != _OF_WRITES
    ):
        logger.warning(
            "this jax writes its cache in a way that is not known here: hosts other "
            "than an island's first compile anew at each start"
        )
        return

    def write(
        key: str, seconds: float, name: str, backend: Any, made: Any, *callbacks: Any
    ) -> None:
        with contextlib.suppress(OSError):
            folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
            entry = f"{folder}/{key}{ENTRY}"
            if os.stat(entry).st_mtime < time.time() - seconds:  # Not another's by now.
                os.unlink(entry)
        # Older versions of jax tell of callbacks, too.
        if not distributed.global_state.process_id or any(callbacks):
            first_writes(key, seconds, name, backend, made, *callbacks)
            return
        try:
            compilation_cache.put_executable_and_time(
                key, name, made, backend, int(seconds)
            )
        except OSError as error:
            logger.warning("%s is compiled, but not kept in the cache: %s", name, error)

    compiler._cache_write = write  # type: ignore[assignment]


def _ours() -> Path | None:
    """Return the cache's folder where the environment names none."""
    with contextlib.suppress(OSError):
        return cache_home() / "jax"
    return None


def _other_owners(root: str) -> set[int]:
    """Return the users that a cache of this machine, or the folder in which it lies,
    belongs to, but for this one and the superuser."""
    owners: set[int] = set()
    for folder in () if is_bucket(root) else (Path(root), Path(root).parent):
        with contextlib.suppress(OSError):  # It is not there, or nobody's to read.
            owners.add(folder.stat().st_uid)
    return owners - {os.getuid(), 0}


def _tidy(folder: Path, max_bytes: int | None) -> None:
    """Remove empty entries and, above `max_bytes`, those unused for longest, here and
    in the folders of kinds.

    The writer of an empty entry was killed, and jax never writes an entry that exists.
    Other files stay, and so do files that this process may not remove.

    Another process may be about to fill an empty entry, or to read one that is removed:
    it then compiles again. An entry that is only partly written is compiled again as
    well, with a warning from jax.
    """
    entries = []
    for inside, kinds, names in os.walk(folder):
        if inside != str(folder):
            kinds.clear()  # No deeper.
        for name in names:
            if not name.endswith(ENTRY):
                continue
            with contextlib.suppress(FileNotFoundError):
                stat = os.lstat(path := f"{inside}/{name}")
                used = max(stat.st_atime, stat.st_mtime)
                entries.append((used if stat.st_size else 0.0, path, stat.st_size))
    kept = 0
    for used, path, size in sorted(entries, reverse=True):
        kept += size
        if not used or (max_bytes is not None and kept > max_bytes):
            with contextlib.suppress(OSError):
                os.unlink(path)


Route = Literal["native", "xla"]

COMPILERS = ("cc", "gcc", "clang")
OF_THIS_MACHINE = ("-march=native", "-shared", "-fPIC")
COMPILE_S = 120.0
"""Seconds after which the compiler is given up."""
TOLD = 300
"""Characters of what a compiler says that an error repeats."""


class NativeError(Exception):
    """The native route is not available here; the text says why."""


def passes_of(setting: MergeRoute) -> Passes | None:
    """Return the passes of the native route; None for the route "xla".

    setting: `placement.merge_route`. "auto": "native" or, where it is not available,
    "xla" with a warning.

    Raises:
      ConfigError: "native", and it is not available.
    """
    if setting == "xla":
        return None
    try:
        return _passes()
    except NativeError as error:
        if setting == "native":
            raise ConfigError(
                f'placement.merge_route = "native", and merges go by "xla" here: '
                f'{error}; install a C compiler, or choose "auto" or "xla"'
            ) from error
        logger.warning(
            'merges go by the route "xla", which takes about three times the CPU of '
            '"native" (placement.merge_route = "auto"): %s',
            error,
        )
        return None


def require(setting: MergeRoute) -> None:
    """Raise ConfigError if the config asks for the native route and it is not
    available.

    Call it before a run makes any file.
    """
    if setting == "native":
        passes_of(setting)


def route_of(passes: Passes | None) -> Route:
    """Return the name of the route, for the tape."""
    return "xla" if passes is None else "native"


@functools.cache
def _passes() -> Passes:
    """Load the library; compile it if it is not there, or cannot be loaded because a
    machine stopped while it was written. Raises NativeError."""
    from diloco_jax.core.tiles import Passes

    cores = machine.cores()
    pool = ThreadPoolExecutor(cores, "diloco-merge-tiles")
    each: Each = map if cores == 1 else pool.map

    try:
        path = cache_home() / "merge" / f"{_key()}.so"
        with contextlib.suppress(OSError):
            return Passes(path, each)
        _compile(path)
        return Passes(path, each)
    except OSError as error:
        raise NativeError(f"{error}") from error


def _compile(path: Path) -> None:
    """Compile the source to this path. Raises NativeError, OSError."""
    from diloco_jax.core.tiles import FLAGS, SOURCES

    named = os.environ.get("CC")
    found = [c for c in ((named,) if named else COMPILERS) if shutil.which(c)]
    if not found:
        raise NativeError(
            f"no C compiler: none of {', '.join((named,) if named else COMPILERS)} is "
            f"installed"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [found[0], *FLAGS, *OF_THIS_MACHINE, str(SOURCES[0]), "-o"]
    try:
        with files.whole(path) as scratch:
            subprocess.run(
                [*command, str(scratch)],
                capture_output=True,
                text=True,
                check=True,
                timeout=COMPILE_S,
            )
    except subprocess.TimeoutExpired as error:
        raise NativeError(f"{found[0]} took more than {COMPILE_S:g} s") from error
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())[:TOLD]
        raise NativeError(f"{found[0]} refused the source: {said}") from error
    logger.info("compiled the native route of merges into %s", path)


def _key() -> str:
    """Return a name that changes with the source, the flags and the processor."""
    from diloco_jax.core.tiles import FLAGS, SOURCES

    parts = [source.read_bytes() for source in SOURCES]
    parts += [" ".join((*FLAGS, *OF_THIS_MACHINE, platform.machine())).encode()]
    parts += [machine.instructions().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
