"""The route by which a process computes merges: "native", functions in C, or "xla".

The source is compiled once per machine, at first use, into the user's cache folder;
that takes a C compiler and two seconds. Both routes make the same bits, and the native
one takes about a third of the time. What the native route lacks, such as rules of your
own, is always computed by the other one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from diloco_jax import files, machine
from diloco_jax.compilation import cache_home
from diloco_jax.config.placement import MergeRoute
from diloco_jax.core.kernels import FLAGS, SOURCES, Passes
from diloco_jax.errors import ConfigError

logger = logging.getLogger(__name__)

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
    cores = machine.cores()
    pool = ThreadPoolExecutor(cores, "diloco-merge-tiles")

    def each(function: Callable[[slice], Any], parts: Iterable[slice]) -> Iterable[Any]:
        """Work of one part, or of one core, goes without threads."""
        given = list(parts)
        return (map if 1 in (len(given), cores) else pool.map)(function, given)

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
    parts = [source.read_bytes() for source in SOURCES]
    parts += [" ".join((*FLAGS, *OF_THIS_MACHINE, platform.machine())).encode()]
    parts += [machine.instructions().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
