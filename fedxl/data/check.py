"""What would make training on some data wrong, and what is worth a look before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedxl.data.examples import Digests, Examples, Splits, are_known, digests, not_finite
from fedxl.data.images import images_in, unreadable
from fedxl.data.sets.own import FolderOptions
from fedxl.data.tables.rawtable import Features, among_numbers, numbering
from fedxl.data.tables.roles import Keys, TableOptions
from fedxl.data.tables.table import feature_names, image_paths, open_files, read_rows
from fedxl.data.targets import quoted
from fedxl.errors import printable
from fedxl.sampling import Indices

FEW, SHOWN = 5, 3  # names and duplicates that a line lists
BLOCK = 1024  # examples that are looked at together
FEWEST = 5  # of a class; of fewer, some column has one value by chance
CHANCE = "probably by chance: {:.0%} of the training examples have a duplicate among them"


class Count(NamedTuple):
    """Examples of a site, in one split."""

    examples: int
    positives: int

    @property
    def one_class(self) -> bool:
        return self.positives in (0, self.examples)


@dataclass(frozen=True)
class Findings:
    """What was found. Problems must be mended before training; remarks are worth a look."""

    problems: Sequence[str] = ()
    remarks: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # missing values and the like, by name
    shape: tuple[int, ...] = ()  # of an example
    names: Sequence[str] = ()  # of the sites; empty: the data could not be read
    counts: Mapping[str, Count] = field(default_factory=lambda: {"train": Count(0, 0)})  # by split, training first
    by_site: Mapping[str, Sequence[Count]] = field(default_factory=dict)  # by split, where sites are known
    timed: bool = False  # whether positives are events

    def site_table(self, most: int) -> tuple[list[str], list[list[str]]]:
        """Columns and rows: examples of each site in each split, of all sites last. most: sites that are listed."""
        rows = []
        for at, name in enumerate(self.names[:most]):
            counts = [self.by_site[split][at] if split in self.by_site else None for split in self.counts]
            rows.append([printable(name, 40), *_cells(counts)])
        if (left := len(self.names) - most) > 0:
            rows.append([f"... and {left:,} more", *([""] * 2 * len(self.counts))])
        rows.append(["all", *_cells(self.counts.values())])
        positive = "events" if self.timed else "positive"
        return ["site", *(name for split in self.counts for name in (split, positive))], rows

    def to_json(self) -> dict[str, Any]:
        sites = [
            {"name": name, **{split: counts[at]._asdict() for split, counts in self.by_site.items()}}
            for at, name in enumerate(self.names)
        ]
        return {
            "shape": list(self.shape),
            "sites": sites,
            **{split: count._asdict() for split, count in self.counts.items()},
            **self.facts,
            "problems": list(self.problems),
            "remarks": list(self.remarks),
        }


def _cells(counts: Iterable[Count | None]) -> list[str]:
    """Examples and positives of each split, as far as they are known."""
    return [f"{number:,}" if each else "" for each in counts for number in each or ("", "")]


def check(splits: Splits, found: Findings = Findings(), whole: bool = True) -> Findings:
    """All that can be told from the data as training would get them, beside what was found in their files.

    whole: whether these are all data of the federation; one of its sites may hold one class only.
    """
    looked = _Data(splits)
    problems, remarks = [*found.problems, *looked.problems()], [*found.remarks, *looked.remarks()]
    (problems if whole else remarks).extend(looked.one_sided())
    for bad, line in looked.duplicates():
        (problems if bad else remarks).append(line)
    facts = {"constant_columns": looked.constant, "blank_images": looked.blank, **found.facts}
    return replace(looked.counted(), problems=problems, remarks=remarks, facts=facts)


def site_table(splits: Splits, most: int) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: examples of each site in each split, of all sites last. Nothing is looked for in the data."""
    return _Data(splits).counted().site_table(most)


def leak(splits: Splits) -> str:
    """A remark on columns that tell the label, as training begins; empty if there are none."""
    return _Data(splits).leak


