"""The figures that are made of committed numbers can be made again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
OF_NUMBERS = ("bandwidth", "finetune", "goodput", "limits", "unequal_islands")


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_a_figure_is_made_and_is_the_same_each_time(name, tmp_path):
    pictures = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, str(FIGURES / f"{name}.py"), str(folder)],
            env={**os.environ, "PYTHONPATH": str(FIGURES.parents[1])},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        (picture,) = folder.iterdir()
        assert picture.name == f"{name}.svg"
        pictures.append(picture.read_bytes())
    assert pictures[0] == pictures[1]


def test_every_figure_has_a_script_and_a_page_that_shows_it():
    pages = [FIGURES.parents[1] / "README.md", *FIGURES.parent.rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    for picture in FIGURES.glob("*.svg"):
        assert picture.with_suffix(".py").is_file()
        assert f"figures/{picture.name})" in text
