"""Models with pictures come from files and go back to files; a part of one is trained;
prompts and tasks have pictures."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pictures
import pytest
import support
import tape_checks
from begin_support import begun, learning, with_learnt
from PIL import Image
from safetensors.numpy import load_file, save_file

from diloco_jax import cli, emulate
from diloco_jax.config import (
    Config,
    ConfigError,
)
from diloco_jax.models.build import build
from diloco_jax.models.generation import (
    Cache,
    generate,
    make_begun,
    make_decode,
)
from diloco_jax.models.presets import preset
from diloco_jax.observability.tape import read_tape
from diloco_jax.simulation.replay import replay
from diloco_jax.simulation.replay.recording import read_recording
from diloco_jax.weights import adapted, families, tensor_files
from diloco_jax.weights.export import export
from diloco_jax.weights.first import first_params, read_folder, started_from
from diloco_jax.weights.tasks import open_model, read_task, score
from diloco_jax.workdir import read_config

FOLDER = Path(__file__).with_name("published") / "idefics3"
EACH = 9
"""Places of a picture in the tiny model."""


def save(path: Path, seed: int, side: int = 40) -> Path:
    """A picture of noise in coarse blocks, so that a resize leaves something of it."""
    values = np.random.default_rng(seed).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    Image.fromarray(values).resize((side, side), Image.Resampling.NEAREST).save(path)
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """A prepared folder: questions about pictures, two in some, and none in others."""
    folder = tmp_path_factory.mktemp("rows")
    lines = []
    for number in range(30):
        names = [f"{number}_{n}.png" for n in range(number % 3)]
        for n, name in enumerate(names):
            save(folder / name, seed=10 * number + n)
        places = "<image>" * len(names)
        lines.append(
            {
                "prompt": f"The {places} cat {number}",
                "completion": f" sat on {number}",
                "images": names,
            }
        )
    path = folder / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    out = folder / "prepared"
    made = ["data", "prepare", str(out), str(path), "--tokenizer", str(FOLDER)]
    made += ["--sequence-length", "64", "--validation-fraction", "0.2"]
    made += ["--picture-tokens", str(EACH), "--pictures-per-row", "2"]
    assert cli.main([*made, "--workers", "1"]) == 0
    return out


def config_of(rows: Path, **model) -> Config:
    """A run from the published folder on these rows."""
    return learning(FOLDER, rows, 64, **model)


def test_what_a_run_starts_from_is_what_it_gives_back(rows, tmp_path):
    """Bit for bit, through a coordinator's snapshot, with its settings and words."""
    workdir = begun(config_of(rows), "", tmp_path / "run")
    out = tmp_path / "out"
    export(read_config(workdir), workdir, out, dtype="bfloat16")
    found, there = (load_file(f / tensor_files.SINGLE) for f in (out, FOLDER))
    assert found.keys() == there.keys()
    for name, array in there.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    written, settings = (
        tensor_files.read_json(folder / "config.json") for folder in (out, FOLDER)
    )
    assert families.read(written, "") == families.read(settings, "")
    for part in ("text_config", "vision_config"):
        inner, theirs = written.pop(part), settings.pop(part)
        assert {k: v for k, v in theirs.items() if inner.get(k) != v} == (
            {"model_type": "siglip_vision_model"} if part == "vision_config" else {}
        )
    assert {k: v for k, v in settings.items() if written.get(k) != v} == {}
    for name in ("preprocessor_config.json", "processor_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (FOLDER / name).read_bytes()
    again = begun(config_of(rows), f"hf:{out}", tmp_path / "again")
    assert read_config(again).run.model.vision == read_config(workdir).run.model.vision


def test_a_model_that_was_drawn_leaves_with_what_other_tools_need(rows, tmp_path):
    config = config_of(rows).replace("model.weights", "")
    model = config.run.model
    workdir = begun(config, "", tmp_path / "run")
    out = tmp_path / "out"
    assert cli.main(["export", str(workdir), str(out)]) == 0
    families.require_processor(out, model)
    said = tensor_files.read_json(out / "processor_config.json")
    assert said["image_seq_len"] == EACH
    assert (
        families.read(tensor_files.read_json(out / "config.json"), "").vision
        == model.vision
    )


@pytest.mark.parametrize("train", [("connector", "decoder"), ("tower",)])
def test_what_is_not_trained_leaves_as_it_came(train, rows, tmp_path, monkeypatch):
    """Its pieces are those that are trained, and the whole model leaves."""
    config = config_of(rows, train=train)
    learnt = emulate(config)
    assert {*learnt.params} == {
        name
        for name in ("tower", "connector", "embedding", "layers", "norm", "unembedding")
        if name in train or (name not in ("tower", "connector") and "decoder" in train)
    }
    workdir = begun(config, "", tmp_path / "run")
    run = with_learnt(workdir, learnt.params, monkeypatch)
    assert run.model.frozen_digest
    out = tmp_path / "out"
    export(read_config(workdir), workdir, out)
    text_model = open_model(out)
    whole = adapted.merged(run, learnt.params)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), text_model.params, whole)
    assert all(jax.tree.leaves(same))
    plain = adapted.base_run(run)
    before = first_params(plain, build(plain))
    for name, own in text_model.params.items():
        moved = jax.tree.map(lambda a, b: bool((a != b).any()), own, before[name])
        part = name if name in ("tower", "connector") else "decoder"
        assert any(jax.tree.leaves(moved)) == (part in train)


