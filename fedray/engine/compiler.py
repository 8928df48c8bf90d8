"""Lets torch compile gradients, only once on each machine for all processes there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from fedray.engine.process import describe
from fedray.errors import UserError, first_sentence
from fedray.gradients.compiled import USER_FOLDER
from fedray.util.cache import cache_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable that tells torch's compiler in which folder to keep compiled code."""


@contextlib.contextmanager
def compiling(threads: int) -> Iterator[None]:
    """A context in which torch may compile functions, such as gradients, for ``threads`` CPU threads. Only one process
    of a machine is in this context at a time, so that the other processes find the compiled code in a cache on disk.

    Raises :class:`UserError` if the compiler fails.
    """
    import torch._inductor.config as inductor

    # this logger would tell every user of a CPU that there is no GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    folder = Path(USER_FOLDER or cache_folder() / "compiled" / _kind())
    # a pool of compiling processes would take longer to start than they save
    settings = {"compile_threads": 1, "cpp.threads": threads, "fx_graph_cache": True}
    if hasattr(inductor, "deterministic"):
        # kernels must not be chosen by their speed on this machine
        settings["deterministic"] = True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"), _cached_in(folder), inductor.patch(settings):
            yield
    except Exception as error:
        raise UserError(
            f"gradients can't be compiled here, {type(error).__name__}: {first_sentence(error)}; use "
            f"engine.compile=false in a new run (what is compiled is kept in {folder}, or in $TORCHINDUCTOR_CACHE_DIR)"
        ) from error


@contextlib.contextmanager
def _cached_in(folder: Path) -> Iterator[None]:
    """A context in which torch keeps compiled code in ``folder``. It changes only the environment variable for this,
    because other threads may read other variables."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _kind() -> str:
    """Returns the name of the cache's folder, which is the same on all machines that can share compiled code: the torch
    version, the CPU and its instruction set."""
    here = describe("cpu")
    return re.sub(r"\W+", "-", f"{here['torch']} {here['device']} {here['instructions']}").strip("-").lower()
