"""Certificates of the coordinator: names, renewal before expiry, and a bundle that verifies old and new ones."""

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Any

import pytest
from cryptography import x509

from trainium_operator.coordinator import certificate_keeper
from trainium_operator.coordinator.certificates import (
    Material,
    UnusableMaterialError,
    list_server_names,
    renew_material,
)

NAMES = list_server_names("coordinator", "system")
NOW = 1.8e9
DAY = 86_400.0


def read_authorities(material: Material) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(material.ca_bundle)


def server(material: Material) -> x509.Certificate:
    return x509.load_pem_x509_certificate(material.server_cert)


@pytest.fixture
def material() -> Material:
    return renew_material(None, NAMES, NOW)


def test_a_fresh_server_certificate_bears_every_name_and_is_signed_by_the_authority(material: Material) -> None:
    names = server(material).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {
        "coordinator",
        "coordinator.system",
        "coordinator.system.svc",
        "coordinator.system.svc.cluster.local",
        "localhost",
    }
    server(material).verify_directly_issued_by(read_authorities(material)[0])


def test_material_is_unchanged_before_its_renewal(material: Material) -> None:
    assert renew_material(material, NAMES, NOW + 19 * DAY) is material


def test_a_server_certificate_is_renewed_at_two_thirds_of_its_life_by_the_same_authority(material: Material) -> None:
    later = renew_material(material, NAMES, NOW + 20.1 * DAY)
    assert later.ca_bundle == material.ca_bundle
    assert later.ca_key == material.ca_key
    assert later.server_cert != material.server_cert
    server(later).verify_directly_issued_by(read_authorities(material)[0])


def test_a_new_authority_is_published_before_it_signs(material: Material) -> None:
    rotated = renew_material(material, NAMES, NOW + 245 * DAY)
    old, new = read_authorities(material)[0], read_authorities(rotated)
    assert len(new) == 2
    assert new[1] == old
    assert rotated.ca_key != material.ca_key
    server(rotated).verify_directly_issued_by(old)  # agents with the old bundle still trust the server
    afterwards = renew_material(rotated, NAMES, NOW + 266 * DAY)
    server(afterwards).verify_directly_issued_by(new[0])


def test_for_five_years_the_bundle_of_yesterday_verifies_the_server(material: Material) -> None:
    for day in range(0, 5 * 365, 1):
        before, material = material, renew_material(material, NAMES, NOW + day * DAY)
        signers = [authority for authority in read_authorities(before) if authority.subject == server(material).issuer]
        assert signers, f"day {day}"
        server(material).verify_directly_issued_by(signers[0])
        assert server(material).not_valid_after_utc.timestamp() > NOW + (day + 1) * DAY
        assert len(read_authorities(material)) <= 2


def test_expired_material_is_recreated(material: Material) -> None:
    later = renew_material(material, NAMES, NOW + 1000 * DAY)
    assert read_authorities(later)[0] not in read_authorities(material)


def test_another_service_name_gets_a_new_certificate(material: Material) -> None:
    other = renew_material(material, list_server_names("renamed", "system"), NOW + DAY)
    assert other.server_cert != material.server_cert
    assert other.ca_bundle == material.ca_bundle


def test_material_round_trips_through_a_secret_and_damage_raises(material: Material) -> None:
    assert Material.from_data(material.encode()) == material
    assert Material.from_data({}) is None
    with pytest.raises(UnusableMaterialError):
        Material.from_data({**material.encode(), "ca.key": b"garbage"})
    with pytest.raises(UnusableMaterialError):
        Material.from_data({"ca.crt": material.ca_bundle})


def test_repr_hides_keys(material: Material) -> None:
    assert "PRIVATE" not in repr(material)
    assert "ca_key" not in repr(material)


