"""The TPUs of this machine, as its devices and its PCI bus show them."""

from __future__ import annotations

from pathlib import Path

GOOGLE = "0x1ae0"
"""Vendor number of TPUs, and of some network cards, on the PCI bus."""
DEVICES = {"0x0062": "v5p", "0x006f": "v6e"}
"""TPU generations by their device number on the PCI bus, with jax's numbers."""


def generation_here(root: Path = Path("/")) -> str:
    """Return the generation of this machine's TPUs; empty if it has no known one."""
    cards = root.glob("sys/bus/pci/devices/*")
    ids = [(_read(card / "vendor"), _read(card / "device")) for card in cards]
    known = [DEVICES.get(device) for vendor, device in ids if vendor == GOOGLE]
    return next(filter(None, known), "")


def may_be_here(root: Path = Path("/")) -> bool:
    """Tell if any device of this machine may be a TPU."""
    if any(any(root.glob(pattern)) for pattern in ("dev/accel*", "dev/vfio/[0-9]*")):
        return True
    vendors = root.glob("sys/bus/pci/devices/*/vendor")
    return any(_read(vendor) == GOOGLE for vendor in vendors)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
