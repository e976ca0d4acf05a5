"""A small model answers questions about pictures that it cannot answer without them.

Pictures have one to three shapes of one kind and colour on grey; a question asks for
colour, kind or number, and has the same words whatever the answer is. Three islands
train the preset `tiny_vision` in one emulation: two have pictures with their questions,
the third has text alone. The blinded twin is the same run with pictures that are all
grey. "Without text" are the two islands alone, with their own share of the tokens. With
weights by tokens the island of text weighs in the tower as much as the others. All
answer the same held-out questions, as evaluation in tasks asks them.
"""

from __future__ import annotations

import argparse
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
from diloco_jax.data.prepared import read_manifest
from diloco_jax.data.tokenizers import open_tokenizer
from diloco_jax.files import write_json
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
KINDS = ("ring", "square", "cross")
NUMBERS = ("one", "two", "three")
GREY = (128, 128, 128)
QUESTIONS = {
    "colour": ("What colour?", tuple(COLOURS)),
    "kind": ("What shape?", KINDS),
    "number": ("How many?", NUMBERS),
}
BOUND, ERRORS = 0.9, 3
"""Share of right answers that is asked of a model, and standard errors by which the
blinded twin may be above chance."""


def draw(chance: random.Random) -> tuple[Image.Image, dict[str, str]]:
    """Return a picture and its answers by question."""
    colour, kind = chance.choice(list(COLOURS)), chance.choice(KINDS)
    number = chance.randrange(len(NUMBERS))
    image = Image.new("RGB", (SIDE, SIDE), GREY)
    pen = ImageDraw.Draw(image)
    places = [(x, y) for x in (8, 24) for y in (8, 24)]
    for x, y in chance.sample(places, number + 1):
        x, y = x + chance.randint(-2, 2), y + chance.randint(-2, 2)
        half, fill = chance.randint(5, 6), COLOURS[colour]
        box = (x - half, y - half, x + half, y + half)
        if kind == "ring":
            pen.ellipse(box, None, fill, 2)
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


TEXT, BLIND, ALONE = "with an island of text", "blinded twin", "without text"
BY_TOKENS = f"{TEXT}, weights by tokens"


def one(folder: Path, options: argparse.Namespace, case: str) -> dict[str, Any]:
    """Train one model; return what it answers, by question."""
    began, blind = time.monotonic(), case == BLIND
    seen = write_pictures(folder / "seen", options.pictures, 1, blind=blind)
    paths, tokens = [prepared(seen, pictures=True)], options.tokens
    islands: tuple[str, ...] = ("b", "c")
    if case == ALONE:
        tokens = 2 * tokens // 3
    else:
        # Each island has a part of the rows, in the order of both.
        text = write_text(folder / "text", 11 * options.pictures // 50, 2)
        paths, islands = [prepared(text, pictures=False), *paths], ("a", *islands)
        rows = [read_manifest(path).train.counts.rows for path in paths]
        if len(islands) * rows[0] < sum(rows):
            raise support.RunError(
                f"rows without and with pictures: {rows}; a has some"
            )
    config = config_of(tuple(paths), islands, tokens)
    if case == BY_TOKENS:
        config = config.replace("sync.weights_by_use", "none")
    learnt = emulate(config, options=EmulationOptions(unlike_shards=True))
    found: dict[str, Any] = {"loss": learnt.summary["eval_loss"]}
    held = write_pictures(folder / "held", options.questions, 3, blind=blind)
    items = json.loads((held / "task.json").read_text())
    for name, (question, choices) in QUESTIONS.items():
        own = [item for item in items if item["question"].endswith(question)]
        task = held / f"{name}.json"
        task.write_text(json.dumps(own))
        found[name] = answers(config, learnt, task) | {"chance": 1 / len(choices)}
    return found | {"seconds": time.monotonic() - began}


def checks(done: dict[str, Any]) -> list[support.Check]:
    """Compare the answers with the bounds."""
    found = []
    for case, by_question in done.items():
        for name in QUESTIONS:
            own = by_question[name]
            what = f"{case}, {name}: share of right answers"
            if case == BY_TOKENS:
                continue
            if case == BLIND:
                bound = own["chance"] + ERRORS * own["accuracy_error"]
                found.append(support.at_most(what, own["accuracy"], bound))
            else:
                found.append(support.at_least(what, own["accuracy"], BOUND))
    return found


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--pictures", type=int, default=6000)
    parser.add_argument("--questions", type=int, default=600)
    parser.add_argument("--tokens", type=float, default=3e6)
    parser.add_argument("--cases", nargs="*", default=[TEXT, BLIND, ALONE, BY_TOKENS])
    parser.add_argument(
        "--runs", type=Path, help="finished runs, kept for the next call"
    )
    options = parser.parse_args()
    options.tokens = int(options.tokens)
    if options.quick:
        options.pictures, options.questions, options.tokens = 300, 30, 30_000
    logging.disable(logging.WARNING)
    done: dict[str, Any] = {}
    if options.runs and options.runs.exists():
        done = json.loads(options.runs.read_text())
    for case in options.cases:
        if case not in done:
            with tempfile.TemporaryDirectory() as scratch:
                done[case] = one(Path(scratch), options, case)
            if options.runs:
                write_json(done, options.runs)
    rows = [
        {
            "run": case,
            **{name: f"{found[name]['accuracy']:.3f}" for name in QUESTIONS},
            "seconds": f"{found['seconds']:.0f}",
        }
        for case, found in done.items()
    ]
    chances = {n: f"{1 / len(choices):.3f}" for n, (_, choices) in QUESTIONS.items()}
    table = [*rows, {"run": "chance", **chances}]
    told = f"Right answers of {options.questions} questions, {options.tokens:,} tokens"
    settings = {"pictures": options.pictures, "tokens": options.tokens}
    return support.deliver(
        options,
        "pictures",
        __doc__,
        {told: table},
        checks(done),
        {**settings, "runs": done},
    )


if __name__ == "__main__":
    support.script(main)
