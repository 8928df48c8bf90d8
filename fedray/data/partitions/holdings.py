"""How many samples of each class each client has, which a run keeps in its folder (partition.parquet)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedray.data.federated import FederatedData
from fedray.util.files import replacement_of


@dataclass(frozen=True)
class Holdings:
    """How many training samples of each class each client has. A run keeps these numbers in its folder, for pictures.

    ``counts`` int64 [N, classes] has a row for each of the N clients. If samples have no classes, all count as one
    class. ``classes`` and ``clients`` are the names of classes and clients, or None if the data have no names for them.
    """

    counts: np.ndarray
    classes: Sequence[str] | None
    clients: Sequence[str] | None

    @classmethod
    def of(cls, data: FederatedData) -> Holdings:
        labels = data.labels
        client = np.repeat(np.arange(data.clients), data.sizes())
        cells = client * labels.classes + labels.train[data.indices]
        counts = np.bincount(cells, minlength=data.clients * labels.classes).reshape(data.clients, labels.classes)
        return cls(counts, data.class_names if data.task == "classification" else None, data.client_names)

    def write(self, path: Path) -> None:
        """Writes the numbers to the Parquet file ``path``, from which :meth:`read` restores them.

        The columns are ``client``, ``class`` and ``samples`` (how many samples of the class the client has), and also
        ``client_name`` and ``class_name`` if there are names. Rows with 0 samples are left out, except the row of the
        last client and the last class: it shows how many clients and classes there are.
        """
        counts = self.counts
        there = counts > 0
        # the last client and the last class say how many there are
        there[-1, -1] = True
        clients, classes = np.nonzero(there)
        columns: dict[str, object] = {"client": clients, "class": classes, "samples": counts[there]}
        for name, names, places in (("client_name", self.clients, clients), ("class_name", self.classes, classes)):
            if names is not None:
                columns[name] = pa.DictionaryArray.from_arrays(pa.array(places), pa.array(list(map(str, names))))
        with replacement_of(path) as staging:
            pq.write_table(pa.table(columns), staging)

    @classmethod
    def read(cls, path: Path) -> Holdings:
        """Reads the numbers from the Parquet file ``path``, which :meth:`write` has written.

        If the file has names, a client or class without samples gets its number as its name.
        """
        table = pq.read_table(path).to_pandas()
        counts = np.zeros((table["client"].max() + 1, table["class"].max() + 1), np.int64)
        counts[table["client"], table["class"]] = table["samples"]
        names: list[Sequence[str] | None] = []
        for axis, name in enumerate(("class_name", "client_name")):
            place = table["class" if axis == 0 else "client"]
            known = dict(zip(place, table[name].astype(str), strict=True)) if name in table else None
            size = counts.shape[1 - axis]
            names.append(None if known is None else [known.get(each, str(each)) for each in range(size)])
        return cls(counts, *names)
