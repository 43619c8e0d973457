"""What the job says of itself while it is hurt: its whole history, and the ledger at chosen moments.

Invariant: the history of a status is short, so it is read several times a second; an entry is kept as it was last seen.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from benchmarks.faults.api import ApiError
from benchmarks.faults.trial import key

if TYPE_CHECKING:
    from benchmarks.faults.patient import Patient

Json = dict[str, Any]
_LOOK_SECONDS = 0.5


class Book:
    """Reads the job's status until it is closed."""

    def __init__(self, patient: Patient) -> None:
        self.entries: dict[tuple[Any, ...], Json] = {}
        self.job: Json = {}
        self.phases: set[str] = set()
        self.beats: list[tuple[float, int]] = []
        """When (Unix seconds) the status was seen to tell another step, and which."""
        self.pods: dict[str, tuple[float, float]] = {}
        """When (Unix seconds) a pod was put on a node, and when it was ready, by its uid."""
        self._patient = patient
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more."""
        self._stop.set()
        self._thread.join(30)

    def ledger(self) -> Json:
        """The ledger as the API server has it now; waits for an API server that is away."""
        while not self._stop.is_set():
            with contextlib.suppress(ApiError, OSError, KeyError):
                status = self._patient.status()
                return dict(status["goodput"])
            time.sleep(0.2)
        return {}

    def silence_after(self, moment: float, least: float = 1.5) -> float | None:
        """How long no step was told after this moment (Unix seconds): until an operator leads that hears the agents.

        A look and a status a second apart are no silence: shorter than `least` counts as none.
        """
        later = [at for at, _ in self.beats if at > moment + least]
        return later[0] - moment if later else None

    def history(self) -> list[Json]:
        """All interruptions, oldest first."""
        return sorted(self.entries.values(), key=lambda entry: entry.get("failedAt") or 0.0)

    def _read(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            with contextlib.suppress(ApiError, OSError, KeyError):
                self.job = self._patient.object()
                status = self.job.get("status") or {}
                self.phases.add(status.get("phase", ""))
                step = (status.get("progress") or {}).get("step", 0)
                if not self.beats or step > self.beats[-1][1]:
                    self.beats.append((time.time(), step))
                self._note_pods()
                for entry in status.get("history") or []:
                    self.entries[key(entry)] = entry

    def _note_pods(self) -> None:
        for pod in self._patient.pods():
            since = {
                condition["type"]: _unix(condition["lastTransitionTime"])
                for condition in pod["status"].get("conditions") or []
                if condition["status"] == "True"
            }
            if {"PodScheduled", "Ready"} <= set(since):
                self.pods.setdefault(pod["metadata"]["uid"], (since["PodScheduled"], since["Ready"]))


def _unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
