"""Check of the image's name."""

from __future__ import annotations

from diloco_jax.config import ConfigError


def check_image(image: str) -> None:
    """Raise ConfigError unless `launch.image` begins with its registry's host: without
    one, each tool that pulls the image has a registry of its own in mind."""
    host, path, _ = image.partition("/")
    if not path or not ("." in host or ":" in host):
        raise ConfigError(
            f"launch.image = {image!r} does not begin with the host of a registry; "
            f"push it to one that the machines reach, and write "
            f"REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG, or docker.io/{image} "
            f"if it is on Docker Hub"
        )
