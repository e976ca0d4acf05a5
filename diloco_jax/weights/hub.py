"""Weights by their name on the Hugging Face Hub, as `--init hf:OWNER/NAME` gives them.

A name becomes `hf://OWNER/NAME@COMMIT` before anything starts, and stands so in the
run's config: a coordinator that comes back reads the same files. They lie in the hub's
own cache (`HF_HOME`), where an interrupted download goes on and other tools find them.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.config import ConfigError
from diloco_jax.config.run import HUB, read_init
from diloco_jax.weights.tensor_files import BESIDE, CONFIG, INDEX, SINGLE, read_index

ENDPOINT = "HF_ENDPOINT"
"""Variable with the address of another hub, as its own tools read it."""
COMMIT = re.compile("[0-9a-f]{40}")
TIMEOUT_S = 30.0
MOST_SAID = 200
"""Characters of the hub's own message that are shown."""


def pinned(weights: str) -> str:
    """Return weights as `model.weights` has them, a model of the hub with its commit.

    Raises ConfigError, with the command to fetch it by hand, if the hub does not answer
    or has no such model or revision.
    """
    kind, folder = read_init(weights)
    if not folder.startswith(HUB):
        return f"{kind}:{folder}"
    name, revision = _parts(folder)
    if COMMIT.fullmatch(revision):
        return f"{kind}:{folder}"
    try:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=os.environ.get(ENDPOINT))
        found = api.model_info(name, revision=revision or None, timeout=TIMEOUT_S)
    except Exception as error:
        raise ConfigError(_cannot(folder, error)) from error
    return f"{kind}:{HUB}{name}@{found.sha}"


def downloaded(folder: str, *, arrays: bool) -> Path:
    """Return a folder on this machine with the files of `hf://OWNER/NAME@COMMIT`; fetch
    those that the cache lacks, with a bar on standard error.

    arrays: the weights too, not only the small files that describe them: those files
      of them that `read_tensors` reads.
    Raises ConfigError as `pinned` does.
    """
    name, revision = _parts(folder)

    def fetch(wanted: Sequence[str]) -> Path:
        try:
            from huggingface_hub import snapshot_download

            return Path(
                snapshot_download(
                    name,
                    revision=revision or None,
                    allow_patterns=list(wanted),
                    endpoint=os.environ.get(ENDPOINT),
                    etag_timeout=TIMEOUT_S,
                )
            )
        except Exception as error:
            raise ConfigError(_cannot(folder, error)) from error

    found = fetch([CONFIG, INDEX, *BESIDE, *([SINGLE] if arrays else [])])
    # Others may lie beside them: the same weights once more, in another layout.
    if arrays and not (found / SINGLE).is_file() and (found / INDEX).is_file():
        return fetch(
            [glob.escape(file) for file in sorted(set(read_index(found).values()))]
        )
    return found


def _parts(folder: str) -> tuple[str, str]:
    """Return OWNER/NAME and the revision, "" if there is none."""
    name, _, revision = folder.removeprefix(HUB).partition("@")
    return name, revision


def _cannot(folder: str, error: Exception) -> str:
    """Say what went wrong, and how to fetch the model by hand."""
    name, revision = _parts(folder)
    at = f" --revision {revision}" if revision else ""
    here = name.partition("/")[2]
    by_hand = f"`hf download {name}{at} --local-dir {here}` and --init hf:{here}"
    if isinstance(error, ImportError):
        return (
            f"--init hf:{name} needs the package huggingface-hub; pip install "
            f"'diloco-jax[text]', or fetch it on another machine: {by_hand}"
        )
    kind = type(error).__name__
    said = " ".join(str(error).split())[:MOST_SAID]
    where = os.environ.get(ENDPOINT) or "the Hugging Face Hub"
    if kind == "GatedRepoError":
        remedy = "accept its licence there, and `hf auth login` or set HF_TOKEN"
    elif kind == "RevisionNotFoundError":
        remedy = f"{name} has no revision {revision!r}; give a branch, tag or commit"
    elif kind == "RepositoryNotFoundError":
        remedy = (
            f"there is no folder {name} here and no such model there, or it is private "
            f"(`hf auth login`, or set HF_TOKEN); correct the name"
        )
    else:
        remedy = f"repeat the command, or fetch it where there is a network: {by_hand}"
    return f"--init hf:{name}: {where} does not give it ({kind}: {said}); {remedy}"
