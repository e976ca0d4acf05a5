"""The notebooks run from top to bottom, and what is committed is what they show.

    WRITE_NOTEBOOKS=1 pytest tests/notebooks -m "notebook or nightly"

executes them and writes their outputs, for a commit.
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import json
import os
import re
import subprocess
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WITHIN_S = 180
ALWAYS = ("01_first_run", "05_a_million_chips")
"""Those that run with every change; the others run at night."""
BOUNDS: dict[str, dict[str, tuple[float, float]]] = {
    "01_first_run": {
        "summary['eval_loss']": (1.5, 4.0),
        "summary['goodput']": (0.2, 1.0),
        "summary['islands']['v5p-b']['joins']": (2, 2),
        "summary['islands']['v6e']['joins']": (1, 1),
        "sum(summary['tokens_lost'].values()) / summary['tokens_computed']": (0, 0.1),
        "len(history.absences('v5p-b'))": (1, 1),
    },
    "02_what_matters": {
        "run.summary['eval_loss']": (2.0, 3.2),
        "table.loc['quorum 3: all must answer', 'merges'] / table.merges.max()": (
            *(0.1, 0.5),
        ),
        "table['over as above, %'].abs().max()": (0.1, 12.0),
        "killed.summary['tokens_lost']['died']": (1, 3000),
    },
    "03_your_own_model_and_loop": {
        "found.summary['eval_loss']": (1.5, 4.0),
        "losses[-1]": (1.0, 4.0),
        "other.returncode": (0, 0),
        "coordinator.returncode": (0, 0),
        "len(history.merges['time'])": (10, 1000),
    },
    "04_your_own_merge_rule": {
        "by_hand == [2.0, 3.0, 0.0]": (1, 1),
        "losses.loc['rda (default)'].mean()": (2.0, 3.2),
        "losses.loc['yours'].mean() / losses.loc['rda (default)'].mean()": (0.9, 1.15),
        "losses.loc['yours'].mean() / losses.loc['mean'].mean()": (0.85, 1.1),
    },
    "05_a_million_chips": {
        "100 * list(results.values())[0].mean.compute_goodput": (22, 32),
        "100 * list(results.values())[1].mean.compute_goodput": (52, 62),
        "100 * list(results.values())[2].mean.compute_goodput": (86, 92),
        "over_islands.uptime.iloc[-1]": (0.999, 1.0),
    },
    "06_plan_a_fleet": {
        "down": (1.0, 1.2),
        "costs.loc['days', 'two regions']": (1.7, 1.9),
    },
    "07_finetune_a_real_model": {
        "costs.loc['lives of the killed island', 'All weights']": (2, 2),
        "costs.loc['MB sent up', 'Adapters']": (50, 150),
    },
    "08_an_evening_s_question": {
        "one.loss": (2.0, 4.5),
        "every.merges / one.merges": (0.1, 0.9),
        "abs(every.seconds - one.seconds) / one.seconds": (0, 0.2),
        "every.half": (0, 10),
    },
}
"""Bounds of the values of a cell's names, by expression."""
OF_RECORDED = ("06_plan_a_fleet", "07_finetune_a_real_model")
"""Those that show results of docs/results/raw."""
PLACEHOLDER = "repository.invalid"
"""In the repository's address in setup.cfg until there is one (`.ci/release`)."""
PROGRESS = re.compile(r"\d%, [\d:]+ left")
"""In the lines of a bar, which are of the machine that made the notebook."""
MOST_PNG_BYTES = 100_000
MOST_BYTES = 700_000


