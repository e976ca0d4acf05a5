"""The notebooks run from top to bottom, within their time."""

import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
WITHIN_S = 180


@pytest.mark.notebook
@pytest.mark.timing
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.timeout(2 * WITHIN_S)
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    resources = {"metadata": {"path": str(tmp_path)}}
    began = time.monotonic()
    NotebookClient(notebook, timeout=WITHIN_S, resources=resources).execute()
    assert time.monotonic() - began <= WITHIN_S
    plots = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert len(plots) >= 2
