"""Which release of the operator serves a namespace, and how hostile registrations are read."""

import json

import pytest

from trainium_operator.cluster.releases import (
    MAX_RELEASES,
    Registration,
    RegistrationTimes,
    decode_registrations,
    encode_registrations,
    find_server,
)


def register(release: str, *namespaces: str) -> Registration:
    return Registration(release, namespaces, "2026-01-01T00:00:00.000000Z", 60, taints_nodes=release == "b/red")


ALL, RED, BLUE = register("a/all"), register("b/red", "red"), register("c/blue", "blue", "red")


@pytest.mark.parametrize(
    ("entries", "served"),
    [
        ((ALL, RED, BLUE), {"red": "a/all", "blue": "a/all", "green": "a/all"}),
        ((RED, ALL, BLUE), {"red": "b/red", "blue": "a/all", "green": "a/all"}),
        ((RED, BLUE), {"red": "b/red", "blue": "c/blue"}),
        ((BLUE, RED), {"red": "c/blue", "blue": "c/blue"}),
    ],
)
def test_exactly_the_first_registered_release_serves_a_namespace(
    entries: tuple[Registration, ...], served: dict[str, str]
) -> None:
    for namespace, server in served.items():
        for entry in entries:
            if entry.serves(namespace):
                assert find_server(entries, entry.release, namespace) == ("" if entry.release == server else server)


def test_registrations_survive_a_round_trip() -> None:
    assert decode_registrations(encode_registrations((ALL, RED, BLUE))) == (ALL, RED, BLUE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[1, null, []]",
        '[{"release": "x/y"}]',
        '[{"release": "", "namespaces": []}]',
        '[{"release": "x/y", "namespaces": [1]}]',
        '[{"release": "x/y", "namespaces": "red"}]',
        "[" * 5_000,
    ],
)
def test_malformed_registrations_keep_nobody_from_serving(text: str) -> None:
    assert decode_registrations(text) == ()


def test_registrations_are_bounded() -> None:
    entry = {"release": "x/y", "namespaces": [], "renewed": "9" * 10_000, "seconds": 10**9}
    entries = decode_registrations(json.dumps([{**entry, "release": f"x/{at}"} for at in range(2 * MAX_RELEASES)]))
    assert len(entries) == MAX_RELEASES
    assert (entries[0].seconds, len(entries[0].renewed)) == (3600, 64)
    twice = decode_registrations(json.dumps([entry, {**entry, "namespaces": ["red"]}]))
    assert [each.namespaces for each in twice] == [()], "a release has one entry, the first"


@pytest.mark.parametrize("lease_seconds", [3, 15, 600])
def test_a_release_stops_writing_before_others_remove_its_entry(lease_seconds: int) -> None:
    times = RegistrationTimes.of(lease_seconds)
    assert times.renew + times.renew_timeout + times.retry < times.renew_deadline < 0.8 * times.duration