def test_a_frozen_part_that_has_changed_is_refused(rows, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FOLDER, source)
    config = started_from(config_of(rows, train=("decoder",)), f"hf:{source}")
    workdir = begun(config, "", tmp_path / "run")
    found = load_file(source / tensor_files.SINGLE)
    changed = "model.connector.modality_projection.proj.weight"
    save_file({**found, changed: found[changed] + 1}, source / tensor_files.SINGLE)
    with pytest.raises(ConfigError, match="frozen_digest"):
        export(read_config(workdir), workdir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_image_splitting": True}, r"do_image_splitting = True.*not split"),
        ({"do_image_splitting": ...}, r"do_image_splitting = None.*splitting\": false"),
        ({"size": {"longest_edge": 2048}}, r"size = .*2048.*\"height\": 26"),
        ({"image_std": [0.2, 0.3, 0.2]}, r"image_std = \[0\.2, 0\.3, 0\.2\].*-1 to 1"),
        ({"max_image_size": {"longest_edge": 52}}, r"max_image_size = .*52"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_processor_that_sees_otherwise_is_refused(changes, message, nested, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FOLDER, source)
    path = source / "preprocessor_config.json"
    found = json.loads(path.read_text()) | changes
    found = {key: value for key, value in found.items() if value is not ...}
    if nested:  # As transformers 5 writes it.
        path.unlink()
        path = source / "processor_config.json"
        found = {"image_processor": found, "image_seq_len": EACH}
    path.write_text(json.dumps(found))
    model = families.read(tensor_files.read_json(source / "config.json"), "")
    with pytest.raises(ConfigError, match=message) as refused:
        read_folder(source, model)
    assert path.name in str(refused.value)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (
            "vision_config",
            {"hidden_act": "gelu"},
            r"vision_config: hidden_act = 'gelu'",
        ),
        ("vision_config", {"layer_norm_eps": 1e-5}, r"layer_norm_eps = 1e-05"),
        ("vision_config", {"image_size": "26"}, r"image_size = '26'"),
        ("text_config", {"model_type": "qwen2"}, r"text_config: model_type = 'qwen2'"),
        ("", {"image_token_id": None}, r"no image_token_id"),
    ],
)
def test_a_tower_that_cannot_be_followed_is_refused(part, changes, message):
    found = tensor_files.read_json(FOLDER / "config.json")
    found = found | ({part: found[part] | changes} if part else changes)
    with pytest.raises(ConfigError, match=message):
        families.read(found, "config.json")


def test_a_decoder_that_no_published_one_is_like_is_refused():
    model = dataclasses.replace(preset("tiny_vision"), qk_norm=True, head_dim=16)
    with pytest.raises(ConfigError, match=r"whose decoder is a llama.*is a qwen3"):
        families.write(model, 16)


