"""The project as a whole: imports go only downwards, examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedxl"

# From the bottom up: a module imports only from lines above its own, or from its own line.
LAYERS = [
    {"errors", "progress", "display", "digest"},
    {"files", "tree", "options", "toml", "registry", "wire_precisions"},
    {"wire", "sampling", "gaussian", "censored"},
    {"risks", "models", "metrics"},
    {"evaluation"},
    {"algorithms"},
    {"data"},
    {"engine"},
    {"tracking"},
    {"training"},
    {"config"},
    {"reporting", "prediction"},
    {"experiments", "deploy"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(path.relative_to(ROOT) for path in PACKAGE.rglob("*.py"))
STUDIES = sorted(path.relative_to(ROOT) for path in (ROOT / "studies").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The fedxl modules a file imports, by their first name below fedxl."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names if node.module == "fedxl"}
    return {name.split(".")[1] for name in found if name.startswith("fedxl.") and "__" not in name}


ROOM = {
    ".ci", ".git", ".github", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff",
    "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md", "benchmarks", "constraints.txt",
    "containers", "docs", "examples", "fedxl", "mkdocs.yml", "pyproject.toml", "studies", "tests",
}  # fmt: skip


def test_the_root_holds_what_it_should_and_no_run():
    """A test that begins a run in the working folder leaves its files here, and one commit took them along."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    found = {path.name for path in ROOT.iterdir() if not any(path.match(pattern) for pattern in ignored)}
    assert found <= ROOM, f"{sorted(found - ROOM)}: remove it, or name it here"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_go_only_downwards(module):
    name = module.with_suffix("").parts[1]
    if name in ("__init__", "__main__"):
        return  # the front door shows what is inside
    assert name in LEVEL, f"put {name} into LAYERS"
    upwards = {other for other in imported(ROOT / module) if LEVEL[other] > LEVEL[name]}
    assert not upwards, f"{module} imports upwards: {sorted(upwards)}"


def test_only_whole_packages_share_a_layer():
    """Two files of one layer do not import each other, packages excepted."""
    for module in MODULES:
        name = module.with_suffix("").parts[1]
        same = {other for other in imported(ROOT / module) if other != name and LEVEL.get(other) == LEVEL.get(name)}
        assert not same, f"{module} imports its neighbours {sorted(same)}"


def test_the_library_knows_nothing_of_the_studies_nor_they_of_its_commands():
    for module in MODULES:
        assert not re.search(r"^\s*(from|import) studies\b", (ROOT / module).read_text(), re.MULTILINE), module
    for module in STUDIES:
        assert "cli" not in imported(ROOT / module), module


@pytest.mark.parametrize("module", [m for m in MODULES + STUDIES if ">>>" in (ROOT / m).read_text()], ids=str)
def test_examples_in_docstrings_run(module):
    loaded = importlib.import_module(".".join(module.with_suffix("").parts))
    result = doctest.testmod(loaded)
    assert result.attempted
    assert not result.failed


def test_every_public_name_loads_when_it_is_used():
    import fedxl

    assert sorted(fedxl._HOMES) == sorted(fedxl.__all__)
    for name in fedxl.__all__:
        assert getattr(fedxl, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        fedxl.fitt  # noqa: B018


WAITING = ["fedxl", "fedxl.cli.main", "fedxl.cli.deploy", "fedxl.cli.report", "fedxl.deploy.processes"]


@pytest.mark.parametrize("module", WAITING)
def test_whoever_only_waits_or_watches_loads_no_torch(module):
    if module == "fedxl.deploy.processes":
        pytest.importorskip("cryptography", reason="needs fedxl[deploy]")
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def test_the_readme_promises_few_lines():
    code = blocks(ROOT / "README.md", "python")
    assert code
    for block in code:
        lines = [line for line in block.splitlines() if line.strip() and not line.strip().startswith("#")]
        assert len(lines) < 15


def test_the_documentation_links_to_files_that_exist():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            file = page.parent / target
            assert file.exists(), f"{page.name} links to {target}"
            assert file.is_dir() or file.stat().st_size > 0, f"{target} is empty"


PUBLIC = re.compile(  # what Flower and FLARE document for applications
    r"flwr\.(app|clientapp|serverapp)|nvflare\.apis(\.impl\.controller|\.\w+)|nvflare\.fuel\.flare_api\.flare_api"
)


@pytest.mark.parametrize("engine", ["flower", "nvflare"])
def test_engines_are_used_by_their_public_interface_alone_and_in_declared_versions(engine):
    package = {"flower": "flwr"}.get(engine, engine)
    nodes = [node for module in MODULES for node in ast.walk(ast.parse((ROOT / module).read_text()))]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert not [name for name in plain if name.split(".")[0] == package], "name what is used"
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    used = [(str(node.module), alias.name) for node in imports for alias in node.names]
    used = [(module, name) for module, name in used if module.split(".")[0] == package]
    assert len({module for module, _ in used}) > 1
    for module, name in used:
        assert PUBLIC.fullmatch(module), module
        assert not name.startswith("_"), f"{module}.{name}"
    (declared,) = (line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith(engine))
    assert re.search(rf'"{package}>=[\d.]+', declared), "since which version"


def test_no_pickle_and_no_ambient_randomness():
    for module in MODULES:
        text = (ROOT / module).read_text()
        # A published file of weights may be a pickle: then tensors alone are read, never code.
        forbidden = (
            r"torch\.save\(|torch\.load\((?!.*weights_only=True)|allow_pickle=True"
            r"|^\s*(import|from) _?(pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve)\b"
        )
        assert not re.search(forbidden, text, re.MULTILINE), module
        if {"algorithms", "risks"} & set(module.parts):
            assert not re.search(
                r"torch\.(rand|randn|randint|randperm|manual_seed)\b|np\.random\.(?!Generator)|\.item\(\)|\.cuda\(",
                text,
            ), module
