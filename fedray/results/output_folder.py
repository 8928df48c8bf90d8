"""Chooses a folder for the output of a command. Only an older result of the same kind and content is overwritten."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedray.errors import UserError


@dataclass(frozen=True)
class Output:
    """Describes the output of a command, such as a comparison, and chooses the folder for it, so that no other files
    are overwritten.

    ``kind`` is a word for messages, such as "comparison". ``mark`` is the name of a JSON file that every output folder
    of this kind contains, such as ``comparison.json``. ``identity`` has the values that decide what the output is
    about, by name, such as the arguments of the comparison. A folder holds an older result of the same kind and content
    if its JSON file has all keys of ``identity``, with the same values.
    """

    kind: str
    mark: str
    identity: Mapping[str, Any]

    def folder_for(self, wanted: Path) -> Path:
        """Returns a folder into which the result can be written: the first of ``wanted``, wanted-2, wanted-3, ... that
        does not exist, or that holds an older result of the same kind and content."""
        numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
        return next(each for each in itertools.chain([wanted], numbered) if not each.exists() or self._lies_in(each))

    def check(self, folder: Path) -> None:
        """Checks that the result may be written into ``folder``. Raises :class:`UserError` if the folder contains
        anything other than an older result of the same kind and content."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not self._lies_in(folder):
            raise UserError(f"{folder} holds something else than this {self.kind}: name another folder by --output")

    def _lies_in(self, folder: Path) -> bool:
        try:
            recorded = json.loads((folder / self.mark).read_text())
            return all(recorded[key] == value for key, value in json.loads(json.dumps(self.identity)).items())
        except (OSError, ValueError, TypeError, KeyError):
            return False