class _Data:
    """Splits, and the questions that are asked of them."""

    def __init__(self, splits: Splits) -> None:
        self.train, self.held, self.preparation = splits.train, splits.held_back, splits.preparation
        self.names, self.timed = splits.names, splits.train.time is not None
        self.owners = np.repeat(np.arange(len(self.names)), [len(part) for part in splits.train.parts])

    def counted(self) -> Findings:
        """How many examples there are, and where."""
        splits = {"train": self.train, **self.held}
        counts = {name: _count(split.y) for name, split in splits.items()}
        by_site = {"train": [counts["train"]]}  # of one client
        by_site |= {name: self._by_site(split) for name, split in splits.items() if split.site is not None}
        return Findings(shape=self.train.shape, names=self.names, counts=counts, by_site=by_site, timed=self.timed)

    def _by_site(self, split: Examples) -> list[Count]:
        assert split.site is not None
        positive = split.site[(split.y > 0).any(1).numpy()]  # for any of their labels
        both = (np.bincount(sites, minlength=len(self.names)).tolist() for sites in (split.site, positive))
        return [Count(*counts) for counts in zip(*both, strict=True)]

    def one_sided(self) -> list[str]:
        """Classes that are not there. Of time to event, only events must be there."""
        whole, missing = _count(self.train.y), self._missing("validation")
        found = [
            (whole.positives == 0, f"no training example {'has an event' if self.timed else 'is positive'}"),
            (whole.positives == whole.examples and not self.timed, "no training example is negative"),
            (missing, f"validation holds {missing}, so it cannot choose a model"),
        ]
        return [line for so, line in found if so]

    def _missing(self, split: str) -> str:
        """What makes a split useless for metrics; empty if nothing does."""
        return self._lacks(_count(self.held[split].y)) if split in self.held else ""

    def _lacks(self, count: Count) -> str:
        if not count.one_class or (self.timed and count.positives):
            return ""
        return "no event" if self.timed else "one class only"

    def _missing_at_sites(self, split: str) -> str:
        """A remark on sites whose part of a split is useless for metrics, beside others whose is not."""
        held = self.held.get(split)
        if held is None or held.site is None or self._missing(split):
            return ""
        counts = zip(self.names, self._by_site(held), strict=True)
        found = [(printable(name, 40), count) for name, count in counts if count.examples and self._lacks(count)]
        if not found:
            return ""
        more = f" and {len(found) - FEW:,} more sites" if len(found) > FEW else ""
        lacks, named = self._lacks(found[0][1]), ", ".join(name for name, _ in found[:FEW])
        return f"{split} holds {lacks} at {named}{more}, so it cannot judge a model there"

    def problems(self) -> list[str]:
        wanted = self.train.shape
        wrong = sum(not_finite(block) for block in self._trained())
        found = [(wrong > 0, f"{wrong:,} training examples hold NaN or infinity")]
        for name, split in self.held.items():
            wrong = not_finite(split.x)
            told = f"{name} holds examples of shape {list(split.shape)}, training of {list(wanted)}"
            found += [(split.shape != wanted, told), (wrong > 0, f"{wrong:,} {name} examples hold NaN or infinity")]
        return [line for wrong, line in found if wrong]

    def remarks(self) -> list[str]:
        test, missing = self.held.get("test"), self._missing("test")
        columns = "column is" if len(self.constant) == 1 else "columns are"
        found = [
            ("validation" not in self.held, "no validation data: the last round is the result"),
            (test is None, "there are no test data"),
            (missing, f"test holds {missing}, so it cannot judge a model"),
            *((line := self._missing_at_sites(split), line) for split in self.held),
            (self.constant, f"{len(self.constant)} {columns} constant in training: {quoted(self.constant)}"),
            (self.leak, self.leak),
            (self.blank, f"{self.blank:,} training images have one colour"),
        ]
        return [line for so, line in found if so]

    def duplicates(self) -> list[tuple[bool, str]]:
        """Duplicates across splits or sites, as (is_error, message).

        Rows of a few coarse columns coincide by chance. They do so within training, too: only more duplicates of test
        examples than that are copies.
        """
        rows = {name: digests(self._blocks(each, torch.arange(len(each)))) for name, each in self.held.items()}
        rows["train"] = digests(self._trained())
        first = first_equal(rows["train"])
        share = float((np.bincount(first)[first] > 1).mean())
        found = []
        for one, other in (("test", "train"), ("validation", "train"), ("test", "validation")):
            if one not in rows or other not in rows:
                continue
            mine, theirs = also_in(rows[one], rows[other])
            if len(mine):
                chance = share * len(rows[one])
                copies = len(mine) > chance + 4 * math.sqrt(chance)
                line = f"{len(mine):,} of {len(rows[one]):,} {one} examples are in {other}, too"
                few = zip(mine[:SHOWN], theirs[:SHOWN], strict=True)
                pairs = ", ".join(f"{self._place(one, a)} = {self._place(other, b)}" for a, b in few)
                shown = pairs + (", ..." if len(mine) > SHOWN else "")
                line += f": {shown}" if copies else f"; {CHANCE.format(share)}"
                found.append((copies and (one, other) == ("test", "train"), line))
        at_sites = np.unique(np.stack([first, self.owners]), axis=1)  # each example once per site
        shared, within = int((np.bincount(at_sites[0]) > 1).sum()), len(first) - at_sites.shape[1]
        if shared:
            found.append((False, f"{shared:,} training examples are at more than one site"))
        if within:
            found.append((False, f"{within:,} training examples repeat another one of their own site"))
        return found

    @cached_property
    def constant(self) -> list[str]:
        """Columns that have one value in training."""
        if len(self.train.shape) != 1:
            return []
        low, high = self._extremes(self._rows)
        # A column of the table is several of the network's, of which some may well be constant.
        return self._columns((low == high).numpy(), np.all)

    @cached_property
    def leak(self) -> str:
        """A remark on columns with one value in all positive training examples, and another in all negative ones."""
        found: dict[str, None] = {}
        for label in self.train.y.T if len(self.train.shape) == 1 else ():
            sides = [self._rows[label[self._rows] == side] for side in (0, 1)]
            if min(map(len, sides)) >= FEWEST:
                (low, high), (lower, higher) = map(self._extremes, sides)
                equal = (low == high) & (lower == higher) & (low != lower)
                found |= dict.fromkeys(self._columns(equal.numpy(), np.any))
        telling = f"the label of every training example follows from {quoted(list(found))} alone"
        return f"{telling}; drop columns that are known only after the label" if found else ""

    def _extremes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each column in these examples."""
        each = [(block.amin(0), block.amax(0)) for block in self._blocks(self.train, rows)]
        low, high = (torch.stack(found) for found in zip(*each, strict=True))
        return low.amin(0), high.amax(0)

    def _columns(self, which: np.ndarray, enough: Callable[[np.ndarray], Any]) -> list[str]:
        """The names of columns of which enough of the network's are among these."""
        made = self.preparation
        if made is None:
            return [f"column {at}" for at in np.flatnonzero(which)]
        return [each.name for each, at in zip(made.columns, made.places(), strict=True) if enough(which[at])]

    @cached_property
    def blank(self) -> int:
        """Images in which all pixels are alike."""
        if len(self.train.shape) < 2:
            return 0
        return sum(int((block.flatten(1) == block.flatten(1)[:, :1]).all(1).sum()) for block in self._trained())

    def _trained(self) -> Iterator[Tensor]:
        """The examples that somebody trains on, some at a time, client by client."""
        return self._blocks(self.train, self._rows)

    @property
    def _rows(self) -> Tensor:
        return torch.from_numpy(np.concatenate(self.train.parts))

    def _blocks(self, examples: Examples, rows: Tensor) -> Iterator[Tensor]:
        """Examples as they are stored, if those of all splits are of one type."""
        stored = all(each.x.dtype == self.train.x.dtype for each in self.held.values())
        return (examples.x[block] if stored else examples.fetch(block) for block in rows.split(BLOCK))

    def _place(self, split: str, row: int) -> str:
        """What identifies an example for its owner."""
        if split == "train":
            owner = int(self.owners[row])
            at = row - int(np.searchsorted(self.owners, owner))
            return f"{printable(self.names[owner], 40)} #{at}"
        rows = self.held[split].row
        return f"row {printable(rows[row], 40)}" if rows else f"#{row}"


