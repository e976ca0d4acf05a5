"""Variables of the user's shell that commands cannot do with, set right at start."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, MutableMapping

WARNINGS = "PYTHONWARNINGS"
ERROR = re.compile(r"(^|,)\s*e[^:,]*")
"""The action by which Python makes errors of warnings."""
SIZE = re.compile(r"0*([1-9]\d|[1-9]\d\d)|\D*")
"""A terminal's size. Rich takes any number at its word: it prints nothing in 0 columns,
and rules of a million characters in a million."""
STRICT = re.compile("(?!strict|disallow)")
"""Strict, optax's own optimizers do not compile, and a batch or delta that comes or
goes is a transfer."""
RIGHT: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("COLUMNS", "LINES"), SIZE.fullmatch),
    "JAX_NUMPY_DTYPE_PROMOTION": STRICT.match,
    "JAX_TRANSFER_GUARD": STRICT.match,
    "JAX_TRANSFER_GUARD_HOST_TO_DEVICE": STRICT.match,
    "JAX_TRANSFER_GUARD_DEVICE_TO_DEVICE": STRICT.match,
    "JAX_TRANSFER_GUARD_DEVICE_TO_HOST": STRICT.match,
    WARNINGS: lambda value: not ERROR.search(value),
}
set_right: dict[str, str] = {}
"""The variables that this process found otherwise, with the values that it found."""


def set_variables_right(environment: MutableMapping[str, str] = os.environ) -> None:
    """Take out what would end or silence this process and its children, and have
    warnings printed that were to be errors: other packages warn as they are imported.
    Call it before anything imports jax."""
    for name, right in RIGHT.items():
        if name in environment and not right(environment[name]):
            set_right[name] = environment.pop(name)
            if name == WARNINGS:
                environment[name] = ERROR.sub(r"\1default", set_right[name])
                warnings.simplefilter("default")
