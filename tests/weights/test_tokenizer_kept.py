"""The tokenizer of a run's data stays with the run, its export, and what it says."""

import json
import shutil

import make_tokenizers
import numpy as np
import pytest

from diloco_jax import cli
from diloco_jax.config import Config, DataConfig, IslandConfig, ModelConfig, RunConfig
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator import main
from diloco_jax.data.prepared import Contents, Split, Tokens
from diloco_jax.data.tokenizers import open_tokenizer
from diloco_jax.weights.first import end_tokens, keep_tokenizer
from diloco_jax.weights.tasks import open_model


@pytest.mark.parametrize(
    ("kind", "name"), [("json", "tokenizer.json"), ("pieces", "tokenizer.model")]
)
def test_generate_speaks_in_the_datas_tokens(kind, name, tmp_path, capsys):
    path = make_tokenizers.KINDS[kind](tmp_path / "made")
    own_name = path.with_name(f"mine{path.suffix}")
    path.rename(own_name)
    tokenizer = open_tokenizer(own_name)
    (tokens,) = tokenizer.encode([make_tokenizers.library_text(5_000)])
    np.save(tmp_path / "tokens.npy", tokens)
    data = DataConfig(paths=(str(tmp_path / "tokens.npy"),), tokenizer=str(own_name))
    model = ModelConfig(
        vocab_size=1024, d_model=32, num_layers=2, num_heads=2, num_kv_heads=1
    )
    run = RunConfig(model=model, data=data, sequence_length=16)
    config = resolve(Config(run=run, islands={"a": IslandConfig()}).validate())
    coordinator = main.Coordinator(config, tmp_path / "run", init=True)
    try:
        coordinator.start()
    finally:
        coordinator.close()
    shutil.rmtree(tmp_path / "made")
    workdir, out = tmp_path / "run", tmp_path / "out"
    assert cli.main(["export", str(workdir), str(out)]) == 0
    said = []
    for source in (workdir, out):
        text_model = open_model(source)
        want = [*tokenizer.start, *tokenizer.encode(["import os"])[0]]
        assert text_model.encode("import os") == want
        assert text_model.ends == {tokenizer.end}
        line = ["generate", str(source), "--prompt", "import", "--max-tokens", "3"]
        capsys.readouterr()
        assert cli.main([*line, "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out))
        assert said[-1]["text"] == tokenizer.decode(said[-1]["tokens"])
    assert said[0]["tokens"] == said[1]["tokens"]
    assert open_tokenizer(out).digest == tokenizer.digest
    assert (out / name).is_file()


@pytest.mark.parametrize(
    ("beside", "want"),
    [
        ({}, [1, 7]),  # The tokenizer's own, and that of the turns.
        ({"config.json": {"eos_token_id": 3}}, [3, 7]),
        ({"generation_config.json": {"eos_token_id": [3, 7], "top_k": 4}}, [3, 7]),
    ],
)
def test_the_end_of_an_answer_ends_a_text(beside, want, tmp_path, monkeypatch):
    source = tmp_path / "run" / "source"
    make_tokenizers.make_json(source)
    for name, found in beside.items():
        (source / name).write_text(json.dumps(found))
    manifest = Contents(
        sequence_length=8,
        row_bytes=8,
        validation_fraction=0.5,
        turn="chatml",
        ends=(7,),
        tokenizer=Tokens(digest="", vocab_size=9, start=(), end=1, file=""),
        train=Split(counts=None, shards=(), largest=0),
        validation=Split(counts=None, shards=(), largest=0),
        sources=(),
    )
    monkeypatch.setattr(
        "diloco_jax.weights.first.is_prepared", lambda path: path == "p"
    )
    monkeypatch.setattr("diloco_jax.weights.first.read_manifest", lambda path: manifest)
    tokenizer = "diloco_jax.weights.first.tokenizer_of"
    monkeypatch.setattr(tokenizer, lambda data: None)
    keep_tokenizer(DataConfig(paths=("text",)), tmp_path / "run")
    assert 7 not in end_tokens(source) or beside
    for _ in range(2):  # A start that crashed is made again.
        keep_tokenizer(DataConfig(paths=("p", "text")), tmp_path / "run")
        assert end_tokens(source) == want
    kept = json.loads((source / "generation_config.json").read_text())
    assert kept.get("top_k") == beside.get("generation_config.json", {}).get("top_k")
