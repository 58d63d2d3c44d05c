"""Every page runs: its commands, its Python code and its settings, from top to bottom, as a reader would."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedxl.config.experiment import execute
from fedxl.data.sets.digits import digits
from tests.docs.pages import ROOT, blocks, pages
from tests.docs.running import Reader
from tests.prediction.conftest import CONFIG, QUIET, patients, trained, write

# What a page's code takes as given.
BEFORE = {
    "docs/guides/extending.md": "import torch\nmodel = torch.nn.Linear(5, 1)\n"
    "clients = [(torch.randn(40, 5), torch.arange(40) % 2) for _ in range(2)]\n"
    "def transformer(features: int, depth: int): return torch.nn.Linear(features, 1)\n"
    "def my_data(): return clients",
}
# What a reader has seen at the end of a page.
SEEN = {
    "README.md": r"test AUROC 0\.97\d, partial AUC 0\.96\d\n[\s\S]*test C-index 0\.\d+\n\[\[0\.\d+ 0\.\d+\]\n",
    "docs/guides/after.md": r"predictions in scores\.csv",
    "docs/guides/data.md": r"fedxl\.LocalPair",
    "docs/guides/evaluation.md": r"auroc +0\.96\d [\s\S]*pauc@0\.3 +0\.93\d [\s\S]*ap +0\.98\d [\s\S]*"
    r"ap .* p = 0\.\d+, jackknife, Student",
    "docs/guides/check.md": r"No problems found",
    "docs/guides/survival.md": r"300 predictions in scores\.csv[\s\S]*auc_at@730 0\.\d+",
    "docs/guides/tuning.md": r"local_sgd",
}
for needed in ("flwr", "pandas", "pyarrow", "PIL", "onnxruntime", "jinja2", "matplotlib"):
    pytest.importorskip(needed, reason="pages use all that fedxl[dev] brings")
RUN = [page for page in pages() if blocks(page)]
table = trained  # a fixture: a run on patients.csv, beside it


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, table: Path) -> Path:
    """What readers have when they come to a page: the examples, some runs, and new data."""
    place = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("__pycache__", "hospitals"))
    shutil.copy(ROOT / "examples" / "digits.toml", place)
    execute(CONFIG, place / "runs" / "digits-1", hooks=QUIET)
    for name in ("a", "b"):
        shutil.copytree(place / "runs" / "digits-1", place / "runs" / name)
    shutil.copytree(table / "run", place / "runs" / "patients-1")
    write(place / "new.csv", patients(20, 1))
    np.savez(place / "new.npz", x=digits(clients=4).test.x.numpy()[:20])
    (place / "site.toml").write_text('[site]\nname = "north"\n[data]\nname = "digits"\nclients = 3\n')
    return place


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs(page, prepared, tmp_path, monkeypatch, capsys):
    name = str(page.relative_to(ROOT))
    place = Path(shutil.copytree(prepared, tmp_path / "place"))
    monkeypatch.chdir(place)
    reader = Reader(name, monkeypatch, capsys, BEFORE.get(name, ""))
    for block in blocks(page):
        reader.follow(block)
    assert re.search(SEEN.get(name, ""), reader.shown), reader.shown
    if name == "docs/guides/after.md":
        by_hand = float(re.search(r"^(0\.\d+)$", reader.shown, re.MULTILINE)[1])
        first = (place / "scores.csv").read_text().splitlines()[1].split(",")
        assert abs(by_hand - float(first[2])) < 1e-5, "by hand from ONNX, as fedxl predict has it"
