"""Builders for tests of the agent: the environment of a worker's pod, and a rank that has ended."""

from pathlib import Path

from trainium_agent.ranks.output import LineFormatter, OutputTail
from trainium_agent.ranks.processes import RankProcess


def environment(tmp_path: Path, **changes: str) -> dict[str, str]:
    """Return a valid environment with these changes; write its configuration into the folder."""
    (tmp_path / "trainer.yaml").write_text("model: {}\n")
    return {
        "TRAINIUM_COORDINATOR": "127.0.0.1:8443",
        "TRAINIUM_NAMESPACE": "team",
        "TRAINIUM_JOB": "job",
        "TRAINIUM_POD_NAME": "job-w-0",
        "TRAINIUM_POD_UID": "uid",
        "POD_IP": "127.0.0.1",
        "TRAINIUM_NODE_NAME": "node",
        "TRAINIUM_PROCESSES_PER_NODE": "2",
        "TRAINIUM_MAX_IN_PLACE_RESTARTS": "3",
        "TRAINIUM_GRACE_SECONDS": "30",
        "TRAINIUM_CONFIG": str(tmp_path / "trainer.yaml"),
        "TRAINIUM_MEMORY_DIR": str(tmp_path / "memory"),
        **changes,
    }


def ended_rank(code: int, output: str = "", formatter: LineFormatter | None = None) -> RankProcess:
    """Return rank 3 after it wrote this output and ended with this code."""
    process = RankProcess(0, 3, 0, 12345, OutputTail("[rank 3] ", formatter))
    process.output.feed(output.encode())
    process.output.close()
    process.record_exit(code)
    return process
