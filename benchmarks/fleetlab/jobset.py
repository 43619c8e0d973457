"""The real JobSet controller beside a fleet, and a JobSet whose pods are those of our job.

Invariants: the controller is JobSet's own program with its own definition and webhooks, as its kustomization has them;
it runs with the administrator's rights and a certificate made here, and its memory and processor time are the kernel's.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import trustme
import yaml

from benchmarks.fleetlab.operator_site import cpu_seconds, memory_mib
from trainium_devcluster.binaries import JOBSET_PROGRAMS, Program, ensure_binaries
from trainium_devcluster.controlplane.components import HOST
from trainium_devcluster.ports import reserved_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.fleetlab.kube import Kube
    from trainium_devcluster.cluster import Cluster

Json = dict[str, Any]
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
LABEL = "jobset.sigs.k8s.io/jobset-name"
_POD_LABEL = {"objectSelector": {"matchExpressions": [{"key": LABEL, "operator": "Exists"}]}}
"""Its webhooks of pods see the pods of JobSets only, as its kustomization patches them."""
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_READY_SECONDS = 90.0


class JobSetController:
    """One process; ends with its `async with` block."""

    def __init__(self, cluster: Cluster, folder: Path, write: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._folder = folder / "jobset"
        self._write = write
        self._port, self._health = reserved_port(), reserved_port()
        self._process: asyncio.subprocess.Process | None = None
        self.log = self._folder / "jobset.log"

    async def install(self, kube: Kube) -> None:
        """Definition and webhooks, with our certificate; the program is built where it is not cached."""
        binaries = await asyncio.to_thread(ensure_binaries, programs=JOBSET_PROGRAMS, write=self._write)
        self._program = binaries.path(Program.JOBSET)
        manifests = binaries.folder / "components"
        self._folder.mkdir()
        authority = trustme.CA()
        certificate = authority.issue_cert(HOST)
        (self._folder / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
        (self._folder / "tls.key").write_bytes(certificate.private_key_pem.bytes())
        definition = yaml.safe_load((manifests / "crd/bases/jobset.x-k8s.io_jobsets.yaml").read_text())
        await kube.request("POST", _DEFINITIONS, definition)
        bundle = base64.b64encode(authority.cert_pem.bytes()).decode()
        for webhooks in self._webhooks(manifests, bundle):
            await kube.request("POST", f"{_ADMISSION}/{webhooks['kind'].lower()}s", webhooks)

    def _webhooks(self, manifests: Path, bundle: str) -> Iterator[Json]:
        for document in yaml.safe_load_all((manifests / "webhook/manifests.yaml").read_text()):
            document["metadata"]["name"] = f"jobset-{document['metadata']['name']}"
            for each in document["webhooks"]:
                path = each["clientConfig"]["service"]["path"]
                each["clientConfig"] = {"url": f"https://{HOST}:{self._port}{path}", "caBundle": bundle}
                if each["name"].endswith("pod.kb.io"):
                    each.update(_POD_LABEL)
            yield document

    async def __aenter__(self) -> Self:
        configuration = self._folder / "configuration.yaml"
        configuration.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
                    "kind": "Configuration",
                    "leaderElection": {"leaderElect": False},
                    "internalCertManagement": {"enable": False},
                    "webhook": {"host": HOST, "port": self._port, "certDir": str(self._folder)},
                    "health": {"healthProbeBindAddress": f"{HOST}:{self._health}"},
                    "metrics": {"bindAddress": "0"},
                }
            )
        )
        command = [str(self._program), f"--kubeconfig={self._cluster.paths.kubeconfig}", f"--config={configuration}"]
        # What it would write to the temporary folder of all.
        environment = {**os.environ, "TMPDIR": str(self._folder)}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdout=log, stderr=log, cwd=self._folder
            )
        await self._ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        await self._process.wait()

    async def _ready(self) -> None:
        assert self._process is not None
        try:
            async with asyncio.timeout(_READY_SECONDS), aiohttp.ClientSession() as session:
                while True:
                    with contextlib.suppress(aiohttp.ClientError, OSError):
                        async with session.get(f"http://{HOST}:{self._health}/readyz") as answer:
                            if answer.status == 200:
                                return
                    if self._process.returncode is not None:
                        raise RuntimeError(f"JobSet ended with {self._process.returncode}; its log: {self.log}")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise TimeoutError(f"JobSet was not ready within {_READY_SECONDS:.0f} s; its log: {self.log}") from None

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        assert self._process is not None
        return cpu_seconds(self._process.pid)

    def peak_mib(self) -> float:
        """Largest resident memory so far."""
        assert self._process is not None
        return memory_mib(self._process.pid, "VmHWM")


def jobset_of(name: str, pod: Json, count: int) -> Json:
    """A JobSet of one Job with `count` pods like `pod` (see `floor.of_wave`), all restarted when one fails."""
    spec = {key: value for key, value in pod["spec"].items() if key not in ("hostname", "subdomain")}
    # The Job controller allows no pod that a kubelet restarts by itself.
    spec["restartPolicy"] = "Never"
    template = {"metadata": {key: pod["metadata"].get(key, {}) for key in ("labels", "annotations")}, "spec": spec}
    job = {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": template,
    }
    replicated = {"name": "w", "replicas": 1, "template": {"spec": job}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"replicatedJobs": [replicated], "failurePolicy": {"maxRestarts": 1000}},
    }
