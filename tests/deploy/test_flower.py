"""Flower is imported in one place, and each process loads only its part of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedxl[flower]")

PACKAGE = Path(__file__).parents[2] / "fedxl"


def test_only_the_flower_package_imports_flower():
    importing = {
        file.parent.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if re.search(r"^\s*(from|import) flwr\b", file.read_text(), re.MULTILINE)
    }
    assert importing == {"deploy/flower"}


def loaded(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )


def test_the_gateway_loads_no_more_of_flower_than_its_messages():
    messages = loaded("flwr.proto.fleet_pb2, flwr.proto.message_pb2, flwr.proto.heartbeat_pb2, flwr.proto.node_pb2")
    gateway = {name for name in loaded("fedxl.deploy.server.gateway") if name.startswith("flwr")}
    assert gateway <= messages


@pytest.mark.parametrize("module", ["fedxl.deploy.site.node", "fedxl.deploy.server.app"])
def test_only_superlinks_own_process_loads_superlink(module):
    assert "flwr.superlink.cli.flower_superlink" not in loaded(module)
