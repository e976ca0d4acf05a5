"""Draw how two unequal islands and a plain loop fine-tune one model.

    python docs/figures/finetune.py

It reads docs/results/raw/finetune.json, of real processes; the commands are on
docs/results/finetune.md.
"""

from __future__ import annotations

import json
from typing import Any

from drawing import BLUE, INK, ORANGE, RAW, draw, paper, say
from matplotlib.figure import Figure

COLUMNS = {"All weights": ("run", "twin"), "Adapters": ("lora", "lora twin")}
STYLES = (("two islands, one killed", BLUE, "o-"), ("a plain loop", ORANGE, "s--"))


def make() -> Figure:
    """Return the figure: bits per byte by tokens, all weights and adapters."""
    parts = json.loads((RAW / "finetune.json").read_bytes())["parts"]
    figure, columns = paper(10, 3.8, 2, sharey=True)
    for axes, (what, names) in zip(columns, COLUMNS.items(), strict=True):
        for name, (label, colour, style) in zip(names, STYLES, strict=True):
            if name in parts:
                curve: list[dict[str, Any]] = parts[name]["curve"]
                fall, error = parts[name]["fall"]
                axes.plot(
                    [point["tokens"] / 1000 for point in curve],
                    [point["bits_per_byte"] for point in curve],
                    style,
                    color=colour,
                    label=f"{label}:\nfalls by {fall:.4f} ± {error:.4f}",
                )
        say(axes, what, "tokens trained on, thousands", "held-out bits per byte")
        if any(name in parts for name in names):
            axes.legend(frameon=False, labelcolor=INK, loc="upper right")
    return figure


if __name__ == "__main__":
    draw("finetune", make)
