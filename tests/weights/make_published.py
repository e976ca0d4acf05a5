"""Make tests/weights/published/: tiny random models in the layouts of published ones.

In an environment with torch and transformers (2.13.0 and 5.24.0 made these files):
`python tests/weights/make_published.py`, or with `make NAME` those alone. Sizes are
small, the weights random and the tokenizers trained here, so the files are of this
project alone. What is kept of the originals: the keys of config.json with their values
but for sizes, places of tokens, names and shards of the tensors, and the kind of the
tokenizer with its special words. Each folder's config.json stays as it is, but for the
tokens, and files of a processor do; all else is made anew.

Seen as published, as copied into these public repositories:

- llama3: config.json of meta-llama/Llama-3.2-1B-Instruct; kevinstephano/
  thunder_model_blocks at 867e9dbdd63b, thunder_model_blocks/hf_llama/llama_config.py.
- qwen3: config.json, tokenizer_config.json and the added tokens of tokenizer.json of
  Qwen3 4B; akougkas/warpio-cli at 8dde6d21c14c, warpio-docs/ai-docs/model_cards.
- gemma3_text: config.json of google/gemma-3-1b-it; NVIDIA/TensorRT-LLM at
  0ab03ee097f0, tests/unittest/_torch/modeling/test_modeling_gemma3.py.
- gemma3: config.json of google/gemma-3-27b-it; the same file at fe6fa01d7fcc.
- mistral: config.json of mistralai/Mistral-Nemo-Base-2407; kevinstephano/
  thunder_model_blocks at 6447bd7e8d76, hf_mistral/mistral_config.py.
- idefics3: keys of config.json, preprocessor_config.json and names of the tensors of
  HuggingFaceTB/SmolVLM-256M-Instruct, as a public repository lists them. Pictures are
  not split, which its preprocessor_config.json does.
- smollm2: the config of HuggingFaceTB/SmolLM2-135M as transformers 4.48.0 prints it;
  satyasundar/erav3-s13 at 3151c4be7777, README.md.

Not seen as published: files of weights (names of tensors and shards are those that
`transformers` 5.24.0 saves), generation_config.json, and tokenizer.json but for the
added tokens of qwen3; their kinds are as `transformers` converts them. The tokenizer
of mistral is in the manner of Mistral 7B. The copies of Gemma's have other sizes than
the published files. In gemma3, sizes that the original leaves to defaults are written
out, and query_pre_attn_scalar is the size of a head: another, as that of 27B, is
refused.
"""

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).with_name("published")
PROMPTS = ("The cat sat on", "def main():\n    ", " 12 dogs, naïve 東京")
CONTINUED = 12
KEPT = ("config.json", "preprocessor_config.json", "processor_config.json")
WORDS, LENGTH = 320, 256
"""Words of the tokenizers, and tokens of the longest text."""
GEMMAS = ("gemma3", "gemma3_text")
PICTURED = ("gemma3", "idefics3")
BYTES = {
    # Special words, first ones and added ones; start, end, ends of generation.
    "llama3": (
        [],
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
        ("<|begin_of_text|>", "<|end_of_text|>", ["<|end_of_text|>", "<|eot_id|>"]),
    ),
    "qwen3": (
        [],
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"],
        ("<|endoftext|>", "<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
    ),
    "smollm2": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        [],
        ("<|endoftext|>", "<|endoftext|>", "<|endoftext|>"),
    ),
    "idefics3": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        [
            "<global-img>",
            "<fake_token_around_image>",
            "<image>",
            "<row_1_col_1>",
            "<end_of_utterance>",
        ],
        ("<|im_start|>", "<end_of_utterance>", "<end_of_utterance>"),
    ),
}
GEMMA = (
    ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    ["<image_soft_token>"],
    ("<bos>", "<eos>", ["<eos>", "<end_of_turn>"]),
)
PIECES = {
    "gemma3_text": GEMMA,
    "gemma3": GEMMA,
    "mistral": (["<unk>", "<s>", "</s>"], [], ("<s>", "</s>", "</s>")),
}