class FakeSecret:
    """A Secret with versions, into which another writer may write first."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.version = 1
        self.writes = 0
        self.missing = False
        self.concurrent_write: dict[str, bytes] | None = None

    async def read(self) -> tuple[Mapping[str, bytes], str]:
        if self.missing:
            raise certificate_keeper.SecretUnavailableError("missing")
        return dict(self.data), str(self.version)

    async def write(self, data: Mapping[str, bytes], version: str) -> str:
        if self.concurrent_write is not None:
            self.data, self.concurrent_write = self.concurrent_write, None
            self.version += 1
        if version != str(self.version):
            raise certificate_keeper.SecretConflictError
        self.data, self.version, self.writes = dict(data), self.version + 1, self.writes + 1
        return str(self.version)


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def build_keeper(secret: FakeSecret, clock: Clock, **options: Any) -> certificate_keeper.CertificateKeeper:
    return certificate_keeper.CertificateKeeper(secret, NAMES, wall_clock=clock, **options)


async def test_the_leader_fills_the_empty_secret_and_followers_load_it() -> None:
    secret, clock = FakeSecret(), Clock()
    leader, follower = build_keeper(secret, clock), build_keeper(secret, clock)
    await follower.refresh(write=False)
    assert not follower.tls.loaded.is_set()
    assert follower.ca_bundle == ""
    await leader.refresh(write=True)
    await follower.refresh(write=False)
    assert leader.ca_bundle == follower.ca_bundle != ""
    assert secret.writes == 1


async def test_a_renewed_certificate_is_loaded_into_the_same_context_and_a_new_bundle_notifies() -> None:
    secret, clock = FakeSecret(), Clock()
    notified: list[float] = []
    keeper = build_keeper(secret, clock, on_new_bundle=lambda: notified.append(clock.now))
    context = keeper.tls.context
    await keeper.refresh(write=True)
    clock.now += 21 * DAY
    await keeper.refresh(write=True)
    assert notified == [NOW]
    clock.now += 224 * DAY
    await keeper.refresh(write=True)
    assert len(notified) == 2
    assert keeper.tls.context is context
    assert secret.writes == 3


async def test_a_leader_loads_the_certificate_of_a_concurrent_writer() -> None:
    secret, clock = FakeSecret(), Clock()
    secret.concurrent_write = renew_material(None, NAMES, NOW).encode()
    theirs = secret.concurrent_write["ca.crt"].decode()
    keeper = build_keeper(secret, clock)
    task = asyncio.create_task(keeper.run(lambda: True))
    await asyncio.wait_for(keeper.tls.loaded.wait(), 5)
    task.cancel()
    assert keeper.ca_bundle == theirs


async def test_only_the_leader_recreates_a_damaged_secret() -> None:
    secret, clock = FakeSecret(), Clock()
    secret.data = {"ca.crt": b"garbage"}
    keeper = build_keeper(secret, clock)
    await keeper.refresh(write=False)
    assert not keeper.tls.loaded.is_set()
    await keeper.refresh(write=True)
    assert keeper.tls.loaded.is_set()


async def test_a_key_that_does_not_match_is_damage() -> None:
    secret, clock = FakeSecret(), Clock()
    other = renew_material(None, ("localhost",), clock.now)
    keeper = build_keeper(secret, clock)
    await keeper.refresh(write=True)
    secret.data = {**secret.data, "tls.key": other.server_key}
    follower = build_keeper(secret, clock)
    await follower.refresh(write=False)
    assert not follower.tls.loaded.is_set()
    await keeper.refresh(write=True)
    await follower.refresh(write=False)
    assert follower.tls.loaded.is_set()


async def test_a_running_server_shows_the_renewed_certificate_to_new_connections() -> None:
    secret, clock = FakeSecret(), Clock()
    clock.now = time.time()
    keeper = build_keeper(secret, clock)
    await keeper.refresh(write=True)
    served = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0, ssl=keeper.tls.context)
    port = served.sockets[0].getsockname()[1]

    async def read_served_certificate() -> bytes:
        trust = ssl.create_default_context(cadata=keeper.ca_bundle)
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname="coordinator.system")
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return certificate

    first = await read_served_certificate()
    other = renew_material(None, NAMES, clock.now)
    secret.data, secret.version = other.encode(), secret.version + 1
    await keeper.refresh(write=False)
    assert await read_served_certificate() != first
    served.close()
    await served.wait_closed()
