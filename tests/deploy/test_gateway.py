"""The gateway: which connections it accepts, and which requests it forwards."""

from __future__ import annotations

import ssl
import time
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedxl[flower]")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from flwr.proto.fleet_pb2 import ActivateNodeResponse

from fedxl.deploy.provision import approval, keys, members
from fedxl.deploy.provision.connection import tls_for_site
from fedxl.deploy.server import fleet, gateway_process
from fedxl.deploy.site import node
from tests.deploy.gateways import CLOSED, PULL, open_gateway, send, signed


def test_a_sites_request_is_passed_on_as_it_is_without_what_is_not_flowers(out):
    with open_gateway(out) as gate:
        connection = gate.connection(out / "sites" / "a")
        more = {"cookie": "mine", "content-type": "x" * 10_000, "x-forwarded-for": "1.2.3.4", "flwr-timestamp": "now"}
        headers = signed(out / "sites" / "a") | more
        for _ in range(3):  # on one connection
            assert send(connection, PULL, headers, b"\0\1body") == (200, b"")
        path, passed, body = gate.link.seen[-1]
        assert (path, body, len(gate.link.seen)) == (PULL, b"\0\1body", 3)
        ours = {"host", "content-length", "content-type", "accept"}
        assert passed.keys() == ours | {"flwr-public-key", "flwr-timestamp"}
        assert passed["content-type"] == "application/protobuf", "whatever the site says: SuperLink would log it"
        connection.request("POST", PULL, b"", headers)
        answer = connection.getresponse()
        assert answer.headers["server"] is None, "it does not tell what stands behind it"


def strangers(out: Path, place: Path) -> dict[str, ssl.SSLContext | None]:
    """Ways to knock for somebody who does not belong."""
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.load_verify_locations(out / "server" / "ca.crt")

    def showing(name: str, key: keys.Key, certificate) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(out / "server" / "ca.crt")
        (place / f"{name}.key").write_bytes(keys.private_pem(key))
        (place / f"{name}.crt").write_bytes(keys.certificate_pem(certificate))
        context.load_cert_chain(place / f"{name}.crt", place / f"{name}.key")
        return context

    key, (other_key, other) = keys.new_key(), keys.authority()
    mine = key.public_key()
    ours = keys.read_key(out / "authority" / "ca.key"), keys.read_certificate(out / "authority" / "ca.crt")
    server_key = keys.read_key(out / "server" / "server.key")
    return {
        "no TLS": None,
        "no certificate": plain,
        "another authority": showing("other", key, keys.site_certificate("a", mine, other_key, other)),
        "of our authority, never approved": showing("new", key, keys.site_certificate("a", mine, *ours)),
        "expired": showing("old", key, expired(mine, *ours)),
        "the server's own": showing("server", server_key, keys.read_certificate(out / "server" / "server.crt")),
    }


def expired(key, issuer_key: keys.Key, issuer: x509.Certificate) -> x509.Certificate:
    """As a site's certificate was, a year and a day ago."""
    good = keys.site_certificate("a", key, issuer_key, issuer)
    ago = timedelta(days=keys.DAYS + 1)
    builder = x509.CertificateBuilder(
        issuer_name=good.issuer,
        subject_name=good.subject,
        public_key=key,
        serial_number=good.serial_number,
        not_valid_before=good.not_valid_before_utc - ago,
        not_valid_after=good.not_valid_after_utc - ago,
        extensions=list(good.extensions),
    )
    return builder.sign(issuer_key, hashes.SHA384())


def test_nobody_gets_in_who_does_not_belong(out, tmp_path):
    with open_gateway(out) as gate:
        for kind, context in strangers(out, tmp_path).items():
            with pytest.raises(CLOSED):  # noqa: PT012
                peer = gate.raw(context)
                peer.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
                if not peer.recv(100):
                    raise ConnectionError(kind)
        assert not gate.link.seen
        assert any("expired" in line for line in gate.lines), gate.lines
        assert send(gate.connection(out / "sites" / "b"), PULL, signed(out / "sites" / "b"))[0] == 200


ELSEWHERE = [
    "/", "/docs", "/openapi.json", "/health", "/v1/control/list-runs", "/v1/control/start-run",
    "/v1/control/register-node", "/v1/control/stream-logs", "/v1/runtime/acquire-task", "/v1/runtime/pull-task-input",
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "//v1/fleet/pull-messages",
    "/v1/fleet/pull-messages/", "/v1/fleet/pull-messages?x=1", "/V1/FLEET/PULL-MESSAGES",
    "http://superlink/v1/control/list-runs", "/v1/fleet/pull-messages/../../control/list-runs",
    "/v1/fleet/get-fab", "/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/fleet/get-run", "*",
]  # fmt: skip


def test_a_site_with_a_valid_key_reaches_nothing_but_what_it_needs(out):
    with open_gateway(out) as gate:
        site = out / "sites" / "a"
        for path in ELSEWHERE:
            assert send(gate.connection(site), path, signed(site))[0] == 404, path
            gate.peers.close()
        for how in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"):
            assert send(gate.connection(site), PULL, signed(site), how=how)[0] == 404, how
            gate.peers.close()
        assert not gate.link.seen


