# Sourced by the other scripts: makes .venv with this package in it, once.
#
#   ensure_environment ""      the package alone
#   ensure_environment test    and what the tests need
#   ensure_environment test,tpu    and libtpu, which is not free software, for the tests
#                                  that compile for TPUs: without it they are skipped
#
# PYTHON chooses the interpreter (default: python3), VENV another folder than .venv. A
# stamp in that folder holds a hash of what was installed, so that nothing happens when
# nothing changed.

VENV=${VENV:-.venv}

fail() {
  echo "error: $*" >&2
  exit 2
}

# Prints "VERSION HASH", or exits with 3 and the version alone if it is too old. Runs on
# any Python, 2 included.
PROBE='
import sys
version = ".".join(str(part) for part in sys.version_info[:3])
if sys.version_info < (3, 11):
    sys.stdout.write(version)
    sys.exit(3)
import hashlib
files = [open(name, "rb").read() for name in ("setup.cfg", "pyproject.toml")]
files.append(version.encode())
print(version, hashlib.sha256(b"\0".join(files)).hexdigest())
'

ensure_environment() {
  local extra=$1 python=${PYTHON:-python3} probed status=0 version hash stamp
  command -v "$python" >/dev/null ||
    fail "no '$python' found; Python 3.11 or newer is needed: install it, or set" \
      "PYTHON to its path"
  probed=$("$python" -c "$PROBE") || status=$?
  [ "$status" -ne 3 ] ||
    fail "'$python' is Python $probed; 3.11 or newer is needed: install it, or set" \
      "PYTHON to its path (PYTHON=/path/to/python3.12 bash $0)"
  [ "$status" -eq 0 ] || fail "'$python' does not run (exit code $status)"
  read -r version hash <<<"$probed"

  # What was installed with more extras will do as well.
  local wanted has enough
  for stamp in "$VENV"/installed-*; do
    [ "$(cat "$stamp" 2>/dev/null)" = "$hash" ] || continue
    has=,${stamp##*/installed-}, enough=yes
    for wanted in ${extra//,/ }; do
      [[ $has == *,$wanted,* ]] || enough=no
    done
    [ "$enough" = no ] || return 0
  done

  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "'$python' (Python $version) has no venv module: install it (Debian and" \
      "Ubuntu: apt install python3-venv), or set PYTHON to a Python that has it"
  if [ "$("$VENV/bin/python" -c "$PROBE" 2>/dev/null)" != "$probed" ]; then
    echo "Making $VENV with Python $version" >&2
    "$python" -m venv --clear "$VENV"
  fi
  echo "Installing into $VENV: once, about 1 GB" >&2
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    --editable ".${extra:+[$extra]}"
  echo "$hash" >"$VENV/installed-$extra"
}
