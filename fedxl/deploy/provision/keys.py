"""Keys, certificates and signing requests. Only their owner can read private files, from the moment they exist.

Every party has one key on the curve P-384.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.hazmat.primitives.serialization import load_pem_private_key as load_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedxl.errors import UserError, first_line, require

DAYS = 365  # for which a certificate of a server or of a site is valid
AUTHORITY_DAYS = 3650
WARNING_DAYS = 30  # before a certificate expires, warn about it
SITE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
HOST_NAME = re.compile(
    r"(?=.{1,64}\Z)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)
MAX_BYTES = 65536  # of a request or a certificate, which another party has written
Key = ec.EllipticCurvePrivateKey


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def write_private(path: Path, content: bytes) -> None:
    """Create a file that only its owner can read, from the first moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def private_pem(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key as bytes, to compare and to look up."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """What two people compare by telephone: the SHA-256 of the public key, in groups of four."""
    digest = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
    return ":".join(digest[i : i + 4] for i in range(0, 64, 4))


def words(shown: str) -> str:
    """The first 128 bits of a fingerprint as syllables, which are easily read aloud: eight words of five letters.

    >>> words("7f00:0001")  # a proquint
    'lusab-babad'
    """
    letters = [("bdfghjklmnprstvz", 12), ("aiou", 10), ("bdfghjklmnprstvz", 6), ("aiou", 4), ("bdfghjklmnprstvz", 0)]
    numbers = [int(group, 16) for group in shown.split(":")[:8]]
    return "-".join("".join(some[(number >> at) % len(some)] for some, at in letters) for number in numbers)


def authority() -> tuple[Key, x509.Certificate]:
    """A new certificate authority, for one federation."""
    key, name = new_key(), _name("fedxl federation")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    rights = (x509.BasicConstraints(True, 0), usage)
    return key, _certificate(name, key.public_key(), key, name, AUTHORITY_DAYS, rights)


def server_certificate(
    key: ec.EllipticCurvePublicKey, issuer_key: Key, issuer: x509.Certificate, hosts: Sequence[str], days: int = DAYS
) -> x509.Certificate:
    """A certificate for a server that sites reach by these names or addresses."""
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    rights = _only_for(ExtendedKeyUsageOID.SERVER_AUTH)
    return _certificate(_name(hosts[0]), key, issuer_key, issuer.subject, days, rights, names)


def site_certificate(
    name: str, key: ec.EllipticCurvePublicKey, issuer_key: Key, issuer: x509.Certificate, days: int = DAYS
) -> x509.Certificate:
    """A certificate for a site: valid for a TLS client, never for a server."""
    rights = _only_for(ExtendedKeyUsageOID.CLIENT_AUTH)
    return _certificate(_name(name), key, issuer_key, issuer.subject, days, rights)


def signing_request(name: str, key: Key) -> bytes:
    """A signing request, which a site sends to the server's operator. It holds no secret."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(name))
    return builder.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM)


def read_request(path: Path) -> tuple[str, ec.EllipticCurvePublicKey]:
    """The site's name and public key. The request's signature proves that its sender has the private key."""
    try:
        request = x509.load_pem_x509_csr(_small(path))
        key, name = request.public_key(), common_name(request.subject)
        valid = request.is_signature_valid
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} is not a signing request: {first_line(error)}") from None
    require(valid, f"{path} is not signed with its own key; ask the site for a new request")
    require(_usable(key), f"{path} holds a key that is not on the curve P-384; `fedxl deploy request` creates one")
    assert isinstance(key, ec.EllipticCurvePublicKey)
    require(bool(SITE_NAME.fullmatch(name)), f"{path} has no valid site name: lower-case letters, digits and dashes")
    return name, key


def read_key(path: Path) -> Key:
    try:
        key = load_key(_small(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} is not a private key: {first_line(error)}") from None
    require(isinstance(key, Key), f"{path} is not an elliptic-curve key")
    assert isinstance(key, Key)
    return key


def read_certificate(path: Path) -> x509.Certificate:
    return parse_certificate(_small(path), str(path))


def parse_certificate(pem: bytes, where: str) -> x509.Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        usable = _usable(certificate.public_key())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{where} is not a certificate: {first_line(error)}") from None
    require(usable, f"{where} holds a key that is not on the curve P-384")
    return certificate


def public_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """The key of a certificate that `parse_certificate` has accepted."""
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def common_name(subject: x509.Name) -> str:
    found = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else ""


def check_dates(certificate: x509.Certificate, whose: str, remedy: str, now: datetime | None = None) -> str | None:
    """A warning if a certificate expires within 30 days; an error if it has expired or is not valid yet."""
    now = now or datetime.now(UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    require(now < end, f"the certificate of {whose} expired on {end:%Y-%m-%d}; {remedy}")
    early = f"the certificate of {whose} is not valid before {begin:%Y-%m-%d %H:%M} UTC; check the clock"
    require(begin <= now, early)
    days = (end - now).days
    if days >= WARNING_DAYS:
        return None
    return f"the certificate of {whose} expires on {end:%Y-%m-%d}, in {days} day(s); {remedy}"


def require_site_name(name: str) -> None:
    valid = bool(SITE_NAME.fullmatch(name))
    require(valid, f"'{name}' is not a valid site name: use lower-case letters, digits and dashes")


def check_host(host: str, port: int) -> None:
    """Check that the host is a name or address that a certificate can hold, and that the port exists."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        right = "give a name such as fl.example.org (up to 64 letters) or an IP address"
        require(bool(HOST_NAME.fullmatch(host)), f"{host[:80]!r} is not a host: {right}")
    require(1 <= port <= 65535, f"port must lie between 1 and 65535, got {port}")


def _certificate(
    subject: x509.Name,
    public: ec.EllipticCurvePublicKey,
    issuer_key: Key,
    issuer: x509.Name,
    days: int,
    rights: Sequence[x509.ExtensionType],
    *more: x509.ExtensionType,
) -> x509.Certificate:
    """A certificate with the identifiers of both keys, which strict verification requires."""
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(days=days))
    own = x509.SubjectKeyIdentifier.from_public_key(public)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    for extension in (own, authority, *more, *rights):
        builder = builder.add_extension(extension, critical=extension in rights)
    return builder.sign(issuer_key, hashes.SHA384())


def _only_for(purpose: x509.ObjectIdentifier) -> tuple[x509.ExtensionType, ...]:
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    return x509.BasicConstraints(False, None), usage, x509.ExtendedKeyUsage([purpose])


def _usable(key: object) -> bool:
    return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)


def _small(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    require(len(content) <= MAX_BYTES, f"{path} is too large for a key or a certificate")
    return content


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
