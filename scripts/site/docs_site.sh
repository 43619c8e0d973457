#!/bin/sh
# Build the documentation site of `make docs`: a virtual environment with pinned packages, the two scripts that pages need
# (diagrams; search without a server), and the pages. Broken links, broken anchors and pages without navigation are errors.
# Usage: scripts/site/docs_site.sh VENV SITE; PYTHON selects the interpreter (3.11 or newer).
set -eu
cd "$(dirname "$0")/../.."
venv=$1
site=$2
python=${PYTHON:-python3}
scripts=${XDG_CACHE_HOME:-$HOME/.cache}/trainium-operator/docs-scripts
work=out/docs

log() { echo "docs: $*"; }

# fetch_script NAME VERSION FILE SHA256: store a file of an npm package in the cache, after a check of its digest.
fetch_script() {
    cached=$scripts/$1-$2.js
    [ -f "$cached" ] && echo "$4  $cached" | sha256sum --check --status && return
    command -v npm >/dev/null 2>&1 || { echo "docs: npm is needed once, to download $1; install it (apt-get install npm)" >&2; exit 1; }
    log "$1 $2"
    mkdir -p "$scripts"
    download_dir=$(mktemp -d)
    (cd "$download_dir" && npm pack --silent "$1@$2" >/dev/null && tar xzf ./*.tgz "package/$3")
    echo "$4  $download_dir/package/$3" | sha256sum --check --status || { echo "docs: $1 $2 has another digest than the pinned one" >&2; exit 1; }
    mv "$download_dir/package/$3" "$cached"
    rm -rf "$download_dir"
}

fingerprint=$(cat scripts/site/docs_requirements.txt | cksum)
if [ "$(cat "$venv/.complete" 2>/dev/null)" != "$fingerprint" ]; then
    log "virtual environment in $venv"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --require-hashes -r scripts/site/docs_requirements.txt
    echo "$fingerprint" >"$venv/.complete"
fi
fetch_script mermaid 11.17.2 dist/mermaid.min.js 581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8
fetch_script iframe-worker 1.0.4 shim/index.js e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609

command -v node >/dev/null 2>&1 || { echo "docs: node is needed to check diagrams; install it (apt-get install nodejs)" >&2; exit 1; }
find docs -name '*.md' -exec node scripts/site/check_diagrams.mjs "$scripts/mermaid-11.17.2.js" {} +
"$venv/bin/python" scripts/site/docs_source.py "$work"
mkdir -p "$work/assets"
cp "$scripts/mermaid-11.17.2.js" "$work/assets/mermaid.js"
cp "$scripts/iframe-worker-1.0.4.js" "$work/assets/iframe-worker.js"
cp scripts/site/docs_site.css "$work/assets/site.css"
# Without --quiet, which would neither show nor count warnings.
NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs build --strict --site-dir "$site"

log "done: $site/index.html (opens without a server; it loads nothing from other sites)"
