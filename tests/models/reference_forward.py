"""The forward pass of the families in float64 numpy, by the formulas of their papers.

It reads config.json and the tensors of a folder as they stand, one position and one
head at a time where that is plainest, and shares no code with the package.
"""

import json
import math
from pathlib import Path

import numpy as np
from safetensors import safe_open


def load(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json, and all tensors in float64."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            tensors |= {n: file.get_tensor(n).astype(np.float64) for n in file.keys()}  # noqa: SIM118
    return json.loads((folder / "config.json").read_text()), tensors


def logits(config: dict, w: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits of [T] tokens, [T, V]."""
    kind = config["model_type"]
    gemma, mixtral, olmoe = (kind == k for k in ("gemma3_text", "mixtral", "olmoe"))
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size, count = config["head_dim"], len(tokens)

    def norm(x, name):
        gain = w[f"{name}.weight"] + (1 if gemma else 0)
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + config["rms_norm_eps"]) * gain

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def gate(x):
        if gemma:
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
            return 0.5 * x * (1 + np.tanh(inner))
        return x / (1 + np.exp(-x))

    def mlp(x, at, names):
        first, second, last = (f"{at}.{name}" for name in names)
        return linear(gate(linear(x, first)) * linear(x, second), last)

    def sparse(x, at):
        """One token through its experts, one after the other."""
        at = f"{at}.{'block_sparse_moe' if mixtral else 'mlp'}"
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        scores = np.exp(linear(x, f"{at}.gate"))
        odds = scores / scores.sum()
        own = np.argsort(-odds)[: config["num_experts_per_tok"]]
        total = 1.0 if olmoe else odds[own].sum()
        return sum(odds[e] / total * mlp(x, f"{at}.experts.{e}", names) for e in own)

    x = w["model.embed_tokens.weight"][tokens]
    if gemma:
        x = x * math.sqrt(config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        kind = config.get("layer_types", ["full_attention"] * 999)[layer]
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (linear(y, f"{at}.self_attn.{n}_proj") for n in "qkv")
        if olmoe:
            q = norm(q, f"{at}.self_attn.q_norm")
            k = norm(k, f"{at}.self_attn.k_norm")
        q, k, v = (a.reshape(count, -1, size) for a in (q, k, v))
        if f"{at}.self_attn.q_norm.weight" in w and not olmoe:
            q = norm(q, f"{at}.self_attn.q_norm")
            k = norm(k, f"{at}.self_attn.k_norm")
        turns = [turn(angle(config, kind, size), p) for p in range(count)]
        q, k = (np.stack([a[p] @ turns[p].T for p in range(count)]) for a in (q, k))
        mixed = np.zeros((count, heads, size))
        for head in range(heads):
            own = head * kv // heads
            for p in range(count):
                first = 0
                if kind == "sliding_attention":
                    first = max(0, p - config["sliding_window"] + 1)
                scores = k[first : p + 1, own] @ q[p, head] / math.sqrt(size)
                shares = np.exp(scores - scores.max())
                mixed[p, head] = shares / shares.sum() @ v[first : p + 1, own]
        y = linear(mixed.reshape(count, -1), f"{at}.self_attn.o_proj")
        if gemma:
            x = x + norm(y, f"{at}.post_attention_layernorm")
            y = norm(x, f"{at}.pre_feedforward_layernorm")
        else:
            x = x + y
            y = norm(x, f"{at}.post_attention_layernorm")
        if "num_experts_per_tok" in config:
            y = np.stack([sparse(token, at) for token in y])
        else:
            y = mlp(y, f"{at}.mlp", ("gate_proj", "up_proj", "down_proj"))
        x = x + (norm(y, f"{at}.post_feedforward_layernorm") if gemma else y)
    table = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ table.T


def angle(config: dict, kind: str, size: int) -> np.ndarray:
    """Angles per position of the pairs of a head."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get(kind, rope)
    base = rope.get("rope_theta", config.get("rope_theta"))
    found = []
    for pair in range(size // 2):
        turns = base ** (-2 * pair / size)
        if rope.get("rope_type") == "linear":
            turns /= rope["factor"]
        if rope.get("rope_type") == "llama3":
            length = 2 * math.pi / turns
            original = rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if length > original / low:
                turns /= rope["factor"]
            elif length >= original / high:
                smooth = (original / length - low) / (high - low)
                turns = (1 - smooth) * turns / rope["factor"] + smooth * turns
        found.append(turns)
    return np.array(found)


def turn(angles: np.ndarray, position: int) -> np.ndarray:
    """Matrix that rotates the pairs (i, i + H / 2) of a head."""
    c, s = np.diag(np.cos(position * angles)), np.diag(np.sin(position * angles))
    return np.block([[c, -s], [s, c]])
