"""docs/data.md: its commands make the folders that they say, and its code is data."""

import json
import re
import shlex
from pathlib import Path

import make_tokenizers
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from diloco_jax import cli
from diloco_jax.config import DataConfig, RunConfig
from diloco_jax.data.loading import load_data
from diloco_jax.data.pictures import PLACE
from diloco_jax.data.prepared import read_manifest

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
LINES = re.findall(r"^diloco data prepare (.*)$", PAGE.read_text(), re.M)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the commands of the page name."""
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "qwen3", "smolvlm"):
        words = (PLACE,) if name == "smolvlm" else ()
        make_tokenizers.make_json(tmp_path / name, start=False, words=words)
    texts = [f"Row {n} of prose, {n * n} words long. " * 20 for n in range(300)]
    (tmp_path / "parquet").mkdir()
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "parquet/a.parquet")
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} + 1?"},
                {"role": "assistant", "content": f"{n + 1}."},
            ]
        }
        for n in range(300)
    ]
    lines = "".join(json.dumps(chat) + "\n" for chat in chats)
    (tmp_path / "chats.jsonl").write_text(lines)
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    shown = [
        {"text": f"It is red, {n} times. " * 50, "image": "red.png"} for n in range(300)
    ]
    lines = "".join(json.dumps(one) + "\n" for one in shown)
    (tmp_path / "shown.jsonl").write_text(lines)
    (tmp_path / "notes").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "notes" / f"{number}.txt").write_text(text)
    return tmp_path


def test_the_page_has_commands():
    assert len(LINES) >= 3


@pytest.mark.parametrize("line", LINES)
def test_a_command_makes_its_folder(line, folder):
    arguments = shlex.split(line)
    assert cli.main(["data", "prepare", *arguments, "--workers", "1"]) == 0
    made = read_manifest(Path(arguments[0]))
    assert made.train.counts.documents + made.validation.counts.documents == 300
    run = RunConfig(
        data=DataConfig(paths=(arguments[0],)), sequence_length=made.sequence_length
    )
    data = load_data(run)
    assert made.train.pictures + made.validation.pictures == 300 * ("shown" in line)
    assert len(data.train) == made.train.counts.rows
    learned = data.train[0]["weights"].sum()
    assert 0 < learned < 500 if "chats" in line else learned > 500


def test_the_code_is_data(folder):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (folder / "squares.py").write_text(code)
    run = RunConfig(data=DataConfig(factory="squares.py:squares"), sequence_length=8)
    data = load_data(run)
    rows = data.index(0)
    first = {tuple(rows[p]["tokens"]) for p in range(900)}
    assert len(first) == 97
    assert data.arrays == ("tokens",)
