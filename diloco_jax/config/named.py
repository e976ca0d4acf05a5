"""The configs that come with the package, by name: those of the folder `configs/`."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs"
"""A link to the checkout's `configs/`; in a wheel, a copy of it."""


def names() -> list[str]:
    """Return the names, in order."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def find(name: str) -> Path | None:
    """Return the file of the config of this name; None if there is none."""
    path = FOLDER / f"{name}.py"
    return path if name in names() else None


def title(name: str) -> str:
    """Return the first line of a config's docstring, without running its code."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    return text.splitlines()[0].strip('"')
