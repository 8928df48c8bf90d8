"""Has gradients compiled: once on a machine, for all of its processes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from filelock import FileLock

from fedray.core.compiled import GIVEN_FOLDER
from fedray.data.find import cache_folder
from fedray.engine.process import describe
from fedray.errors import UserError, first_sentence


@contextlib.contextmanager
def compiling(threads: int) -> Iterator[None]:
    """A context in which functions are compiled for ``threads`` threads. One process of a machine does it at a time, so
    that the others find what the first has made.

    Raises :class:`UserError` if the compiler fails.
    """
    import torch._inductor.config as inductor

    # it would tell every user of a CPU that there is no GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    folder = Path(GIVEN_FOLDER or cache_folder() / "compiled" / _kind())
    folder.mkdir(parents=True, exist_ok=True)
    # a pool of compiling processes would take longer to start than they save
    settings = {"compile_threads": 1, "cpp.threads": threads, "fx_graph_cache": True}
    with (
        FileLock(folder / ".lock"),
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(folder)}),
        inductor.patch(settings),
    ):
        try:
            yield
        except Exception as error:
            raise UserError(
                f"gradients can't be compiled here, {type(error).__name__}: {first_sentence(error)}; use "
                "engine.compile=false"
            ) from error


def _kind() -> str:
    """Returns a name for machines that can share what was compiled."""
    here = describe("cpu")
    return re.sub(r"\W+", "-", f"{here['torch']} {here['device']} {here['instructions']}").strip("-").lower()
