#!/usr/bin/env bash
# Makes a venv with torchft and a torch that runs on CPUs, apart from this package's:
#
#   bash benchmarks/peers/install.sh [FOLDER]     default: .venv-peers
#
# PYTHON chooses the interpreter (3.11 or 3.12; default: python3). Where pip's index has
# only torch for CUDA, give that of CPU builds: PIP_EXTRA_INDEX_URL or PIP_INDEX_URL.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=${1:-.venv-peers}
"${PYTHON:-python3}" -m venv --clear "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check \
  --requirement benchmarks/peers/requirements.txt
"$folder/bin/python" -c '
from importlib.metadata import version
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo
print("torchft", version("torchft") + ", torch", version("torch"))
'
