"""Run a node: connect its parts and pass pods to their runners.

Guarantees:
- A pod bound to this node has exactly one runner, by uid.
- Leftovers of a previous process of this node (pod directories, statuses of running containers) are handled before any
  new pod starts.
- A graceful stop kills the containers and leaves the API objects unchanged, as a power loss would.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from trainium_contract.api_server.kubeconfig import find_access
from trainium_devcluster import control_socket
from trainium_devcluster.controlplane.certificates import Authority
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.events import EventSink
from trainium_devcluster.node.api.objects import Json, get_name, get_namespace, get_uid
from trainium_devcluster.node.api.reflector import ObjectCache, Reflector
from trainium_devcluster.node.faults import NodeFaults
from trainium_devcluster.node.network import addresses
from trainium_devcluster.node.network.service_directory import ServiceDirectory
from trainium_devcluster.node.options import KUBELET_PORT, NodeOptions
from trainium_devcluster.node.pods.node_services import NodeServices
from trainium_devcluster.node.pods.pod import PodRunner
from trainium_devcluster.node.processes.launcher_client import Launcher
from trainium_devcluster.node.processes.programs import create_agent_image, find_program_folders
from trainium_devcluster.node.registration import Registration
from trainium_devcluster.node.server.server import NodeServer
from trainium_devcluster.node.volumes import persistent_volume_claims
from trainium_devcluster.processes.cleanup import remove_tree

_log = logging.getLogger(__name__)


async def run(options: NodeOptions, launcher_socket: socket.socket) -> None:
    """Run the node until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    launcher = Launcher(launcher_socket)
    access = find_access(str(options.state_dir / "kubeconfig"), None, {})
    async with (
        Api(access, f"process-node/{options.name}") as api,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as http,
    ):
        node = _create_node(options, launcher, api, http)
        tasks = [asyncio.create_task(node.run()), asyncio.create_task(stop.wait())]
        tasks.append(asyncio.ensure_future(launcher.ended))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        launcher.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks[0] in done:
            tasks[0].result()


def _create_node(options: NodeOptions, launcher: Launcher, api: Api, http: aiohttp.ClientSession) -> "NodeRuntime":
    network, listener = addresses.reserve_network(
        addresses.iterate_candidate_networks(f"{options.api_server}/{options.name}"), KUBELET_PORT
    )
    events = EventSink(api, options.name)
    registration = Registration(api, options, str(network[1]), str(network))
    runners: dict[str, PodRunner] = {}
    pod_addresses = addresses.PodAddresses(network)
    services = NodeServices(
        options=options,
        api=api,
        cache=ObjectCache(api),
        events=events,
        directory=ServiceDirectory(api, options.api_server),
        launcher=launcher,
        http=http,
        address=str(network[1]),
        node=lambda: registration.node,
        active_pods=lambda: [runner.pod for runner in runners.values() if runner.active],
        release_address=pod_addresses.release,
        programs=find_program_folders(Path(options.venv_bin)),
    )
    create_agent_image(services.agent_folder, Path(options.venv_bin))
    return NodeRuntime(services, registration, listener, pod_addresses, runners)


@dataclass(slots=True, eq=False)
class NodeRuntime:
    """The parts of a running node."""

    services: NodeServices
    registration: Registration
    listener: socket.socket
    addresses: addresses.PodAddresses
    runners: dict[str, PodRunner]
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        """Register and run pods until cancelled."""
        options = self.services.options
        faults = NodeFaults(self.services.api, self.registration, self.runners.values)
        control_server = await control_socket.serve(options.paths.find_node_socket(options.name), faults.handle)
        web_runner = await self._serve_api()
        pods = Reflector(
            self.services.api, "/api/v1/pods", {"fieldSelector": f"spec.nodeName={options.name}"}, self._handle_pod
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.services.events.run())
                group.create_task(self.services.directory.run())
                await self.registration.register()
                _log.info("node %s is up at %s", options.name, self.services.address)
                group.create_task(self.registration.run())
                group.create_task(
                    persistent_volume_claims.Provisioner(self.services.api, options.name, options.claims_dir).run()
                )
                group.create_task(pods.run())
                await pods.synced.wait()
                self._remove_orphaned_folders()
        finally:
            control_server.close()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(faults.stop(), *self._tasks.values(), return_exceptions=True)
            await web_runner.cleanup()

    async def _serve_api(self) -> web.AppRunner:
        """Serve the node's API over HTTPS, with a certificate of the cluster's authority."""
        options = self.services.options
        pki, folder = options.paths.pki, options.state_dir
        names = (self.services.address,)
        pair = Authority.load(pki).issue(f"system:node:{options.name}", organization="system:nodes", names=names)
        pair.write(folder, "serving")
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(pki / "ca.crt"))
        tls.verify_mode = ssl.CERT_REQUIRED
        tls.load_cert_chain(folder / "serving.crt", folder / "serving.key")
        # A stop must not wait for clients that follow logs.
        runner = web.AppRunner(NodeServer(self._find).app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, self.listener, ssl_context=tls).start()
        return runner

    def _remove_orphaned_folders(self) -> None:
        """Remove the directories of pods that were deleted while this node was down."""
        folder = self.services.options.state_dir / "pods"
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.name not in self.runners:
                remove_tree(entry)

    def _find(self, pod_namespace: str, pod_name: str) -> PodRunner | None:
        runners = [
            r for r in self.runners.values() if get_namespace(r.pod) == pod_namespace and get_name(r.pod) == pod_name
        ]
        return runners[-1] if runners else None

    def _handle_pod(self, pod: Json, deleted: bool) -> None:
        runner = self.runners.get(get_uid(pod))
        if runner is not None:
            runner.handle_deletion(pod) if deleted else runner.update(pod)
        elif not deleted:
            self._start_runner(pod)

    def _start_runner(self, pod: Json) -> None:
        key = get_uid(pod)
        if pod["spec"].get("hostNetwork"):
            address = self.services.address
        else:
            address = self.addresses.allocate(key, pod.get("status", {}).get("podIP", ""))
        runner = self.runners[key] = PodRunner(self.services, pod, address)
        task = self._tasks[key] = asyncio.create_task(runner.run(), name=f"pod {get_namespace(pod)}/{get_name(pod)}")
        task.add_done_callback(lambda done: self._handle_finished_runner(key, done))

    def _handle_finished_runner(self, key: str, task: asyncio.Task[None]) -> None:
        self.runners.pop(key, None)
        self._tasks.pop(key, None)
        self.addresses.release(key)
        with contextlib.suppress(asyncio.CancelledError):
            if (error := task.exception()) is not None:
                _log.error("%s failed", task.get_name(), exc_info=error)
