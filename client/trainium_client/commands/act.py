"""Commands that change a job: suspend, resume, scale, retry."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_client.commands.options import Context, JobName, Kubeconfig, Namespace, open_api, say
from trainium_client.errors import ClientError, NotFoundError
from trainium_contract.views.raw import mapping, text

if TYPE_CHECKING:
    from trainium_client.api import Api, Json

_GONE_SECONDS = 120.0
_POLL_SECONDS = 0.5
_KEPT_METADATA = ("name", "namespace", "labels", "annotations", "ownerReferences")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def suspend(name: JobName, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Save, give all nodes back, and wait for `resume`."""
    _set_suspend(open_api(namespace, context, kubeconfig), name, yes=True)


def resume(name: JobName, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Go on from the newest checkpoint."""
    _set_suspend(open_api(namespace, context, kubeconfig), name, yes=False)


def scale(
    name: JobName,
    size: Annotated[
        int, typer.Argument(min=1, help="Nodes; those that would save no pass of a step stay warm in reserve.")
    ],
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Change the number of nodes while the job trains."""
    api = open_api(namespace, context, kubeconfig)
    _refuse_ended(api.job(name), "scaled")
    api.scale_job(name, size)
    say(f"{name} is asked to train on {size} nodes; see: kubectl trn watch {name}")


def retry(name: JobName, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Run a failed job again, from its newest checkpoint: it is deleted and made anew as it was written."""
    api = open_api(namespace, context, kubeconfig)
    again(api, api.job(name))
    say(f"{name} runs again; it resumes from its newest checkpoint; see: kubectl trn watch {name}")


def again(api: Api, job: Json, *, seconds: float = _GONE_SECONDS) -> Json:
    """Delete a failed job and make it anew; what cannot be made anew is not deleted."""
    name, phase = text(mapping(job, "metadata"), "name"), text(mapping(job, "status"), "phase")
    if phase != "Failed":
        raise ClientError(f"only a failed job can be retried, and {name} is {phase or 'not answered yet'}")
    manifest = written_again(job)
    probe = copy.deepcopy(manifest)
    probe["metadata"] |= {"name": f"{name[:40]}-probe"}
    api.create_job(probe, dry_run=True)  # an older definition, a quota or a policy says no before anything is lost
    uid = str(job["metadata"]["uid"])
    api.delete_job(name, uid, foreground=True)
    deadline = time.monotonic() + seconds
    while _is_there(api, name, uid):
        if time.monotonic() > deadline:
            raise ClientError(
                f"{name} is deleted, but its pods are not gone after {seconds:.0f} s (is a node down?); when they are, "
                f"make it anew with kubectl apply"
            )
        time.sleep(_POLL_SECONDS)
    return api.create_job(manifest)


def written_again(job: Json) -> dict[str, Any]:
    """The job as a person wrote it: without what the server and the operator added."""
    metadata = mapping(job, "metadata")
    kept: dict[str, Any] = {key: copy.deepcopy(metadata[key]) for key in _KEPT_METADATA if metadata.get(key)}
    kept["annotations"] = {key: value for key, value in kept.get("annotations", {}).items() if key != _LAST_APPLIED}
    if not kept["annotations"]:
        del kept["annotations"]
    spec = copy.deepcopy(dict(mapping(job, "spec")))
    return {"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": kept, "spec": spec}


def _is_there(api: Api, name: str, uid: str) -> bool:
    try:
        return str(api.job(name)["metadata"].get("uid")) == uid
    except NotFoundError:
        return False


def _set_suspend(api: Api, name: str, *, yes: bool) -> None:
    job = api.job(name)
    _refuse_ended(job, "suspended" if yes else "resumed")
    if (mapping(job, "spec").get("suspend") is True) is yes:
        say(f"{name} is {'suspended' if yes else 'not suspended'} already")
        return
    api.patch_job(name, {"spec": {"suspend": yes}})
    say(f"{name} saves and gives its nodes back" if yes else f"{name} goes on from its newest checkpoint")


def _refuse_ended(job: Json, what: str) -> None:
    phase, name = text(mapping(job, "status"), "phase"), text(mapping(job, "metadata"), "name")
    if phase in {"Completed", "Failed"}:
        hint = f"; run it again with: kubectl trn retry {name}" if phase == "Failed" else ""
        raise ClientError(f"{name} has {phase.lower()} and cannot be {what}{hint}")
