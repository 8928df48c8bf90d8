"""Keeps the URI of a sweep up to date while it runs, if ``tune.output`` is one, and downloads a sweep for reports.

The driver, the process that the user started, sends what it writes itself, such as the study, which records all trials.
The runs of trials, which may be on other nodes, send their own folders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from fedray.config import load
from fedray.remote.fetching import fetch_new, fetched, fetched_place
from fedray.remote.mirror import Mirror, mirrored
from fedray.tuning.spec import SweepSpec


@contextlib.contextmanager
def mirrored_sweep(spec: SweepSpec, say: Callable[[str], None]) -> Iterator[Mirror]:
    """A context that keeps the URI of a sweep up to date while the sweep runs. ``spec`` describes the sweep; its
    ``tune.output`` must be a URI. Until the context ends, changed files in the sweep's folder on this machine are sent
    to the URI, except those of trials' runs, which the runs send themselves. The context yields the :class:`Mirror`,
    which sends the files in a thread.

    At the beginning, unless ``tune.resume`` is false, what is at the URI is downloaded into the folder if it is newer
    than the folder's content, and so are runs of trials that this machine does not have. ``say`` shows a line to the
    user. Raises :class:`UserError` if the storage can't be used.
    """
    assert spec.uri is not None
    is_new = spec.tune.resume is False
    with mirrored(spec.uri, spec.folder, load(spec.base).run.output_timeout, say, anew=is_new) as mirror:
        if not is_new:
            fetch_new(spec.uri, spec.folder)
        yield mirror


def fetched_sweep(spec: SweepSpec) -> SweepSpec:
    """Downloads a sweep whose ``tune.output`` is a URI into the user's cache, for a report. Returns ``spec`` with the
    downloaded folder as the sweep's folder. A sweep without a URI is returned as it is."""
    if spec.uri is None:
        return spec
    fetched(spec.uri)
    place = {"output": str(fetched_place(spec.tune.output)), "working_copy": None}
    return replace(spec, tune=spec.tune.model_copy(update=place))