def tokenizer(name, folder):
    """Write the tokenizer's files; return a function from its words to tokens."""
    from make_tokenizers import library_text
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, trainers
    from tokenizers import pre_tokenizers as pre
    from tokenizers.processors import TemplateProcessing

    first, added, (start, end, ends) = (BYTES | PIECES)[name]
    if name in BYTES:
        made = Tokenizer(models.BPE())
        words = {
            "llama3": pre.Split(Regex(r"\p{N}{1,3}|\s?\p{L}+|\s+"), "isolated"),
            "qwen3": pre.Split(Regex(r"\p{N}|\s?\p{L}+|\s+"), "isolated"),
            "smollm2": pre.Digits(individual_digits=True),
            "idefics3": pre.Digits(individual_digits=True),
        }
        regex = name in ("smollm2", "idefics3")
        own = pre.ByteLevel(add_prefix_space=False, use_regex=regex)
        made.pre_tokenizer = pre.Sequence([words[name], own])
        made.decoder = decoders.ByteLevel()
        alphabet = pre.ByteLevel.alphabet()
        if name == "qwen3":
            made.normalizer = normalizers.NFC()
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        space = normalizers.Replace(" ", "▁")
        made.normalizer = space
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if name == "mistral":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
            parts.append(decoders.Strip(" ", 1, 0))
        made.decoder = decoders.Sequence(parts)
        first, alphabet = [*first, *(f"<0x{byte:02X}>" for byte in range(256))], []
    size = WORDS - len(added) - (8 if name == "qwen3" else 0)
    trainer = trainers.BpeTrainer(
        vocab_size=size + (name == "gemma3_text"),
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=256 if name in BYTES else 40,
        show_progress=False,
    )
    made.train_from_iterator(library_text(100_000).split(), trainer)
    if name in PIECES:  # Bytes are ordinary words of the vocabulary.
        saved = json.loads(made.to_str())
        saved["added_tokens"] = [
            token for token in saved["added_tokens"] if token["content"][:3] != "<0x"
        ]
        made = Tokenizer.from_str(json.dumps(saved))
    made.add_special_tokens(added)
    if name not in ("qwen3", "smollm2", "idefics3"):
        made.post_processor = TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, made.token_to_id(start))]
        )
    made.save(str(folder / "tokenizer.json"))
    said = {
        "bos_token": None if name == "qwen3" else start,
        "eos_token": end,
        "model_max_length": LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2))
    of = made.token_to_id
    many = [of(word) for word in ends] if isinstance(ends, list) else of(ends)
    return of(start), of(end), many


def config(name, start, end, ends):
    """Return the config.json that is kept, in the published layout, with the tokens."""
    found = json.loads((FOLDER / name / "config.json").read_text())
    if name == "idefics3":
        return found
    ids = {"bos_token_id": start, "eos_token_id": ends if name in GEMMAS else end}
    return found | {key: value for key, value in ids.items() if key in found}


def continued(folder, prompts=PROMPTS):
    """Return what `transformers` makes of prompts: their tokens, and those it adds
    before an end."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )

    kind = AutoConfig.from_pretrained(folder).model_type
    auto = AutoModelForImageTextToText if kind in PICTURED else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    words, found = AutoTokenizer.from_pretrained(folder), []
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for prompt in prompts:
        tokens = words(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            made = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=CONTINUED,
                do_sample=False,
                pad_token_id=0,
            )
        more = made[0, tokens.shape[1] :].tolist()
        more = more[:-1] if more[-1] in ends else more
        found.append({"prompt": tokens[0].tolist(), "tokens": more})
    return found


def pictured(folder):
    """Write rows with 0, 1 and 2 pictures and their logits, by `transformers`."""
    import numpy as np
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    side, each, length, place = 26, 9, 32, model.config.image_token_id
    chance = np.random.default_rng(0)
    tokens = chance.integers(3, 312, (3, length)).astype(np.int32)
    pictures = chance.integers(0, 256, (3, 2, side, side, 3)).astype(np.uint8)
    tokens[1, 5 : 5 + each] = tokens[2, 1 : 1 + each] = place
    tokens[2, 14 : 14 + each] = place
    found = []
    for row, of_row in enumerate(pictures):
        values = torch.from_numpy(of_row[:row].astype(np.float64) / 127.5 - 1)
        given = {"pixel_values": values.permute(0, 3, 1, 2)[None]} if row else {}
        with torch.no_grad():
            made = model.eval()(torch.from_numpy(tokens[row : row + 1]), **given)
        found.append(made.logits[0].numpy().astype(np.float32))
        pictures[row, row:] = 0
    np.savez_compressed(
        folder / "pictures.npz",
        tokens=tokens,
        pictures=pictures,
        counts=np.arange(3, dtype=np.int32),
        logits=np.stack(found),
    )


def main():
    """Write a folder for each model, with what `transformers` makes of the prompts."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    for name in sys.argv[2:] or (*BYTES, *PIECES):
        folder = FOLDER / name
        for path in folder.iterdir():
            if path.name not in KEPT:
                path.unlink()
        settings = config(name, *tokenizer(name, folder))
        text = json.dumps(settings, indent=2) + "\n"
        (folder / "config.json").write_text(text)
        torch.manual_seed(0)
        auto = AutoModelForImageTextToText if name in PICTURED else AutoModelForCausalLM
        model = auto.from_config(AutoConfig.from_pretrained(folder))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.3 * torch.randn_like(parameter)
                else:
                    parameter.copy_(torch.randn_like(parameter) * 0.2)
        single = name in ("llama3", "smollm2", "idefics3")
        shards = {} if single else {"max_shard_size": "40KB"}
        model.bfloat16().save_pretrained(folder, **shards)
        (folder / "config.json").write_text(text)
        outer = settings.get("text_config", {}) | settings
        ends = outer["eos_token_id"] if name != "idefics3" else 319
        said = {"eos_token_id": ends, "do_sample": True, "temperature": 0.6}
        (folder / "generation_config.json").write_text(json.dumps(said, indent=2))
        if name == "idefics3":
            pictured(folder)
        found = json.dumps(continued(folder)) + "\n"
        (folder / "continuations.json").write_text(found)
        print(name, sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    if len(sys.argv) > 1 and sys.argv[1] != "make":
        print(json.dumps([continued(folder) for folder in sys.argv[1:]]))
    else:
        main()
