#!/bin/sh
# Branch coverage of plan, checkpoint and agent for `make coverage`, by the tests that are meant for each: a table, and JSON
# under out/coverage. All processes count, however they end (coverage_start.py).
# Usage: scripts/coverage/coverage.sh VENV PYTHON [ROOM [TEST...]]
# ROOM: plan, checkpoint or agent; all of them without. With TESTs (a file, a folder, pytest's options) what these reach is
# added to what is known of the room, so that it can be measured in parts. A changed source file begins its room anew.
set -eu
cd "$(dirname "$0")/../.."
venv=$1
python=$2
shift 2

# What counts has an environment of its own that looks into the project's: `make test` stays as it is.
want=$("$python" -VV && cat scripts/coverage/coverage.sh scripts/coverage/coverage_start.py scripts/coverage/coverage_requirements.txt | cksum)
if [ "$(cat "$venv/.complete" 2>/dev/null)" != "$want" ]; then
    echo "coverage: virtual environment in $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --require-hashes -r scripts/coverage/coverage_requirements.txt
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    theirs=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$theirs')" >"$packages/project.pth"
    cp scripts/coverage/coverage_start.py "$packages"
    rm -f "$packages/a1_coverage.pth"
    echo "import coverage_start; coverage_start.start('$PWD/out/coverage/rc')" >"$packages/start.pth"
    for program in "${python%/*}"/trainium-*; do
        sed "1s|.*|#!$PWD/$venv/bin/python|" "$program" >"$venv/bin/${program##*/}"
        chmod +x "$venv/bin/${program##*/}"
    done
    echo "$want" >"$venv/.complete"
fi

folder_of() {
    case $1 in
    plan) echo operator/trainium_operator/plan ;;
    checkpoint | agent) echo "trainer_image/trainium_trainer/$1" ;;
    *) echo "coverage: there is no room $1; give plan, checkpoint or agent" >&2; exit 2 ;;
    esac
}

# The explorer takes minutes for what the tables reach as well.
tests_of() {
    case $1 in
    plan) echo tests/unit/plan --ignore=tests/unit/plan/test_explorer.py ;;
    checkpoint) echo tests/unit/checkpoint ;;
    agent) echo tests/unit/agent tests/wire/agent tests/wire/operator/test_operator_stream_client.py tests/wire/operator/test_operator_handover.py ;;
    esac
}

measure() {
    room=$1
    shift
    folder=$(folder_of "$room")
    kept=out/coverage/$room
    now=$(find "$folder" -name '*.py' | LC_ALL=C sort | xargs cat | cksum)
    if [ $# -eq 0 ]; then
        rm -rf "$kept"
        # shellcheck disable=SC2046 # words are meant
        set -- $(tests_of "$room")
    elif [ "$(cat "$kept/source" 2>/dev/null)" != "$now" ]; then
        rm -rf "$kept"
    fi
    mkdir -p "$kept"
    echo "$now" >"$kept/source"
    cat >out/coverage/rc <<END
[run]
branch = true
parallel = true
source = $PWD/$folder
data_file = $PWD/$kept/data
disable_warnings = no-data-collected, module-not-imported, module-not-measured, module-not-python
[report]
exclude_also = if __name__ == .__main__.:
END
    failed=0
    "$venv/bin/python" -m pytest -q -p no:cacheprovider "$@" || failed=1
    mv out/coverage/rc "$kept/rc"
    "$venv/bin/python" -m coverage combine -q --append --rcfile="$kept/rc"
    "$venv/bin/python" -m coverage json -q --rcfile="$kept/rc" -o "$kept.json"
    [ $failed = 0 ] || echo "coverage: a test of $room failed: see above" >&2
    return $failed
}

mkdir -p out/coverage
trap 'rm -f out/coverage/rc' EXIT INT TERM
code=0
if [ $# -gt 0 ]; then
    measure "$@" || code=$?
else
    for room in plan checkpoint agent; do measure "$room" || code=$?; done
fi
"$python" scripts/coverage/coverage_table.py out/coverage || code=$?
exit $code
