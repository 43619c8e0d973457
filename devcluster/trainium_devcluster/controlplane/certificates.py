"""The cluster's own certificate authority and what it signs.

Invariants: every connection of the cluster is TLS and verified against this authority; keys are P-256 (made in a
millisecond, so start-up does not wait for them), readable by their owner only, and never leave the state folder except
inside a kubeconfig.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LIFETIME = timedelta(days=365)
_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Pair:
    """The PEM text of a certificate and of its key."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, stem: str) -> None:
        """Store `<stem>.crt` and `<stem>.key`."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(folder / f"{stem}.crt", self.certificate)
        write_private(folder / f"{stem}.key", self.key)


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority; `issue` signs with it."""

    pair: Pair

    @classmethod
    def create(cls, name: str) -> Authority:
        """Make a new authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            _builder(subject, subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(_pair(certificate, key))

    @classmethod
    def load(cls, folder: Path, stem: str = "ca") -> Authority:
        """Read an authority that `Pair.write` stored."""
        return cls(Pair((folder / f"{stem}.crt").read_bytes(), (folder / f"{stem}.key").read_bytes()))

    def issue(
        self,
        common_name: str,
        *,
        organizations: Sequence[str] = (),
        names: Sequence[str] = (),
        addresses: Sequence[str] = (),
    ) -> Pair:
        """Sign a certificate that may serve and call, for the DNS names and IP addresses given."""
        issuer = x509.load_pem_x509_certificate(self.pair.certificate)
        issuer_key = serialization.load_pem_private_key(self.pair.key, password=None)
        if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
            raise TypeError("the authority's key is not an elliptic-curve key")
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [
                *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization) for organization in organizations),
                x509.NameAttribute(NameOID.COMMON_NAME, common_name),
            ]
        )
        builder = (
            _builder(subject, issuer.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            # Python's default context is strict about chains and wants this link to the issuer.
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
                    issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
                ),
                critical=False,
            )
        )
        alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
        alternatives += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return _pair(builder.sign(issuer_key, hashes.SHA256()), key)


def signing_pair() -> tuple[bytes, bytes]:
    """Return private and public PEM of a key that signs ServiceAccount tokens."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return _key_pem(key), public


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    staging.replace(path)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
