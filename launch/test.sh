#!/usr/bin/env bash
# Makes .venv if need be and runs all checks: format, lint, types, tests. Those that hold
# times to bounds come last and one by one, the others share the cores; those of many
# minutes (`nightly`) run when they are asked for. Arguments go to one pytest instead:
#
#   bash launch/test.sh tests/core -x
#   bash launch/test.sh -m "not dist"
#   bash launch/test.sh --fast       the cheapest files: 150 CPU seconds (tests/fast.py)
#   bash launch/test.sh --measure    writes anew which these are: tests/seconds.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
ensure_environment test
export PATH="$PWD/$VENV/bin:$PATH"
ruff format --check .
ruff check .
mypy diloco_jax
share=(--numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder)
case "${1:-}" in
  --fast | --measure) exec pytest "${share[@]}" "$@" ;;
  ?*) exec pytest "$@" ;;
esac
pytest -m "not tpu_compile and not timing and not nightly" "${share[@]}"
pytest -m "tpu_compile and not timing and not nightly" "${share[@]}"
exec pytest -m "timing and not nightly"
