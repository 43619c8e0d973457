#!/bin/sh
# Mutation testing of the plan for `make mutants`: draws a sample of mutants, plays the tests of the plan against each and
# tells which survive. What draws has a virtual environment of its own; what plays uses the project's.
# Usage: scripts/mutants/mutants.sh VENV PYTHON [--seed N] [--sample N] [--room ROOM] [--explorer] [--enough SECONDS] [--again]
# --room draws from one room of the plan alone; --explorer also plays the dearest tests, --enough leaves the dear ones;
# --again plays those that survived the last time.
# An interrupted run goes on when it is started again: out/mutants is what it knows.
set -eu
cd "$(dirname "$0")/../.."
venv=$1
python=$2
shift 2
seed=1
sample=300
ignore=--ignore=tests/unit/plan/test_explorer.py
folder=operator/trainium_operator/plan
rest=
while [ $# -gt 0 ]; do
    case $1 in
    --seed) seed=$2; shift ;;
    --sample) sample=$2; shift ;;
    --room) folder=operator/trainium_operator/plan/$2; shift ;;
    --explorer) ignore= ;;
    *) rest="$rest $1" ;;
    esac
    shift
done

want=$(cat scripts/mutants/mutants_requirements.txt | cksum)
if [ "$(cat "$venv/.complete" 2>/dev/null)" != "$want" ]; then
    echo "mutants: virtual environment in $venv"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --require-hashes --no-deps -r scripts/mutants/mutants_requirements.txt
    echo "$want" >"$venv/.complete"
fi
"$venv/bin/python" scripts/mutants/mutants_draw.py --seed "$seed" --sample "$sample" --out out/mutants/drawn.json "$folder"
"$python" scripts/mutants/mutants_play.py out/mutants/drawn.json --results out/mutants/results.jsonl tests/unit/plan $ignore $rest
