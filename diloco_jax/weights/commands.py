"""`diloco export WORKDIR or HOST:PORT DIR` and `diloco generate RUN_OR_EXPORT`."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diloco_jax.config import Config, ConfigError, Placement
from diloco_jax.config.fields import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    SOME_SHARE,
    check_utf8,
    positional,
    setting,
)
from diloco_jax.config.loading import from_builtins, require_trust_flag
from diloco_jax.config.options import TRUST_CODE, parse
from diloco_jax.errors import EXIT_DONE
from diloco_jax.files import absolute, expand
from diloco_jax.workdir import read_config

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `diloco export`."""

    run: str = positional(
        metavar="WORKDIR or HOST:PORT",
        help="Workdir of the run, or the coordinator of a run that goes on.",
    )
    target: Path = positional(metavar="DIR", help="A folder that does not exist yet.")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", help="Type of the weights in the files."
    )
    cycle: int = setting(
        0,
        NOT_NEGATIVE,
        help="Cycle whose parameters are written: one that is kept; 0 = the newest "
        "snapshot of a workdir, or the present cycle of a run that goes on.",
    )
    merged: bool = setting(
        False,
        help="Of a run with adapters: the weights with them added, not the adapters.",
    )
    certificates: str = setting("", help="Folder made by diloco certs.")
    insecure: bool = setting(
        False, help="Ask an address that is not loopback without TLS."
    )
    trust_code: bool = setting(False, help=TRUST_CODE)


def export_command(arguments: Sequence[str]) -> int:
    """Write a run's global parameters as safetensors with config.json."""
    (options,) = parse(
        [ExportOptions],
        arguments,
        "diloco export",
        "Write a run's global parameters as a folder that other tools read: "
        "safetensors, config.json, and the tokenizer of the weights that the run "
        "started from. Of a run that goes on, all of them are of one cycle.",
    )
    workdir, target = expand(options.run), Path(absolute(str(options.target)))
    if not workdir.is_dir() and ":" not in options.run:
        raise ConfigError(
            f"{options.run!r} is neither a folder nor HOST:PORT; give a run's workdir, "
            f"or its coordinator's address"
        )
    is_local = workdir.is_dir()
    config = read_config(workdir, trust_code=options.trust_code) if is_local else None
    from diloco_jax.before_jax import skip_absent_tpu

    # Before anything imports jax.
    skip_absent_tpu()
    from rich.console import Console

    began, console = time.monotonic(), Console(stderr=True)
    if config is not None:
        cycle = options.cycle or None
        count, lacks = _write(options, console, config, workdir, target, cycle)
    else:
        (count, lacks), cycle = _export_live(options, console, target)
    of_cycle = "" if cycle is None else f" of cycle {cycle}"
    print(
        f"{target}: {count:,} parameters{of_cycle} in {options.dtype}, in "
        f"{time.monotonic() - began:.1f} s" + (lacks and f"; {lacks}"),
        file=sys.stderr,
    )
    return EXIT_DONE


def _write(
    options: ExportOptions,
    console: Console,
    config: Config,
    workdir: Path,
    target: Path,
    cycle: int | None,
) -> tuple[int, str]:
    from diloco_jax.observability.terminal import bar
    from diloco_jax.weights.export import export

    with bar(console, "writing") as report:
        return export(
            config,
            workdir,
            target,
            cycle=cycle,
            merged=options.merged,
            dtype=options.dtype,
            report=report,
        )


def _export_live(
    options: ExportOptions, console: Console, target: Path
) -> tuple[tuple[int, str], int]:
    """Return what `export` does, and the number of the cycle."""
    from diloco_jax.observability.terminal import bar
    from diloco_jax.weights.export import gather, require_target
    from diloco_jax.wire.client import Client
    from diloco_jax.wire.peers import OPERATOR
    from diloco_jax.wire.tls import TlsFiles

    require_target(target)
    placement = Placement(certificates=options.certificates, insecure=options.insecure)
    client = Client(
        options.run,
        tls=TlsFiles.load_given(options.certificates, OPERATOR),
        deadlines=placement.deadlines,
        bulk_channels=0,
        insecure=options.insecure,
    )
    try:
        patience_s = placement.deadlines.budget_s
        config = from_builtins(client.config(patience_s), client.address)
        whose = f"the config of {options.run}"
        require_trust_flag(config.run, whose, trust_code=options.trust_code)
        # Beside the export: a disk that has room for one has room for the other.
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}.", suffix=".tmp", dir=target.parent
        ) as made:
            with bar(console, "gathering") as report:
                cycle = gather(client, patience_s, options.cycle, Path(made), report)
            written = _write(options, console, config, Path(made), target, cycle)
    finally:
        client.close()
    return written, cycle


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of `diloco generate`."""

    source: Path = positional(
        metavar="RUN_OR_EXPORT",
        help="Workdir of a run, or a folder with config.json and safetensors.",
    )
    prompt: str = setting("", help="Text to be continued.")
    image: tuple[str, ...] = setting(
        (),
        metavar="FILE...",
        help="Pictures of the prompt, of a model that takes some: each in the place "
        "<image> of the prompt, or all before a prompt without any.",
    )
    max_tokens: int = setting(100, AT_LEAST_1, help="Most tokens of the continuation.")
    temperature: float = setting(
        0.0, NOT_NEGATIVE, help="Divides the logits; 0 = always the likeliest token."
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
    check_utf8("--prompt", options.prompt, *options.image)
    from diloco_jax.before_jax import skip_absent_tpu

    # Before anything imports jax.
    skip_absent_tpu()
    from rich.console import Console

    from diloco_jax.observability.terminal import bar
    from diloco_jax.weights.tasks import files_of, open_model

    console = Console(stderr=True)
    with bar(console, "reading the weights") as report:
        text_model = open_model(
            options.source, options.dtype, trust_code=options.trust_code, report=report
        )
    began, tokens, shown = time.monotonic(), list[int](), ""
    files = files_of("--image", options.image, None)
    prompt = text_model.encode(options.prompt, len(files))
    made = text_model.generate(
        prompt,
        options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        pictures=text_model.pixels(files),
    )
    # Otherwise the text itself shows how far it is.
    silent = bar(console, "generating") if options.json else nullcontext(None)
    with silent as report_tokens:
        for token in made:
            tokens.append(token)
            if report_tokens is not None:
                report_tokens(len(tokens) / options.max_tokens)
                continue
            text = text_model.continuation(prompt, tokens)
            # A character may be of several tokens.
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                print(text[len(shown) :], end="", flush=True)
                shown = text
    seconds = time.monotonic() - began
    text = text_model.continuation(prompt, tokens)
    if options.json:
        print(json.dumps({"text": text, "tokens": tokens, "seconds": seconds}))
        return EXIT_DONE
    print(text[len(shown) :])
    rate = f"{len(tokens)} tokens in {seconds:.1f} s, compilation included"
    print(rate, file=sys.stderr)
    return EXIT_DONE
