"""Sweeps whose ``tune.output`` is a URI: keeps it up to date while they run, and brings it here for reports.

The driver sends what it writes itself, such as the study. The runs of trials, which may be on other nodes, send their
own folders.
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
    """A context in which the URI of the sweep ``spec`` is kept up to date. At its beginning the sweep's folder gets
    what is there, if it is newer, and the trials' runs that this machine does not have."""
    assert spec.uri is not None
    is_new = spec.tune.resume is False
    with mirrored(spec.uri, spec.folder, load(spec.base).run.output_timeout, say, anew=is_new) as mirror:
        if not is_new:
            fetch_new(spec.uri, spec.folder)
        yield mirror


def fetched_sweep(spec: SweepSpec) -> SweepSpec:
    """Returns ``spec`` with a folder on this machine that has all of the sweep at its URI, for a report. A sweep
    without a URI is returned as it is."""
    if spec.uri is None:
        return spec
    fetched(spec.uri)
    place = {"output": str(fetched_place(spec.tune.output)), "working_copy": None}
    return replace(spec, tune=spec.tune.model_copy(update=place))
