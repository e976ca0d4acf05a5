"""The documents of a corpus: files by name, the same on every machine.

A document is a file. Its name is the path relative to what was given.
"""

from __future__ import annotations

import logging
import os
import pathlib
import sysconfig
from collections.abc import Iterable, Iterator

from diloco_jax.config import ConfigError
from diloco_jax.data import manifest
from diloco_jax.data.tokens import SUFFIX
from diloco_jax.paths import is_bucket

logger = logging.getLogger(__name__)

# Not every installation has these, or they differ between builds, or they are tables
# and test data rather than text.
SKIPPED_FOLDERS = frozenset(
    (
        *("site-packages", "dist-packages", "__pycache__", "test", "tests"),
        *("encodings", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
    )
)
SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


def find_documents(
    paths: tuple[str, ...], field: str = "data.paths"
) -> list[tuple[str, pathlib.Path]]:
    """Return the names and paths of all documents, in order of the names; see
    `corpus.load_corpus`.

    Raises ConfigError, naming `field`, for a path that is missing or empty, and for two
    documents of one name.
    """
    return list(_user_files(paths, field) if paths else _library())


def encoded(name: str, path: pathlib.Path, field: str = "data.paths") -> bytes:
    """Return the bytes of a name; raise ConfigError if it is not UTF-8."""
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{field}: the name of {os.fsencode(path)!r} is not UTF-8, and the "
            f"split goes by names; rename it"
        ) from error


def unreadable(error: OSError, field: str = "data.paths") -> ConfigError:
    """Return the error of a file or folder that cannot be read."""
    return ConfigError(
        f"{field}: {error.filename} cannot be read ({error.strerror}); check its "
        f"permissions"
    )


def _library() -> Iterator[tuple[str, pathlib.Path]]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for name, path in _walk(root, skipped=SKIPPED_FOLDERS):
        if path.suffix == ".py" and not path.name.startswith(SKIPPED_PREFIXES):
            yield name, path


def _user_files(paths: Iterable[str], field: str) -> Iterator[tuple[str, pathlib.Path]]:
    found: dict[str, pathlib.Path] = {}
    for given in paths:
        if is_bucket(given):
            raise ConfigError(
                f"{field}: {given} is a bucket; mount it (gcsfuse, mount-s3) and give "
                f"the folder, or copy it"
            )
        root = pathlib.Path(given)
        try:
            root.stat()
        except OSError as error:
            raise ConfigError(
                f"{field}: {given} does not exist ({error.strerror}); name a text "
                f"file or a folder"
            ) from error
        files = _walk(root, field) if root.is_dir() else [(root.name, root)]
        if not any(path.stat().st_size for _, path in files):
            raise ConfigError(
                f"{field}: {given} is empty; name a file or folder with text"
            )
        for name, path in files:
            if name in found and found[name].resolve() != path.resolve():
                raise ConfigError(
                    f"{field}: {found[name]} and {path} are both called {name!r}; "
                    f"rename one, or give the folder that contains both"
                )
            found[name] = path
    yield from sorted(found.items())


def _walk(
    root: pathlib.Path,
    field: str = "data.paths",
    skipped: frozenset[str] = frozenset(),
) -> list[tuple[str, pathlib.Path]]:
    """Return the regular files below root with relative names, in order of the names;
    neither hidden folders nor links to folders are entered."""

    def refuse(error: OSError) -> None:
        raise unreadable(error, field) from error

    found = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if f not in skipped and f[0] != "."]
        for path in (pathlib.Path(folder, name) for name in folders):
            if path.is_symlink():
                logger.warning(
                    "%s: %s is a link to a folder, which is not entered; name it as a "
                    "path of its own if it is meant",
                    field,
                    path,
                )
        for path in (pathlib.Path(folder, file) for file in files if file[0] != "."):
            if path.is_file() and not _is_manifest(path):
                found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


def _is_manifest(path: pathlib.Path) -> bool:
    """Tell if a file is another one's manifest. Small files of text have none, so that
    names which end alike are documents."""
    if path.suffix != manifest.SUFFIX:
        return False
    described = path.with_suffix("")
    if described.suffix == SUFFIX:
        return True
    return described.is_file() and manifest.is_large(described)
