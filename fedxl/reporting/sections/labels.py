"""Several labels: each label's AUROC, and their mean, with intervals."""

from __future__ import annotations

from collections.abc import Sequence

from fedxl.evaluation.label_table import LabelRow, label_table
from fedxl.reporting.groups import Group
from fedxl.reporting.page import Cell, Column, Row, Section, Table, between, figure_of, shown


def sections(focus: Group) -> Sequence[Section]:
    """One section, if the run that is looked at closely has several labels."""
    run = focus.shown
    found = run.by_label.get(run.split)
    if found is None:
        return []
    rows = label_table(found)
    caption = f"AUROC on {run.split} data, with 95 % intervals: DeLong's for a label, a bootstrap's for the mean."
    columns = [Column("label", numeric=False), *(Column(name) for name in ("positives", "negatives", "AUROC"))]
    return [Section("labels", "Labels", tables=[Table(caption, columns, [Row(_cells(row)) for row in rows])])]


def _cells(row: LabelRow) -> list[Cell]:
    value = Cell(figure_of(row.auroc.value), between(row.auroc.low, row.auroc.high))
    return [Cell(shown(row.name, 60)), Cell(f"{row.positives:,}"), Cell(f"{row.negatives:,}"), value]
