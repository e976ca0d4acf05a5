#!/usr/bin/env bash
# Makes the run that README prints, and all pictures of it. About ten minutes on two
# quiet cores; the pictures of the page need Chromium.
#
#   bash docs/figures/first_run.sh WORKDIR     a new one, or that of a run that is over
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
workdir=${1:?give the folder of the run}
[ -f "$workdir/summary.json" ] ||
  diloco run configs/quickstart.py --baseline --workdir "$workdir"
figures=docs/figures
python $figures/survives_a_kill.py "$workdir" $figures/survives_a_kill.svg
python $figures/dashboard.py "$workdir" $figures/dashboard_light.png
python $figures/dashboard.py "$workdir" $figures/dashboard_dark.png --dark
python $figures/dashboard.py "$workdir" $figures/dashboard_phone.png --size 390x900
