"""A compiled PyTorch step of the bundled model's sizes, for `gpu_step.py`.

It runs in an environment that has PyTorch, and nothing else of this package. One
argument: the sizes, as JSON. The last line of its output is the result, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Layer(nn.Module):  # type: ignore[misc]
    """Grouped-query attention with rotary positions, and a gated MLP."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        width, self.head = sizes["width"], sizes["head"]
        queries, pairs = sizes["heads"] * self.head, sizes["kv_heads"] * self.head
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, queries, bias=False)
        self.key = nn.Linear(width, pairs, bias=False)
        self.value = nn.Linear(width, pairs, bias=False)
        self.out = nn.Linear(queries, width, bias=False)
        self.gate = nn.Linear(width, sizes["mlp"], bias=False)
        self.up = nn.Linear(width, sizes["mlp"], bias=False)
        self.down = nn.Linear(sizes["mlp"], width, bias=False)

    def forward(self, x: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        """x: [B, T, D]; turned: cosines and sines, [2, T, head / 2]."""
        y = self.before_attention(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotated(q, turned), rotated(k, turned), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):  # type: ignore[misc]
    """Embedding, layers, norm and logits."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes["vocab"], sizes["width"])
        nn.init.normal_(self.embedding.weight, std=sizes["width"] ** -0.5)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes["layers"]))
        self.norm = nn.RMSNorm(sizes["width"])
        self.logits = nn.Linear(sizes["width"], sizes["vocab"], bias=False)
        if sizes["tied"]:
            self.logits.weight = self.embedding.weight
        steps = torch.arange(0, sizes["head"], 2) / sizes["head"]
        angles = torch.outer(torch.arange(sizes["length"]), 1e4**-steps)
        turned = torch.stack([angles.cos(), angles.sin()])
        self.register_buffer("turned", turned, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of [B, T + 1] tokens."""
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, self.turned)
        logits = self.logits(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def rotated(x: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    """Rotate [B, N, T, head] by the angles of its places."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = turned.to(x.dtype)
    return torch.cat(
        [first * cosine - second * sine, second * cosine + first * sine], dim=-1
    )


def main() -> None:
    """Print the times of steps."""
    sizes = json.loads(sys.argv[1])
    device = torch.device(sizes["platform"])
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Decoder(sizes).to(device)
    # An inductor needs a compiler, which a machine without a GPU may not have.
    loss_of = torch.compile(model) if on_gpu else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    shape = (sizes["batch"], sizes["length"] + 1)
    tokens = torch.randint(0, sizes["vocab"], shape, device=device)
    seconds, losses = [], []
    for _ in range(sizes["warm"] + sizes["steps"]):
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    told = {
        "seconds": seconds[sizes["warm"] :],
        "loss": losses[0],
        "device": name,
        "versions": f"torch {torch.__version__}",
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
