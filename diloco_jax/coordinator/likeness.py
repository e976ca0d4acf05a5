"""Whether an island trains what the coordinator does: one config, and one model."""

from __future__ import annotations

from diloco_jax.config import RunConfig, differences, shared_fields
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.models.plan import other_model
from diloco_jax.protocol import messages


class Likeness:
    """Compares what islands say of themselves with the run."""

    def __init__(self, run: RunConfig, plan: FragmentPlan) -> None:
        self._shared, self._fingerprint = shared_fields(run), run.fingerprint()
        self._plan = plan.digest()

    def differences(self, hello: messages.Hello) -> list[str]:
        """Field by field, what is here and what is there; empty: it is the same run."""
        if hello.fingerprint != self._fingerprint:
            prints = f"fingerprint: {self._fingerprint} here, {hello.fingerprint} there"
            return [*differences(self._shared, hello.run), prints]
        return other_model(self._plan, hello.plan)
