"""`diloco export WORKDIR DIR`."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from diloco_jax.config.fields import positional, setting
from diloco_jax.exit_codes import EXIT_DONE
from diloco_jax.options import TRUST_CODE, parse
from diloco_jax.paths import absolute
from diloco_jax.workdir import read_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `diloco export`."""

    workdir: Path = positional(metavar="WORKDIR", help="Workdir of the run.")
    target: Path = positional(metavar="DIR", help="A folder that does not exist yet.")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", help="Type of the weights in the files."
    )
    trust_code: bool = setting(False, help=TRUST_CODE)


def export_command(arguments: Sequence[str]) -> int:
    """Write a run's newest global parameters as safetensors with config.json."""
    (options,) = parse(
        [ExportOptions],
        arguments,
        "diloco export",
        "Write a run's newest global parameters as a folder that other tools read: "
        "safetensors, config.json, and the tokenizer of the weights that the run "
        "started from.",
    )
    config = read_config(options.workdir, trust_code=options.trust_code)
    from diloco_jax.island.environment import skip_absent_tpu

    # Before anything imports jax.
    skip_absent_tpu()
    from rich.console import Console

    from diloco_jax.observability.bar import bar
    from diloco_jax.weights.export import export

    began, target = time.monotonic(), Path(absolute(str(options.target)))
    with bar(Console(stderr=True), "writing") as report:
        count = export(
            config, options.workdir, target, dtype=options.dtype, report=report
        )
    print(
        f"{target}: {count:,} parameters in {options.dtype}, in "
        f"{time.monotonic() - began:.1f} s",
        file=sys.stderr,
    )
    return EXIT_DONE
