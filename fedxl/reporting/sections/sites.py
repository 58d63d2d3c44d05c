"""One row per site: how many examples it has, and how well the model does there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedxl.evaluation.assess import Assessment
from fedxl.evaluation.intervals import Interval
from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.scale import Axis, ticks_in
from fedxl.reporting.page import (
    Cell,
    Column,
    Row,
    Section,
    Table,
    columns,
    figure_of,
    interval_cell,
    interval_text,
    left_out,
    listed,
    metric_name,
    shown,
)
from fedxl.reporting.study import Study
from fedxl.training.run_folder import Run

MOST = 300  # rows; a page of thousands of sites helps nobody
MOST_COLUMNS = 20  # labels in the table of sites
UNLISTED = "sites are not listed"
MEAN = "mean of the labels"
SEVERAL = " Metrics are means over labels. Training rows count as positive or negative if any of their labels is."
Members = Mapping[str, tuple[int, int]]


def section(it: Study) -> Section:
    """From scores where there are any; else from what sites told themselves, else the training data alone."""
    run, found = it.focus.shown, it.found
    trained: Members = {member.name: (member.positives, member.negatives) for member in run.members}
    if found is not None and found.sites:
        table, left = _labels_at_sites(it, found) if found.several else _from_scores(it, found, trained)
        left = [*_absent(run, found.split, [name for name in trained if name not in found.sites]), *left]
        left += left_out(len(found.sites), MOST, UNLISTED)
    elif told := _told(run):
        table, left = _from_told(it, told, trained)
    elif trained:
        rows = [Row.of(shown(name, 60), _counts(held, run)) for name, held in list(trained.items())[:MOST]]
        caption = "Who took part." + (SEVERAL if run.labels else "")
        table = Table(caption, columns("site", f"training: {_counted(run)}"), rows)
        unknown = "their held-back examples do not say which site they are from"
        why = unknown if found else "there are no scores by site"
        left = [*left_out(len(trained), MOST, UNLISTED), f"no metrics by site: {why}"]
    else:
        return Section("sites", "Sites", missing=["the run did not record who took part"])
    return Section("sites", "Sites", tables=[table], missing=left)


def _from_scores(it: Study, found: Assessment, trained: Members) -> tuple[Table, list[str]]:
    run, pooled = it.focus.shown, found.pooled.one
    each = [pooled, *(site.one for site in found.sites.values())]
    names = [name for name in it.names if all(name in part.metrics for part in each)]
    everyone = (sum(held[0] for held in trained.values()), sum(held[1] for held in trained.values()))
    sites = [("all sites", everyone if trained else None, pooled)]
    sites += [(shown(name, 60), trained.get(name), site.one) for name, site in list(found.sites.items())[:MOST]]
    parts = []
    for name, held, site in sites:
        parts.append(([name, _counts(held, run), _counts((site.positives, site.negatives), run)], site.metrics))
    caption = (
        f"{it.focus.title} at each site, {found.split} data, with 95 % intervals; the vertical line is the pooled "
        f"value. Intervals of sites with few {'events' if it.timed else 'positives'} are wide."
    )
    heads = columns("site", f"training: {_counted(run)}", f"{found.split}: {_counted(run)}")
    one_class = [n for n, site in found.sites.items() if not math.isfinite(site.one.metrics[names[0]].value)]
    unknown = listed([shown(name, 40) for name in one_class])
    why = "no two examples can be compared" if it.timed else "one class only"
    notes = [f"{why} in the {found.split} data of {unknown}: no metric there"] if one_class else []
    return metric_table(caption, heads, parts, names, it.key), notes


def _labels_at_sites(it: Study, found: Assessment) -> tuple[Table, list[str]]:
    """AUROC of several labels."""
    labels = list(found.pooled.labels)[:MOST_COLUMNS]
    total = sum(site.examples for site in found.sites.values())
    parts = [("all sites", total, found.pooled)]
    parts += [(shown(name, 60), site.examples, site) for name, site in list(found.sites.items())[:MOST]]
    rows = []
    for name, count, site in parts:
        own = {label: part.metrics["auroc"] for label, part in site.labels.items()}
        each = [site.mean["auroc"], *(own.get(label) for label in labels)]
        rows.append(Row.of(name, f"{count:,}", *map(interval_cell, each), focus=site is found.pooled))
    caption = (
        f"AUROC of {it.focus.title} at each site, {found.split} data, with 95 % intervals: the mean over the labels "
        "that have both classes there, and each label."
    )
    notes = left_out(len(found.pooled.labels), MOST_COLUMNS, "labels are not in this table")
    return Table(caption, columns("site", f"{found.split}: n", MEAN, *(shown(n, 40) for n in labels)), rows), notes


def _counts(found: tuple[int, int] | None, run: Run) -> str:
    """Positives of all; of several labels a row may be both positive and negative, and there is no sum."""
    if found is None:
        return "–"
    return f"{found[0]:,} and {found[1]:,}" if run.labels else f"{found[0]:,} of {sum(found):,}"


def _counted(run: Run) -> str:
    return "positives and negatives" if run.labels else "events of n" if run.timed else "positives of n"


def _told(run: Run) -> Mapping[str, Any]:
    """What sites said of themselves, of the test data or else of the validation data of the chosen round."""
    return run.told("test") or run.told("validation")


def _absent(run: Run, split: str, names: Sequence[str]) -> list[str]:
    """Why there are no scores of these sites, by what they said, and which labels others withhold."""
    reasons = {name: why for name, why in run.told(split).items() if isinstance(why, str)}
    unknown = [shown(name, 40) for name in names if name not in reasons]
    lines = [f"no {split} data from {listed(unknown)}"] if unknown else []
    lines += [f"{shown(name, 60)}: {shown(reasons[name])}" for name in names if name in reasons]
    row = (run.done if split == "test" else run.shown) or {}
    withheld = row.get(f"{split}_withheld")
    withheld = withheld if isinstance(withheld, Mapping) else {}
    each = [(site, *told) for site, all in withheld.items() if isinstance(all, Mapping) for told in all.items()]
    return lines + [f"{shown(site, 60)} withholds {shown(label, 40)}: {shown(why)}" for site, label, why in each]


def _from_told(it: Study, told: Mapping[str, Any], trained: Members) -> tuple[Table, list[str]]:
    run, rows, notes = it.focus.shown, [], []
    for name, found in list(told.items())[:MOST]:
        if isinstance(found, str):
            notes.append(f"{shown(name, 60)}: {shown(found)}")
            continue
        counts = [found.get(each) for each in ("positives", "negatives")]
        held = _counts(None if None in counts else (int(counts[0]), int(counts[1])), run)
        values = [figure_of(found.get(each)) for each in it.names]
        rows.append(Row.of(shown(name, 60), _counts(trained.get(name), run), held, *values))
    counted = _counted(run)
    heads = columns("site", f"training: {counted}", f"measured on: {counted}", *map(metric_name, it.names))
    caption = f"What sites disclosed of {it.focus.title}: metrics without scores have no intervals."
    return Table(caption + (SEVERAL if run.labels else ""), heads, rows), notes + left_out(len(told), MOST, UNLISTED)


def metric_table(
    caption: str,
    heads: Sequence[Column],
    parts: Sequence[tuple[Sequence[str], Mapping[str, Interval]]],
    names: Sequence[str],
    key: Key,
) -> Table:
    """Metrics with intervals, the first also as a picture whose vertical line is at the first row's value.

    The pictures share their axis: from the lowest end, but not below chance, to 1.
    """
    first = names[0]
    every = [metrics[first] for _, metrics in parts]
    lows = [value for found in every for value in (found.value, found.low) if math.isfinite(value)]
    low = math.floor(min([0.9, *(max(value, 0.0) for value in lows)]) * 10) / 10
    axis = Axis("", low, 1.0, (low, 1.0) if low > 0 else ticks_in(0.0, 1.0, 1))
    rows = []
    for number, ((cells, metrics), found) in enumerate(zip(parts, every, strict=True)):
        title, line = f"{metric_name(first)} {interval_text(found)}", every[0].value
        known = math.isfinite(found.value)
        picture = Cell(svg=pictures.dot_and_interval(found, axis, line, key, title) if known else None)
        rows.append(Row.of(*cells, picture, *(interval_cell(metrics[name]) for name in names), focus=number == 0))
    dots = Column(f"{metric_name(first)}, {axis.texts()[0]} to {axis.texts()[-1]}", numeric=False)
    return Table(caption, [*heads, dots, *(Column(metric_name(name)) for name in names)], rows)
