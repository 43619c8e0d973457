#!/bin/sh
# Run mutation tests of the plan, for `make mutants`: mutmut changes the code of a copy below out/mutants.
# Usage: scripts/mutants.sh VENV [PATTERN...], for instance 'trainium_operator.plan.view*'; by default the whole plan
# An interrupted run continues. Results: cd out/mutants && ../../.venv-mutants/bin/mutmut results
set -eu
cd "$(dirname "$0")/.."
venv=$PWD/$1
shift
[ $# -gt 0 ] || set -- 'trainium_operator.plan*'
mkdir -p out/mutants/src
git ls-files -z tests manifests docs helm | xargs -0 cp --parents -u -t out/mutants
for package in contract/trainium_contract operator/trainium_operator simulator/trainium_simulator; do
    (cd "${package%/*}" && git ls-files -z "${package#*/}" | xargs -0 cp --parents -u -t ../out/mutants/src)
done
cd out/mutants
cat >pyproject.toml <<'E2'
[tool.mutmut]
source_paths = ["src"]
only_mutate = ["src/trainium_operator/plan/*"]
also_copy = ["manifests", "docs", "helm"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "--ignore=tests/unit/plan/test_explorer.py"]
pytest_add_cli_args_test_selection = ["tests/unit/plan"]
use_git_change_detection = false
E2
"$venv/bin/mutmut" run "$@"
"$venv/bin/mutmut" results
