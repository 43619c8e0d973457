"""The store of a cache keeps the newest version of each object, whatever the order of lists, watches and writes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.cluster.api.resources import PODS
from trainium_operator.cluster.cache.reflector import Lister
from trainium_operator.cluster.cache.store import Entry, IndexedCache
from trainium_operator.plan.model.names import JobId

KEY = ("ns", "pod")
OWNER = JobId("ns", "job", "job-uid")


def entry(version: int, view: str = "v", uid: str = "u") -> Entry[str]:
    return Entry(view, uid, version, OWNER)


@pytest.fixture
def store() -> IndexedCache[str]:
    return IndexedCache()


def notifications(store: IndexedCache[str]) -> list[tuple[str | None, str | None]]:
    received: list[tuple[str | None, str | None]] = []
    store.listen(lambda _key, old, new: received.append((old and old.view, new and new.view)))
    return received


def test_an_older_version_never_replaces_a_newer_one(store: IndexedCache[str]) -> None:
    assert store.put(KEY, entry(5, "new"))
    assert not store.put(KEY, entry(4, "old"))
    assert store.get(KEY) == "new"


def test_a_write_through_is_visible_at_once_and_notifies_nobody(store: IndexedCache[str]) -> None:
    received = notifications(store)
    assert store.write_through(KEY, entry(5))
    assert store.get(KEY) == "v"
    assert store.list_owned_by(OWNER) == {KEY: "v"}
    store.put(KEY, entry(5))  # the watch's echo of it
    assert received == []


def test_a_stale_response_is_not_parsed_again() -> None:
    read: list[str] = []
    lister: Lister[str] = Lister(SimpleNamespace(), PODS, lambda raw: read.append(raw["metadata"]["name"]) or "v")
    pod = {"metadata": {"namespace": "ns", "name": "pod", "uid": "u", "resourceVersion": "5"}}
    lister.observe(pod, deleted=False)
    lister.write_through(pod)
    assert read == ["pod"]
    lister.write_through({"metadata": {**pod["metadata"], "resourceVersion": "6"}})
    assert read == ["pod", "pod"]


def test_a_list_keeps_newer_writes(store: IndexedCache[str]) -> None:
    store.put(("ns", "old"), entry(3))
    store.write_through(("ns", "new"), entry(9))
    store.replace({}, 8)
    assert list(store.snapshot()) == [("ns", "new")]


def test_a_list_notifies_once_of_each_difference(store: IndexedCache[str]) -> None:
    store.put(("ns", "a"), entry(1, "a"))
    store.put(("ns", "b"), entry(2, "b"))
    received = notifications(store)
    store.replace({("ns", "b"): entry(2, "b"), ("ns", "c"): entry(6, "c")}, 6)
    assert received == [("a", None), (None, "c")]


def test_forget_removes_only_the_named_uid(store: IndexedCache[str]) -> None:
    store.put(KEY, entry(5, uid="second"))
    store.forget(KEY, "first")
    assert store.get(KEY) == "v"
    store.forget(KEY, "second")
    assert store.get(KEY) is None
    assert store.list_owned_by(OWNER) == {}


@pytest.mark.parametrize(
    ("delete", "restore"),
    [
        pytest.param(
            lambda store: store.remove(KEY, 7),
            lambda store: store.write_through(KEY, entry(5)),
            id="deleted by the watch, restored by a late response to a write",
        ),
        pytest.param(
            lambda store: store.remove(KEY, 9),
            lambda store: store.replace({KEY: entry(5)}, 7),
            id="deleted by the watch, restored by a list from before",
        ),
        pytest.param(
            lambda store: store.forget(KEY, "u"),
            lambda store: store.replace({KEY: entry(5)}, 7),
            id="deleted by the server, restored by a list from before",
        ),
        pytest.param(
            lambda store: store.replace({}, 9),
            lambda store: store.replace({KEY: entry(5)}, 7),
            id="absent from a newer list, restored by an older one",
        ),
    ],
)
def test_an_older_answer_does_not_restore_a_deleted_object(
    store: IndexedCache[str],
    delete: Callable[[IndexedCache[str]], object],
    restore: Callable[[IndexedCache[str]], object],
) -> None:
    store.put(KEY, entry(5))
    delete(store)
    assert not restore(store)
    assert store.get(KEY) is None
    store.replace({KEY: entry(12, "another", uid="second")}, 13)
    assert store.get(KEY) == "another"


def test_deletions_are_remembered_until_a_newer_list_arrives(store: IndexedCache[str]) -> None:
    for number in range(100):
        store.put(("ns", f"pod-{number}"), entry(2 * number + 1))
        store.remove(("ns", f"pod-{number}"), 2 * number + 2)
    store.replace({}, 1000)
    assert store._deleted == {}


async def test_a_pod_deleted_while_the_pods_are_listed_stays_deleted() -> None:
    def pod(version: int) -> dict[str, Any]:
        return {"metadata": {"namespace": "ns", "name": "pod", "uid": "u", "resourceVersion": str(version)}}

    async def list_page(*_: object, continue_token: str, **__: object) -> dict[str, Any]:
        if not continue_token:
            return {"items": [pod(5)], "metadata": {"continue": "more", "resourceVersion": "7"}}
        lister.observe(pod(9), deleted=True)  # the watch, which continues beside the list of a takeover
        return {"items": [], "metadata": {"resourceVersion": "7"}}

    lister: Lister[str] = Lister(SimpleNamespace(list_page=list_page), PODS, lambda raw: raw["metadata"]["uid"])
    lister.observe(pod(5), deleted=False)
    await lister.refresh()
    assert lister.store.get(("ns", "pod")) is None


def test_the_oldest_entry_is_evicted() -> None:
    kept: BoundedDict[str, int] = BoundedDict(2)
    kept["a"], kept["b"], kept["a"], kept["c"] = 1, 2, 3, 4
    assert list(kept.items()) == [("a", 3), ("c", 4)]
    assert kept.setdefault("d", 5) == 5
    assert list(kept) == ["c", "d"]
