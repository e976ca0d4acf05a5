#!/usr/bin/env bash
# Makes the text that `quality.py` trains 0.3 M parameters and more on: 130 MB of the
# sources of Linux, from Debian's package. Needs apt-get, dpkg-deb and xz.
#
#   bash benchmarks/linux_text.sh FOLDER     # then quality.py --text FOLDER
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: bash $0 FOLDER" >&2; exit 2; }
PACKAGE=linux-source-6.1
VERSION=6.1.192-2
[ ! -e "$1" ] || { echo "error: $1 exists; name a folder that does not" >&2; exit 2; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
(cd "$scratch" && apt-get download "$PACKAGE=$VERSION" >&2)
dpkg-deb -x "$scratch"/*.deb "$scratch"
tar -xJf "$scratch/usr/src/$PACKAGE.tar.xz" -C "$scratch"
mkdir -p "$1"
folder=$(realpath "$1")
cd "$scratch/$PACKAGE"
find Documentation kernel mm fs net lib block crypto security ipc init -type f \
  -regex '.*\.\(rst\|txt\|c\|h\|S\)' -not -path 'Documentation/translations/*' -print0 |
  tar -cf - --null -T - | tar -xf - -C "$folder"
echo "$(find "$folder" -type f | wc -l) files in $folder" >&2
