"""Tiny models in published layouts: prepared for, trained, adapted and given back, and
continued as `transformers` does.

`make_published.py` made `published/`, and says after which public repositories.
DILOCO_PEFT_PYTHON names a Python that has torch and transformers: with it, every model
is trained, whole and by adapters, and `transformers` reads the exports itself.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jax
import make_published
import pytest
from begin_support import begun, learning, with_learnt

from diloco_jax import cli, emulate
from diloco_jax.config import (
    Config,
)
from diloco_jax.config.resolving import resolve
from diloco_jax.models.build import build
from diloco_jax.models.generation import generate
from diloco_jax.weights import adapted
from diloco_jax.weights.export import export
from diloco_jax.weights.first import end_tokens, first_params
from diloco_jax.weights.tasks import open_model
from diloco_jax.workdir import read_config

FOLDER = make_published.FOLDER
NAMES = sorted(path.name for path in FOLDER.iterdir())
PYTHON = os.environ.get("DILOCO_PEFT_PYTHON", "")
TIMEOUT_S = 300


def continued(folder: Path) -> list[dict]:
    """As `make_published.continued`, by this project."""
    text_model, found = open_model(folder), []
    for prompt in make_published.PROMPTS:
        tokens = text_model.encode(prompt)
        made = generate(
            text_model.model,
            text_model.params,
            tokens,
            make_published.CONTINUED,
            ends=text_model.ends,
        )
        found.append({"prompt": tokens, "tokens": [int(token) for token in made]})
    return found


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_continued_as_transformers_does(name):
    there = json.loads((FOLDER / name / "continuations.json").read_text())
    assert continued(FOLDER / name) == there


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(30):
        line = f"The cat number {n} sat on the mat in naïve 東京.\ndef main(): pass\n"
        (folder / f"{n}.txt").write_text(line * 4)
    return folder


def run_on(text: Path, name: str, rank: int) -> Config:
    """A run from a folder, on text that is prepared with its tokenizer."""
    prepared = text.with_name("prepared")
    of = ["--tokenizer", str(FOLDER / name), "--validation-fraction", "0.1"]
    made = ["data", "prepare", str(prepared), str(text), "--sequence-length", "16"]
    assert cli.main([*made, *of, "--workers", "1"]) == 0
    how = {"lora_rank": rank, "lora_alpha": 2.0 * rank}
    return learning(FOLDER / name, prepared, 16, **how)


@pytest.mark.parametrize(
    ("name", "rank"),
    [(name, rank) for name in NAMES for rank in (0, 2)]
    if PYTHON
    else [("mistral", 0), ("gemma3", 2)],
)
def test_what_is_trained_leaves_as_what_was_trained(
    name, rank, text, tmp_path, monkeypatch
):
    config = run_on(text, name, rank)
    learnt = emulate(config)
    losses = learnt.history.steps["loss"]
    assert not rank or set(learnt.params) == {"layers"}, "adapters alone are merged"
    assert learnt.summary["eval_loss"] < losses[0]
    workdir = begun(config, "", tmp_path / "run")
    run = with_learnt(workdir, learnt.params, monkeypatch)
    out = tmp_path / "out"
    export(read_config(workdir), workdir, out, merged=bool(rank))
    text_model = open_model(out)
    whole = adapted.merged(run, learnt.params) if rank else learnt.params
    plain = adapted.base_run(resolve(config).run)
    before = first_params(plain, build(plain))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), text_model.params, whole)
    assert all(jax.tree.leaves(same))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), text_model.params, before)
    assert any(jax.tree.leaves(moved))
    assert end_tokens(out) == end_tokens(FOLDER / name)
    assert (out / "tokenizer.json").is_file()
    if PYTHON:
        assert continued(out) == by_transformers(out)


def by_transformers(folder: Path) -> list[dict]:
    found = subprocess.run(
        [PYTHON, make_published.__file__, str(folder)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=TIMEOUT_S,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(found.stdout)[0]
