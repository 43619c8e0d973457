"""Write the output of commands into the pages that show it, between the marks `<!-- output: COMMAND -->`.

`python scripts/doc_outputs.py` writes all pages; with `--check` it only compares, and exits with 1 if a page is stale.
A nightly test compares the output of commands that take seconds. `python scripts/doc_outputs.py record FILE NAMESPACE
COMMAND...` runs a command of `kubectl trn` on the cluster of KUBECONFIG and records its input and output
(tests/testing/api/recorded).
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.testing.outputs.blocks import update_blocks  # noqa: E402 - after the path
from tests.testing.outputs.commands import PAGES, SLOW, output  # noqa: E402
from tests.testing.outputs.recording import record  # noqa: E402


def main(arguments: list[str]) -> int:
    """Write or check the outputs; return the exit code."""
    if arguments[:1] == ["record"] and len(arguments) > 3:
        recording, text = record(arguments[3:], arguments[2])
        recording.write(Path(arguments[1]))
        sys.stdout.write(f"{text}\n")
        return 0
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python scripts/doc_outputs.py [--check | record FILE NAMESPACE COMMAND...]\n")
        return 2
    check = bool(arguments)
    exit_code = 0
    for name in PAGES:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        updated = update_blocks(text, output, leave=SLOW if check else frozenset())
        if updated == text:
            continue
        if check:
            sys.stderr.write(f"{name} is stale; run `python scripts/doc_outputs.py`\n")
            sys.stderr.writelines(difflib.unified_diff(text.splitlines(True), updated.splitlines(True), name, "now"))
            exit_code = 1
        else:
            page.write_text(updated, encoding="utf-8")
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