def first_equal(rows: Digests) -> Indices:
    """For each row, the first one that is equal to it: itself, if it is the first or the only one."""
    _, first, which = np.unique(rows, return_index=True, return_inverse=True)
    return np.asarray(first[which], np.int64)


def also_in(mine: Digests, theirs: Digests) -> tuple[Indices, Indices]:
    """(rows of the first, the first equal rows of the second)."""
    known, first = np.unique(theirs, return_index=True)
    found = np.flatnonzero(are_known(mine, known))
    return found, first[np.searchsorted(known, mine[found])]


def _count(labels: Tensor) -> Count:
    return Count(len(labels), int((labels > 0).any(1).sum()))


def inspect_table(path: str | tuple[str, ...], options: TableOptions = TableOptions()) -> Findings:
    """The settings are those of the data set `table`."""
    files = open_files(path, options)
    features = Features(files, [] if options.image else feature_names(files[0], options), options.categorical)
    keys, _, chunks = read_rows(features, options)
    problems, remarks = _groups(keys, options.group)
    if options.id:  # rows that predictions could not tell apart
        ids, name = keys.texts[options.id], f"column '{printable(options.id, 40)}', which identifies rows"
        again = len(ids) - ids.null_count - len(ids.drop_null().unique())
        counts = [(ids.null_count, "have nothing"), (again, "repeat another row")]
        remarks += [f"{count:,} of {len(ids):,} rows {what} in {name}" for count, what in counts if count]
    if options.image:
        damaged = unreadable(*image_paths(files, keys, options.image))
        return Findings([*problems, *damaged], remarks, {"unreadable_images": len(damaged)})
    each = (np.isnan(piece).sum(0) for piece in chunks.pieces if piece is not None)
    missing = sum(each, np.zeros(len(features.names), np.int64))
    if some := {name: count for name, count in zip(features.names, missing.tolist(), strict=True) if count}:
        few = [f"{printable(name, 40)} {count / len(keys.y):.1%}" for name, count in list(some.items())[:FEW]]
        more = f" and {len(some) - FEW} more columns" if len(some) > FEW else ""
        remarks.append(f"values are missing: {', '.join(few)}{more}; the preparation fills them in")
    for name, texts in features.index.items():
        if (text := among_numbers(list(texts))) and name not in options.categorical:
            told = f"column '{printable(name, 40)}' holds numbers, but also '{printable(text, 40)}'"
            remarks.append(f"{told}: all of it counts as categories; correct it, or name it in categorical")
    numbered = numbering(features.names, features.texts, chunks)
    remarks += [f"column '{printable(name, 40)}' {told}" for name, told in numbered.items()]
    return Findings(problems, remarks, {"missing_values": some})


