"""Members of the open families: codecs, merge rules, outer optimizers and the like.

A family is a table of names. A member outside the table is named by its location,
"package.module:name" or "path/to/file.py:name". A member is imported only on demand,
so a config can be read, and refused, without loading JAX.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

M = TypeVar("M")

MAIN = "__main__:"
"""Beginning of the location of what this process's own script or notebook defines."""
PATH = "DILOCO_PATH"
"""Variable with the folders from which the process that started this one imports."""


@dataclasses.dataclass(frozen=True, eq=False)
class Family(Generic[M]):
    """The members of one family, of type `M`."""

    kind: str
    """Word for a member in messages: "codec"."""
    table: Mapping[str, str]
    """Location of each bundled member, by name: "package.module:name"."""
    checker: str
    """Location of the function that tries an outside member on a tiny piece, and raises
    an error if it is unfit. Bundled members have tests instead."""
    otherwise: str = ""
    """Location of the function that makes a member from a name outside the table."""

    def find(self, name: str) -> M:
        """Return the member with that name.

        Raises:
          ValueError: no member has it, or its file cannot be executed.
        """
        # A cell may be executed again, with another definition.
        own = name.startswith(MAIN)
        return cast(M, load(name) if own else _find(self, name))

    def check(self, name: str) -> None:
        """Try the named member on a tiny piece, unless it is one of the package.

        Raises:
          ValueError: no member has that name, or it is unfit; names the line at fault.
        """
        if name in self.table:
            return
        member = self.find(name)
        try:
            load(self.checker)(member)
        except Exception as error:
            where = (_line(error, name) or _defined(member)) if ":" in name else ""
            remedy = (
                "; it is a class: name an instance" if inspect.isclass(member) else ""
            )
            raise ValueError(f"{where}{said(error)}{remedy}") from error


@functools.cache
def _find(family: Family[Any], name: str) -> Any:
    if name in family.table:
        return load(family.table[name])
    if ":" in name:
        return load(name)
    if family.otherwise:
        return load(family.otherwise)(name)
    raise ValueError(
        f"no {family.kind} {name!r}{suggest(name, family.table)}; choose from "
        f"{', '.join(family.table)}, or name your own as 'path/to/file.py:name', or "
        f"of a notebook, to emulate it, as '__main__:name'"
    )


def load(reference: str) -> Any:
    """Import the object named by "package.module:name" or "path/to/file.py:name".

    Raises:
      ValueError: module, file or name is missing, or the file cannot be executed.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ValueError(
            "it names nothing; write 'package.module:name' or 'path/to/file.py:name'"
        )
    module = _execute(_file(place)) if place.endswith(".py") else _import(place, name)
    if not hasattr(module, name):
        known = [other for other in vars(module) if not other.startswith("_")]
        raise ValueError(f"{place} has no {name!r}{suggest(name, known)}")
    return getattr(module, name)


_stamps: dict[Path, tuple[int, int]] = {}
"""Time and length of files that were looked at."""


def refresh(reference: str) -> tuple[int, int] | None:
    """Have a file that has changed since be executed again, as in a notebook; what it
    imports is not. Return its time and length; None if there is no file.

    No more than a config's validation calls this: a run keeps what it began with."""
    path = Path(os.path.expanduser(reference.rpartition(":")[0])).absolute()
    try:
        found = path.stat()
    except OSError:
        return None
    stamp = found.st_mtime_ns, found.st_size
    if _stamps.setdefault(path, stamp) != stamp:
        _stamps[path] = stamp
        _execute.cache_clear()
        _find.cache_clear()
    return stamp


def said(error: Exception) -> str:
    """Describe an exception in one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}{f': {lines[0]}' if lines else ''}"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)`, or "" if no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def find_beside(path: Path) -> None:
    """Let a file that is executed import what lies beside it, as Python lets a script;
    where names are equal, what is installed comes first."""
    if (folder := str(path.absolute().parent)) not in sys.path:
        sys.path.append(folder)


def importable() -> dict[str, str]:
    """Return the variable by which a child finds members where this process does. The
    child looks there last: its own modules are those that are installed."""
    _find_as_parent()
    return {PATH: os.pathsep.join(os.path.abspath(folder) for folder in sys.path)}


def _find_as_parent() -> None:
    for folder in os.environ.get(PATH, "").split(os.pathsep):
        if folder and folder not in sys.path:
            sys.path.append(folder)


def _file(place: str) -> Path:
    path = Path(os.path.expanduser(place)).absolute()
    if not path.is_file():
        raise ValueError(
            f"there is no file {path}; correct the path, which counts from where the "
            f"command is given"
        )
    return path


def _import(place: str, name: str) -> ModuleType:
    _find_as_parent()
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error}; install it, put its folder on PYTHONPATH, or give "
            f"'path/to/file.py:{name}'"
        ) from error


@functools.cache
def _execute(path: Path) -> ModuleType:
    """Execute a file as a module, once."""
    name = f"diloco_file_{path}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "what ends in .py is a module"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up the module that they are in.
    sys.modules[name] = module
    find_beside(path)
    _find_as_parent()
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        where = line or _line(error, f"{path}:")
        raise ValueError(f"{path} cannot be executed: {where}{said(error)}") from error
    return module


def _line(error: Exception, reference: str) -> str:
    """Return the line of the named file where the error arose, or ""."""
    place = reference.rpartition(":")[0]
    path = str(Path(os.path.expanduser(place)).absolute())
    if not place.endswith(".py") and place in sys.modules:
        path = str(getattr(sys.modules[place], "__file__", ""))
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    return f"line {lines[-1]}: " if lines else ""


def _defined(member: Any) -> str:
    """Return the line of its file at which a member begins, or ""."""
    try:
        named = inspect.isfunction(member) or inspect.isclass(member)
        found = member if named else type(member)
        return f"line {inspect.getsourcelines(found)[1]}: "
    except (OSError, TypeError):
        return ""
