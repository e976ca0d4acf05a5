#!/usr/bin/env bash
# Write launch/gke/constraints.txt: every Python package of the image, by version and
# hash. The image is built from it once it is there. It needs `uv` on PATH.
#
#   bash launch/constraints.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v uv >/dev/null; then
  echo "error: uv is not on PATH; install it: pip install uv" >&2
  exit 2
fi
JAX=$(sed -n 's/^ARG JAX=//p' launch/gke/Dockerfile)
PYTHON=$(sed -n 's/^ARG PYTHON=python:\([0-9.]*\).*/\1/p' launch/gke/Dockerfile)
# With setuptools, which builds the package itself.
printf '%s\n' "jax[tpu]==$JAX" 'setuptools>=77' |
  uv pip compile - setup.cfg --extra tpu --extra gcs --generate-hashes --quiet \
    --python-version "$PYTHON" --python-platform x86_64-manylinux_2_31 \
    --custom-compile-command 'bash launch/constraints.sh' \
    --output-file launch/gke/constraints.txt
echo "written: launch/gke/constraints.txt"
