#!/usr/bin/env bash
# Makes .venv if need be and runs all checks: format, lint, types, tests. Those that hold
# times to bounds come last and one by one, the others share the cores; those of many
# minutes (`nightly`) run when they are asked for. Arguments go to one pytest instead:
#
#   bash launch/test.sh tests/core -x
#   bash launch/test.sh -m "not dist"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
ensure_environment test
export PATH="$PWD/$VENV/bin:$PATH"
ruff format --check .
ruff check .
mypy diloco_jax
[ $# -eq 0 ] || exec pytest "$@"
pytest -m "not timing and not nightly" --numprocesses auto --maxprocesses 4 \
  --dist loadfile --no-loadscope-reorder
exec pytest -m "timing and not nightly"
