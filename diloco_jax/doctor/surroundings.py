"""Look for what is around a run and not of it: variables, folders, limits, names."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from diloco_jax import files, machine, shell_variables
from diloco_jax.doctor.finding import Finding, note, problem, refused
from diloco_jax.errors import ConfigError
from diloco_jax.wire.addresses import is_loopback

HOMES = {"XDG_CACHE_HOME": "~/.cache", "XDG_STATE_HOME": "~/.local/state"}
LONGEST_TMP = 84
"""Characters of a folder in which workers can have their sockets."""
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


def check_surroundings(folder: Path) -> Iterator[Finding]:
    """Yield what commands could stumble over. folder: of runs."""
    for what, (look, wrong, remedy) in LOOKS.items():
        try:
            if found := ", ".join(look(folder) or ()):
                yield note(what, f"{found}: {wrong}", remedy)
        except ConfigError as error:
            yield refused(what, error)
        except OSError as error:
            of_names = isinstance(error, socket.gaierror)
            yield (note if of_names else problem)(what, str(error), remedy)


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _homes(folder: Path) -> Iterable[str]:
    for name, default in HOMES.items():
        path = os.environ.get(name) or os.path.expanduser(default)
        if path[0] == "~" or not os.access(existing(Path(path)), os.W_OK):
            yield path


def _name(folder: Path) -> Iterable[str]:
    address = socket.gethostbyname(name := socket.gethostname())
    return [f"{name} is {address}"] if is_loopback(address) else []


def _locks(folder: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=existing(folder)) as file:
        files.lock(file, Path(file.name))


Look = Callable[[Path], Iterable[str] | None]
LOOKS: dict[str, tuple[Look, str, str]] = {
    "home": (
        _homes,
        "no file can be kept there",
        "set HOME, or XDG_CACHE_HOME and XDG_STATE_HOME, to folders to write to",
    ),
    "temporary": (
        lambda _: [d for d in [tempfile.gettempdir()] if len(d) > LONGEST_TMP],
        "too long for sockets",
        f"set TMPDIR to a folder to write to, of {LONGEST_TMP} characters at most",
    ),
    "proxies": (
        lambda _: [f"{n}={v}" for n, v in os.environ.items() if n.lower() in PROXIES],
        "machines of a run dial each other without them",
        "name those machines in no_proxy, if connections fail",
    ),
    "name": (
        _name,
        "no other machine reaches that",
        "write this machine's own address and its name into /etc/hosts",
    ),
    "modules": (
        lambda _: {p.stem for p in Path().glob("*.py")} & sys.stdlib_module_names,
        "Python has modules of these names, and the current folder, too",
        "rename those files, or work in another folder",
    ),
    "variables": (
        lambda _: [f"{n}={v}" for n, v in shell_variables.set_right.items()],
        "commands of diloco do not heed them",
        "unset them, if that surprises",
    ),
    "threads": (lambda _: machine.require_threads(2), "", ""),
    "locks": (_locks, "", "give a folder to write to, as --folder"),
}
"""Looks: the function that finds what is unusual, why that matters, the remedy."""
