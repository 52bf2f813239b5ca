"""Documents of Parquet files, some rows at a time. Needs pyarrow (the extra ``data``)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparda_jax.train.errors import TrainingError
from sparda_jax.train.mds import IDS, INDICES, TEXT, check_bounds

# Rows that are in memory at a time, besides what pyarrow holds of a row group.
_ROWS = 64


def read_rows(file: Path) -> Iterator[tuple[int, int, str | list[np.ndarray]]]:
    """Each row's number, from 0, how many rows there are, and the row.

    A row is the text of the column ``text``, or the documents of ``input_ids``. ``text`` comes first where both exist:
    it fits any tokenizer. With a column ``indices``, pairs of begin and end, a row of ids is several documents. A null
    is empty.

    Raises:
        TrainingError: pyarrow is not installed; the file is damaged or has neither column; a row is no such list.
    """
    try:
        import pyarrow
        from pyarrow import parquet, types
    except ImportError as error:
        raise TrainingError(
            f"{file} needs pyarrow, which is not installed: pip install pyarrow, or convert it to JSON lines"
        ) from error
    try:
        with parquet.ParquetFile(file, memory_map=True) as table:
            schema = table.schema_arrow
            by_name = {field.name: field.type for field in schema}
            if len(by_name) < len(schema.names):
                raise TrainingError(f"{file} has several columns of one name; write it anew with names that differ")
            text, ids = by_name.get(TEXT), by_name.get(IDS)
            columns = [TEXT]
            if text is None or not (types.is_string(text) or types.is_large_string(text)):
                if ids is None or not _is_list_of_integers(types, ids):
                    described = ", ".join(f"{name} ({kind})" for name, kind in by_name.items())
                    raise TrainingError(
                        f"{file} needs a column {TEXT} (string) or {IDS} (list of integers); it has {described}"
                    )
                columns = [name for name in (IDS, INDICES) if name in by_name]
            number = 0
            for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
                for values in zip(*(batch.column(name) for name in columns), strict=True):
                    place = f"{file}, row {number}"
                    row = (values[0].as_py() or "") if columns == [TEXT] else _documents(place, *values)
                    yield number, table.metadata.num_rows, row
                    number += 1
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise TrainingError(f"{file} can't be read ({error}); fetch or write it again") from error


def _is_list_of_integers(types: Any, kind: Any) -> bool:
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and types.is_integer(kind.value_type)


def _documents(place: str, ids: Any, indices: Any = None) -> list[np.ndarray]:
    if not ids.is_valid:
        return []
    if ids.values.null_count:
        raise TrainingError(f"{place}: {IDS} holds nulls; only numbers are ids")
    tokens = ids.values.to_numpy(zero_copy_only=False)
    if indices is None or not indices.is_valid:
        return [tokens]
    try:
        pairs = check_bounds(np.asarray(indices.as_py(), np.int64), len(tokens))
    except (ValueError, TypeError, OverflowError) as error:
        raise TrainingError(f"{place}: {INDICES} is no list of pairs of numbers ({error})") from error
    if pairs is None:
        raise TrainingError(f"{place} has {len(tokens)} tokens, which its {INDICES} do not divide")
    return [tokens[a:b] for a, b in pairs]
