"""What metrics of single jobs cost the operator: 100 jobs that train, scraped every 15 seconds, with and without.

One operator after the other leads the same jobs, with `--named-jobs` and without by turns. Its processor time is taken
while it does what it does each minute: heartbeats, statuses, scrapes.

    python -m benchmarks.fleets.named_jobs --json out/bench/named_jobs.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.fleetlab.agents.control import AgentsProcess
from benchmarks.fleetlab.crowd import Crowd
from benchmarks.fleetlab.figures import Report
from benchmarks.fleetlab.kube import Kube
from benchmarks.fleetlab.operator_site import SERVER_NAME, OperatorSite, free_port
from benchmarks.fleetlab.scenario import cluster_of, say

COUNT, LARGEST = 100, 16
HOST = "127.0.0.1"
SCRAPE_SECONDS = 15.0
"""As often as Prometheus does unless told otherwise."""
SCRAPES = 4
"""In one window."""
QUIET_SECONDS = 15.0
"""After the start of an operator, until agents and statuses have come to rest."""
GOAL = 1.10
_SERIES = "trainingjob_operator_job_step{"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=COUNT)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    report = Report("named_jobs", quick=options.jobs != COUNT, of="jobs")
    with tempfile.TemporaryDirectory(prefix="trainium-bench-") as folder:
        asyncio.run(_run(options.jobs, options.rounds, report, Path(folder)))
    report.write(options.json)
    report.print()


async def _run(count: int, rounds: int, report: Report, folder: Path) -> None:
    dice = random.Random(1)
    jobs = {f"job-{number}": round(LARGEST ** dice.random()) for number in range(count)}
    nodes = sum(jobs.values())
    say(f"{count} jobs of {nodes} nodes: starting the control plane")
    with cluster_of(nodes + 8, nodes) as cluster:
        async with AsyncExitStack() as stack:
            kube = await stack.enter_async_context(Kube(cluster))
            site = OperatorSite(cluster, folder)
            await site.install(kube)
            crowd = Crowd(kube)
            await stack.enter_async_context(crowd.watch)
            port = free_port(HOST)
            agents = await stack.enter_async_context(
                AgentsProcess(cluster, *jobs, addresses=[(HOST, port)], name=SERVER_NAME)
            )
            for name, size in jobs.items():
                await crowd.create(name, size)
            operator = await site.start(HOST, port)
            await operator.leads()
            await crowd.train(agents, jobs)
            say(f"{count} jobs train")
            await operator.stop()
            for number in range(rounds):
                # The order turns, so that neither comes always first.
                order = (0, count) if number % 2 == 0 else (count, 0)
                found = {named: await _window(site, port, named, count, report) for named in order}
                report.add("metrics by job over none", count, "x", found[count] / found[0], goal=GOAL)


async def _window(site: OperatorSite, port: int, named: int, count: int, report: Report) -> float:
    """Processor seconds of one operator over some scrapes."""
    operator = await site.start(HOST, port, *((f"--named-jobs={named}",) if named else ()))
    try:
        await operator.leads()
        await asyncio.sleep(QUIET_SECONDS)
        how = "with metrics by job" if named else "without"
        cpu, scraped = operator.cpu_seconds(), ""
        for _ in range(SCRAPES):
            await asyncio.sleep(SCRAPE_SECONDS)
            scraped = await operator.metrics()
        seconds = operator.cpu_seconds() - cpu
        if scraped.count(_SERIES) != named:
            raise RuntimeError(f"{scraped.count(_SERIES)} jobs have metrics, not {named}")
        say(f"{how}: {seconds:.2f} s")
        report.add(f"operator cores, {how}", count, "cores", seconds / (SCRAPES * SCRAPE_SECONDS))
        report.add(f"a scrape, {how}", count, "kB", len(scraped) / 1000)
        report.add(f"operator memory, {how}", count, "MiB", operator.resident_mib())
        return seconds
    finally:
        await operator.stop()


if __name__ == "__main__":
    main()
