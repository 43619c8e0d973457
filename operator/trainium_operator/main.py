"""Implement the command `trainium-operator`: start the parts, supervise them, and stop them in order.

Invariants:
- A task that ends with an error ends the process, and so does a lost Lease. The kubelet starts it again, and all state
  is in the cluster.
- SIGTERM and SIGINT stop in order: agents are redirected, the running plan is finished, the Lease is released.
- Every long-lived task is created before kopf's, because kopf cancels tasks that are created later.
- Start-up is short because a restart is a recovery: slow imports happen when they are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from trainium_operator.command_line import fail
from trainium_operator.logs import configure_logs
from trainium_operator.memory import freeze_gc, trim_periodically, use_little_memory_per_connection, use_one_heap
from trainium_operator.settings import Settings, create_process_identity, parse_settings

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from trainium_operator.cluster.api.transport import HttpClient
    from trainium_operator.endpoints.servers import EndpointServer
    from trainium_operator.runtime import Runtime

logger = logging.getLogger("trainium_operator")

DRAIN_SECONDS = 10.0
KOPF_STOP_SECONDS = 8.0
LEAVE_SECONDS = 3.0
FIRST_LIST_RETRY_SECONDS = 2.0
LEASE_CONNECTIONS = 2
"""One for a renewal, one for the next while the first hangs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until a signal; return 0 then, and 1 after a failure. `simulate` and `check` have their own codes."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["simulate"]:
        sys.exit(_simulate(given[1:]))
    if given[:1] == ["check"]:
        from trainium_operator.check import main as check  # noqa: PLC0415 - only this command needs it

        check(given[1:])
    settings = parse_settings(given)
    configure_logs(settings.log_level, settings.log_format)
    use_one_heap()
    use_little_memory_per_connection()
    sys.exit(asyncio.run(operate(settings)))


def _simulate(arguments: Sequence[str]) -> int:
    """Run the simulator, a separate distribution that the operator never needs."""
    try:
        from trainium_simulator.command import main as simulate  # noqa: PLC0415 - the image does not have it
    except ModuleNotFoundError as error:
        if error.name != "trainium_simulator":
            raise
        fail("the simulator is not installed here: pip install trainium_simulator-*.whl")
    return simulate(arguments)


async def operate(settings: Settings) -> int:
    """Connect and run; return the exit code."""
    from trainium_contract.api_server.errors import NoClusterError  # noqa: PLC0415 - after --help
    from trainium_operator.cluster.api.transport import connect  # noqa: PLC0415 - after --help
    from trainium_operator.runtime import Runtime  # noqa: PLC0415 - after --help

    try:
        transport = await connect(settings.kubeconfig or None)
    except NoClusterError as error:
        logger.error("%s", error)  # noqa: TRY400 - the sentence is enough
        return 1
    namespace = settings.namespace or transport.access.namespace
    lease_transport = transport.open_separate_pool(LEASE_CONNECTIONS)
    identity = create_process_identity(os.environ)
    runtime = Runtime(settings, transport, namespace=namespace, identity=identity, lease_transport=lease_transport)
    try:
        return await RuntimeSupervisor(runtime, transport).run()
    finally:
        await lease_transport.close()
        await transport.close()


