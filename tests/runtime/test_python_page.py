"""Docs and README show Python that works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "python.md"


def test_the_block_of_the_readme_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert "50_000" in block
    names: dict = {}
    exec(compile(block.replace("50_000", "15_000"), "README.md", "exec"), names)
    assert set(names["found"].summary["islands"]) == {"v6e", "v5p-a", "v5p-b"}
    loss, goodput = map(float, capsys.readouterr().out.split())
    assert loss < 5.55, "of a uniform guess"
    assert 0 < goodput <= 1


def test_the_blocks_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    names: dict = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    tables = names["found"].history
    assert {"fast", "slow"} == set(names["steps"].island)
    assert sum(names["merges"].final) == tables.merges["fragment"].max() + 1
    assert names["summary"]["islands"]["slow"]["joins"] > 1, "it was killed"
    assert set(names["of_islands"].island) == {"fast", "slow"}
    assert names["of_merges"].tokens.sum() > 30_000, "of two fragments"
    leaves = jax.tree.leaves(names["params"])
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}
    # Two results: of the emulation, and of the run.
    assert len(capsys.readouterr().out.splitlines()) >= 3
