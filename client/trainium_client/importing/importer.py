"""Choose the format of an input and translate it: `import_job`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_client.importing.convert import ImportedJob, convert
from trainium_client.importing.documents import parse_documents
from trainium_client.importing.kubeflow_jobs import RUNTIMES
from trainium_client.importing.kubernetes_jobs import FORMS, read_kubernetes_job
from trainium_client.importing.sbatch import is_script, read_script_file
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_client.importing.source_job import SourceJob


@dataclass(frozen=True, slots=True)
class Options:
    """Options that a person adds to the input."""

    instance_type: str = ""
    image: str = ""
    replica: str = ""
    """Name of the part that trains, where a job has several."""


def import_jobs(inputs: Sequence[tuple[str, str]], options: Options) -> list[tuple[str, ImportedJob]]:
    """Return a TrainingJob, and the name of its source, for each job of the inputs, which are names and texts.

    Raises ClientError if an input cannot be read or has no job.
    """
    jobs: list[tuple[str, SourceJob]] = []
    documents: list[tuple[str, dict[str, Any]]] = []
    for name, text in inputs:
        if is_script(text):
            stem = name.rsplit("/", 1)[-1].split(".", 1)[0]
            jobs.append((name, read_script_file(text, stem if stem.isidentifier() else "training")))
        else:
            documents += [(name, document) for document in parse_documents(text, name)]
    others = [document for _, document in documents]
    unknown: list[str] = []
    for name, document in documents:
        form = version, kind = str(document.get("apiVersion", "")), str(document.get("kind", ""))
        if form in FORMS:
            jobs.append((f"{name}, {kind} {version}", read_kubernetes_job(form, document, others, options.replica)))
        elif kind not in RUNTIMES:
            unknown.append(" ".join(filter(None, (kind, version))) or "an object without a kind")
    if not jobs:
        readable = ", ".join(f"{kind} ({version})" for version, kind in FORMS)
        content = f"has {', '.join(dict.fromkeys(unknown))}" if unknown else "has no job"
        raise ClientError(
            f"{' and '.join(name for name, _ in inputs)} {content}: give one of {readable}, a script of Slurm or a "
            "command of torchrun"
        )
    imported = [(name, convert(job, instance_type=options.instance_type, image=options.image)) for name, job in jobs]
    for text in dict.fromkeys(unknown):
        imported[0][1].header.append(f"{text} beside the job: apply it by itself")
    return imported
