from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trainium_operator.cluster.api.resources import PODS
from trainium_operator.cluster.cache.reflector import Lister
from trainium_operator.cluster.cache.store import Entry, IndexedCache
from trainium_operator.plan.model.names import JobId

KEY = ("ns", "pod")
OWNER = JobId("ns", "job", "job-uid")


def entry(version: int, view: str = "v", uid: str = "u") -> Entry[str]:
    return Entry(view, uid, version, OWNER)


def listened(store: IndexedCache[str]) -> list[tuple[str | None, str | None]]:
    told: list[tuple[str | None, str | None]] = []
    store.listen(lambda _key, old, new: told.append((old and old.view, new and new.view)))
    return told


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store: IndexedCache[str] = IndexedCache()
    assert store.put(KEY, entry(5, "new"))
    assert not store.put(KEY, entry(4, "old"))
    assert store.get(KEY) == "new"


def test_a_write_of_our_own_is_seen_at_once_and_not_told() -> None:
    store: IndexedCache[str] = IndexedCache()
    told = listened(store)
    assert store.write_through(KEY, entry(5))
    assert store.get(KEY) == "v"
    assert store.owned_by(OWNER) == {KEY: "v"}
    store.put(KEY, entry(5))  # the watch's echo of it
    assert told == []


def test_a_late_answer_to_our_own_write_does_not_bring_back_what_the_watch_saw_deleted() -> None:
    store: IndexedCache[str] = IndexedCache()
    store.put(KEY, entry(5))
    store.remove(KEY, 7)
    assert not store.write_through(KEY, entry(5))
    assert store.get(KEY) is None


def test_an_answer_that_the_watch_has_passed_is_not_read_anew() -> None:
    read: list[str] = []
    store: IndexedCache[str] = IndexedCache()
    lister: Lister[str] = Lister(
        SimpleNamespace(), PODS, store, lambda raw: read.append(raw["metadata"]["name"]) or "v"
    )
    pod = {"metadata": {"namespace": "ns", "name": "pod", "uid": "u", "resourceVersion": "5"}}
    lister.observe(pod, deleted=False)
    lister.write_through(pod)
    assert read == ["pod"]
    lister.write_through({"metadata": {**pod["metadata"], "resourceVersion": "6"}})
    assert read == ["pod", "pod"]


def test_a_list_keeps_what_was_written_after_it_was_made() -> None:
    store: IndexedCache[str] = IndexedCache()
    store.put(("ns", "old"), entry(3))
    store.write_through(("ns", "new"), entry(9))
    store.replace({}, 8)
    assert list(store.snapshot()) == [("ns", "new")]


def test_a_list_tells_what_vanished_what_came_and_what_changed_once() -> None:
    store: IndexedCache[str] = IndexedCache()
    store.put(("ns", "a"), entry(1, "a"))
    store.put(("ns", "b"), entry(2, "b"))
    told = listened(store)
    store.replace({("ns", "b"): entry(2, "b"), ("ns", "c"): entry(6, "c")}, 6)
    assert told == [("a", None), (None, "c")]


def test_only_the_incarnation_that_is_named_is_forgotten() -> None:
    store: IndexedCache[str] = IndexedCache()
    store.put(KEY, entry(5, uid="second"))
    store.forget(KEY, "first")
    assert store.get(KEY) == "v"
    store.forget(KEY, "second")
    assert store.get(KEY) is None
    assert store.owned_by(OWNER) == {}


def test_a_list_that_was_on_its_way_does_not_bring_back_what_the_watch_saw_deleted() -> None:
    store: IndexedCache[str] = IndexedCache()
    store.put(KEY, entry(5))
    store.remove(KEY, 9)
    store.replace({KEY: entry(5)}, 7)
    assert store.get(KEY) is None
    store.replace({KEY: entry(12, "another", uid="second")}, 13)
    assert store.get(KEY) == "another"


def test_a_list_that_was_on_its_way_does_not_bring_back_what_the_server_says_is_gone() -> None:
    store: IndexedCache[str] = IndexedCache()
    store.put(KEY, entry(5, uid="first"))
    store.forget(KEY, "first")
    store.replace({KEY: entry(5, uid="first")}, 7)
    assert store.get(KEY) is None


def test_of_two_lists_the_older_one_does_not_bring_back_what_the_newer_one_had_no_more() -> None:
    store: IndexedCache[str] = IndexedCache()
    store.put(KEY, entry(5))
    store.replace({}, 9)
    store.replace({KEY: entry(5)}, 7)
    assert store.get(KEY) is None


def test_what_is_gone_is_remembered_until_a_younger_list_has_come() -> None:
    store: IndexedCache[str] = IndexedCache()
    for number in range(100):
        store.put(("ns", f"pod-{number}"), entry(2 * number + 1))
        store.remove(("ns", f"pod-{number}"), 2 * number + 2)
    store.replace({}, 1000)
    assert store._deleted == {}


async def test_a_pod_that_goes_while_the_pods_are_listed_stays_gone() -> None:
    def pod(version: int) -> dict[str, Any]:
        return {"metadata": {"namespace": "ns", "name": "pod", "uid": "u", "resourceVersion": str(version)}}

    async def list_page(*_: object, continue_token: str, **__: object) -> dict[str, Any]:
        if not continue_token:
            return {"items": [pod(5)], "metadata": {"continue": "more", "resourceVersion": "7"}}
        lister.observe(pod(9), deleted=True)  # the watch, which goes on beside a take-over's list
        return {"items": [], "metadata": {"resourceVersion": "7"}}

    lister: Lister[str] = Lister(
        SimpleNamespace(list_page=list_page), PODS, IndexedCache(), lambda raw: raw["metadata"]["uid"]
    )
    lister.observe(pod(5), deleted=False)
    await lister.refresh()
    assert lister.store.get(("ns", "pod")) is None
