"""One replica under torchft's DiLoCo; runs in the venv that `install.sh` makes.

It writes a JSON line for each step, for each round of a fragment and for each copy of
another replica's state that it takes over. Its decoder has the tensors of the preset
"tiny": `V` bytes, `D` model, `N` query and `K` key heads of `H`, `F` MLP.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.nn import functional as F  # noqa: N812
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

V, D, N, K, H, F_, LAYERS = 256, 64, 4, 2, 16, 128, 2
TEXT_BYTES = 4 << 20


class Layer(nn.Module):  # type: ignore[misc]
    """Grouped-query attention with rotary positions, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(D), nn.RMSNorm(D)
        self.query = nn.Linear(D, N * H, bias=False)
        self.key = nn.Linear(D, K * H, bias=False)
        self.value = nn.Linear(D, K * H, bias=False)
        self.out = nn.Linear(N * H, D, bias=False)
        self.gate = nn.Linear(D, F_, bias=False)
        self.up = nn.Linear(D, F_, bias=False)
        self.down = nn.Linear(F_, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, T, D]."""
        y = self.before_attention(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, H)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Head(nn.Module):  # type: ignore[misc]
    """The last norm and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.RMSNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, T, D]."""
        return self.logits(self.norm(x))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Turn heads, [B, N, T, H], by their positions."""
    half = H // 2
    rates = 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1
    )


def decoder() -> nn.Sequential:
    """Return the model; each of its parts is a fragment."""
    torch.manual_seed(0)
    parts = [nn.Embedding(V, D), *(Layer() for _ in range(LAYERS)), Head()]
    for parameter in (p for part in parts for p in part.parameters() if p.ndim > 1):
        nn.init.normal_(parameter, std=0.02)
    return nn.Sequential(*parts)


def text() -> torch.Tensor:
    """Return bytes of the standard library's sources."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) > TEXT_BYTES:
            break
    return torch.frombuffer(found, dtype=torch.uint8)


class Told:
    """A file of JSON lines, whole even if the process is killed between two."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def __call__(self, kind: str, **facts: Any) -> None:
        """Write a line with the time and the life that writes it."""
        line = {"kind": kind, "time": time.time(), "pid": os.getpid(), **facts}
        self._file.write(json.dumps(line).encode() + b"\n")


class Recording(Manager):  # type: ignore[misc]
    """torchft's manager, which tells how each round ends."""

    told: Told
    sizes: list[int]

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Return what torchft decides."""
        number = self.current_step()
        committed: bool = super().should_commit(timeout)
        self.told(
            "round",
            number=number,
            fragment=number % len(self.sizes),
            committed=committed,
            participants=self.num_participants(),
        )
        return committed


def main() -> None:
    """Train until killed, or until `until`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=json.loads)
    parser.add_argument("options", type=json.loads)
    options = parser.parse_args()
    work, given = options.work, options.options
    torch.set_num_threads(1)
    told = Told(given["log"])
    model, data = decoder(), text()
    parts = list(model.children())
    inner = torch.optim.AdamW(
        model.parameters(),
        lr=work["learning_rate"],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    outer = [
        torch.optim.SGD(
            part.parameters(),
            lr=work["outer_learning_rate"],
            momentum=work["outer_momentum"],
            nesterov=True,
        )
        for part in parts
    ]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        told("healed")

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    patience = timedelta(seconds=given["timeout_s"])
    manager = Recording(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=max(1, work["replicas"] - 1),
        use_async_quorum=False,
        timeout=patience,
        replica_id=given["name"],
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=given["lighthouse"],
        hostname="localhost",
        quorum_retries=given["quorum_retries"],
    )
    manager.told = told
    manager.sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
    told("began", sizes=manager.sizes)
    draw = torch.Generator().manual_seed(os.getpid())
    with DiLoCo(manager, parts, inner, outer, sync_every=work["steps_per_cycle"]):
        while time.time() < given["until"]:
            due = time.monotonic() + given["pace"]
            at = torch.randint(
                len(data) - work["sequence"] - 1, (work["batch"],), generator=draw
            )
            rows = torch.stack([data[i : i + work["sequence"] + 1] for i in at]).long()
            inner.zero_grad()
            logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not math.isfinite(loss.item()):
                sys.exit("the loss is not finite")
            time.sleep(max(0.0, due - time.monotonic()))
            # A round, which the optimizer's step may end with, has this step in it.
            told("step", loss=loss.item())
            inner.step()


if __name__ == "__main__":
    main()
