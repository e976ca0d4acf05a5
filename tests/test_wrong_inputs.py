"""Every wrong input of the table is refused in words that help, and nothing is left."""

import logging
import os
import re
import shlex
from unittest import mock

import pytest
from wrong_inputs import FILES, INPUTS, Wrong

from diloco_jax import cli

FRAME = re.compile(r"[\s│╭╮╰╯─]+")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with all that the rows name."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "empty").mkdir()
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return folder


@pytest.fixture(autouse=True)
def inside(files, monkeypatch):
    """In the folder; what a command sets for its process does not outlast the test."""
    monkeypatch.chdir(files)
    before = logging.getLogger().handlers[:]
    with mock.patch.dict(os.environ):
        yield
    logging.getLogger().handlers[:] = before


def contents(folder):
    """Every file and folder, with what is in it."""
    return {
        path: path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("row", INPUTS, ids=[row.line for row in INPUTS])
def test_a_wrong_input_is_refused_in_words(row: Wrong, files, capsys):
    before = contents(files)
    try:
        code = cli.main(shlex.split(row.line))
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    said = FRAME.sub(" ", err)
    assert (code, out) == (row.code, ""), said
    assert re.search(".*".join(map(re.escape, row.said.split(" ... "))), said), said
    assert "Traceback" not in said
    assert contents(files) == before


def test_no_row_is_there_twice():
    lines = [row.line for row in INPUTS]
    assert len(set(lines)) == len(lines)
