#!/usr/bin/env bash
# Makes .venv if need be and runs all checks: format, lint, types, tests. Those that hold
# times to bounds come last and one by one, the others share the cores, with the check of
# types beside them; those of many minutes (`nightly`) run when they are asked for. Most
# are compiled without XLA's optimization, which would take longer than their programs
# run. Those that compare bits with compiled C need it (`optimized`). Arguments go to one
# pytest instead:
#
#   bash launch/test.sh tests/core -x
#   bash launch/test.sh -m "not dist"
#   bash launch/test.sh --fast       what needs no model: two CPU minutes of tests
#
# The seconds of every test that ran are left in build/tests/: a JUnit file a phase, and
# one list of them all, the longest first, in durations.txt.
# CHECKS=no in front leaves out format, lint and types.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
ensure_environment test
export PATH="$PWD/$VENV/bin:$PATH"
checks=${CHECKS:-yes}
unset CHECKS

types() {
  mypy diloco_jax benchmarks/members benchmarks/peers
  # These are modules by their file names alone, as they find each other.
  mypy --explicit-package-bases benchmarks/*.py
}

# The files with tests of a marker: to collect all files takes as long as some phases.
marked() { grep -lrE "mark\.($1)\b" tests --include='test_*.py' || true; }

seconds=build/tests
mkdir -p "$seconds"
if [ "$checks" = yes ]; then
  ruff format --check .
  ruff check .
  if [ $# -gt 0 ]; then types; else types >"$seconds/types.log" 2>&1 & fi
fi
# One process more than cores, since many tests wait for processes of their own.
cores=$(python -c 'import os; print(os.cpu_count())')
share=(--numprocesses $((cores < 3 ? cores + 1 : 4)) --dist loadfile --no-loadscope-reorder)
quick=""
for flag in --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false; do
  # jax 0.12 has not the second one any more, and XLA ends who gives it an unknown one.
  asks='from jaxlib import xla_client; xla_client.CompileOptions()'
  if { XLA_FLAGS=$flag python -c "$asks"; } 2>/dev/null; then quick+="$flag "; fi
done
most=(env XLA_FLAGS="$quick${XLA_FLAGS:-}" pytest "${share[@]}")
if [ "${1:-}" = --fast ]; then
  exec "${most[@]}" tests/{chaos,cluster,config,coordinator,core,hardware,launch} \
    tests/{observability,planning,protocol,wire} \
    -m "not (dist or timing or optimized or tpu_compile or notebook or nightly)" \
    "${@:2}"
fi
trap 'python tests/durations.py "$seconds"' EXIT
if [ $# -gt 0 ]; then
  pytest --junitxml "$seconds/asked.xml" "$@"
  exit
fi
rm -f "$seconds"/{most,compiled,timing}.xml
"${most[@]}" -m "not (optimized or tpu_compile or timing or nightly)" \
  --junitxml "$seconds/most.xml"
if [ "$checks" = yes ]; then
  wait "$!" || { cat "$seconds/types.log" && exit 1; }
  cat "$seconds/types.log"
fi
pytest -m "(optimized or tpu_compile) and not (timing or nightly)" "${share[@]}" \
  --junitxml "$seconds/compiled.xml" $(marked "optimized|tpu_compile")
pytest -m "timing and not nightly" --junitxml "$seconds/timing.xml" $(marked timing)
