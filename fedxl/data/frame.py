"""One data frame, or one for each site, as a federation: what the data set `table` does for files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from fedxl.data.feature_forms import is_frame
from fedxl.data.federation import Splits
from fedxl.data.label_forms import Label
from fedxl.data.preparation import Preparation, Rows
from fedxl.data.table import TableOptions, table
from fedxl.errors import UserError, first_line, kind_of, printable, require
from fedxl.risks.several import label_names

R = TypeVar("R")
SITE = "site"  # the column that names the sites of several data frames


def from_frame(
    frame: Any,
    *,
    label: str | Sequence[str],
    positive: Label | None = None,
    site: str = "",
    split: str = "",
    group: str = "",
    query: str = "",
    id: str = "",
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    rare: int = 5,
    validation: float = 0.2,
    test: float = 0.2,
    seed: int = 0,
) -> Splits:
    """The sites of a data frame with numbers and categories, and what is held back of each: what `fit` takes.

    Numbers are standardised, and missing ones replaced by the mean, with a column that says so; each category that is
    not rare gets a column. Both are fitted on the training data alone, and kept with the model of a run.

    Args:
        frame: A data frame of pandas or polars, an arrow table, or a dict of them by the sites' names.
        label: The column to predict, which has two values; or several columns, with the same two values in all, and
            nothing where a label is not known.
        positive: The value that counts as positive; not needed for 0 and 1, or booleans.
        site: The column that names the site, unless there is one data frame a site.
        split: The column that says train, validation or test; without it, they are drawn.
        group: The column of patients or the like: a group is never in two splits that are drawn.
        query: The column that names the query of an item. Then labels are grades of relevance, and splits are drawn
            query by query.
        id: The column that identifies a row in predictions; without it, its number.
        columns: What to learn from; all columns that have no other meaning if none is named.
        drop: Columns to leave out.
        categorical: Columns of numbers that are codes: categories, not amounts.
        rare: What a site has fewer times is not told of it: such categories count as "other".
        validation: The share of rows to validate on, if splits are drawn.
        test: The share of rows to test on, if splits are drawn.
        seed: Of the draws.
    """
    _require_pyarrow()
    for name, given in (("columns", columns), ("drop", drop), ("categorical", categorical)):
        right = isinstance(given, (list, tuple)) and all(isinstance(one, str) for one in given)
        require(right, f"{name} must be a list of columns' names, such as ['age'], not {kind_of(given)}")
    rows, site = _one_table(frame, site)
    named = label if isinstance(label, str) else label_names(label)
    options = TableOptions(
        positive=positive, site=site, split=split, group=group, query=query, id=id, columns=tuple(columns),
        drop=tuple(drop), categorical=tuple(categorical), rare=rare, validation=validation, test=test, seed=seed,
    )  # fmt: skip
    return _through_a_file(rows, lambda path: table(str(path), named, options))


def prepared(frame: Any, preparation: Preparation) -> Rows:
    """New rows of a data frame, prepared as those of the run were."""
    _require_pyarrow()
    return _through_a_file(_arrow(frame, "x"), preparation.read)


def _through_a_file(rows: Any, read: Callable[[Path], R]) -> R:
    """What `read` makes of these rows: one definition of what a table is, for files and for memory."""
    import pyarrow as pa
    from pyarrow import parquet

    with TemporaryDirectory(prefix="fedxl-") as folder:
        path = Path(folder) / "frame.parquet"
        try:
            parquet.write_table(rows, path, compression="none")
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"the data frame cannot be read: {printable(first_line(error))}") from None
        try:
            return read(path)
        except UserError as error:
            raise UserError(str(error).replace(str(path), "the data frame")) from None


def _one_table(frame: Any, site: str) -> tuple[Any, str]:
    """All rows, and the column that names their site."""
    import pyarrow as pa

    if not isinstance(frame, Mapping):
        require(bool(site), "site must name the column with the sites; or give a dict of data frames by site")
        return _arrow(frame, "frame"), site
    require(not site, "site is for one data frame; of a dict, the names are the sites")
    require(len(frame) > 0, "a federation needs at least one site, and the dict of data frames is empty")
    tables = {str(name): _arrow(one, f"'{printable(name, 40)}'") for name, one in frame.items()}
    taken = {name for one in tables.values() for name in one.column_names}
    column = SITE
    while column in taken:
        column = f"{column}_"
    for name, one in tables.items():
        lacking = sorted(taken - set(one.column_names))
        require(not lacking, f"'{printable(name, 40)}' lacks the column '{printable(''.join(lacking[:1]), 40)}'")
    named = [one.append_column(column, pa.array([name] * len(one))) for name, one in tables.items()]
    try:
        return pa.concat_tables(named, promote_options="permissive"), column
    except pa.ArrowException as error:
        raise UserError(f"the data frames differ in a column: {printable(first_line(error))}") from None


def _arrow(frame: Any, what: str) -> Any:
    """A data frame as a table of arrow's, without its index."""
    import pyarrow as pa

    if isinstance(frame, pa.Table):
        return frame
    require(is_frame(frame), f"{what} must be a data frame, not {kind_of(frame)}")
    try:
        if hasattr(frame, "to_arrow"):  # of polars
            return frame.to_arrow()
        return pa.Table.from_pandas(frame.rename(columns=str), preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{what} cannot be read: {printable(first_line(error))}") from None


def _require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError("a data frame that is to be prepared needs pyarrow; pip install 'fedxl[table]'") from None
