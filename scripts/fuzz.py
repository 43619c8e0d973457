"""Run the property tests of `tests/unit/fuzz` under atheris, which is guided by coverage (`make fuzz`).

Each target runs in a separate process and stops at the first failure. Hypothesis saves a failing input in its
database, so `make test ARGS=tests/unit/fuzz` replays and shrinks it. Inputs that reach new code are kept in
out/fuzz/TARGET, so the next run continues there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = ("coordinator", "cluster", "spec")
MAX_INPUT_BYTES = 8 << 10
TIMEOUT_SECONDS, MEMORY_MIB = 300, 2048


def fuzz(target: str, inputs: int, seed: int) -> None:
    """Fuzz a target in this process; does not return."""
    sys.path.insert(0, str(ROOT))
    import atheris  # noqa: PLC0415 - only in the environment of `make fuzz`

    with atheris.instrument_imports(include=["trainium_operator", "trainium_contract"]):
        from tests.unit.fuzz.test_targets import hostile_test  # noqa: PLC0415 - instrumented
    corpus = ROOT / "out/fuzz" / target
    corpus.mkdir(parents=True, exist_ok=True)
    options = {"runs": inputs, "seed": seed, "max_len": MAX_INPUT_BYTES, "len_control": 0, "timeout": TIMEOUT_SECONDS}
    options |= {"rss_limit_mb": MEMORY_MIB, "print_final_stats": 1}
    arguments = [sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)]
    atheris.Setup(arguments, hostile_test(target).hypothesis.fuzz_one_input)
    atheris.Fuzz()


def main() -> int:
    """Fuzz all requested targets; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=30_000, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", default=",".join(TARGETS), help="targets, separated by commas")
    parser.add_argument("--target", choices=TARGETS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.target:
        fuzz(options.target, options.inputs, options.seed)
    failed = []
    for target in options.targets.split(","):
        print(f"== {target}", flush=True)
        command = [sys.executable, __file__, "--target", target, "--inputs", str(options.inputs)]
        if subprocess.run([*command, "--seed", str(options.seed)], cwd=ROOT, check=False).returncode:
            failed.append(target)
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
