"""The record of a membership: which write wins, and what it costs to write one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.testing.suite.virtual_time import in_virtual_time
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.errors import ConflictError
from trainium_operator.cluster.api.resources import CONFIG_MAPS
from trainium_operator.cluster.cache.membership_record import membership_of

if TYPE_CHECKING:
    from execution_world import World


@in_virtual_time
async def test_one_generation_never_stands_for_two_memberships(world: World) -> None:
    await world.do(world.publication(1, 0))
    with pytest.raises(ConflictError):
        await world.do(world.publication(1, 0, ip="10.9.9.9"))
    await world.do(world.publication(2, 1))
    with pytest.raises(ConflictError, match="holds generation 2, not 1"):
        await world.do(world.publication(2, 1, ip="10.9.9.9"))
    assert world.published == [1, 2]


@in_virtual_time
async def test_a_generation_replaces_the_record_that_is_known_in_one_request(world: World) -> None:
    await world.do(world.publication(1, 0))
    world.cluster.requests.clear()
    second = world.publication(2, 1, "10.0.0.2")
    await world.do(second)
    path = CONFIG_MAPS.path("default", "j-membership")
    assert world.cluster.requests == [("PATCH", path)]
    record = world.caches.membership_of(world.job)
    assert record is not None
    assert record.membership is second.membership, "it is not read again, and not kept twice"
    assert membership_of(world.cluster.get(CONFIG_MAPS, "default", "j-membership")) == second.membership


@in_virtual_time
async def test_a_record_that_has_changed_is_read_before_it_is_replaced(world: World) -> None:
    await world.do(world.publication(1, 0))
    theirs = {**world.publication(2, 1, "10.9.9.9").manifest, "metadata": {"labels": {"of": "another operator"}}}
    await Api(world.cluster).merge(CONFIG_MAPS, "default", "j-membership", theirs)
    with pytest.raises(ConflictError, match="holds generation 2, not 1"):
        await world.do(world.publication(2, 1))
    assert world.published == [1]
    await Api(world.cluster).delete(CONFIG_MAPS, "default", "j-membership")
    await world.do(world.publication(3, 2))
    assert world.published == [1, 3], "it was deleted by hand"


@in_virtual_time
async def test_what_somebody_has_put_beside_the_record_goes_with_the_next_generation(world: World) -> None:
    await world.do(world.publication(1, 0))
    await Api(world.cluster).merge(CONFIG_MAPS, "default", "j-membership", {"data": {"theirs": "x"}})
    await world.caches.config_maps.refresh()
    await world.do(world.publication(2, 1))
    assert "theirs" not in world.cluster.get(CONFIG_MAPS, "default", "j-membership").get("data", {})
    assert world.published == [1, 2]


@in_virtual_time
async def test_the_record_of_an_earlier_job_of_that_name_is_waited_out(world: World) -> None:
    stale = world.owned("j-membership", data={})
    stale["metadata"]["ownerReferences"][0]["uid"] = "an-earlier-job"
    world.cluster.add(CONFIG_MAPS, stale)
    with pytest.raises(ConflictError, match="belongs to an earlier job"):
        await world.do(world.publication(1, 0))


@in_virtual_time
async def test_a_record_that_was_deleted_by_hand_is_made_again(world: World) -> None:
    await world.do(world.publication(3, 0))
    world.cluster.remove(CONFIG_MAPS, "default", "j-membership")
    await world.do(world.publication(4, 3))
    assert world.published == [3, 4]
