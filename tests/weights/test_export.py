"""An export says what begins and ends a text; one of an own model is its arrays.

A cycle is gathered from a coordinator that goes away and comes back.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import make_tokenizers
import numpy as np
import pytest
import tiny
from begin_support import FAMILIES, begun
from safetensors.numpy import load_file

from diloco_jax import cli
from diloco_jax.data.tokenizers import open_tokenizer
from diloco_jax.evaluation import load_params
from diloco_jax.weights import export, families, tensor_files
from diloco_jax.weights.export import _settings
from diloco_jax.weights.first import end_tokens
from diloco_jax.wire.errors import Busy, ConnectionLost

WRITTEN = families.write(dataclasses.replace(tiny.UNLIKE, norm_gain="scale"), 16)
NO = {"bos_token_id": None, "eos_token_id": None}


def said(source, **beside):
    for name, found in beside.items():
        (source / f"{name}.json").write_text(json.dumps(found))
    found, lacks = _settings(WRITTEN, source, "float32")
    config, generation = found["config.json"], found.get("generation_config.json", {})
    return [{key: have.get(key) for key in NO} for have in (config, generation)], lacks


@pytest.mark.parametrize("kind", ["pieces", "json"])
def test_a_run_from_nothing_says_the_ends_of_its_tokenizer(kind, tmp_path):
    """A start that there is not is null."""
    make, how = (
        make_tokenizers.KINDS[kind],
        {} if kind == "pieces" else {"start": False},
    )
    tokenizer = open_tokenizer(make(tmp_path, **how))
    start = next(iter(tokenizer.start), None)
    assert (start is None) == (kind == "json")
    own = {"bos_token_id": start, "eos_token_id": tokenizer.end}
    assert said(tmp_path) == ([own, own], "")
    # As a run from nothing on chats keeps them; a start is asked for beside them.
    ends = [tokenizer.end, 9]
    own = {"bos_token_id": start, "eos_token_id": ends}
    found = said(tmp_path, generation_config={"eos_token_id": ends, "top_k": 3})
    assert found == ([own, own if start else NO], "")
    assert end_tokens(tmp_path) == ends


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        ({"bos_token_id": 5, "eos_token_id": 6}, None, (5, 6)),
        ({"bos_token_id": 5, "eos_token_id": 6}, {"eos_token_id": [6, 7]}, (5, [6, 7])),
        ({"bos_token_id": None, "eos_token_id": 6}, {"bos_token_id": 4}, (4, 6)),
    ],
)
def test_what_the_source_says_counts(config, generation, want, tmp_path):
    source = json.loads((FAMILIES / "smollm2" / "config.json").read_text())
    beside = {"config": source | config}
    if generation is not None:
        beside["generation_config"] = generation
    found, lacks = said(tmp_path, **beside)
    assert found[1] == dict(zip(NO, want, strict=True))
    assert not lacks


@pytest.mark.parametrize("tokenizer", [None, "{}", "[" * 200_000])
def test_tokens_that_are_not_known_are_null_and_told(tokenizer, tmp_path):
    """A tokenizer that does not open keeps no parameters back."""
    if tokenizer:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    found, lacks = said(tmp_path)
    assert found == [NO, NO]
    assert "bos_token_id" in _settings(WRITTEN, tmp_path, "float32")[0]["config.json"]
    assert lacks.startswith("no end token: ")
    assert ("tokenizer.json" in lacks) == bool(tokenizer)


def test_a_model_of_ones_own_leaves_as_its_arrays(config, tmp_path, capsys):
    module = tmp_path / "own.py"
    module.write_text(
        "from diloco_jax.models.transformer import build\n"
        "import dataclasses\n"
        "def model(run, island, layout):\n"
        "    return build(dataclasses.replace(run.model, factory=''))\n"
    )
    own = config.replace("model.factory", f"{module}:model")
    workdir = begun(own, "", tmp_path / "run")
    out = tmp_path / "out"
    trusted = [str(workdir), str(out), "--trust-code"]
    assert cli.main(["export", *trusted]) == 0
    told = capsys.readouterr().err
    assert f"model.factory = '{module}:model': the arrays by their names" in told
    found = load_file(out / tensor_files.SINGLE)
    assert "layers/attention/query" in found
    want = jax.tree_util.tree_leaves_with_path(load_params(workdir, trust_code=True))
    assert len(found) == len(want)
    for path, leaf in want:
        name = "/".join(key.key for key in path)
        np.testing.assert_array_equal(found[name], leaf)
    assert not (out / "config.json").exists()


FILES = {"facts.json": b"{}", "fragments/0": b"abcdef", "fragments/1": b"ghi"}
BUDGET_S = 5.0


class Served:
    """A coordinator, as far as a gathering asks it; it fails where the test says."""

    address = "coordinator:7000"

    def __init__(self, failures: dict[str, list[Exception]]) -> None:
        self._failures = failures
        self.asked: list[str] = []

    def keep(self, cycle: int, timeout_s: float) -> dict[str, Any]:
        if self._failures.get("keep"):
            raise self._failures["keep"].pop()
        return {"cycle": cycle or 4, "files": list(FILES), "share": 1.0}

    def kept(self, cycle: int, name: str) -> Iterator[bytes]:
        self.asked.append(name)
        yield FILES[name][:1]
        if self._failures.get(name):
            raise self._failures[name].pop()
        yield FILES[name][1:]


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the gathering waits, and then alone."""
    now = [0.0]
    monkeypatch.setattr(export.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(export.time, "sleep", sleep)
    return now


def gather(served: Served, folder: Path) -> int:
    return export.gather(cast(Any, served), BUDGET_S, 0, folder, lambda share: None)


def test_a_file_that_breaks_off_is_begun_again(clock, tmp_path):
    lost = [ConnectionLost("by the test"), Busy("by the test")]
    served = Served({"keep": lost[:], "fragments/0": lost[:]})
    assert gather(served, tmp_path) == 4
    (folder,) = (tmp_path / "exports").iterdir()
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert served.asked == ["facts.json", *["fragments/0"] * 3, "fragments/1"]


def test_a_coordinator_that_stays_away_ends_it(clock, tmp_path):
    always = [ConnectionLost("by the test") for _ in range(100)]
    with pytest.raises(ConnectionLost):
        gather(Served({"fragments/1": always}), tmp_path)
    assert BUDGET_S < clock[0] <= BUDGET_S + export.POLL_S
