"""docs/mixtures.md: every command of the page, one after the other, as it stands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from begin_support import FAMILIES

from diloco_jax import cli

pytestmark = pytest.mark.dist

PAGE = Path(__file__).parents[2] / "docs" / "mixtures.md"


def test_the_commands_of_the_page_lead_from_files_to_an_export(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FAMILIES / "mixtral", tmp_path / "mixtral")
    (tmp_path / "text").mkdir()
    for index in range(40):
        line = "The experts of a layer are sent the tokens of a text. "
        (tmp_path / "text" / f"{index}.txt").write_text(line * 20)
    (config,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "run.py").write_text(config)
    lines = re.findall(r"^diloco (.*)$", PAGE.read_text(), re.M)
    names = ["data", "run", "eval", "export", "generate"]
    assert [line.split()[0] for line in lines] == names
    said = {}
    for name, line in zip(names, lines, strict=True):
        assert cli.main(shlex.split(line)) == 0, line
        said[name] = capsys.readouterr()
    summary = json.loads((tmp_path / "runs/mixture/summary.json").read_text())
    assert summary["eval_loss"] < 4
    written = json.loads((tmp_path / "exported/config.json").read_text())
    assert written["model_type"] == "mixtral"
    assert written["num_local_experts"] == 4
    assert len(said["generate"].out) >= 20
