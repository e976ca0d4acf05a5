#!/usr/bin/env bash
# Checks the spelling of the pages, and of the code that pages are made of; then builds
# the documentation as a site, in `site/`. A warning is an error. Arguments go to
# sphinx-build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
ensure_environment docs
"$VENV/bin/codespell" ./*.md docs launch notebooks configs diloco_jax
"$VENV/bin/sphinx-build" --fail-on-warning --keep-going --quiet --jobs auto \
  -c docs "$@" . site
echo "site/docs/index.html"
