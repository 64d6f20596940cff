"""Rows of a query with a model's predictions, for R's `augment_sql`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pybackend.job.options import ColumnEncoding
from pybackend.sql.compile import DIALECTS, answer, ask
from pybackend.sql.connections import connect
from pybackend.sql.deploy import check_listed, look_up_types
from pybackend.sql.query import SourceQuery, WeightsPart, list_columns


def augment(
    con: Any,
    model: Any,
    query: str,
    key: Sequence[str],
    *,
    columns: Sequence[str],
    features: Any,
    type: str | None,
    levels: Sequence[str] | None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    encode: Mapping[str, ColumnEncoding] | None = None,
) -> str:
    """Return SQL for a query's rows with a model's predictions, without running it.

    The weights are written to a temporary table, once for each model and connection.

    Parameters
    ----------
    con, model, features, type, levels, categories, encode
        As in `deploy_model`.
    query, columns
        SQL of the rows, and its columns.
    key
        Columns of the query that the result has in addition to the predictions.
    """
    database = connect(con)
    question = ask(
        model,
        database.dialect,
        SourceQuery(query),
        key,
        features=features,
        type=type,
        levels=levels,
        categories=categories,
        encode=encode,
    )
    check_listed("features", list_columns(question.features), columns, "the query")
    with database.transaction():
        question = look_up_types(database, question)
        parts = answer(database.dialect, question, database.has_vectors).parts
        weights = f"tfdist_weights_{_hash(parts)}"
        database.keep_weights(DIALECTS[database.dialect].quote(weights), parts)
        question = replace(question, weights=weights)
        return answer(database.dialect, question, database.has_vectors).query


def _hash(parts: Sequence[WeightsPart]) -> str:
    """Return a hash of the weights and their layout."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.name} {part.numbers.shape} {part.is_kernel}".encode())
        digest.update(part.numbers.tobytes())
    return digest.hexdigest()[:24]
