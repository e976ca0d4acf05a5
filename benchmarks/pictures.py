"""A small model answers questions about pictures that it cannot answer without them.

Pictures have one to three shapes of one kind and colour on grey; questions ask for
colour, kind or number, and have the same words whatever the answer is. Three islands
train in one emulation: two have pictures, the third has text alone. The blinded twin is
the same run whose pictures are all grey. Both answer the same held-out questions, as
`diloco eval --tasks` asks them.

`python benchmarks/pictures.py --output docs/results/raw/pictures`
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import support
from PIL import Image, ImageDraw

from diloco_jax import cli, preset
from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.data.tokenizers import open_tokenizer
from diloco_jax.simulation.emulate import Emulation, emulate
from diloco_jax.simulation.emulation_options import EmulationOptions
from diloco_jax.weights.tasks import TextModel, read_task, score

SIDE, LENGTH = 32, 96
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 230),
    "yellow": (235, 220, 50),
}
KINDS = ("circle", "square", "cross")
NUMBERS = ("one", "two", "three")
GREY = (128, 128, 128)
QUESTIONS = {
    "colour": ("What colour?", tuple(COLOURS)),
    "kind": ("What shape?", KINDS),
    "number": ("How many?", NUMBERS),
}
BOUND, CHANCE_MARGIN = 0.9, 0.1
"""Accuracy that is asked of the model, and how far above chance the twin may be."""


def draw(chance: random.Random) -> tuple[Image.Image, dict[str, str]]:
    """Return a picture and its answers by question."""
    colour, kind = chance.choice(list(COLOURS)), chance.choice(KINDS)
    number = chance.randrange(len(NUMBERS))
    image = Image.new("RGB", (SIDE, SIDE), GREY)
    pen = ImageDraw.Draw(image)
    places = [(x, y) for x in (8, 24) for y in (8, 24)]
    for x, y in chance.sample(places, number + 1):
        x, y = x + chance.randint(-2, 2), y + chance.randint(-2, 2)
        half, fill = chance.randint(4, 5), COLOURS[colour]
        box = (x - half, y - half, x + half, y + half)
        if kind == "circle":
            pen.ellipse(box, fill)
        elif kind == "square":
            pen.rectangle(box, fill)
        else:
            pen.line((box[0], box[1], box[2], box[3]), fill, 3)
            pen.line((box[0], box[3], box[2], box[1]), fill, 3)
    return image, {"colour": colour, "kind": kind, "number": NUMBERS[number]}


def write_pictures(folder: Path, count: int, seed: int, *, blind: bool = False) -> Path:
    """Write so many pictures and `examples.jsonl`, a question about each; and
    `task.json`, the same questions with their choices."""
    chance = random.Random(seed)
    (folder / "pictures").mkdir(parents=True)
    lines, items = [], []
    for number in range(count):
        image, answers = draw(chance)
        name = f"pictures/{number:05}.png"
        grey = Image.new("RGB", image.size, GREY)
        (grey if blind else image).save(folder / name)
        asked = chance.choice(list(QUESTIONS))
        question, choices = QUESTIONS[asked]
        prompt, answer = f"<image>{question}", answers[asked]
        lines.append(
            json.dumps({"prompt": prompt, "completion": f" {answer}", "image": name})
        )
        items.append(
            {"question": prompt, "choices": choices, "answer": answer, "image": name}
        )
    (folder / "examples.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "task.json").write_text(json.dumps(items))
    return folder


def write_text(folder: Path, count: int, seed: int) -> Path:
    """Write so many sentences about shapes, and no picture."""
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    lines = [
        json.dumps(
            {
                "text": f"There are {chance.choice(NUMBERS)} shapes, and each is a "
                f"{chance.choice(list(COLOURS))} {chance.choice(KINDS)}."
            }
        )
        for _ in range(count)
    ]
    (folder / "examples.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def prepared(source: Path, *, pictures: bool) -> Path:
    """Prepare a folder's examples beside it."""
    out = source.with_name(f"{source.name}_rows")
    vision = preset("tiny_vision").vision
    taken = ["--picture-tokens", str(vision.tokens_per_picture)] if pictures else []
    made = ["data", "prepare", str(out), str(source / "examples.jsonl")]
    made += ["--sequence-length", str(LENGTH), "--workers", "2", *taken]
    if cli.main([*made, *(["--pictures-per-row", "3"] if pictures else [])]):
        raise support.RunError(f"diloco data prepare of {source} failed")
    return out


def config_of(paths: tuple[Path, ...], names: tuple[str, ...], tokens: int) -> Config:
    """Return a run of these islands on these rows."""
    run = RunConfig(
        model=preset("tiny_vision"),
        data=DataConfig(paths=tuple(map(str, paths))),
        inner=InnerConfig(learning_rate=2e-3),
        sync=SyncConfig(fragments=6, steps_per_cycle=12),
        sequence_length=LENGTH,
        total_tokens=tokens,
    )
    island = IslandConfig(batch_size=16, step_seconds=0.1)
    return Config(run=run, islands=dict.fromkeys(names, island))


def answers(config: Config, learnt: Emulation, task: Path) -> dict[str, Any]:
    """Return the scores of what was learnt, in one task."""
    model = TextModel(
        model=config.run.model,
        params=learnt.params,
        tokenizer=open_tokenizer(""),
        ends=frozenset(),
    )
    return score(model, read_task(task), LENGTH)


def one(folder: Path, options: argparse.Namespace, *, blind: bool) -> dict[str, Any]:
    """Train one model; return what it answers, by question."""
    began = time.monotonic()
    seen = write_pictures(folder / "seen", options.pictures, 1, blind=blind)
    text = write_text(folder / "text", options.pictures // 6, 2)
    paths = prepared(text, pictures=False), prepared(seen, pictures=True)
    config = config_of(paths, ("a", "b", "text"), options.tokens)
    # Parts are in the order of rows, and islands in that of their names.
    names = ("a_text", "b", "c")
    config = dataclasses.replace(
        config, islands=dict.fromkeys(names, config.islands["a"])
    )
    learnt = emulate(config, options=EmulationOptions(unlike_shards=True))
    found: dict[str, Any] = {"seconds": time.monotonic() - began}
    held = write_pictures(folder / "held", options.questions, 3, blind=blind)
    items = json.loads((held / "task.json").read_text())
    for name, (question, choices) in QUESTIONS.items():
        own = [item for item in items if item["question"].endswith(question)]
        task = held / f"{name}.json"
        task.write_text(json.dumps(own))
        found[name] = answers(config, learnt, task) | {"chance": 1 / len(choices)}
    found["loss"] = learnt.summary["eval_loss"]
    return found


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--pictures", type=int, default=6000)
    parser.add_argument("--questions", type=int, default=600)
    parser.add_argument("--tokens", type=float, default=6e6)
    options = parser.parse_args()
    options.tokens = int(options.tokens)
    logging.disable(logging.WARNING)
    found = {}
    for name, blind in (("with pictures", False), ("blinded", True)):
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = one(Path(scratch), options, blind=blind)
        print(name, json.dumps(found[name]), flush=True)
    return 0


if __name__ == "__main__":
    support.script(main)
