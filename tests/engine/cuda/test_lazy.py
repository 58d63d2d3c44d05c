"""Private modules of torch are imported only where they are used, and what is wrong with them costs one line."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedxl.engine import executors
from fedxl.engine.executors import loop
from tests.engine.cuda.test_graph import Run
from tests.engine.test_executors import assert_agree
from tests.running import again

PACKAGE = Path(executors.__file__).parents[1]
OURS = PACKAGE / "engine" / "cuda"

FIT = """
import torch, fedxl
clients = [(torch.randn(12, 3), torch.arange(12) % 2) for _ in range(2)]
for executor in ("loop", "vmap", "graph"):
    fedxl.fit(torch.nn.Linear(3, 1), clients, fedxl.FeDXL1(fedxl.auroc()), rounds=1, local_steps=1, batch_size=2,
              device="cpu", executor=executor)
"""


def test_the_compiler_layer_and_scipy_are_not_loaded_before_they_are_used():
    """By the package, the command line, and all executors on a CPU. Each would take a second of every command."""
    loaded = "import sys; print([n for n in sys.modules if n.startswith(('fedxl.engine.cuda', 'scipy'))])"
    told = "\n".join(f"{code}\n{loaded}" for code in ("import fedxl", "import fedxl.cli.train", FIT))
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" * 3


def private(path: Path) -> list[str]:
    """What a file imports from torch, or reads of it, that has a name with an underscore in front."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        found += [name for name in names if name.startswith("torch.") and hidden(name)]
    return found


def hidden(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_names_of_torch_stay_in_the_compiler_layer():
    files = [path for path in PACKAGE.rglob("*.py") if OURS not in path.parents]
    assert {str(path): private(path) for path in files if private(path)} == {}
    assert private(OURS / "trace.py"), "the check sees them where they are"


BROKEN = ("torch._guards", "torch._decomp", "torch.fx.experimental.proxy_tensor")


def test_a_torch_without_a_private_module_costs_one_line():
    code = f"""
import sys, torch
from fedxl.engine import executors
from fedxl.engine import executors
for broken in {BROKEN}:
    before = dict(sys.modules)
    sys.modules[broken] = None  # which makes its import an error
    assert executors.executor("graph", say=print) is executors.loop
    for name in [name for name in sys.modules if name.startswith("fedxl.engine.cuda")]:
        del sys.modules[name]
    sys.modules.pop(broken) if before.get(broken) is None else sys.modules.update({{broken: before[broken]}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for broken, line in zip(BROKEN, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"executor: loop, because graph does not work with torch {torch.__version__}:")
        assert broken in line


@pytest.mark.parametrize("error", [AttributeError, TypeError, AssertionError])
@pytest.mark.parametrize("place", ["trace.make_fx", "trace.FakeTensorMode", "lanes.Census", "lanes.as_products"])
def test_a_torch_that_breaks_tracing_costs_one_line(place, error, monkeypatch, network):
    def fails(*args, **options):
        raise error("a private function of torch has changed\nin many ways")

    monkeypatch.setattr(f"fedxl.engine.cuda.{place}", fails)
    lines: list[str] = []
    found = Run(executors.executor("graph", False, lines.append, capture=again), network()).state(0, 0, 4)
    assert lines == ["executor: loop, because graph cannot trace this step: a private function of torch has changed"]
    assert_agree(Run(loop, network()).state(0, 0, 4), found, tolerance=0)


def test_an_error_of_the_run_itself_is_no_reason_to_go_on(network, monkeypatch):
    """What breaks after the step was captured is not the compiler's fault, and must not be hidden."""
    executor = executors.executor("graph", compiled=False, capture=again)
    run = Run(executor, network())
    run.state(0, 0)

    def fails() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(executor.captured, "replay", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run.state(0)
