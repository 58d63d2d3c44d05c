"""Who a site's keys in a secure sum belong to: they are signed with its long-term key, which the authority certified.

Without this a server could put keys of its own in place of the other sites', and read all shares and masks.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedxl.deploy.provision import keys
from fedxl.deploy.secure.member import signed_text
from fedxl.deploy.secure.messages import Advert
from fedxl.errors import RefusedError, UserError, require

SCHEME = ec.ECDSA(SHA384())


def sign(folder: Path, context: str, number: int, advert: Advert) -> Advert:
    """A site's keys with its certificate and signature, from the key that it connects with."""
    ready = all((folder / name).exists() for name in ("site.key", "site.crt", "ca.crt"))
    require(ready, f"a secure sum needs site.key, site.crt and ca.crt in {folder}; see fedxl deploy request")
    key, certificate = keys.read_key(folder / "site.key"), keys.read_certificate(folder / "site.crt")
    text = signed_text(context, keys.common_name(certificate.subject), number, advert)
    pem = keys.certificate_pem(certificate).decode()
    return advert._replace(certificate=pem, signature=key.sign(text, SCHEME))


def verify(folder: Path, context: str, number: int, advert: Advert, trusted: Collection[str]) -> str:
    """The name of the site whose keys these are; RefusedError if its signature or its certificate is not valid.

    trusted: fingerprints of the only keys that count; empty: all that the federation's authority has certified.
    """
    authority = keys.read_certificate(folder / "ca.crt")
    try:
        certificate = keys.parse_certificate(advert.certificate.encode(), "the certificate of another site")
        name = keys.common_name(certificate.subject)
        certificate.verify_directly_issued_by(authority)
        keys.check_dates(certificate, f"site {name}", "it needs a new one")
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        public = keys.public_key(certificate)
        public.verify(advert.signature, signed_text(context, name, number, advert), SCHEME)
    except UserError as error:
        raise RefusedError(str(error)) from None
    except (InvalidSignature, x509.ExtensionNotFound, ValueError, TypeError):
        raise RefusedError(f"the keys of site {number} are not signed by a site of this federation") from None
    if ExtendedKeyUsageOID.CLIENT_AUTH not in uses:  # the authority certifies the server, too
        raise RefusedError(f"the keys of site {number} are not signed by a site")
    shown = keys.fingerprint(public)
    if trusted and shown not in trusted:
        raise RefusedError(f"the key of site {name} is not among this site's peers; its fingerprint is {shown}")
    return name
