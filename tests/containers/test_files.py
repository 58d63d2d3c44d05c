"""Images, compose and Kubernetes as files: what they copy exists, what they run is a command, and keys stay private.

No daemon runs here, so no image is built.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")
pytest.importorskip("yaml", reason="comes with fedxl[dev]")

import yaml

from fedxl.deploy import processes
from fedxl.deploy.provision.folders import PORT, init
from fedxl.errors import UserError
from tests.docs.forms import fedxl, pip
from tests.docs.pages import ROOT

CONTAINERS = ROOT / "containers"
DOCKERFILE = (CONTAINERS / "Dockerfile").read_text()
LINES = [line for line in DOCKERFILE.replace("\\\n", "").splitlines() if not line.startswith("#")]
COMPOSE = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())
KUBERNETES = [
    document
    for file in sorted((CONTAINERS / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text())
]
PODS = {
    f"{document['kind']} {document['metadata']['name']}": document["spec"]["template"]["spec"]
    for document in KUBERNETES
    if "template" in document.get("spec", {})
}


def of(kind: str) -> list[Any]:
    return [document for document in KUBERNETES if document["kind"] == kind]


def instructions(name: str) -> list[str]:
    """The arguments of all instructions of a kind in the Dockerfile."""
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{name} ")]


def test_the_dockerfile_copies_what_exists_and_its_context_holds_nothing_else():
    copied = {source for line in instructions("COPY") for source in line.split()[:-1]}
    ignored, *kept = [
        line
        for line in (CONTAINERS / "Dockerfile.dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert ignored == "*"
    assert copied == {line.removeprefix("!") for line in kept if line.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)
    assert any(fnmatch("fedxl/cli/__pycache__", line.replace("**", "*")) for line in kept)


def test_the_dockerfile_installs_extras_that_exist_and_runs_as_nobody_special(monkeypatch):
    for asked in re.findall(r"/src(\[.*?\])", DOCKERFILE):
        pip(["install", f"fedxl{asked}"], monkeypatch)
    assert [line.split()[-1] for line in instructions("FROM")] == ["base", "gpu", "cpu", "trial"]
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[2:]:
        assert re.findall(r"^USER (.*)$", stage, re.MULTILINE)[-1] == "1000:1000"
    assert instructions("EXPOSE") == [str(PORT)]
    assert instructions("ENTRYPOINT") == ['["fedxl"]']


def test_each_party_of_compose_runs_a_command_and_only_init_is_left_out(monkeypatch):
    services = COMPOSE["services"]
    for name, service in services.items():
        if name != "init":
            fedxl(list(service["command"]), monkeypatch)
            assert service["networks"] == ["federation"]
            assert "ports" not in service
    assert [name for name, service in services.items() if "profiles" in service] == ["init"]
    assert {service["image"] for service in services.values()} == {"fedxl:trial"}
    assert services["init"]["command"][1] in services, "the server's name in its certificate is that of a service"
    build = services["init"]["build"]
    assert (CONTAINERS / build["context"] / build["dockerfile"]).is_file()
    assert f" AS {build['target']}\n" in DOCKERFILE


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_no_rights_that_it_does_not_need(name):
    pod = PODS[name]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert f"USER {pod['securityContext']['runAsUser']}:" in DOCKERFILE
    for container in pod["initContainers"] + pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in of("PersistentVolumeClaim")} | {"north-data"}
    assert {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v} <= claims


def test_manifests_agree_on_names_ports_and_exit_codes(monkeypatch):
    (namespace,) = of("Namespace")
    assert {document["metadata"].get("namespace") for document in KUBERNETES if document != namespace} == {"fedxl"}
    (service,), (job,), (site,) = of("Service"), of("Job"), of("Deployment")
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert service["spec"]["ports"] == [{"port": PORT, "targetPort": PORT}]
    assert site["spec"]["selector"]["matchLabels"] == site["spec"]["template"]["metadata"]["labels"] != labels
    for pod in PODS.values():
        (container,) = pod["containers"]
        fedxl(list(container["args"]), monkeypatch)
    failing = job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]
    assert failing["values"] == [processes.USER_ERROR]
    assert failing["containerName"] == PODS["Job fedxl-server"]["containers"][0]["name"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation")
    init(("north",), folder / "f", host="fedxl-server")
    return folder / "f"


def secret(folder: Path, source: Path) -> None:
    """A folder's files as a Secret's volume shows them: links to files that a group can read."""
    own = folder / "..2026_11_19"
    own.mkdir(parents=True)
    (folder / "..data").symlink_to(own.name)
    for file in filter(Path.is_file, source.iterdir()):  # as kubectl's --from-file takes them
        (own / file.name).write_bytes(file.read_bytes())
        (own / file.name).chmod(0o440)
        (folder / file.name).symlink_to(Path("..data") / file.name)


@pytest.mark.skipif(sys.platform != "linux", reason="the images are Linux")
@pytest.mark.parametrize("name", PODS)
def test_keys_of_a_secret_become_a_folder_that_fedxl_takes_again_and_again(name, federation, tmp_path):
    pod = PODS[name]
    server = name.startswith("Job")
    source = federation / ("server" if server else "sites/north")
    keys, volume = tmp_path / "keys", tmp_path / "volume"
    secret(keys, source)
    secret(tmp_path / "members", federation / "server" / "members")
    volume.mkdir()
    volume.chmod(0o2775)  # as fsGroup makes it
    (container,) = pod["initContainers"]
    place = volume / Path(pod["containers"][0]["args"][-1]).name
    script = container["command"][-1]
    for path, own in (("/srv/fedxl", volume), ("/keys", keys), ("/members", tmp_path / "members")):
        script = re.sub(rf"(?<=\s){path}\b", shlex.quote(str(own)), script)
    with pytest.raises(UserError, match="others can read"):
        processes.require_private(keys)
    for _ in range(2):
        subprocess.run([*container["command"][:-1], script], check=True)
        processes.require_private(place, place / "members")
        for file in filter(Path.is_file, source.iterdir()):
            assert (place / file.name).read_bytes() == file.read_bytes()
        for file in place.rglob("*"):  # as fsGroup may change them at the next start
            file.chmod(0o770 if file.is_dir() else 0o660)
        (place / "run").mkdir(exist_ok=True)  # what a party keeps stays
    if server:
        assert (place / "members" / "north.json").exists()
        (tmp_path / "members" / "north.json").unlink()  # revoked
        subprocess.run([*container["command"][:-1], script], check=True)
        assert not (place / "members" / "north.json").exists()
