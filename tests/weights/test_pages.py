"""docs/mixtures.md and docs/pictures.md: every command, one after the other, as it
stands."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pictures
import pytest
from begin_support import FAMILIES

from diloco_jax import cli

pytestmark = pytest.mark.dist

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "kind"), [("mixtures", "mixtral"), ("pictures", "idefics3")]
)
def test_the_commands_of_a_page_lead_from_files_to_an_export(
    page, kind, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FAMILIES / "mixtral", tmp_path / "mixtral")
    (tmp_path / "text").mkdir()
    for index in range(40):
        line = "The experts of a layer are sent the tokens of a text. "
        (tmp_path / "text" / f"{index}.txt").write_text(line * 20)
    pictures.write_pictures(tmp_path / "shapes", 200, 1)
    text = (DOCS / f"{page}.md").read_text()
    (config,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    (tmp_path / "run.py").write_text(config)
    commands = re.search(r"^```\n(diloco .*?)^```", text, re.M | re.S)[1].splitlines()
    names = ["data", "run", "eval", "export", "generate"]
    assert [line.split()[1] for line in commands] == names
    for line in commands:
        capsys.readouterr()
        assert cli.main(shlex.split(line)[1:]) == 0, line
    assert capsys.readouterr().out
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_loss"] < 4
    assert page == "mixtures" or summary["eval_tasks"]["task"]["items"] == 200
    written = Path(shlex.split(commands[3])[-1], "config.json")
    assert json.loads(written.read_text())["model_type"] == kind
