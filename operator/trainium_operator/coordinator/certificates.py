"""Create, renew and bundle the coordinator's certificate authority and server certificate; no I/O.

Guarantees:
- An authority of the bundle signs the server certificate, and agents received that bundle at least one server renewal
  earlier. When the authority is renewed, the old one first signs a new server certificate, and stays in the bundle
  until it expires.
- Keys appear in no `repr`. Times are Unix seconds from the caller.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CA_DAYS = 365.0
SERVER_DAYS = 30.0
RENEW_AT = 2 / 3
"""Part of its lifetime after which a certificate is renewed."""
_SKEW = timedelta(minutes=5)

CA_KEY, CA_CERT, SERVER_KEY, SERVER_CERT = "ca.key", "ca.crt", "tls.key", "tls.crt"


class UnusableMaterialError(ValueError):
    """The Secret does not hold a usable set of certificates."""


@dataclass(frozen=True, slots=True)
class Material:
    """The content of the Secret, all PEM."""

    ca_key: bytes = field(repr=False)
    ca_bundle: bytes
    """Return the current authority, then those that are still valid."""
    server_key: bytes = field(repr=False)
    server_cert: bytes

    def encode(self) -> dict[str, bytes]:
        """Return the content by key of the Secret."""
        return {
            CA_KEY: self.ca_key,
            CA_CERT: self.ca_bundle,
            SERVER_KEY: self.server_key,
            SERVER_CERT: self.server_cert,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, bytes]) -> Material | None:
        """Parse the content; None for an empty Secret. Raises UnusableMaterialError."""
        if not any(data.get(key) for key in (CA_KEY, CA_CERT, SERVER_KEY, SERVER_CERT)):
            return None
        try:
            material = cls(data[CA_KEY], data[CA_CERT], data[SERVER_KEY], data[SERVER_CERT])
            _load_key(material.ca_key)
            x509.load_pem_x509_certificates(material.ca_bundle)
            held = x509.load_pem_x509_certificate(material.server_cert).public_key()
            key = _load_key(material.server_key).public_key()
        except (KeyError, ValueError, TypeError) as error:
            raise UnusableMaterialError(f"missing or damaged: {type(error).__name__}") from error
        if key != held:
            raise UnusableMaterialError("the key is not that of the certificate")
        return material


def list_server_names(service: str, namespace: str) -> tuple[str, ...]:
    """Return every name by which a worker or a port-forward reaches the coordinator."""
    full = f"{service}.{namespace}"
    return (service, full, f"{full}.svc", f"{full}.svc.cluster.local", "localhost")


def renew_material(material: Material | None, names: Sequence[str], now: float) -> Material:
    """Return the material, with new certificates for those that expire soon or lack a name."""
    moment = datetime.fromtimestamp(now, UTC)
    if material is None:
        return _create_material(names, moment)
    bundle = x509.load_pem_x509_certificates(material.ca_bundle)
    authority = _Authority(bundle[0], _load_key(material.ca_key))
    if authority.certificate.not_valid_after_utc <= moment:
        return _create_material(names, moment)
    server = x509.load_pem_x509_certificate(material.server_cert)
    renew_ca = _must_renew(authority.certificate, moment)
    if renew_ca or _must_renew(server, moment) or not _is_valid_for(server, names, bundle):
        key, certificate = _create_server(authority, names, moment)
        material = replace(material, server_key=key, server_cert=certificate)
    valid = [old for old in bundle if old.not_valid_after_utc > moment]
    if renew_ca:
        authority = _create_authority(moment)
        valid.insert(0, authority.certificate)
        material = replace(material, ca_key=_encode_key(authority.key))
    joined = b"".join(_encode_certificate(certificate) for certificate in valid)
    return material if valid == bundle else replace(material, ca_bundle=joined)


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def _create_material(names: Sequence[str], moment: datetime) -> Material:
    authority = _create_authority(moment)
    key, certificate = _create_server(authority, names, moment)
    return Material(_encode_key(authority.key), _encode_certificate(authority.certificate), key, certificate)


def _must_renew(certificate: x509.Certificate, moment: datetime) -> bool:
    start_serving, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return moment >= start_serving + (end - start_serving) * RENEW_AT


def _is_valid_for(server: x509.Certificate, names: Sequence[str], bundle: Sequence[x509.Certificate]) -> bool:
    held = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    signed = any(server.issuer == authority.subject for authority in bundle)
    return signed and set(names) <= set(held.get_values_for_type(x509.DNSName))


def _create_authority(moment: datetime) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # The serial in the name distinguishes two authorities in one bundle.
    name = _build_name(f"trainium-operator coordinator CA {serial:x}"[:64])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(moment - _SKEW)
        .not_valid_after(moment + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _Authority(certificate, key)


def _create_server(authority: _Authority, names: Sequence[str], moment: datetime) -> tuple[bytes, bytes]:
    """Create a key and a certificate, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
    alternatives.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_build_name("trainium-operator coordinator"))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - _SKEW)
        .not_valid_after(moment + timedelta(days=SERVER_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return _encode_key(key), _encode_certificate(certificate)


def _build_name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _encode_certificate(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("not an elliptic-curve key")
    return key
