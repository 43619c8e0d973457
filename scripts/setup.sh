#!/bin/sh
# Create the virtual environment that every make target uses, from hash-pinned versions; safe to repeat and to interrupt.
# Usage: scripts/setup.sh [VENV [with-binaries [OPTION]...]]; PYTHON selects the interpreter (3.11 or newer).
# With `with-binaries`, the binaries of the development cluster are built meanwhile, as `trainium-devcluster binaries
# OPTION...` does: pip uses one processor, and the compiler uses the others. If the build fails, the next command that
# needs a binary reports why.
set -eu
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || { echo "setup: Python 3.11 or newer is needed and none is on PATH; install it or set PYTHON=/path/to/python" >&2; exit 1; }

fingerprint=$(cat pyproject.toml ./*/pyproject.toml constraints.txt | cksum)
[ "$(cat "$venv/.complete" 2>/dev/null)" = "$fingerprint" ] && exit 0

started=$(date +%s)
log() { echo "[$(($(date +%s) - started)) s] setup: $*"; }

create_venv() {
    "$python" -m venv "$venv" 2>/dev/null && return
    rm -rf "$venv"
    "$python" -m virtualenv -q "$venv" 2>/dev/null && return
    # Debian and Ubuntu have ensurepip in a separate package.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        log "installing the distribution's python3-venv"
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; } >/dev/null
        "$python" -m venv "$venv" && return
    fi
    if command -v pip3 >/dev/null 2>&1; then
        log "installing virtualenv for this user"
        pip3 install -q --user --break-system-packages virtualenv 2>/dev/null || pip3 install -q --user virtualenv
        "$python" -m virtualenv -q "$venv" && return
    fi
    echo "setup: cannot create a virtual environment with $python; install python3-venv (apt-get install python3-venv) and try again" >&2
    exit 1
}
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    log "virtual environment in $venv ($("$python" --version))"
    create_venv
fi
pip_pid=
binaries_pid=
# A shell handles signals at once only while it waits for background processes, and these do not receive Ctrl-C.
stop_children() {
    trap - EXIT
    for pid in $pip_pid $binaries_pid; do kill "$pid" 2>/dev/null || true; done
    wait
}
trap stop_children EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
if [ "${2:-}" = with-binaries ]; then
    shift 2
    PYTHONPATH=devcluster "$venv/bin/python" -m trainium_devcluster.binaries "$@" >/dev/null &
    binaries_pid=$!
fi
log "packages at pinned versions and hashes (the first time downloads about 3 GB, most of it torch)"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-compile --require-hashes -r constraints.txt &
pip_pid=$!
wait "$pip_pid"
pip_pid=
log "this project's distributions, editable"
# All are removed first. Otherwise, if a program moved to another distribution, pip would delete it with the old one.
"$venv/bin/python" -m pip uninstall -q -y --disable-pip-version-check \
    trainium-agent trainium-client trainium-contract trainium-devcluster trainium-operator trainium-simulator trainium-trainer \
    trainium-worker 2>/dev/null || true
set --
for folder in ./*/pyproject.toml; do set -- "$@" -e "${folder%/*}"; done
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation "$@"
# Pods of the development cluster have these files in a separate overlay each, so what a pod compiles is lost. pip would
# compile on one processor.
"$venv/bin/python" -m compileall -q -j 0 agent client contract operator simulator trainer_image devcluster worker "$venv/lib" >/dev/null || true
echo "$fingerprint" >"$venv/.complete"
if [ -n "$binaries_pid" ]; then
    log "packages installed; waiting for the binaries of the development cluster"
    wait "$binaries_pid" || log "some binaries of the development cluster failed (see above); the build is retried when needed"
    binaries_pid=
fi
log "done"
