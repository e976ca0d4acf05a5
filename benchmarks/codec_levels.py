"""Two bits a value: which levels, which scale, which block?

Question: what do codecs of about two bits lose of a delta, and how much waits in the
residual once error feedback runs? Deltas are normal numbers, and those that one of
eight islands sends while 0.04 M parameters train in f32 (`quality.py`, 0.6 M tokens,
H = 24, 85 merges), with AdamW and with Muon inside.

Prediction: four odd levels at the scale of least squares, as for normal numbers, and
ternary ones behind at equal bytes.

Command: `python benchmarks/codec_levels.py`. It prints the table of
docs/design/codecs.md. Cost: about two minutes on one idle core.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import support
from quality_configs import SIZES
from quality_rows import rows

from diloco_jax import emulate
from diloco_jax.core.fragment_merge import FragmentMerge
from diloco_jax.core.fragments import Piece

Values = npt.NDArray[Any]
Series = list[list[Values]]
"""By fragment and piece, its deltas one after the other, f32[tiles, elements]."""
TOKENS = 600_000


def main() -> int:
    """Print the table."""
    support.parser(__doc__).parse_args()
    normal = np.random.default_rng(0).standard_normal((1, 64, 4096))
    found = {
        "normal": [list(normal.astype(np.float32))],
        "AdamW": sent("decoupled, 8 islands"),
        "Muon": sent("Muon inside"),
    }
    print("| levels | scale | block | bits | normal: lost |", end="")
    print(" AdamW: lost | waits | Muon: lost | waits |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, scale, code, bits, blocks in SCHEMES:
        for block in blocks:
            cells = [name, scale, str(block), f"{bits + 16 / block:.3g}"]
            for what, series in found.items():
                lost, waits = measure(code, block, series)
                cells += [f"{lost:.3f}"] + [f"{waits:.2f}"] * (what != "normal")
            print("|", " | ".join(cells), "|", flush=True)
    return 0


def sent(row: str) -> Series:
    """Emulate a row of `quality.py` with f32 on the wire; return an island's deltas."""
    found: dict[tuple[Piece, ...], Series] = {}
    merge = FragmentMerge.merge

    def heard(of: Any, state: Any, payloads: Any, *rest: Any, **more: Any) -> Any:
        own = found.setdefault(of.pieces, [[] for _ in of.pieces])
        for kept, octets in zip(own, of.layout_up.unpack(payloads[0]), strict=True):
            kept.append(octets.reshape(-1, octets.shape[-1]).view(np.float32).copy())
        return merge(of, state, payloads, *rest, **more)

    config, options = next(
        (r.config, r.options) for r in rows(SIZES["0.04m"]) if r.name == row
    )
    sync = dataclasses.replace(
        config.run.sync, codec_up="f32", codec_down="f32", steps_per_cycle=24
    )
    config = config.replace("sync", sync).replace("total_tokens", TOKENS)
    with mock.patch.object(FragmentMerge, "merge", heard):
        emulate(config, options=options)
    return [piece for fragment in found.values() for piece in fragment]


def measure(code: Callable[[Values], Values], block: int, series: Series) -> Any:
    """Return the share of the squares that an encoding loses, and the squares of the
    residual at the end over those of the last delta."""
    lost, squares, waits, last = 0.0, 0.0, 0.0, 0.0
    for deltas in series:
        residual: Values = np.zeros_like(deltas[0])
        for delta in deltas:
            lost += float(np.square(_coded(code, block, delta) - delta).sum())
            squares += float(np.square(delta).sum())
            total = delta + residual
            residual = total - _coded(code, block, total)
        waits += float(np.square(residual).sum())
        last += float(np.square(deltas[-1]).sum())
    return lost / squares, waits / last


def _coded(code: Callable[[Values], Values], block: int, tiles: Values) -> Values:
    elements = tiles.shape[-1]
    padded = np.pad(tiles, ((0, 0), (0, -elements % block)))
    blocks = padded.reshape(len(tiles), -1, block)
    coded: Values = np.where(np.any(blocks, -1, keepdims=True), code(blocks), 0.0)
    return coded.reshape(len(tiles), -1)[:, :elements]


def _largest(x: Values) -> Values:
    largest: Values = np.abs(x).max(-1, keepdims=True)
    return largest


def _extreme(x: Values) -> Values:
    found: Values = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    return found


def _nearest(least: int, most: int) -> Callable[[Values, Values], Values]:
    return lambda x, scale: np.clip(np.rint(x / scale), least, most)


def _odd(x: Values, scale: Values) -> Values:
    odd: Values = np.clip(2 * np.floor(x / scale / 2) + 1, -3, 3)
    return odd


def scheme(
    levels: Callable[[Values, Values], Values],
    first: Callable[[Values], Values],
    rounds: int = 0,
) -> Callable[[Values], Values]:
    """Return encode and decode: the first scale, then rounds of least squares."""

    def code(x: Values) -> Values:
        scale = first(x)
        scale = np.where(scale, scale, 1.0)
        for _ in range(rounds):
            near = levels(x, scale)
            fitted = (x * near).sum(-1, keepdims=True)
            fitted /= np.maximum(np.square(near).sum(-1, keepdims=True), 1)
            scale = np.where(fitted, fitted, scale)
        return levels(x, scale) * scale

    return code


def _schemes() -> Iterator[tuple[str, str, Callable[[Values], Values], float, Any]]:
    two, three, fit = _nearest(-2, 1), _nearest(-1, 1), "least squares"
    wide = (32, 64, 128, 256)
    yield "-3, -1, 1, 3", "largest", scheme(_odd, lambda x: _largest(x) / 3), 2, (32,)
    mean = scheme(_odd, lambda x: np.abs(x).mean(-1, keepdims=True) / 2, 2)
    yield "-3, -1, 1, 3", fit, mean, 2, wide
    yield "-1, 0, 1", "largest", scheme(three, _largest), 1.6, (16, 32)
    mean = scheme(three, lambda x: np.abs(x).mean(-1, keepdims=True) * 1.5, 2)
    yield "-1, 0, 1", fit, mean, 1.6, (16, 32)
    yield "-2, -1, 0, 1", "largest", scheme(two, lambda x: _extreme(x) / -2), 2, wide
    extreme = scheme(two, lambda x: _extreme(x) / -2, 1)
    yield "-2, -1, 0, 1", fit, extreme, 2, (32, 64)
    int4 = scheme(_nearest(-7, 7), lambda x: _largest(x) / 7)
    yield "-7 to 7", "largest", int4, 4, (32,)


SCHEMES = tuple(_schemes())

if __name__ == "__main__":
    sys.exit(main())
