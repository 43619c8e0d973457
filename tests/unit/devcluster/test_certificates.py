"""Certificates of the cluster: TLS accepts those of its authority and refuses others."""

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from trainium_contract.api_server.kubeconfig import find_access
from trainium_devcluster.controlplane.certificates import Authority, create_signing_pair
from trainium_devcluster.controlplane.components import Ports, prepare
from trainium_devcluster.state import ClusterPaths


def handshake(folder: Path, *, trusted: str, server: str, client: str | None, name: str) -> str:
    """Connect over a socket pair; return the common name that the server reads, or the errors of both."""
    server_end, client_end = socket.socketpair()
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / f"{trusted}.crt"))
    server_context.verify_mode = ssl.CERT_REQUIRED
    server_context.load_cert_chain(folder / f"{server}.crt", folder / f"{server}.key")
    client_context = ssl.create_default_context(cafile=str(folder / f"{trusted}.crt"))
    if client is not None:
        client_context.load_cert_chain(folder / f"{client}.crt", folder / f"{client}.key")
    results: list[str] = []

    def serve() -> None:
        try:
            with server_context.wrap_socket(server_end, server_side=True) as connection:
                connection.recv(1)
                subject = connection.getpeercert()["subject"]  # type: ignore[index]
                results.append(dict(pair[0] for pair in subject)["commonName"])  # type: ignore[index, misc]
        except (ssl.SSLError, OSError) as error:
            results.append(f"server: {error}")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client_context.wrap_socket(client_end, server_hostname=name) as connection:
            connection.sendall(b"x")
    except (ssl.SSLError, OSError) as error:
        results.append(f"client: {error}")
    thread.join()
    client_end.close()
    server_end.close()
    return "; ".join(results)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    authority = Authority.create("cluster")
    authority.pair.write(folder, "ca")
    authority.issue("server", names=("localhost", "127.0.0.1")).write(folder, "server")
    authority.issue("alice", organization="system:masters").write(folder, "alice")
    Authority.create("other").issue("mallory").write(folder, "mallory")
    return folder


def test_both_ends_of_a_connection_are_verified(folder: Path) -> None:
    assert handshake(folder, trusted="ca", server="server", client="alice", name="127.0.0.1") == "alice"


def test_a_certificate_of_another_authority_is_refused(folder: Path) -> None:
    assert "verify failed" in handshake(folder, trusted="ca", server="mallory", client="alice", name="localhost")
    assert "server:" in handshake(folder, trusted="ca", server="server", client="mallory", name="localhost")


def test_a_server_under_another_name_is_refused(folder: Path) -> None:
    assert "mismatch" in handshake(folder, trusted="ca", server="server", client="alice", name="example.org")


def test_an_authority_read_back_signs_for_the_same_trust(folder: Path) -> None:
    Authority.load(folder).issue("bob").write(folder, "bob")
    assert handshake(folder, trusted="ca", server="server", client="bob", name="localhost") == "bob"


def test_keys_are_readable_only_by_their_owner(folder: Path) -> None:
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.glob("*.key")} == {0o600}


def test_the_token_signing_pair_is_private_and_public() -> None:
    private, public = create_signing_pair()
    assert b"PRIVATE KEY" in private
    assert b"PUBLIC KEY" in public


def test_a_kubeconfig_has_server_authority_and_client_certificate(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path)
    prepare(paths, Ports(etcd=1, etcd_peer=2, apiserver=3, controller_manager=4, scheduler=5))
    access = find_access(str(paths.kubeconfig), None, {})
    assert (access.context, access.server) == (tmp_path.name, "https://127.0.0.1:3")
    found = access.configuration
    files = [Path(name).read_bytes() for name in (found.ssl_ca_cert, found.cert_file, found.key_file)]
    assert files == [(paths.pki / name).read_bytes() for name in ("ca.crt", "admin.crt", "admin.key")]
