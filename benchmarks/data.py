"""The data's speed: preparing, and reading what was prepared.

Question: how many tokens a second does one core read of a mixture of prepared folders,
and does that feed a host of TPUs? How fast is data prepared? How many rows with
pictures does a core decode?

Read is what a run reads: leased positions of two folders with weights become batches
with tokens, segments and weights, by the product's own stream, in a process that has
one core. CPU seconds are those of all threads. The vocabulary has 262,144 words, as
Gemma's, so that a token takes four bytes. Tokens are made of each four bytes of text,
since no tokenizer of that size comes with this project; its own time is therefore not
in the figures of preparing. Files lie in the page cache.

Demand: an island of one v6e host with eight chips trains gemma3_1b, and nothing is
computed again. Its step is that of `diloco plan CONFIG --arithmetic`, by the same
function: FLOPs by the formula over the chips' published peak rate. A real step takes
longer. (The formula counts attention whole, a tenth of the FLOPs here, and most layers
of this model have a window.) A bound asks for twice these tokens.

Rows with pictures have two each, of noise that is smooth, in the sizes that the table
says. Each becomes a square of 512 pixels. The host's demand of such rows is that of
smolvlm_256m, all parts trained, by the same arithmetic, its tower included.

Command: `python benchmarks/data.py`. Cost: two minutes on one core.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import support
from PIL import Image

from diloco_jax.config import Config, DataConfig, IslandConfig, RunConfig
from diloco_jax.data.examples import Reader, pictures_for
from diloco_jax.data.loading import load_data
from diloco_jax.data.pictures import PictureInput
from diloco_jax.data.prepare import Recipe, prepare
from diloco_jax.data.reader import BatchReader, LeasedStream
from diloco_jax.data.source import TOKENS
from diloco_jax.data.tokenizers import Bytes, Placed, Tokenizer
from diloco_jax.models.presets import preset
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.plan import fragments_of, plan_run
from diloco_jax.protocol.messages import Span

HOST = IslandConfig(topology="v6e:2x4", batch_size=64, mesh_fsdp=8, remat="none")
TEXT, SEEN = "gemma3_1b", "smolvlm_256m"
"""Models that the host trains, of text and of pictures beside it."""
SPARE = 2.0
"""The stream must read that many times what is asked of it."""
LENGTH, BATCH, REPEATS = 2048, 64, 5
BATCHES = 40
"""Batches of one repeat."""
WEIGHTS = (3.0, 1.0)
PICTURES = {
    "JPEG, 640 x 480": ("jpg", 640, 480),
    "JPEG, 2,048 x 1,536": ("jpg", 2048, 1536),
    "PNG, 640 x 480": ("png", 640, 480),
    "WebP, 640 x 480": ("webp", 640, 480),
}
PER_ROW, EACH, SIDE, ROWS = 2, 64, 512, 64
"""Pictures of a row, placeholders of each, pixels of a side in the batch, and rows."""
TIMEOUT_S = 60.0


class Quads(Tokenizer):
    """A tokenizer without time of its own: a token of each four bytes of text."""

    name = digest = "quads"
    vocab_size = 262_144
    start = (2,)
    end = 1

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text."""
        found = []
        for text in texts:
            data = text.encode()
            whole = np.frombuffer(data + b" " * (-len(data) % 4), "<u4")
            found.append((whole % self.vocab_size).astype(np.int32))
        return found

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        """Return nothing for none: no text is a chat."""
        assert not texts
        return []

    def decode(self, tokens: Sequence[int]) -> str:
        """Not needed here."""
        raise NotImplementedError

    def token_of(self, word: str) -> int | None:
        """Return None: no word is a token."""
        return None

    def word(self, token: int) -> str:
        """Return nothing: no token is a word."""
        return ""


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        written = [write(Path(folder), name) for name in ("a", "b")]
        paths = tuple(str(Path(folder, name)) for name in ("a", "b"))
        data = DataConfig(paths=paths, weights=WEIGHTS)
        read = [speed(data) for _ in range(REPEATS)]
        shown = {
            said: pictured(Path(folder, said), *how) for said, how in PICTURES.items()
        }
    step_s = planned_step_s(RunConfig(model=preset(TEXT), sequence_length=LENGTH))
    demand = HOST.batch_size * LENGTH / step_s
    vision = preset(SEEN).vision
    seen = DataConfig(
        arrays=("tokens", "pictures", "picture_count"),
        pictures=PER_ROW,
        picture_tokens=vision.tokens_per_picture,
        picture_token=vision.token,
    )
    seen_s = planned_step_s(
        RunConfig(model=preset(SEEN), data=seen, sequence_length=LENGTH)
    )
    rows_per_s = HOST.batch_size / seen_s
    per_core = statistics.median(r["tokens_per_cpu_s"] for r in read)
    checks = [
        support.at_least(
            "tokens read by one core, per second of it",
            per_core,
            SPARE * demand,
            ",.0f",
        )
    ]
    asked = {
        "host": f"{HOST.topology}, {TEXT}",
        "tokens of a step": f"{HOST.batch_size * LENGTH:,}",
        "seconds of a step, planned": f"{step_s:.4f}",
        "tokens / s that it trains on": f"{demand:,.0f}",
        "one core reads": f"{per_core / demand:.1f} times that",
    }
    table = [
        {
            "work": f"prepare {name}",
            "tokens": f"{w['tokens']:,}",
            "CPU s": f"{w['cpu_s']:.2f}",
            "tokens / CPU s": f"{w['tokens'] / w['cpu_s']:,.0f}",
            "MB of text / CPU s": f"{w['text_bytes'] / w['cpu_s'] / 1e6:.1f}",
        }
        for name, w in zip("ab", written, strict=True)
    ] + [
        {
            "work": f"read, {number}",
            "tokens": f"{r['tokens']:,}",
            "CPU s": f"{r['cpu_s']:.2f}",
            "tokens / CPU s": f"{r['tokens_per_cpu_s']:,.0f}",
            "MB of text / CPU s": "",
        }
        for number, r in enumerate(read, start=1)
    ]
    pictures = [
        {
            "two pictures a row": said,
            "KB each": f"{s['kb']:.0f}",
            "rows / CPU s": f"{s['rows_per_cpu_s']:,.0f}",
            "pictures / CPU s": f"{s['rows_per_cpu_s'] * PER_ROW:,.0f}",
            f"rows / s of the host, {SEEN}": f"{rows_per_s:,.0f}",
            "cores for them": f"{rows_per_s / s['rows_per_cpu_s']:,.1f}",
            "prepared / CPU s": f"{s['prepared_per_cpu_s'] * PER_ROW:,.0f}",
        }
        for said, s in shown.items()
    ]
    raw = {
        "written": written,
        "read": read,
        "demand_tokens_per_s": demand,
        "pictures": shown,
        "demand_rows_per_s": rows_per_s,
    }
    tables = {"Demand": [asked], "Work": table, "Pictures": pictures}
    return support.write_results(options.out, "data", __doc__, tables, checks, raw)


