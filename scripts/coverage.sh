#!/bin/sh
# Measure branch coverage of each package by its tests, for `make coverage` (pyproject.toml has the settings).
# Usage: scripts/coverage.sh VENV [plan|checkpoint|agent]...; by default all three
set -eu
cd "$(dirname "$0")/.."
coverage="$PWD/$1/bin/python -m coverage"
shift
[ $# -gt 0 ] || set -- plan checkpoint agent
code=0
for package in "$@"; do
    case $package in
    # The explorer takes minutes, and the other tests reach the same branches.
    plan) folder=operator/trainium_operator/plan tests="tests/unit/plan --ignore=tests/unit/plan/test_explorer.py" ;;
    checkpoint) folder=trainer_image/trainium_trainer/checkpoint tests=tests/unit/checkpoint ;;
    agent) folder=agent/trainium_agent tests="tests/unit/agent tests/wire/agent" ;;
    *) echo "coverage: no package $package; give plan, checkpoint or agent" >&2; exit 2 ;;
    esac
    export COVERAGE_FILE="$PWD/out/coverage/$package/data"
    rm -rf "out/coverage/$package"
    mkdir -p "out/coverage/$package"
    # shellcheck disable=SC2086 # word splitting is intended
    $coverage run --source="$PWD/$folder" -m pytest -q -p no:cacheprovider $tests || code=1
    $coverage combine -q
    $coverage report || code=1
done
exit $code