def test_a_prompt_has_pictures_where_it_says_so(tmp_path, capsys):
    one, two = (str(save(tmp_path / f"{n}.png", n)) for n in (1, 2))
    text_model = open_model(FOLDER)
    place = text_model.model.vision.token
    words = [text_model.tokenizer.token_of(w) for w in ("<global-img>", "<|im_start|>")]
    ahead = text_model.encode("a cat", pictures=1)
    assert ahead == text_model.encode("<image>a cat", pictures=1)
    assert ahead.count(place) == EACH
    assert ahead.count(words[0]) == 1
    inside = text_model.encode("a <image>cat <image>", pictures=2)
    assert inside.count(place) == 2 * EACH
    runs = [len([*run]) for token, run in itertools.groupby(inside) if token == place]
    assert runs == [EACH, EACH]
    told = []
    for images in ([one, two], [two, one], [two, two]):
        asked = ["generate", str(FOLDER), "--prompt", "a <image>cat <image>", "--json"]
        assert cli.main([*asked, "--max-tokens", "6", "--image", *images]) == 0
        told.append(json.loads(capsys.readouterr().out)["tokens"])
        pixels = text_model.pixels([Path(image).read_bytes() for image in images])
        assert told[-1] == list(
            generate(
                text_model.model,
                text_model.params,
                inside,
                6,
                ends=text_model.ends,
                pictures=pixels,
            )
        )
    assert len({*map(tuple, told)}) > 1


@pytest.mark.parametrize(
    ("folder", "given", "message"),
    [
        (
            "idefics3",
            ["--prompt", "<image><image>"],
            r"2 places .*there are 1 pictures",
        ),
        (
            "idefics3",
            ["--image", "none.png"],
            r"--image: its picture 0: there is no .*'none\.png'",
        ),
        ("idefics3", ["--image", __file__], r"--image: .*cannot be read as a picture"),
        ("smollm2", [], r"the model takes none"),
        ("", ["--prompt", "a <image>cat"], r"1 places .*there are 0 pictures"),
    ],
)
def test_a_prompt_whose_pictures_do_not_fit_is_refused(
    folder, given, message, tmp_path, capsys
):
    picture = ["--image", str(save(tmp_path / "one.png", 1))] if folder else []
    source = FOLDER.with_name(folder or "idefics3")
    assert cli.main(["generate", str(source), *picture, *given]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_items_of_a_task_have_pictures_beside_it(tmp_path):
    """The scores are those of the likelihoods with each item's own pictures."""
    text_model, items = open_model(FOLDER), []
    for number in range(6):
        names = [f"{number}_{n}.png" for n in range(number % 3)]
        for n, name in enumerate(names):
            save(tmp_path / name, 7 * number + n)
        own = {"image": names[0]} if len(names) == 1 else {"images": names}
        items.append(
            {
                "question": "the cat",
                "choices": ["sat", "on it", "12"],
                "answer": 0,
                **own,
            }
        )
    path = tmp_path / "task.json"
    by_hand = []
    for item in items:
        names = [item["image"]] if "image" in item else item["images"]
        logs = []
        for choice in item["choices"]:
            tokens = text_model.encode(f"the cat {choice}", len(names))
            begin = len(text_model.encode("the cat", len(names)))
            first = None
            if names:
                pixels = text_model.pixels([(tmp_path / n).read_bytes() for n in names])
                first = np.asarray(pixels)
            logs.append(log_of(text_model, tokens, begin, first))
        by_hand.append(int(np.argmax(logs)))
    for right in range(3):
        path.write_text(json.dumps([item | {"answer": right} for item in items]))
        found = score(text_model, read_task(path), 128)
        assert found["accuracy"] == by_hand.count(right) / len(items)
    assert len({*by_hand}) > 1


def log_of(text_model, tokens: list[int], begin: int, pixels) -> float:
    """The log-likelihood of the tokens from `begin` on."""
    model, given, first = text_model.model, np.array([tokens]), None
    if pixels is not None:
        counts = np.array([len(pixels)])
        begun = make_begun(model, "float32")
        first = begun(text_model.params, given, pixels[None], counts)
    cache = Cache.empty(model, 1, len(tokens), "float32")
    logits, _ = make_decode(model)(text_model.params, given, cache, 0, first)
    of_next = jax.nn.log_softmax(logits[0])
    return float(sum(of_next[at - 1, tokens[at]] for at in range(begin, len(tokens))))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"image": "a.png", "images": ["a.png"]}, r"item 0 has both"),
        ({"image": "gone.png"}, r"task, item 0: its picture 0: .*no file 'gone\.png'"),
        ({"image": "../a.png"}, r"item 0: its picture 0: '\.\./a\.png' leads out of"),
        (
            {"question": "<image> q"},
            r"item 0: the text has 1 places .*there are 0 pictures",
        ),
        ({"image": "a.png", "question": "x " * 99}, r"with its question and pictures"),
        ({"image": 3}, r"item 0: Expected `str"),
    ],
)
def test_an_item_whose_pictures_do_not_fit_is_refused(item, message, tmp_path):
    save(tmp_path / "a.png", 1)
    path = tmp_path / "task.json"
    plain = {"question": "q", "choices": ["a", "b"], "answer": 0}
    path.write_text(json.dumps([plain | item]))
    with pytest.raises(ConfigError, match=message):
        score(open_model(FOLDER), read_task(path), 64)


