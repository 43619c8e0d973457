"""A mounted certificate that another controller renews."""

import asyncio
import ssl
import time
from pathlib import Path

import pytest

from trainium_operator.coordinator.certificates import renew_material
from trainium_operator.http.tls import CertificateFolder


def write_pair(folder: Path, certificate: bytes, key: bytes) -> None:
    (folder / "tls.crt").write_bytes(certificate)
    (folder / "tls.key").write_bytes(key)


async def read_served_certificate(port: int) -> str:
    """Return the certificate that a new connection gets, PEM."""
    return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))


async def test_only_a_complete_new_certificate_serves_new_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (renew_material(None, ("localhost",), time.time()) for _ in range(2))
    mounted = CertificateFolder(str(tmp_path))
    await mounted.refresh()
    assert not mounted.tls.loaded.is_set()
    assert "tls.crt" in caplog.text

    write_pair(tmp_path, first.server_cert, first.server_key)
    await mounted.refresh()
    assert mounted.tls.loaded.is_set()
    server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0, ssl=mounted.tls.context)
    port = server.sockets[0].getsockname()[1]
    assert (await read_served_certificate(port)).strip() == first.server_cert.decode().strip()

    write_pair(tmp_path, second.server_cert, first.server_key)
    for _ in range(3):
        await mounted.refresh()
    assert (await read_served_certificate(port)).strip() == first.server_cert.decode().strip(), (
        "the last good pair serves"
    )
    assert caplog.text.count("certificate and key cannot be used") == 1

    write_pair(tmp_path, second.server_cert, second.server_key)
    await mounted.refresh()
    assert (await read_served_certificate(port)).strip() == second.server_cert.decode().strip()
    (tmp_path / "tls.key").unlink()
    await mounted.refresh()
    assert (await read_served_certificate(port)).strip() == second.server_cert.decode().strip()
    server.close()


async def test_changed_files_are_loaded_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainium_operator.http.tls.CHECK_SECONDS", 0.01)
    material = renew_material(None, ("localhost",), time.time())
    mounted = CertificateFolder(str(tmp_path))
    task = asyncio.create_task(mounted.run())
    write_pair(tmp_path, b"", b"")
    await asyncio.sleep(0.05)
    write_pair(tmp_path, material.server_cert, material.server_key)
    await asyncio.wait_for(mounted.tls.loaded.wait(), 30)
    task.cancel()
