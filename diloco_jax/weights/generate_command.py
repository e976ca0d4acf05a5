"""`diloco generate RUN_OR_EXPORT --prompt TEXT`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from diloco_jax.config.fields import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    SOME_SHARE,
    check_bounds,
    check_utf8,
    positional,
    setting,
)
from diloco_jax.errors import EXIT_DONE
from diloco_jax.options import TRUST_CODE, parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of `diloco generate`."""

    source: Path = positional(
        metavar="RUN_OR_EXPORT",
        help="Workdir of a run, or a folder with config.json and safetensors.",
    )
    prompt: str = setting("", help="Text to be continued.")
    max_tokens: int = setting(100, AT_LEAST_1, help="Most tokens of the continuation.")
    temperature: float = setting(
        0.0,
        NOT_NEGATIVE,
        help="Divides the logits; 0 = always the likeliest token.",
    )
    top_p: float = setting(
        1.0,
        SOME_SHARE,
        help="Draw among the likeliest tokens whose probabilities reach this sum.",
    )
    seed: int = setting(0, NOT_NEGATIVE, help="Seed of the draws.")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", help="Type in which the model computes."
    )
    json: bool = setting(False, help="Print one JSON object to standard output.")
    trust_code: bool = setting(False, help=TRUST_CODE)


def generate_command(arguments: Sequence[str]) -> int:
    """Continue a text with a run's newest parameters, or with exported ones."""
    (options,) = parse(
        [GenerateOptions],
        arguments,
        "diloco generate",
        "Continue a text, with a run's newest global parameters or with a folder of "
        "weights.",
    )
    check_bounds(options)
    check_utf8("--prompt", options.prompt)
    from diloco_jax.before_jax import skip_absent_tpu

    # Before anything imports jax.
    skip_absent_tpu()
    from rich.console import Console

    from diloco_jax.models.generation import generate
    from diloco_jax.observability.terminal import bar
    from diloco_jax.weights.speaker import open_speaker

    console = Console(stderr=True)
    with bar(console, "reading the weights") as report:
        speaker = open_speaker(
            options.source,
            options.dtype,
            trust_code=options.trust_code,
            report=report,
        )
    began, tokens, shown = time.monotonic(), list[int](), ""
    prompt = speaker.encode(options.prompt)
    made = generate(
        speaker.model,
        speaker.params,
        prompt,
        options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        ends=speaker.ends,
        dtype=options.dtype,
    )
    # Otherwise the text itself shows how far it is.
    silent = bar(console, "generating") if options.json else nullcontext(None)
    with silent as report_tokens:
        for token in made:
            tokens.append(token)
            if report_tokens is not None:
                report_tokens(len(tokens) / options.max_tokens)
                continue
            text = speaker.continuation(prompt, tokens)
            # A character may be of several tokens.
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                print(text[len(shown) :], end="", flush=True)
                shown = text
    seconds = time.monotonic() - began
    text = speaker.continuation(prompt, tokens)
    if options.json:
        print(json.dumps({"text": text, "tokens": tokens, "seconds": seconds}))
        return EXIT_DONE
    print(text[len(shown) :])
    rate = f"{len(tokens)} tokens in {seconds:.1f} s, compilation included"
    print(rate, file=sys.stderr)
    return EXIT_DONE
