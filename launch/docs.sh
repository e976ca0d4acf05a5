#!/usr/bin/env bash
# Builds the documentation as a site, in `site/`; a warning is an error. Arguments go to
# sphinx-build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
ensure_environment docs
"$VENV/bin/sphinx-build" --fail-on-warning --keep-going --quiet --jobs auto \
  -c docs "$@" . site
echo "site/docs/index.html"
