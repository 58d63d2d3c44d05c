"""Certificates for TLS and keys for sites. Private files can be read by their owner alone, from the first byte on."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

YEARS = 3
Key = ec.EllipticCurvePrivateKey


def write_private(path: Path, content: bytes) -> None:
    """A new file that nobody else could ever read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def authority() -> tuple[Key, x509.Certificate]:
    """A certificate authority of this federation's own."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedxl federation")
    builder = _certificate(name, name, key.public_key()).add_extension(x509.BasicConstraints(True, 0), critical=True)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    return key, builder.add_extension(usage, critical=True).sign(key, hashes.SHA384())


def server_certificate(key: Key, issuer_key: Key, issuer: x509.Certificate, hosts: Sequence[str]) -> x509.Certificate:
    """For a server that sites know by these names or addresses."""
    builder = _certificate(_name(hosts[0]), issuer.subject, key.public_key())
    return (
        builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(False, None), critical=True)
        .sign(issuer_key, hashes.SHA384())
    )


def private_pem(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())


def site_key() -> tuple[bytes, bytes]:
    """(private, public), as ssh-keygen would write them."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def _certificate(subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=365 * YEARS))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