def inspect_folder(path: str, options: FolderOptions = FolderOptions()) -> Findings:
    """The settings are those of the data set `folder`."""
    damaged = unreadable(Path(path), images_in(Path(path)))
    return Findings(damaged, [], {"unreadable_images": len(damaged)})


def _groups(keys: Keys, column: str) -> tuple[list[str], list[str]]:
    """Groups in two splits, which only a column of splits can bring about, and groups at two sites."""
    if not column:
        return [], []
    assert keys.groups is not None
    name = f"of column '{printable(column, 40)}'"
    problems, remarks = [], []
    if keys.splits is not None and (crossing := _torn(keys.groups, keys.splits)):
        rows = " and ".join(f"{row + 1:,}" for row in crossing[0])
        problems.append(f"{len(crossing):,} groups {name} are in two splits, for example rows {rows}")
    if torn := _torn(keys.groups, keys.sites):
        remarks.append(f"{len(torn):,} groups {name} are at two sites")
    return problems, remarks


def _torn(groups: np.ndarray, places: np.ndarray) -> list[tuple[int, int]]:
    """Two rows in different places of each group that has such."""
    _, first, owner = np.unique(groups, return_index=True, return_inverse=True)
    other = np.flatnonzero(places != places[first[owner]])
    _, once = np.unique(groups[other], return_index=True)
    return [(int(first[owner[row]]), int(row)) for row in other[once]]
