#!/bin/sh
# Create the virtual environment of `make test-nxd`: torch and torch_xla 2.9, which images of trn1 have, and the pinned
# packages of everything else; safe to repeat and to interrupt.
# Usage: scripts/nxd_environment.sh VENV; PYTHON selects the interpreter (3.11 to 3.13, for which torch_xla has wheels).
set -eu
cd "$(dirname "$0")/.."
venv=$1
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.12 python3.11 python3.13 python3; do
        if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || { echo "nxd: torch_xla 2.9 needs Python 3.11 to 3.13 and none is on PATH; install it or set PYTHON=/path/to/python" >&2; exit 1; }

fingerprint=$(cat pyproject.toml ./*/pyproject.toml constraints.txt scripts/nxd_environment.sh | cksum)
[ "$(cat "$venv/.complete" 2>/dev/null)" = "$fingerprint" ] && exit 0

log() { echo "nxd: $*"; }

log "virtual environment in $venv ($("$python" --version))"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
log "torch and torch_xla 2.9 (the first time downloads about 3 GB)"
"$venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.9.0 torch_xla==2.9.0
log "the other packages at pinned versions and hashes"
"$venv/bin/python" scripts/image_requirements.py dev >"$venv/requirements.txt"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r "$venv/requirements.txt"
set --
for folder in ./*/pyproject.toml; do set -- "$@" -e "${folder%/*}"; done
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation "$@"
echo "$fingerprint" >"$venv/.complete"
log "done"