class RuntimeSupervisor:
    """Starts, supervises and stops the parts of one runtime."""

    def __init__(self, runtime: Runtime, transport: HttpClient) -> None:
        self._runtime = runtime
        self._transport = transport
        self._stop = asyncio.Event()
        self._kopf_stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Run until a signal (return 0) or a failure (return 1)."""
        from trainium_contract.api_server.errors import StateRestoredError  # noqa: PLC0415
        from trainium_operator.cluster.lease import LeaseLostError  # noqa: PLC0415

        self._install_signal_handlers()
        try:
            async with asyncio.TaskGroup() as group:
                await self._start(group)
                await self._stop.wait()
                await self._shut_down()
        except BaseExceptionGroup as failures:
            for failure in _leaves(failures):
                reported = None if isinstance(failure, OSError | LeaseLostError | StateRestoredError) else failure
                logger.error("%s: %s", type(failure).__name__, failure, exc_info=reported)  # noqa: TRY400
            return 1
        else:
            return 0
        finally:
            await self._stop_after_failure()

    async def _start(self, group: asyncio.TaskGroup) -> None:
        runtime, settings = self._runtime, self._runtime.settings
        host = settings.bind_address or "0.0.0.0"  # noqa: S104 - in a pod without POD_IP, all addresses are the pod's
        await runtime.health.start(host, settings.metrics_port)
        for reflector in (*runtime.caches.list_reflectors(), *runtime.caches.list_optional_reflectors()):
            self._spawn(group, reflector.run(), f"watch of {reflector.resource.plural}")
        self._spawn(group, self._wait_for_first_list(), "first list of trainingjobs")
        self._spawn(group, runtime.discovery.run(), "discovery")
        self._spawn(group, runtime.caches.kueue.run(), "kueue")
        self._spawn(group, runtime.caches.dra.run(), "devices")
        self._spawn(group, runtime.recorder.run(), "events")
        self._spawn(group, self._lead(), "lease")
        self._spawn(group, runtime.certificate_keeper.run(lambda: runtime.elector.leading), "certificates")
        self._spawn(group, runtime.token_verifier.run(), "token keys")
        self._spawn(group, self._serve_agents(host), "coordinator")
        if runtime.readers is not None:
            self._spawn(group, self._serve_readers(runtime.readers, host), "readers")
            if runtime.https_certificate is not None:
                self._spawn(group, runtime.https_certificate.run(), "mounted certificate")
        if runtime.job_page_data is not None:
            self._spawn(group, runtime.job_page_data.run(), "curves")
        self._spawn(group, runtime.prober.run(), "probes")
        self._spawn(group, self._resync(), "resync")
        self._spawn(group, trim_periodically(), "memory")
        self._spawn(group, runtime.fleet.run(), "fleet")
        self._spawn(group, runtime.owner_references.run(), "owner references")
        for number in range(settings.workers):
            self._spawn(group, self._work(), f"worker {number}")
        self._spawn(group, self._watch_jobs(), "kopf")

    def _spawn(self, group: asyncio.TaskGroup, work: Coroutine[None, None, None], name: str) -> None:
        self._tasks.append(group.create_task(work, name=name))

    async def _wait_for_first_list(self) -> None:
        """List the jobs; while the CRD is not installed, log that it is missing."""
        from trainium_contract.api_server.errors import ApiError, NotFoundError  # noqa: PLC0415

        while True:
            try:
                await self._runtime.caches.jobs.refresh()
            except NotFoundError:
                logger.warning(
                    "the CustomResourceDefinition trainingjobs.trainium.dev is not installed; waiting for it"
                )
            except ApiError as error:
                logger.warning("listing the jobs: %s", error)
            else:
                return
            await asyncio.sleep(FIRST_LIST_RETRY_SECONDS)

    async def _lead(self) -> None:
        """Acquire the Lease, start to act, hold the Lease. Raises LeaseLostError."""
        runtime = self._runtime
        await runtime.elector.acquire()
        async with asyncio.TaskGroup() as group:
            group.create_task(runtime.hold())
            runtime.certificate_keeper.check_now()
            await runtime.take_over()

    async def _serve_agents(self, host: str) -> None:
        """Listen as soon as there is a certificate. Followers answer 503, so agents try the next replica."""
        runtime = self._runtime
        await runtime.certificate_keeper.tls.loaded.wait()
        port = await runtime.coordinator.start(
            host, runtime.settings.coordinator_port, runtime.certificate_keeper.tls.context
        )
        logger.info("agents are served on port %d", port)

    async def _serve_readers(self, readers: EndpointServer, host: str) -> None:
        """Listen as soon as there is a certificate."""
        runtime = self._runtime
        tls = runtime.certificate_keeper.tls if runtime.https_certificate is None else runtime.https_certificate.tls
        await tls.loaded.wait()
        port = await readers.start(host, runtime.settings.https_port, tls.context)
        logger.info("readers are served on port %d", port)

    async def _work(self) -> None:
        await self._runtime.leading.wait()
        await self._runtime.reconciler.work()

    async def _resync(self) -> None:
        # Followers list too, so that their copy of the jobs stays current.
        await self._runtime.caches.jobs.synced.wait()
        await self._runtime.reconciler.resync(self._runtime.settings.resync)

    async def _watch_jobs(self) -> None:
        """Run kopf; if it ends, the operator ends."""
        runtime = self._runtime
        # The operator's own list is enough to begin with; kopf's import must not delay it.
        await runtime.caches.wait_until_synced()
        if runtime.settings.namespaces:
            # Each namespace has a reflector: kopf would end with the first namespace that it may not read.
            freeze_gc()
            await self._kopf_stop.wait()
            return
        handlers = await asyncio.to_thread(importlib.import_module, "trainium_operator.handlers")
        freeze_gc()
        registry = handlers.make_registry(
            observe=lambda raw, deleted: runtime.caches.jobs.observe(raw, deleted=deleted),
            client=self._transport,
        )
        ready = asyncio.Event()
        reinstallation = asyncio.ensure_future(self._reinstall_signal_handlers(ready))
        try:
            await handlers.run_kopf(registry, stop=self._kopf_stop, ready=ready)
        finally:
            reinstallation.cancel()
        self._stop.set()

    async def _reinstall_signal_handlers(self, ready: asyncio.Event) -> None:
        """Take the signal handlers back from kopf, which would stop before the other parts."""
        await ready.wait()
        self._install_signal_handlers()

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    async def _shut_down(self) -> None:
        """Finish running plans, release the Lease, close streams, write events, stop kopf, then the rest.

        Once no plan runs this process does not need the Lease, and holding it leaves the cluster without an operator.
        """
        runtime = self._runtime
        logger.info("stopping")
        runtime.stop_leading()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await runtime.queue.wait_until_idle()
        await self._end("lease")
        await runtime.elector.release()
        await runtime.coordinator.stop()
        await runtime.recorder.flush(2.0)
        self._kopf_stop.set()
        await self._end("kopf", grace_seconds=KOPF_STOP_SECONDS)
        await self._stop_reading()
        for task in self._tasks:
            task.cancel()

    async def _stop_after_failure(self) -> None:
        """Release the Lease and stop the servers, also after a failure."""
        runtime = self._runtime
        runtime.stop_leading()
        await runtime.elector.release()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await runtime.coordinator.stop()
                await self._stop_reading()

    async def _stop_reading(self) -> None:
        if self._runtime.readers is not None:
            await self._runtime.readers.stop()
        await self._runtime.health.stop()

    async def _end(self, name: str, *, grace_seconds: float = 0.0) -> None:
        task = next(task for task in self._tasks if task.get_name() == name)
        if grace_seconds:
            await asyncio.wait([task], timeout=grace_seconds)
        task.cancel()
        await asyncio.wait([task])


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for exception in group.exceptions:
        found += _leaves(exception) if isinstance(exception, BaseExceptionGroup) else [exception]
    return found


if __name__ == "__main__":
    main()
