"""What `import fedxl` loads: neither torch's private modules through us, nor what only some users need."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fedxl
import fedxl.errors

# Names of modules that are loaded after the code, one per line.
REPORT = "\nimport sys\nprint('\\n'.join(sys.modules))"
HEAVY = ("sklearn", "scipy", "matplotlib", "rich", "typer", "flwr", "PIL", "cryptography")


def loaded(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code + REPORT], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_alone_loads_no_torch():
    assert not {name for name in loaded("import fedxl") if name.split(".")[0] in (*HEAVY, "torch", "numpy")}


def test_dir_lists_what_fedxl_offers():
    assert not {"Any", "TYPE_CHECKING", "import_module", "sys"} & {*dir(fedxl)}
    assert {"__version__", "fit", "errors"} <= {*dir(fedxl)}, "submodules, once they are loaded, too"


def test_one_process_loads_nothing_for_several():
    found = loaded("import fedxl.cli.train, fedxl.training.fit")
    assert "fedxl.cli.processes" in found
    assert not {name for name in found if name.startswith("fedxl.engine.ranks")}


def test_fit_loads_nothing_that_it_may_not_need():
    found = loaded("import fedxl; fedxl.fit, fedxl.FeDXL2, fedxl.partial_auc")
    assert "torch" in found
    assert not {name for name in found if name.split(".")[0] in HEAVY}
    assert not {name for name in found if name.startswith("fedxl.engine.cuda")}, "where private modules are used"


def test_a_site_loads_little_beside_torch():
    """With scipy each site's process would take 80 MB more."""
    found = loaded("import fedxl.deploy.site.requests")
    assert "torch" in found
    assert {name for name in found if name.split(".")[0] in HEAVY} <= {
        n for n in found if n.startswith("cryptography")
    }


@pytest.mark.parametrize("platform", ["win32"])
def test_windows_is_refused_in_one_line(platform):
    code = f"import sys; sys.platform = '{platform}'; import fedxl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].endswith("use WSL2")
