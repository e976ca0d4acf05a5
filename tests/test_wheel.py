"""The files of a wheel besides modules; `.ci/wheel` builds one and runs it."""

from __future__ import annotations

import configparser
import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "diloco_jax"


def test_every_file_of_the_package_goes_into_the_wheel():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    patterns = {
        f"{package.replace('.', '/')}/{pattern}"
        for package, value in settings["options.package_data"].items()
        for line in value.splitlines()
        for pattern in line.replace(",", " ").split()
        if not line.lstrip().startswith("#")
    }
    others = [
        path.relative_to(ROOT).as_posix()
        for path in [*PACKAGE.rglob("*"), *(PACKAGE / "configs").glob("*.py")]
        if path.is_file()
        and "__pycache__" not in path.parts
        and (path.suffix != ".py" or path.parent.name == "configs")
    ]
    assert len(others) > 8
    for path in others:
        assert any(fnmatch.fnmatchcase(path, p) for p in patterns), path


def test_every_folder_with_modules_is_a_package():
    """Only packages are found."""
    for path in PACKAGE.rglob("*.py"):
        assert (path.parent / "__init__.py").is_file(), path