def planned_step_s(run: RunConfig) -> float:
    """Return the seconds of the host's step by the plan's arithmetic."""
    # TPUs of this machine play no part.
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    config = Config(run=run, islands={"host": HOST}).validate()
    plan = plan_run("", config, fragments_of(config), Assumptions())
    return plan.islands["host"].step_seconds


def write(folder: Path, name: str) -> dict[str, Any]:
    """Prepare the Python standard library's sources once."""
    recipe = Recipe(
        tokenizer=Quads(),
        reader=Reader(),
        sequence_length=LENGTH,
        validation_fraction=0.02 if name == "a" else 0.3,
    )
    began = time.process_time()
    made = prepare(folder / name, (), recipe, workers=1)
    counts = made.train.counts + made.validation.counts
    return {
        "cpu_s": time.process_time() - began,
        "tokens": counts.tokens,
        "text_bytes": counts.text_bytes,
        "rows": counts.rows,
    }


def pictured(folder: Path, kind: str, width: int, height: int) -> dict[str, float]:
    """Prepare and read rows with pictures of one kind and size."""
    (folder / "in").mkdir(parents=True)
    draw, lines, nbytes = np.random.default_rng(0), [], 0
    for number in range(ROWS * PER_ROW):
        small = draw.integers(0, 256, (height // 16, width // 16, 3), np.uint8)
        image = Image.fromarray(small).resize((width, height))
        path = folder / "in" / f"{number}.{kind}"
        image.save(path, quality=90)
        nbytes += path.stat().st_size
    for number in range(ROWS):
        names = [f"{PER_ROW * number + n}.{kind}" for n in range(PER_ROW)]
        lines.append(json.dumps({"text": "row " * 150, "images": names}))
    (folder / "in" / "rows.jsonl").write_text("\n".join(lines))
    pictures = pictures_for(Bytes(), EACH, LENGTH, PER_ROW)
    recipe = Recipe(
        tokenizer=Bytes(),
        reader=Reader(pictures=pictures),
        sequence_length=LENGTH,
        validation_fraction=0.02,
    )
    began = time.process_time()
    made = prepare(folder / "out", (str(folder / "in"),), recipe, workers=1)
    prepared_s = time.process_time() - began
    data = DataConfig(paths=(str(folder / "out"),))
    found = load_data(RunConfig(data=data, sequence_length=LENGTH))
    taken = PictureInput(side=SIDE, tokens=EACH, token=pictures.token)
    fields = {"tokens": TOKENS, **taken.fields(PER_ROW)}
    reader = BatchReader(found.index(0), fields, LENGTH)
    read = []
    for number in range(REPEATS):
        began = time.process_time()
        reader.batch(np.arange(number * ROWS // 4, (number + 1) * ROWS // 4))
        read.append(ROWS / 4 / (time.process_time() - began))
    return {
        "kb": nbytes / ROWS / PER_ROW / 1e3,
        "rows": made.train.counts.rows,
        "rows_per_cpu_s": statistics.median(read),
        "prepared_per_cpu_s": ROWS / prepared_s,
    }


def speed(data: DataConfig) -> dict[str, Any]:
    """Read `BATCHES` batches as an island's loop takes them."""
    found = load_data(RunConfig(data=data, sequence_length=LENGTH))
    reader = BatchReader(found.index(0), found.train.fields, LENGTH)
    stream = LeasedStream(reader, BATCH)
    began, began_cpu = time.monotonic(), time.process_time()
    stream.grant(Span(0, BATCH * BATCHES))
    for _ in range(BATCHES):
        stream.next_batch(TIMEOUT_S)
    cpu_s, wall_s = time.process_time() - began_cpu, time.monotonic() - began
    stream.close()
    tokens = BATCHES * BATCH * LENGTH
    return {
        "tokens": tokens,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "tokens_per_cpu_s": tokens / cpu_s,
    }


if __name__ == "__main__":
    sys.exit(main())
