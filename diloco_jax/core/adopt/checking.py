"""Check an adopt rule from outside the package on a tiny piece."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from diloco_jax.core.adopt.rule import AdoptRule
from diloco_jax.core.changes import adopt

SHAPE = (4, 6)
FACTS = ("adopts_first", "keeps_pending", "loses_steps")


def check(rule: AdoptRule) -> None:
    """Raise an error that describes the fault of the rule, if it has one."""
    for fact in FACTS:
        if not isinstance(getattr(rule, fact, None), bool):
            raise ValueError(
                f"{fact} = {getattr(rule, fact, None)!r}; an adopt rule is an object "
                f"that says True or False of it: make one of a class derived from "
                f"diloco_jax.core.adopt.rule.AdoptRule"
            )
    rng = np.random.default_rng(0)
    local, base, anchor = rng.standard_normal((3, *SHAPE)).astype(np.float32)
    found = adopt(rule, local, base, anchor, 0.5)
    if (found.shape, found.dtype) != (SHAPE, jnp.float32):
        raise ValueError(
            f"adopt made {found.dtype}{list(found.shape)} of local values of float32"
            f"{list(SHAPE)}; it must keep shape and dtype"
        )
    if not np.isfinite(found).all():
        raise ValueError("adopt made numbers that are not finite of finite ones")
