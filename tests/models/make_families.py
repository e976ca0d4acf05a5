"""Make tests/models/families/: tiny random models of every family, by `transformers`.

In an environment with torch and transformers (5.24.0 made these files):
`python tests/models/make_families.py`, or with names of families after it. The weights
are random, so the files are of this project alone.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers as published

FOLDER = Path(__file__).with_name("families")
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
EXPERTS = {"num_hidden_layers": 2, "num_experts_per_tok": 2}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}

FAMILIES = {
    "smollm2": (
        published.LlamaForCausalLM,
        published.LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5),
        {},
    ),
    "llama3": (
        published.LlamaForCausalLM,
        published.LlamaConfig(
            **SIZES,
            tie_word_embeddings=False,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=LLAMA3,
        ),
        {"max_shard_size": "48KB"},
    ),
    "qwen2": (
        published.Qwen2ForCausalLM,
        published.Qwen2Config(**SIZES, tie_word_embeddings=True),
        {},
    ),
    "qwen3": (
        published.Qwen3ForCausalLM,
        published.Qwen3Config(**SIZES, tie_word_embeddings=False),
        {},
    ),
    "gemma3": (
        published.Gemma3ForCausalLM,
        published.Gemma3TextConfig(
            **{**SIZES, "num_hidden_layers": 5},
            query_pre_attn_scalar=16,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"] * 2
            + ["sliding_attention"],
            rope_parameters={"full_attention": LINEAR, "sliding_attention": PLAIN},
        ),
        {},
    ),
    "mixtral": (
        published.MixtralForCausalLM,
        published.MixtralConfig(**SIZES | EXPERTS, num_local_experts=4),
        {},
    ),
    "qwen3_moe": (
        published.Qwen3MoeForCausalLM,
        published.Qwen3MoeConfig(
            **SIZES | EXPERTS,
            num_experts=4,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        ),
        {"max_shard_size": "24KB"},
    ),
    "olmoe": (
        published.OlmoeForCausalLM,
        published.OlmoeConfig(**SIZES | EXPERTS | {"hidden_size": 64}, num_experts=4),
        {},
    ),
}


def main() -> None:
    """Write a folder for each family, with the logits of 24 tokens."""
    for name in sys.argv[1:] or FAMILIES:
        kind, config, saving = FAMILIES[name]
        torch.manual_seed(0)
        config._attn_implementation = config._experts_implementation = "eager"
        model = kind(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.3 * torch.randn_like(parameter)
                else:
                    parameter.copy_(torch.randn_like(parameter) * 0.2)
                parameter.copy_(parameter.bfloat16().float())
        tokens = torch.randint(0, config.vocab_size, (1, 24))
        with torch.no_grad():
            logits = model.double()(tokens).logits[0]
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        model.bfloat16().save_pretrained(folder, **saving)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(
            folder / "logits.npz",
            tokens=tokens.numpy().astype(np.int32),
            logits=logits.numpy().astype(np.float32),
        )
        print(name, sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    main()
