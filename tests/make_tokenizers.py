"""Makes tiny tokenizers for the tests, from the sources of the Python standard library.

`python tests/make_tokenizers.py FOLDER` writes them for a look.
"""

from __future__ import annotations

import contextlib
import json
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

WORDS = 512
START, END = "<s>", "</s>"


def library_text(nbytes: int) -> str:
    """Text with more than ASCII: sources, and a line of other scripts in between."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8") + "naïve Σ 東京 🙂\r\n\t  two  spaces\n"
        parts.append(text)
        size += len(text.encode())
        if size >= nbytes:
            break
    return "".join(parts)[:nbytes]


def make_json(folder: Path, *, start: bool = True, words: tuple[str, ...] = ()) -> Path:
    """Write a byte-level BPE as tokenizer.json, and the file that names its end.
    words: special ones besides."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=[START, END, *words],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(library_text(200_000).splitlines(True), trainer)
    if start:
        made.post_processor = TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, made.token_to_id(START))]
        )
    # Files of published models may ask for this; a document must not be cut by it.
    made.enable_truncation(16)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder / "tokenizer.json"


def make_pieces(folder: Path, *, control: str = "") -> Path:
    """Write a BPE of SentencePiece, which falls back to bytes, as tokenizer.model.
    control: a piece that is none of the text."""
    from sentencepiece import SentencePieceTrainer

    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        (folder / "tokenizer.model").unlink()
    SentencePieceTrainer.train(
        sentence_iterator=iter(library_text(200_000).splitlines()),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=2 * WORDS,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=control,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    return folder / "tokenizer.model"


KINDS: dict[str, Callable[[Path], Path]] = {"json": make_json, "pieces": make_pieces}

if __name__ == "__main__":
    for kind, make in KINDS.items():
        print(make(Path(sys.argv[1], kind)))
