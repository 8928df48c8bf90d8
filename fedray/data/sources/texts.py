"""Turns columns of texts into tokens, by a tokenizer of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from fedray.errors import UserError, first_sentence
from fedray.usercode.importing import as_user_error
from fedray.util.files import in_home

INSTALL = "pip install 'fedray[transformers]'"


def texts_among(dataset: Any, columns: Sequence[str]) -> list[str]:
    """Returns those of the ``columns`` of a Hugging Face Dataset that hold texts."""
    schema = dataset.select_columns(list(columns)).with_format("arrow")[:1].schema
    return [each.name for each in schema if pa.types.is_string(each.type) or pa.types.is_large_string(each.type)]


def tokenized(
    sets: Mapping[str, Any], texts: Sequence[str], tokenizer: str, length: int
) -> tuple[dict[str, Any], list[str]]:
    """Returns Hugging Face Datasets with tokens in place of their columns ``texts``, and the names of the new columns,
    such as ``input_ids`` and ``attention_mask``. Two columns are a pair of texts, of which the second follows the
    first. Each row has ``length`` tokens: longer texts are cut, and shorter ones are padded.

    ``tokenizer`` is a folder of ``save_pretrained``, or a name on the hub. Raises :class:`UserError` if it can't be
    used, or there are more than two columns of texts.
    """
    if len(texts) > 2:
        raise UserError(f"data.tokenizer takes one column of texts or a pair of them, not {', '.join(texts)}")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError(f"data.tokenizer needs the library transformers: {INSTALL}") from None
    folder = in_home(tokenizer)
    try:
        chosen = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else tokenizer, trust_remote_code=False)
    except Exception as error:  # transformers passes on the errors of the libraries that it uses
        raise UserError(f"data.tokenizer={tokenizer} can't be loaded: {first_sentence(error)}") from None
    if chosen.pad_token is None:
        chosen.pad_token = chosen.eos_token
    if chosen.pad_token is None:
        raise UserError(f"data.tokenizer={tokenizer} has neither a token for padding nor one for the end of a text")

    def tokens_of(rows: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        given = [list(rows[name]) for name in texts]
        for name, column in zip(texts, given, strict=True):
            if None in column:
                raise UserError(f"column {name!r} has a row without a text")
        return dict(chosen(*given, padding="max_length", truncation=True, max_length=length))

    made = {}
    for part, dataset in sets.items():
        if lacking := [name for name in texts if name not in dataset.column_names]:
            raise UserError(f"the set {part!r} lacks column {lacking[0]!r}, whose texts become tokens")
        with as_user_error(f"data.tokenizer={tokenizer} failed"):
            made[part] = dataset.with_format(None).map(
                tokens_of, batched=True, remove_columns=list(texts), keep_in_memory=True, load_from_cache_file=False
            )
    before = next(iter(sets.values())).column_names
    new = [name for name in next(iter(made.values())).column_names if name not in before]
    return made, new
