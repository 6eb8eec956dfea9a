"""The rules that checks are made of. Those over columns are a few vector operations. All raise CodecError."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from proto.errors import CodecError
from proto.messages import Int32, Int64

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_NAME = 256  # characters of ids and names


def largest(column: NDArray[Any]) -> Any:
    """The largest entry of a column that has one; NaN if any is. (The search costs a third of a reduction.)"""
    return column.item(column.argmax())


def smallest(column: NDArray[Any]) -> Any:
    """The smallest entry of a column that has one; NaN if any is."""
    return column.item(column.argmin())


def check_range(record: Any, low: float, high: float, *names: str) -> None:
    """The named scalars are in [low, high]."""
    for name in names:
        value = getattr(record, name)
        if not low <= value <= high:
            raise CodecError(name, f"must be {low} to {high}, not {value}")


def check_names(record: Any, *names: str, shortest: int = 1) -> None:
    """The named texts have `shortest` to MAX_NAME characters."""
    for name in names:
        value = getattr(record, name)
        if not shortest <= len(value) <= MAX_NAME:
            raise CodecError(name, f"must have {shortest} to {MAX_NAME} characters, not {len(value)}")


def check_handles(sequences: Int64, least: int = 0) -> None:
    """Sequence handles are > 0, at least `least` of them."""
    if len(sequences) < least:
        raise CodecError("sequences", f"must name at least {least} sequence(s)")
    if len(sequences) and smallest(sequences) < 1:
        raise CodecError("sequences", f"must all be at least 1, not {smallest(sequences)}")


def check_ids(record: Any, *names: str) -> None:
    """The named tuples hold token ids."""
    for name in names:
        ids = getattr(record, name)
        if ids and not (min(ids) >= 0 and max(ids) <= INT32_MAX):
            raise CodecError(name, f"must hold ids from 0 to {INT32_MAX}, not {min(ids)} to {max(ids)}")


def check_lengths(record: Any, first: str, *others: str) -> None:
    """The named columns are as long as the first."""
    length = len(getattr(record, first))
    for name in others:
        if len(getattr(record, name)) != length:
            found = len(getattr(record, name))
            raise CodecError(name, f"must have as many entries as {first}, {length}, not {found}")


def check_counts(counts: Int32, flat: NDArray[Any], name: str) -> None:
    """The flat column `name` holds as many entries as the counts (>= 0) say."""
    # Zeros and ones, as in most steps, are counted in a quarter of the time of a sum.
    few = not len(counts) or largest(counts) <= 1
    told = int(np.count_nonzero(counts) if few else np.add.reduce(counts))
    if told != len(flat):
        raise CodecError(name, f"must have {told} entries, the sum of its counts, not {len(flat)}")


def check_no_negatives(record: Any, *names: str) -> None:
    """The named columns have no negative entry."""
    for name in names:
        column = getattr(record, name)
        if len(column) and smallest(column) < 0:
            raise CodecError(name, f"must not be negative, not {smallest(column)}")
