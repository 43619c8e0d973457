#!/bin/sh
# Fuzzing of the operator's entrances for `make fuzz`: see fuzz_campaign.py. Whoever guides the search by coverage (atheris) has a
# virtual environment of its own, which looks into the project's; where it cannot be installed, dice alone draw.
# Usage: scripts/fuzz/fuzz.sh VENV PYTHON [--inputs N] [--seed N] [--targets A,B] [--round N] [--dice] [--again CASE]
# An interrupted run goes on when it is started again: out/fuzz is what it knows.
set -eu
cd "$(dirname "$0")/../.."
venv=$1
python=$2
shift 2

want=$("$python" -VV && cat scripts/fuzz/fuzz.sh scripts/fuzz/fuzz_requirements.txt | cksum)
if [ "$(cat "$venv/.complete" 2>/dev/null)" != "$want" ]; then
    echo "fuzz: virtual environment in $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --require-hashes --only-binary :all: --no-deps \
        -r scripts/fuzz/fuzz_requirements.txt ||
        echo "fuzz: atheris is not to be had for this Python and machine; dice alone draw the cases" >&2
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    theirs=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$theirs')" >"$packages/project.pth"
    echo "$want" >"$venv/.complete"
fi
exec "$venv/bin/python" scripts/fuzz/fuzz_campaign.py "$@"
