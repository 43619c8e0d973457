"""Teach a tiny model a rule by TRL's GRPO through `elastic`, with a rank killed twice.

`.venv-trl/bin/python -m benchmarks.elastic_grpo`; `make test-trl` creates that environment. Two ranks generate answers
themselves. The reward is the share of tokens that follow the rule: each number is followed by the next one. The run
with kills must have the answers and the rewards of the undisturbed run, bit for bit. `reward.png` and `report.json` are
in the folder of `--out`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.conditions import write_report
from benchmarks.harness.ranks import build_node_environment, start_ranks

RANKS, STEPS, KILLS = 2, 160, (40, 90)
NUMBERS, PROMPTS, SAMPLES, TOKENS = 12, 8, 8, 8
_TIMEOUT_SECONDS = 300.0
_PAD, _END = "<pad>", "<eos>"

Answers = dict[int, list[list[Any]]]
"""By step: (prompt, answer, reward) of all ranks, sorted."""


def main() -> None:
    """Run without and with kills, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/elastic_grpo"))
    parser.add_argument("--rank", nargs=2, metavar=("FOLDER", "ATTEMPT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train(Path(options.rank[0]), int(options.rank[1]))
        return
    shutil.rmtree(options.out, ignore_errors=True)
    undisturbed, _, seconds = run(options.out / "undisturbed", ())
    disturbed, repeated, disturbed_seconds = run(options.out / "disturbed", KILLS)
    curves = [{step: compute_mean_reward(each[step]) for step in sorted(each)} for each in (undisturbed, disturbed)]
    rewards = list(curves[1].values())
    figures = {
        "steps": len(disturbed),
        "answers": sum(map(len, disturbed.values())),
        "identical": undisturbed == disturbed,
        "repeatedSteps": repeated,
        "rewardOfFirstTenSteps": statistics.fmean(rewards[:10]),
        "rewardOfLastTenSteps": statistics.fmean(rewards[-10:]),
        "seconds": {"undisturbed": round(seconds, 1), "withKills": round(disturbed_seconds, 1)},
        "rewards": rewards,
    }
    report = write_report(options.out / "report.json", "elastic_grpo", **figures)
    draw(options.out / "reward.png", *curves)
    print(json.dumps({key: value for key, value in report.items() if key != "rewards"}, indent=1))
    sys.exit(0 if report["identical"] and len(disturbed) == STEPS else 1)


def compute_mean_reward(answers: list[list[Any]]) -> float:
    """Return the mean reward of the answers of a step."""
    return statistics.fmean(reward for _, _, reward in answers)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all ranks."""

    folder: Path
    number: int

    def run(self, kill_after: int | None) -> None:
        """Run to the last step, or until a rank is killed after a step."""
        logs = self.folder / f"attempt-{self.number}"
        logs.mkdir(parents=True)
        command = [sys.executable, "-m", "benchmarks.elastic_grpo", "--rank", str(self.folder), str(self.number)]
        variables = {"TRAINIUM_REQUESTED_WORLD_SIZE": str(RANKS), "ACCELERATE_USE_CPU": "true"}
        processes = start_ranks(command, RANKS, logs, variables)
        try:
            if kill_after is None:
                for process in processes:
                    if process.wait(_TIMEOUT_SECONDS):
                        raise SystemExit(f"a rank ended with {process.returncode}: see the logs in {self.folder}")
                return
            deadline = time.monotonic() + _TIMEOUT_SECONDS
            while self.find_newest_step() <= kill_after:
                if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                    raise SystemExit(f"a rank ended, or is too slow: see the logs in {self.folder}")
                time.sleep(0.05)
            processes[-1].send_signal(signal.SIGKILL)
        finally:
            for process in processes:  # as the agents end the others
                process.kill()
                process.wait()

    def find_newest_step(self) -> int:
        """Return the newest step for which all answers are recorded; 0 before the first."""
        return max(self.read_answers(), default=0)

    def read_answers(self) -> Answers:
        """Return the answers of each step for which all ranks recorded theirs."""
        answers: Answers = {}
        for path in self.folder.glob(f"attempt-{self.number}/answers-*.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    record = json.loads(line)
                    answers.setdefault(record["step"], []).extend(record["answers"])
        return {step: sorted(each) for step, each in answers.items() if len(each) == PROMPTS * SAMPLES}


def run(folder: Path, kills: tuple[int, ...]) -> tuple[Answers, list[int], float]:
    """Run with a rank killed after each step of `kills`; return the answers, the repeated steps and the seconds."""
    started, answers, repeated = time.monotonic(), Answers(), []
    for number, kill_after in enumerate((*kills, None)):
        attempt = Attempt(folder, number)
        attempt.run(kill_after)
        recorded = attempt.read_answers()
        repeated += sorted(recorded.keys() & answers.keys())
        answers |= recorded
    return answers, repeated, time.monotonic() - started


def compute_reward(prompt: str, answer: str) -> float:
    """Return the share of tokens that follow the rule."""
    numbers = [int(word) for word in f"{prompt} {answer}".split()]
    return sum((before + 1) % NUMBERS == after for before, after in itertools.pairwise(numbers)) / TOKENS


def train(folder: Path, attempt: int) -> None:
    """Run one rank."""
    rank = int(os.environ["RANK"])
    os.environ |= build_node_environment(folder, rank, attempt)
    import torch  # noqa: PLC0415 - the ranks import it
    from datasets import Dataset  # noqa: PLC0415 - as above
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - as above
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415 - as above
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415 - as above

    from trainium_worker.hooks.transformers import elastic  # noqa: PLC0415 - as above

    torch.set_num_threads(1)
    log = (folder / f"attempt-{attempt}" / f"answers-{rank}.jsonl").open("w")

    def score(prompts: list[str], completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        rewards = [compute_reward(*pair) for pair in zip(prompts, completions, strict=True)]
        answers = list(zip(prompts, completions, rewards, strict=True))
        log.write(json.dumps({"step": trainer_state.global_step + 1, "answers": answers}) + "\n")
        log.flush()
        return rewards

    words = [_PAD, _END, *map(str, range(NUMBERS))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=_PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    arguments = GRPOConfig(
        output_dir=str(folder / "run"),
        max_steps=STEPS,
        per_device_train_batch_size=PROMPTS * SAMPLES // RANKS,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        learning_rate=0.005,
        beta=0.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        LlamaForCausalLM(config),
        reward_funcs=score,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": str(number % NUMBERS)} for number in range(96)]),
        processing_class=PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, padding_side="left"
        ),
    )
    elastic(trainer).train()


def draw(path: Path, undisturbed: dict[int, float], disturbed: dict[int, float]) -> None:
    """Draw both reward curves, and the kills."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - the ranks need no plots

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*undisturbed.items(), strict=True), color="#b8c4d6", linewidth=6, label="undisturbed run")
    axes.plot(*zip(*disturbed.items(), strict=True), color="#1f4e9c", linewidth=1.4, label="run with killed ranks")
    for step in KILLS:
        axes.axvline(step, color="#c0392b", linewidth=0.8, linestyle=":")
        axes.annotate("SIGKILL of a rank", (step, 0.02), color="#c0392b", fontsize=8, rotation=90, ha="right")
    axes.set_xlabel("step")
    axes.set_ylabel(f"mean reward of {PROMPTS * SAMPLES} answers")
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