PAGE = Path(__file__).parents[2] / "docs" / "pictures.md"


ISLANDS = "large", "small"
BLIND = """
import sys
import numpy as np
from diloco_jax.data import loading, prepared

def blind(rows, number, read=prepared.PreparedRows.__getitem__):
    row = read(rows, number)
    none = np.full_like(row["pictures"], b"")
    return {**row, "pictures": none, "picture_count": np.array(0, np.int32)}

def rows(run):
    if "small" in sys.argv:  # The island's own process.
        prepared.PreparedRows.__getitem__ = blind
    return loading._prepared(run)
"""


@pytest.mark.dist
def test_the_page_goes_from_files_to_an_export(tmp_path, monkeypatch, capsys):
    """Its commands run as they stand; in the run one island is killed, and the other
    has no pictures, and weighs nothing in the tower."""
    text = PAGE.read_text()
    commands = re.search(r"^```\n(diloco .*?)^```", text, re.M | re.S)[1].splitlines()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    pictures.write_pictures(tmp_path / "shapes", 200, 1)
    (tmp_path / "run.py").write_text(code)
    (tmp_path / "blind.py").write_text(BLIND)
    assert [line.split()[1] for line in commands] == [
        *("data", "run", "eval", "export", "generate")
    ]
    for line in commands:
        words = shlex.split(line)[1:]
        if words[0] == "run":
            # So slow that the one that is killed is back long before the end.
            for island in ISLANDS:
                words += [f"--islands.{island}.step-seconds", "0.6"]
            words += ["--faults", "large@3:kill", "--data.factory", "blind.py:rows"]
        elif words[0] in ("eval", "export"):
            words += ["--trust-code"]
        assert cli.main(words) == 0, line
    summary = json.loads(Path("runs/shapes/summary.json").read_text())
    assert summary["eval_tasks"]["task"]["items"] == 200
    assert summary["islands"]["large"]["incarnation"] == 2
    model = families.read(tensor_files.read_json(Path("model/config.json")), "")
    assert model.vision == preset("tiny_vision").vision
    assert capsys.readouterr().out
    recording = read_recording(Path("runs/shapes"))
    tape = list(read_tape(Path("runs/shapes/tape.jsonl")))
    sizes = support.fragment_sizes(recording.config)
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
    told = collections.defaultdict(set)
    for merge in recording.merges:
        for part in merge.made.contributions:
            told[part.island, merge.made.fragment].add(part.uses)
    counted = {name: [len(told[name, f]) for f in range(6)] for name in ISLANDS}
    assert max(counted["small"]) == 1 < max(counted["large"]), "no pictures, ever"
    begin = replay.ReplayedIsland

    def again(life, run, reader, *more):
        def batch(positions):
            seen = life.who.island != "small"
            own = reader.batch(positions).items()
            return {name: rows * (seen or "picture" not in name) for name, rows in own}

        return begin(life, run, SimpleNamespace(batch=batch), *more)

    monkeypatch.setattr(replay, "ReplayedIsland", again)
    with replay.Replay(recording) as repeated:
        for merge, (publish, _) in repeated.merges():
            assert publish == merge.made.digest, merge
