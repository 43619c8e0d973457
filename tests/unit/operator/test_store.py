from __future__ import annotations

from trainium_operator.cluster.store import Entry, Store
from trainium_operator.plan.model.job_id import JobId

KEY = ("ns", "pod")
OWNER = JobId("ns", "job", "job-uid")


def entry(version: int, view: str = "v", uid: str = "u") -> Entry[str]:
    return Entry(view, uid, version, OWNER)


def listened(store: Store[str]) -> list[tuple[str | None, str | None]]:
    told: list[tuple[str | None, str | None]] = []
    store.listen(lambda _key, old, new: told.append((old and old.view, new and new.view)))
    return told


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store: Store[str] = Store()
    assert store.put(KEY, entry(5, "new"))
    assert not store.put(KEY, entry(4, "old"))
    assert store.get(KEY) == "new"


def test_a_write_of_our_own_is_seen_at_once_and_not_told() -> None:
    store: Store[str] = Store()
    told = listened(store)
    assert store.write_through(KEY, entry(5))
    assert store.get(KEY) == "v"
    assert store.owned_by(OWNER) == {KEY: "v"}
    store.put(KEY, entry(5))  # the watch's echo of it
    assert told == []


def test_a_late_answer_to_our_own_write_does_not_bring_back_what_the_watch_saw_deleted() -> None:
    store: Store[str] = Store()
    store.put(KEY, entry(5))
    store.remove(KEY, 7)
    assert not store.write_through(KEY, entry(5))
    assert store.get(KEY) is None


def test_a_list_keeps_what_was_written_after_it_was_made() -> None:
    store: Store[str] = Store()
    store.put(("ns", "old"), entry(3))
    store.write_through(("ns", "new"), entry(9))
    store.replace({}, 8)
    assert list(store.snapshot()) == [("ns", "new")]


def test_a_list_tells_what_vanished_what_came_and_what_changed_once() -> None:
    store: Store[str] = Store()
    store.put(("ns", "a"), entry(1, "a"))
    store.put(("ns", "b"), entry(2, "b"))
    told = listened(store)
    store.replace({("ns", "b"): entry(2, "b"), ("ns", "c"): entry(6, "c")}, 6)
    assert told == [("a", None), (None, "c")]


def test_only_the_incarnation_that_is_named_is_forgotten() -> None:
    store: Store[str] = Store()
    store.put(KEY, entry(5, uid="second"))
    store.forget(KEY, "first")
    assert store.get(KEY) == "v"
    store.forget(KEY, "second")
    assert store.get(KEY) is None
    assert store.owned_by(OWNER) == {}