@pytest.mark.notebook
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=() if path.stem in ALWAYS else pytest.mark.nightly,
        )
        for path in NOTEBOOKS
    ],
)
@pytest.mark.timeout(4 * WITHIN_S)
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    within_s = WITHIN_S if path.stem in ALWAYS else 3 * WITHIN_S
    shown = {expression: f"float({expression})" for expression in BOUNDS[path.stem]}
    pairs = ", ".join(f"{key!r}: {value}" for key, value in shown.items())
    asked = nbformat.v4.new_code_cell(f"import json; print(json.dumps({{{pairs}}}))")
    del asked["id"]
    notebook.cells.append(asked)
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # Recorded results.
    resources = {"metadata": {"path": str(tmp_path)}}
    began = time.monotonic()
    NotebookClient(notebook, timeout=within_s, resources=resources).execute()
    seconds = time.monotonic() - began
    assert seconds <= within_s
    found = json.loads(notebook.cells.pop().outputs[-1].text)
    for expression, (low, high) in BOUNDS[path.stem].items():
        assert low <= found[expression] <= high, expression
    if os.environ.get("WRITE_NOTEBOOKS"):
        print(f"{path.stem}: {seconds:.0f} s, {found}")
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            told = [o for o in cell.get("outputs", ()) if not PROGRESS.search(str(o))]
            cell.update({"outputs": told} if cell.cell_type == "code" else {})
        notebook.metadata["language_info"] = {"name": "python"}
        if shown := read_by(path):
            notebook.metadata["shows"] = shown
        nbformat.write(notebook, path)


def outputs_of(path: Path) -> list[dict]:
    cells = nbformat.read(path, as_version=4).cells
    return [output for cell in cells for output in cell.get("outputs", ())]


def test_each_has_bounds():
    assert [path.stem for path in NOTEBOOKS] == sorted(BOUNDS)


def test_an_evening_s_question_takes_at_most_15_lines():
    path = ROOT / "notebooks/08_an_evening_s_question.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert len([line for line in code.splitlines() if line]) <= 15


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_was_executed_in_order(path):
    cells = nbformat.read(path, as_version=4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert "error" not in {output.output_type for output in outputs_of(path)}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_small_and_say_nothing_of_the_machine(path):
    outputs = outputs_of(path)
    plots = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    assert len(plots) >= 2
    assert max(len(base64.b64decode(plot)) for plot in plots) < MOST_PNG_BYTES
    assert path.stat().st_size < MOST_BYTES
    text = json.dumps(
        [{**o, "data": {**o.get("data", {}), "image/png": ""}} for o in outputs]
    )
    assert not re.search(r"/(work|tmp|root|home|Users)/", text)
    assert "stderr" not in {o.get("name") for o in outputs}, "warnings, or a bar"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_a_badge_once_the_repository_has_an_address(path):
    """Until then nothing in it leads there."""
    first, *_ = nbformat.read(path, as_version=4).cells
    assert first.source.startswith("# ")
    address = address_of_the_repository()
    badge = f"{address.removeprefix('https://')}/blob/main/notebooks/{path.name})"
    if PLACEHOLDER in address:
        assert not re.search(r"colab|OWNER|github\.com/\S*diloco", path.read_text())
    else:
        assert badge in first.source


def address_of_the_repository() -> str:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings["metadata"]["url"]


def test_nothing_is_released_while_the_address_is_a_placeholder():
    if PLACEHOLDER not in (address := address_of_the_repository()):
        pytest.skip(f"the repository is at {address}")
    done = subprocess.run(
        ["bash", ".ci/release"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"url = {address} in setup.cfg is a placeholder" in done.stderr


def read_by(path: Path) -> dict[str, str]:
    """Digests of the recorded results that a notebook shows, by name."""
    cells = nbformat.read(path, as_version=4).cells
    code = "".join(cell.source for cell in cells if cell.cell_type == "code")
    names = re.findall(r'recorded\("([^"]+)"\)', code)
    files = {name: ROOT / "docs/results/raw" / name for name in names}
    return {n: hashlib.sha256(f.read_bytes()).hexdigest() for n, f in files.items()}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_figures_are_of_the_recorded_results_that_there_are(path):
    """A result that was recorded anew asks for `WRITE_NOTEBOOKS=1`."""
    shown = nbformat.read(path, as_version=4).metadata.get("shows", {})
    assert shown == read_by(path)
    assert bool(shown) == (path.stem in OF_RECORDED)
