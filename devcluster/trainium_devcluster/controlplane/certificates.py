"""Sign the certificates of a cluster with its own authority.

Guarantees:
- Every connection of the cluster uses TLS, verified against this authority.
- Keys are P-256 (generated in a millisecond, so start-up does not wait for them); only their owner can read them.
- Keys never leave the state folder except inside a kubeconfig.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_ORGANIZATION = "trainium-devcluster"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The PEM text of a certificate and of its key."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, stem: str) -> None:
        """Store `<stem>.crt` and `<stem>.key`."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(folder / f"{stem}.crt", self.certificate)
        write_private(folder / f"{stem}.key", self.key)


class Authority:
    """A certificate authority; `issue` signs with it."""

    def __init__(self, authority: trustme.CA) -> None:
        self._authority = authority
        self.pair = KeyPair(authority.cert_pem.bytes(), authority.private_key_pem.bytes())

    @classmethod
    def create(cls, name: str) -> Authority:
        """Create a new authority."""
        return cls(trustme.CA(organization_name=_ORGANIZATION, organization_unit_name=name))

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Read the authority that `KeyPair.write` stored as `ca`."""
        return cls(trustme.CA.from_pem((folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes()))

    def issue(
        self, common_name: str, *, organization: str = _ORGANIZATION, names: Sequence[str] = ("localhost",)
    ) -> KeyPair:
        """Sign a certificate for server and client use, with at least one DNS name or IP address."""
        leaf = self._authority.issue_cert(*names, common_name=common_name, organization_name=organization)
        return KeyPair(leaf.cert_chain_pems[0].bytes(), leaf.private_key_pem.bytes())


def create_signing_pair() -> tuple[bytes, bytes]:
    """Return the private and public PEM of a key that signs ServiceAccount tokens."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return private, public


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, atomically."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    staging.replace(path)
