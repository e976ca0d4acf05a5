#!/usr/bin/env bash
# Makes .venv if need be and runs all checks: format, lint, types, tests. Arguments go
# to pytest, after the default choice of tests, which they may override:
#
#   bash launch/test.sh tests/core -x
#   bash launch/test.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
ensure_environment test
export PATH="$PWD/.venv/bin:$PATH"
ruff format --check .
ruff check .
mypy diloco_jax
exec pytest -m "not slow and not tpu_compile" "$@"
