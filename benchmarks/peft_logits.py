"""Do PEFT and this project agree on an exported adapter?

PEFT puts the adapter that `diloco export` wrote on the weights, in torch; this project
adds it to them, as `diloco export --merged` wrote them. Both predict the same text.
The greatest difference of two logits is told as a share of the greatest logit.

Command, in an environment with torch, transformers and peft beside this project:
`python benchmarks/peft_logits.py WEIGHTS FOLDER`, where FOLDER was made by `python
benchmarks/finetune.py --lora --keep FOLDER`. Cost: a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

DIFFERENCE_MAX = 1e-4
TEXT = "def read_lines(path):\n    with open(path, encoding='utf-8') as file:\n"


def main() -> int:
    """Compare; return 1 if they differ by more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path, help="with `adapter` and `export`")
    parser.add_argument("--out", type=Path, help="JSON file of the result")
    options = parser.parse_args()
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(options.weights / "tokenizer.json"))
    rows = np.array([tokens.encode(TEXT).ids], np.int32)
    theirs = of_peft(options.weights, options.folder / "adapter", rows)
    ours = of_project(options.folder / "export", rows)
    plain = of_project(options.weights, rows)
    greatest = np.abs(theirs).max()
    found = {
        "difference": float(np.abs(ours - theirs).max() / greatest),
        "adapter_changes": float(np.abs(plain - theirs).max() / greatest),
        "tokens": rows.size,
    }
    print(json.dumps(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["difference"] <= DIFFERENCE_MAX else 1


def of_peft(weights: Path, adapter: Path, rows: np.ndarray) -> np.ndarray:
    """Return the logits of torch, f32 [B, T, V]."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, str(adapter)).eval()
    with torch.no_grad():
        return np.asarray(model(torch.from_numpy(rows).long()).logits)


def of_project(weights: Path, rows: np.ndarray) -> np.ndarray:
    """Return the logits of this project, f32 [B, T, V]."""
    import jax.numpy as jnp

    from diloco_jax.models.generation import Cache, make_decode
    from diloco_jax.weights import families, tensor_files
    from diloco_jax.weights.first import read_folder, whole

    model = families.read(
        tensor_files.read_json(weights / tensor_files.CONFIG), str(weights)
    )
    params = whole(read_folder(weights, model))
    count, length = rows.shape
    empty = Cache.empty(model, count, length, "float32")
    logits, _ = make_decode(model)(params, jnp.asarray(rows), empty, 0)
    return np.asarray(logits)


if __name__ == "__main__":
    sys.exit(main())