def test_every_path_that_flower_serves_is_known():
    """If a new version of Flower opens a path for nodes, somebody has to decide whether sites need it."""
    from flwr.superlink.routers.fleet.router import router

    assert {route.path for route in router.routes} == fleet.ALLOWED.keys() | fleet.WITHHELD


def test_a_request_is_signed_with_the_key_of_its_connection(out):
    with open_gateway(out) as gate:
        a, b = out / "sites" / "a", out / "sites" / "b"
        assert send(gate.connection(a), PULL, signed(b))[0] == 401
        assert send(gate.connection(a), PULL, {**signed(a), "flwr-public-key": "%%%"})[0] == 401
        assert send(gate.connection(a), PULL, {})[0] == 401
        assert not gate.link.seen


def test_a_revoked_site_is_out_at_once_and_an_approved_one_in(out):
    with open_gateway(out) as gate:
        site = out / "sites" / "a"
        connection, headers = gate.connection(site), signed(site)
        assert send(connection, PULL, headers)[0] == 200
        approval.revoke(out, "a")
        assert send(connection, PULL, headers)[0] == 403, "on the connection that it has"
        with pytest.raises(CLOSED):
            send(gate.connection(site), PULL, headers)
        file, shown = approval.request(site)
        approval.accept(site, approval.approve(out, file, 100, lambda name, found: found == shown))
        assert send(gate.connection(site), PULL, headers)[0] == 200


def test_a_body_that_takes_its_time_does_not_outlast_a_revocation(out):
    site = out / "sites" / "a"
    with open_gateway(out) as gate:
        peer = gate.raw(tls_for_site(site))
        key = signed(site)["flwr-public-key"]
        head = f"POST {PULL} HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\nflwr-public-key: {key}\r\n\r\nhalf"
        peer.sendall(head.encode())
        while not gate.gateway.bytes:  # until the gateway waits for the other half
            time.sleep(0.01)
        approval.revoke(out, "a")
        peer.sendall(b"half")
        assert peer.recv(12) == b"HTTP/1.1 403"
        assert not gate.link.seen


def test_an_entry_that_cannot_be_read_lets_nobody_in_and_disturbs_nobody_else(out):
    with open_gateway(out) as gate:
        (out / "server" / members.FOLDER / "a.json").write_text("{")
        with pytest.raises(CLOSED):
            send(gate.connection(out / "sites" / "a"), PULL, signed(out / "sites" / "a"))
        assert send(gate.connection(out / "sites" / "b"), PULL, signed(out / "sites" / "b"))[0] == 200
        assert any("cannot read" in line and "approve the site again" in line for line in gate.lines)


def test_a_renewed_certificate_of_the_server_is_used_without_a_restart(out, monkeypatch):
    monkeypatch.setattr(gateway_process, "WATCH", 0.05)
    with open_gateway(out) as gate:
        context = tls_for_site(out / "sites" / "a")

        def shown() -> bytes | None:
            with gate.raw(context) as peer:
                return peer.getpeercert(True)

        before = shown()
        renewed = approval.renew(out, days=20)
        while (now := shown()) == before:
            time.sleep(0.05)
        assert now == renewed.public_bytes(Encoding.DER)


def test_a_server_that_is_starting_says_so(out):
    with open_gateway(out) as gate:
        gate.gateway.link = out / "nowhere.sock"
        status, said = send(gate.connection(out / "sites" / "a"), PULL, signed(out / "sites" / "a"))
        assert (status, said) == (503, b"fedxl: the server is starting, or busy\n")


def test_certificates_end(out):
    certificate = keys.read_certificate(out / "sites" / "a" / "site.crt")
    end = certificate.not_valid_after_utc
    assert keys.check_dates(certificate, "site a", "renew", end - timedelta(days=40)) is None
    soon = keys.check_dates(certificate, "site a", "renew", end - timedelta(days=29, hours=-1))
    assert soon == f"the certificate of site a expires on {end:%Y-%m-%d}, in 28 day(s); renew"
    with pytest.raises(ValueError, match=f"site a expired on {end:%Y-%m-%d}; renew"):
        keys.check_dates(certificate, "site a", "renew", end)


def test_a_site_takes_the_pinned_key_alone_for_the_servers(out):
    """Whoever has stolen the authority's key can sign a certificate for the server's name, but not with its key."""
    site = out / "sites" / "a"
    with open_gateway(out) as gate:
        address = ("127.0.0.1", gate.port)
        gate.link.responses["/v1/fleet/activate-node"] = ActivateNodeResponse(node_id=7).SerializeToString()
        (site / "flower").mkdir()
        with node.connect(site, *address) as link:
            assert link.node.node_id == 7
        thief = keys.new_key()
        issuer = keys.read_key(out / "authority" / "ca.key"), keys.read_certificate(out / "authority" / "ca.crt")
        forged = keys.server_certificate(thief.public_key(), *issuer, ["127.0.0.1"])
        (out / "server" / "server.crt").write_bytes(keys.certificate_pem(forged))
        (out / "server" / "server.key").write_bytes(keys.private_pem(thief))
    pinned = r"not the one pinned in connection\.toml"
    with (
        open_gateway(out) as gate,
        pytest.raises(ssl.SSLError, match=pinned),
        node.connect(site, "127.0.0.1", gate.port),
    ):
        pass
