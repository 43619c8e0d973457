"""What the ranks of the tests do; in a module of its own so that a forked process can find it."""

from __future__ import annotations

from typing import Any

from checkpoint_world import Place, Run, position, solo


def train_until_killed(root: Any, memory: Any, completed: Any) -> None:
    run = solo(root, memory, scale=4000)
    while True:
        run.advance()
        completed.value = run.step


def report_after(place: Place, root: Any, memories: Any, steps: int, settings: Any) -> dict[str, Any]:
    """Resume, advance to `steps` with saves at the given ones, and report; `memories` has one folder per rank."""
    memory = memories[place.rank] if memories else None
    settings = dict(settings)
    save_at = settings.pop("save_at", ())
    finish = settings.pop("finish", False)
    run = Run(place, root, memory, **settings)
    report = run.report()
    while run.step < steps:
        run.advance(save=run.step + 1 in save_at)
        if run.step in save_at:
            run.settle()
    if finish:
        run.manager.finish(position(run.step))
    run.manager.before_update()
    report["reached"] = run.step
    report["durable"] = run.manager.durable_step
    run.manager.close()
    return report
