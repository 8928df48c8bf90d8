"""Chooses a folder for what a command writes, such that nothing but an older result of the same is overwritten."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedray.errors import UserError


@dataclass(frozen=True)
class Result:
    """What is written into a folder: its ``kind`` in a word, such as comparison, and the JSON file ``mark`` that says
    what it is by the keys and values of ``identity``."""

    kind: str
    mark: str
    identity: Mapping[str, Any]

    def folder_for(self, wanted: Path) -> Path:
        """Returns ``wanted``, or the first of wanted-2, wanted-3, ... that is not there yet, or holds the same."""
        numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
        return next(each for each in itertools.chain([wanted], numbered) if not each.exists() or self._lies_in(each))

    def check(self, folder: Path) -> None:
        """Raises :class:`UserError` if something else is in ``folder``."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not self._lies_in(folder):
            raise UserError(f"{folder} holds something else than this {self.kind}: name another folder by --output")

    def _lies_in(self, folder: Path) -> bool:
        try:
            recorded = json.loads((folder / self.mark).read_text())
            return all(recorded[key] == value for key, value in json.loads(json.dumps(self.identity)).items())
        except (OSError, ValueError, TypeError, KeyError):
            return False
