"""Contract tests of a data source. To test yours, subclass :class:`SourceContract` in a test file of pytest.

from fedray.testing import SourceContract

class TestMine(SourceContract):
    settings = {"data.source": "mine.py:load", "data.root": "photos"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from fedray.config import load
from fedray.data.federated import federate
from fedray.data.sources.source import Source, source_of
from fedray.data.storage.contents import data_digests


class SourceContract:
    """Tests that every data source must pass. They check properties of a source on which runs rely, but which runs do
    not check when they load it.

    A subclass in a test file of pytest sets ``settings``, a dict with the keys of the configuration that name the
    source (``data.source``, ``data.root`` and others) and their values.

    Example:
        >>> class TestMine(SourceContract):
        ...     settings = {"data.source": "mine.py:load"}
    """

    settings: ClassVar[Mapping[str, Any]]

    def load(self) -> Source:
        """Loads the data source that ``settings`` names, and returns its samples before they are partitioned among
        clients."""
        config = load(dict(self.settings))
        return source_of(config.data, config.task)

    def test_it_is_the_same_each_time(self) -> None:
        """Checks that the source returns the same samples each time it is loaded. Otherwise a run could not be resumed
        or repeated."""
        data = load(dict(self.settings)).data
        one, other = (data_digests(source, federate(source, data, 0, 0)) for source in (self.load(), self.load()))
        assert one == other

    def test_its_samples_reach_clients(self) -> None:
        """Checks that each training sample of the source belongs to one client at most, and that no client is without
        samples."""
        source, data = self.load(), load(dict(self.settings)).data
        federated = federate(source, data, 0, 0)
        assert (federated.sizes() > 0).all()
        assert len(np.unique(federated.indices)) == len(federated.indices) <= len(source.y_train)

    def test_clients_have_names_in_the_order_of_their_numbers(self) -> None:
        """Checks that there is a name for each client, if the source has clients with names."""
        source = self.load()
        if source.client_train is not None and source.client_names is not None:
            assert 0 <= source.client_train.min() <= source.client_train.max() < len(source.client_names)

    def test_models_can_read_its_inputs(self) -> None:
        """Checks that the inputs of a mini-batch are finite numbers after they are scaled, and that there are as many
        inputs as targets."""
        data = load(dict(self.settings)).data
        inputs, targets = federate(self.load(), data, 0, 0).examples(2)
        parts = inputs.values() if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else [inputs]
        assert all(len(part) == len(targets) == 2 and part.isfinite().all() for part in parts)
