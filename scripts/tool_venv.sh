#!/bin/sh
# Create the virtual environment of a tool, which also has the packages of the project. The environment of `make test`
# does not change.
# Usage: scripts/tool_venv.sh VENV PYTHON REQUIREMENTS
set -eu
venv=$1
python=$2
requirements=$3

fingerprint=$("$python" -VV && cat "$0" "$requirements" | cksum)
[ "$(cat "$venv/.complete" 2>/dev/null)" != "$fingerprint" ] || exit 0
echo "virtual environment in $venv"
rm -rf "$venv"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --require-hashes --only-binary :all: -r "$requirements"
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
project_packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$project_packages')" >"$packages/project.pth"
# Programs that tests start by name run in this environment, too.
for program in "${python%/*}"/trainium-*; do
    sed "1s|.*|#!$PWD/$venv/bin/python|" "$program" >"$venv/bin/${program##*/}"
    chmod +x "$venv/bin/${program##*/}"
done
echo "$fingerprint" >"$venv/.complete"
