"""Execute the notebooks of examples/ in place, as `make notebooks` does: what they show is what this version says."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


def execute(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.clear()
    NotebookClient(notebook, timeout=1800, record_timing=False, resources={"metadata": {"path": EXAMPLES}}).execute()
    notebook.metadata.language_info = {"name": "python"}  # without the version that it happened to be
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(EXAMPLES.glob("*.ipynb")):
        execute(path)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
