"""Check the installed packages: all that are required, in versions that go together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from diloco_jax import libtpu
from diloco_jax.doctor.finding import Finding, note, ok, problem

PACKAGE = "diloco-jax"
PAIRS = (((0, 10, 2), (0, 0, 42)), ((0, 12, 0), (0, 0, 50)))
"""Versions of jax and of the libtpu that was built with it, each pair from there on.
Both pairs compile for v5p and v6e (docs/results/plan.md)."""
OF_DEVELOPERS = ("test", "docs", "fixtures")
"""Extras for work on the package itself, which its users need not have."""


def check_packages() -> Iterator[Finding]:
    """Yield findings on the required packages, on each extra that is only partly
    installed, and on jax's libraries.
    """
    required, extras = _requirements()
    yield _complete(required)
    yield from _begun(required, extras)
    yield _jax()
    if libtpu.installed_version():
        yield _libtpu(metadata.version("jax"), libtpu.installed_version())
    else:
        yield note(
            "libtpu",
            "not installed: no TPU is used, and diloco plan compiles nothing",
            f"pip install '{PACKAGE}[tpu]', if that is wanted",
        )


def _requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """Return what the package requires, and what each of its extras adds."""
    required: list[Requirement] = []
    extras: dict[str, list[Requirement]] = {}
    for line in metadata.requires(PACKAGE) or []:
        requirement = Requirement(line)
        extra = re.search(r"extra == ['\"](.+?)['\"]", str(requirement.marker or ""))
        if extra:
            extras.setdefault(extra[1], []).append(requirement)
        elif requirement.marker is None or requirement.marker.evaluate():
            required.append(requirement)
    return required, extras


def _complete(required: list[Requirement]) -> Finding:
    wrong = [text for r in required if (text := _wrong(r))]
    if wrong:
        return problem("packages", "; ".join(wrong), f"pip install --upgrade {PACKAGE}")
    return ok("packages", f"all {len(required)} that are required")


def _begun(
    required: list[Requirement], extras: dict[str, list[Requirement]]
) -> Iterator[Finding]:
    """Yield the extras of which only some packages are here, or an old one."""
    base = {r.name.lower() for r in required}
    for extra, requirements in sorted(extras.items()):
        if extra in OF_DEVELOPERS:
            continue
        own = [r for r in requirements if r.name.lower() not in base]
        wrong = [text for r in own if _applies(r, extra) and (text := _wrong(r))]
        if wrong and len(wrong) < len(own):
            yield note(
                f"extra {extra}",
                "; ".join(wrong),
                f"pip install '{PACKAGE}[{extra}]', if it is wanted",
            )


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _wrong(requirement: Requirement) -> str:
    """Say what is wrong with the package that should meet a requirement."""
    try:
        here = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if here in requirement.specifier:
        return ""
    return f"{requirement.name} {here} is not {requirement.specifier}"


def _jax() -> Finding:
    jax, jaxlib = metadata.version("jax"), metadata.version("jaxlib")
    if _release(jax)[:3] == _release(jaxlib)[:3]:
        return ok("jax", f"jax {jax}, jaxlib {jaxlib}")
    return problem(
        "jax",
        f"jax {jax} beside jaxlib {jaxlib}; jax needs the jaxlib of its own version",
        f"pip install --upgrade jax=={jax} jaxlib",
    )


def _libtpu(jax: str, here: str) -> Finding:
    """Compare libtpu with the one that the jax here was tried with."""
    tried = [tpu for since, tpu in PAIRS if _release(jax) >= since]
    what = f"libtpu {here} with jax {jax}"
    if tried and _release(here)[:3] == tried[-1]:
        return ok("libtpu", what)
    wanted = ".".join(map(str, tried[-1])) if tried else "another jax"
    return note(
        "libtpu",
        f"{what}: this pair was not tried; with that jax it was {wanted}",
        "pip install --upgrade 'jax[tpu]', which brings the two that belong together",
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
