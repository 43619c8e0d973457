"""A job trains through an upgrade of the operator, with a fault in the middle of each of its stages, and back."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.cluster.jobs import Job
from tests.testing.cluster.sites import Site
from tests.testing.versions.previous import previous_version
from tests.testing.versions.releases import BROKEN, NEW, OLD, Releases
from trainium_devcluster.cluster import Cluster, node_specs, system_node
from trainium_devcluster.story.metrics import every_sample_once

if TYPE_CHECKING:
    from collections.abc import Iterator

# In the lane of the tests that share a cluster: it has one of its own, and would be in their way beside them.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

TRAINING = (
    "trainer: {steps: 100000, data: {sequenceLength: 32}}\nrecovery: {budgets: {infrastructure: {maxFailures: 50}}}"
)
PACED = {"TRAINIUM_RANK_ENTRY": "trainium_paced:main", "TRAINIUM_TEST_PACE": "0.5"}
SPACE = "upgrade"


@pytest.fixture
def releases(request: pytest.FixtureRequest) -> Iterator[Releases]:
    if request.config.getoption("--cluster") != "local":
        pytest.skip("needs a node that runs two versions from one machine, which the development cluster has")
    with tempfile.TemporaryDirectory(prefix="trainium-upgrade-") as folder:
        root = Path(folder)
        (root / "previous").mkdir()
        previous = previous_version(root / "previous")
        with Cluster.start(nodes=[*node_specs(3, cpu="4", memory="8Gi"), system_node()]) as cluster:
            yield Releases(Site("local", cluster.variables(), root, {}, cluster), previous)


class Story:
    """The job, and what has been done to it."""

    def __init__(self, releases: Releases) -> None:
        self.releases = releases
        self.job = Job(releases.site, SPACE, "llama", TRAINING, environment=PACED).apply()
        self.replaced: set[str] = set()
        """Pods that a fault took: no other may ever be replaced."""
        self.before: dict[str, str] = {}
        self.faults = 0

    def begin(self) -> None:
        self.job.until_step(5)
        self.before = self.members()

    def members(self) -> dict[str, str]:
        """uid -> name."""
        return {member["podUid"]: member["podName"] for member in self.job.members()}

    def goes_on(self, steps: int = 2) -> None:
        """Steps are made now."""
        self.job.log.refresh()
        self.job.until_step(self.job.log.newest + steps)

    def lose_pod(self, where: str) -> dict[str, Any]:
        """The pod of node rank 1 is gone at once; the entry of its recovery."""
        before = self.job.history()[-1:]
        victim = self.job.members()[1]
        self.replaced.add(victim["podUid"])
        self.job.site.kubectl("delete", "pod", victim["podName"], "-n", SPACE, "--grace-period=0", "--force")
        return self._recovered(before, f"a worker lost, {where}")

    def lose_process(self, where: str) -> dict[str, Any]:
        """The rank of node rank 0 is killed; the entry of its recovery."""
        before = self.job.history()[-1:]
        self.job.kill_rank(0)
        return self._recovered(before, f"a rank killed, {where}")

    def _recovered(self, before: list[dict[str, Any]], what: str) -> dict[str, Any]:
        """The newest entry once it is another one, and over; the status keeps the last ten."""

        def over(status: dict[str, Any]) -> bool:
            newest = status.get("history", [])[-1:]
            return newest[0]["time"] != before[0]["time"] if newest and before else bool(newest)

        self.faults += 1
        self.job.until(f"word of {what}", over)
        entry = self.job.until_recovered()
        self.goes_on()
        self.releases.say(
            f"{what}: {entry['rung']} in {entry['recoveredSeconds']:.1f} s, {entry['stepsLost']} steps lost"
        )
        assert entry["stepsLost"] <= 1
        assert self.untouched() == [], "pods that no fault took are those from the beginning"
        return entry

    def images(self) -> set[str]:
        """What the workers run."""
        return {pod["spec"]["containers"][0]["image"] for pod in self.job.pods()}

    def untouched(self) -> list[str]:
        """Names of pods that are gone though nothing was done to them."""
        return [name for uid, name in self.before.items() if uid not in self.members() and uid not in self.replaced]

    def say_of_the_spec(self, fields: dict[str, Any]) -> None:
        """Use what came with this version."""
        patch = json.dumps({"spec": fields})
        self.job.site.kubectl("patch", "trainingjob", self.job.name, "-n", SPACE, "--type=merge", f"-p={patch}")
        self.releases.say(f"the job says {', '.join(fields)}")

    def another_begins(self, name: str) -> None:
        """A job that is made now is trained, and ended again."""
        other = Job(self.job.site, SPACE, name, "workers: {replicas: 1}\n" + TRAINING).apply()
        other.until_step(2)
        other.delete("--wait=false")
        self.releases.say(f"job {name} began")


@pytest.mark.long
def test_a_job_trains_through_an_upgrade_and_back_with_a_fault_in_each_stage(releases: Releases) -> None:
    releases.site.kubectl("create", "namespace", SPACE)
    releases.install_previous()
    assert releases.tags() == [OLD, OLD]
    story = Story(releases)
    job = story.job
    story.begin()
    story.lose_pod("old operator, old definition")

    releases.apply_definition()
    story.goes_on()
    story.lose_pod("old operator, new definition")
    story.another_begins("under-the-new-definition")

    releases.upgrade(BROKEN)
    releases.until("a replica that cannot start", lambda: BROKEN in releases.tags(ready=False))
    story.lose_process("a roll-out whose image nobody can pull")
    story.lose_pod("a roll-out whose image nobody can pull")
    assert releases.tags() == [OLD, OLD], "the old replicas stay until a new one is ready"

    releases.hold_roll_out(590)
    releases.upgrade()
    releases.until("a new replica stands by", lambda: NEW in releases.tags())
    assert releases.leading_tag() == OLD
    story.lose_pod("old leader, new standby")
    story.lose_process("old leader, new standby")

    releases.hold_roll_out(0)
    releases.until_rolled_out(NEW)
    story.goes_on()
    story.lose_process("new leader, old agents")
    story.lose_pod("new leader, old agents")
    releases.kill_leader()
    story.lose_pod("the new leader lost with it")
    story.another_begins("under-the-new-operator")
    assert job.status().get("outdatedPods", 0) == 0
    assert not [note for note in job.events() if note.startswith(("Unreadable", "TemplateChanged"))]
    assert story.images() == {f"trainium-trainer:{OLD}"}, "who is replaced gets the version that the others run"
    story.say_of_the_spec({"activeDeadlineSeconds": 86400})

    releases.go_back()
    releases.until_rolled_out(OLD)
    assert releases.knows("activeDeadlineSeconds")
    story.goes_on()
    story.lose_process("old operator again, new definition, a job with a new field")
    story.lose_pod("old operator again, new definition, a job with a new field")
    story.another_begins("after-the-way-back")

    releases.rollback(1)
    assert not releases.knows("activeDeadlineSeconds"), "helm's own rollback takes the definition back too"
    story.goes_on()
    story.lose_pod("old operator and definition again")
    assert not [note for note in job.events() if note.startswith("TemplateChanged")]
    assert story.untouched() == []
    assert job.status()["restarts"]["total"] == story.faults, "nothing was interrupted by the roll-outs themselves"
    job.suspend()
    job.until_phase("Suspended")

    releases.upgrade()
    releases.until_rolled_out(NEW)
    job.suspend(yes=False)
    story.goes_on(5)
    assert story.images() == {f"trainium-trainer:{NEW}"}, "a job takes the new trainer when it is resumed"
    releases.say("suspended, upgraded, resumed: this version's trainer goes on from the other's checkpoint")
    job.suspend()
    job.until_phase("Suspended")

    losses = job.losses()
    assert every_sample_once(job.folder, max(losses), 12)
    undisturbed = Job(releases.site, SPACE, "undisturbed", TRAINING).apply()
    undisturbed.until_step(max(losses), 500)
    reference = undisturbed.losses()
    assert losses == {step: reference[step] for step in losses}
    releases.keep_story()
