#!/bin/sh
# Makes the virtual environment that every make target uses, from hash-pinned versions; safe to repeat and to interrupt.
# Usage: scripts/setup.sh [VENV [ahead [OPTION]...]]; PYTHON chooses the interpreter (3.11 or newer). With `ahead` the
# programs of the development cluster are prepared meanwhile, as `trainium-devcluster binaries OPTION...` does: pip keeps
# one processor busy at most, compiling takes all that is left. Should they fail, who needs them next says why.
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

want=$(cat pyproject.toml ./*/pyproject.toml constraints.txt | cksum)
[ "$(cat "$venv/.complete" 2>/dev/null)" = "$want" ] && exit 0

started=$(date +%s)
say() { echo "[$(($(date +%s) - started)) s] setup: $*"; }

make_venv() {
    "$python" -m venv "$venv" 2>/dev/null && return
    rm -rf "$venv"
    "$python" -m virtualenv -q "$venv" 2>/dev/null && return
    # Debian and Ubuntu keep ensurepip in a package of its own.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing the distribution's python3-venv"
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; } >/dev/null
        "$python" -m venv "$venv" && return
    fi
    if command -v pip3 >/dev/null 2>&1; then
        say "installing virtualenv for this user"
        pip3 install -q --user --break-system-packages virtualenv 2>/dev/null || pip3 install -q --user virtualenv
        "$python" -m virtualenv -q "$venv" && return
    fi
    echo "setup: cannot make a virtual environment with $python; install python3-venv (apt-get install python3-venv) and try again" >&2
    exit 1
}
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "virtual environment in $venv ($("$python" --version))"
    make_venv
fi
packages=
programs=
# Both are in the background, where a signal reaches this shell at once. What a shell starts there does not hear Ctrl-C:
# it is told.
end() {
    trap - EXIT
    for each in $packages $programs; do kill "$each" 2>/dev/null || true; done
    wait
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
if [ "${2:-}" = ahead ]; then
    shift 2
    PYTHONPATH=devcluster "$venv/bin/python" -m trainium_devcluster.binaries "$@" >/dev/null &
    programs=$!
fi
say "packages at pinned versions and hashes (the first time downloads about 3 GB, most of it torch)"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-compile --require-hashes -r constraints.txt &
packages=$!
wait "$packages"
packages=
say "this project's distributions, editable"
# All go first: pip would take away a program with the distribution that it moved out of, after the new one has installed it.
"$venv/bin/python" -m pip uninstall -q -y --disable-pip-version-check \
    trainium-agent trainium-client trainium-contract trainium-devcluster trainium-operator trainium-simulator trainium-trainer \
    trainium-worker 2>/dev/null || true
set --
for folder in ./*/pyproject.toml; do set -- "$@" -e "${folder%/*}"; done
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation "$@"
# Pods of the development cluster see these files through a layer of their own: what they compiled would be lost. pip would
# compile on one processor.
"$venv/bin/python" -m compileall -q -j 0 agent client contract operator simulator trainer_image devcluster worker "$venv/lib" >/dev/null || true
echo "$want" >"$venv/.complete"
if [ -n "$programs" ]; then
    say "the packages are there"
    wait "$programs" || say "not all programs of the development cluster are there (see above); they are tried again when needed"
    programs=
fi
say "done"
