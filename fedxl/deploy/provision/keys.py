"""Keys, certificates and signing requests. Every party has one key on the curve P-384."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

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
PublicKey = ec.EllipticCurvePublicKey


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def private_pem(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def public_pem(key: PublicKey) -> bytes:
    """A public key as bytes, to compare and to look up."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: PublicKey) -> str:
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


class Authority(NamedTuple):
    """Signs the certificates of a federation."""

    key: Key
    certificate: x509.Certificate


def new_authority() -> Authority:
    key, name = new_key(), _name("fedxl federation")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    rights = (x509.BasicConstraints(True, 0), usage)
    return Authority(key, _certificate(name, key.public_key(), key, name, AUTHORITY_DAYS, rights))


def server_certificate(host: str, key: PublicKey, issuer: Authority, days: int = DAYS) -> x509.Certificate:
    """A certificate for a server that sites reach by this name or address, or on its own machine."""
    hosts = dict.fromkeys([host, "localhost", "127.0.0.1"])
    names = x509.SubjectAlternativeName([_host(each) for each in hosts])
    rights = _only_for(ExtendedKeyUsageOID.SERVER_AUTH)
    return _certificate(_name(host), key, issuer.key, issuer.certificate.subject, days, rights, names)


def site_certificate(name: str, key: PublicKey, issuer: Authority, days: int = DAYS) -> x509.Certificate:
    """A certificate for a site: valid for a TLS client, never for a server."""
    rights = _only_for(ExtendedKeyUsageOID.CLIENT_AUTH)
    return _certificate(_name(name), key, issuer.key, issuer.certificate.subject, days, rights)


def signing_request(name: str, key: Key) -> bytes:
    """A signing request, which a site sends to the server's operator. It holds no secret."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(name))
    return builder.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM)


def read_request(path: Path) -> tuple[str, PublicKey]:
    """The site's name and public key. The request's signature proves that its sender has the private key."""
    content = _small(path)
    with _parsing(f"{path} is not a signing request"):
        request = x509.load_pem_x509_csr(content)
        key, name = request.public_key(), common_name(request.subject)
        valid = request.is_signature_valid
    require(valid, f"{path} is not signed with its own key; ask the site for a new request")
    require(_usable(key), f"{path} holds a key that is not on the curve P-384; `fedxl deploy request` creates one")
    assert isinstance(key, PublicKey)
    require(bool(SITE_NAME.fullmatch(name)), f"{path} has no valid site name: lower-case letters, digits and dashes")
    return name, key


def read_key(path: Path) -> Key:
    content = _small(path)
    with _parsing(f"{path} is not a private key"):
        key = load_key(content, None)
    require(isinstance(key, Key), f"{path} is not an elliptic-curve key")
    assert isinstance(key, Key)
    return key


def read_certificate(path: Path) -> x509.Certificate:
    return parse_certificate(_small(path), str(path))


def parse_certificate(pem: bytes, where: str) -> x509.Certificate:
    with _parsing(f"{where} is not a certificate"):
        certificate = x509.load_pem_x509_certificate(pem)
        usable = _usable(certificate.public_key())
    require(usable, f"{where} holds a key that is not on the curve P-384")
    return certificate


def public_key(certificate: x509.Certificate) -> PublicKey:
    """The key of a certificate that `parse_certificate` has accepted."""
    key = certificate.public_key()
    assert isinstance(key, PublicKey)
    return key


def common_name(subject: x509.Name) -> str:
    found = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else ""


def check_dates(certificate: x509.Certificate, whose: str, remedy: str) -> str | None:
    """A warning if a certificate expires within 30 days; an error if it has expired or is not valid yet."""
    now = datetime.now(UTC)
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
    public: PublicKey,
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
    return isinstance(key, PublicKey) and isinstance(key.curve, ec.SECP384R1)


@contextmanager
def _parsing(told: str) -> Iterator[None]:
    """Turn what cryptography raises for bytes that make no sense into the user's error."""
    try:
        yield
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise UserError(f"{told}: {first_line(error)}") from None


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
