#!/usr/bin/env bash
# Makes .venv if need be and runs the quickstart; arguments go to `diloco run`:
#
#   bash launch/local.sh --total-tokens 100000 --baseline
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
ensure_environment ""
exec "$VENV/bin/diloco" run configs/quickstart.py "$@"
