"""Writes the samples of a data set to memory-mapped files, with all nodes of a Ray cluster (``fedray data prepare``).

The driver's node writes the files. All nodes that have the data set read items for it, with all their processors. In
the end, each node that does not share the driver's folder gets a copy.
"""

from __future__ import annotations

import os
import platform
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedray.core.structure import leaves
from fedray.data.storage.lazy import LazyItems
from fedray.data.storage.mapped import COLUMNS, open_file, recorded_sums, shipped
from fedray.data.storage.mapping import RESERVE, Filling, Progress, Reader, map_arrays, readers_here
from fedray.engine.ray.cluster import NO_TASK_EVENTS, living_nodes
from fedray.engine.ray.engine import ship_user_code
from fedray.errors import ClientError, UserError, first_line
from fedray.util.files import move_whole

PIECE = 64 << 20
"""The number of bytes of a file that are sent to other nodes at a time."""


class NodeReader:
    """A Ray actor that helps ``fedray data prepare`` from another node than the one on which the user has started this
    command. The command writes the samples of a data set to memory-mapped files. The actor reads samples for it, and
    writes a copy of the finished files on its own node."""

    def __init__(self) -> None:
        self.fillings: dict[tuple[str, ...], Filling] = {}
        # distinguishes this copy from those of other commands that run at the same time
        self.token = uuid.uuid4().hex

    def about(self) -> tuple[str, int]:
        """Returns the name of the actor's node, and the number of its processors, as a pair."""
        return platform.node(), os.cpu_count() or 1

    def obstacle(self, items: LazyItems, digest: str) -> str | None:
        """Returns the reason why this node can't read ``items``, the samples of a data set, or None if it can.
        ``digest`` is the digest of the data set on the node where the command was started; it must be the same here."""
        try:
            return None if items.digest() == digest else f"its files of {items.name} are others"
        except UserError as error:
            return str(error)

    def load(self, files: tuple[str, ...], filling: Sequence[Any], chunk: int) -> list[np.ndarray]:
        """Reads one chunk of samples, the one with the number ``chunk``. Returns an array ``[samples, ...]`` for each
        of ``files``, the paths of the files into which the samples will be written. ``filling`` is a list with one
        entry, Ray's reference to the :class:`Filling`, the object that has the data set and reads the chunk. The object
        is fetched only at the first call with these ``files``."""
        if files not in self.fillings:
            self.fillings[files] = ray.get(filling[0])
        return self.fillings[files].load(chunk)

    def has(self, folder: Path, columns: str) -> bool:
        """Returns whether this node already has a copy of ``folder``, the folder of mapped files, with intact files.
        ``columns`` is the text that must be in its file :data:`COLUMNS`, which describes the other files."""
        place = folder / COLUMNS
        if not place.exists() or place.read_text() != columns:
            return False
        try:
            for name in recorded_sums(folder):
                open_file(folder / name)
        except UserError:
            return False
        return True

    def begin(self, folder: Path, size: int) -> None:
        """Begins this node's copy of ``folder``, the folder of mapped files, in an empty temporary folder. ``size`` is
        the number of bytes that the copy will have. Raises :class:`UserError` if the disk has less room."""
        staging = self._staging(folder)
        staging.mkdir(parents=True)
        free = shutil.disk_usage(staging).free
        if size + RESERVE > free:
            raise UserError(
                f"the copy needs {size / 1e9:.3g} GB in {folder.parent}, where {free / 1e9:.3g} GB are free"
            )

    def append(self, folder: Path, name: str, piece: np.ndarray) -> None:
        """Appends ``piece``, bytes as a uint8 array, to the file ``name`` of this node's copy of ``folder``."""
        with (self._staging(folder) / name).open("ab") as file:
            file.write(piece.data)

    def finish(self, folder: Path, columns: str) -> None:
        """Completes this node's copy of ``folder``: writes ``columns``, the text that describes the files, to
        :data:`COLUMNS`, checks all files, and moves the copy to ``folder``, in place of an earlier one."""
        staging = self._staging(folder)
        (staging / COLUMNS).write_text(columns)
        for file in staging.glob("*.npy"):
            open_file(file)
        shutil.rmtree(folder, ignore_errors=True)
        move_whole(staging, folder)

    def drop(self, folder: Path) -> None:
        """Removes this node's copy of ``folder`` if it is unfinished."""
        shutil.rmtree(self._staging(folder), ignore_errors=True)

    def _staging(self, folder: Path) -> Path:
        return folder.with_name(f"{folder.name}.{self.token}.copy")


def map_on_cluster(
    arrays: dict[str, Any], folder: Path, progress: Progress, say: Callable[[str], None]
) -> dict[str, Any]:
    """Writes samples to memory-mapped files in ``folder`` with the help of all nodes of the Ray cluster that this
    process is connected to, and returns the mapped arrays. Nodes that have the data set read samples too. Nodes that do
    not share the folder get a copy of the files. The files are as :func:`fedray.data.storage.mapping.map_arrays` makes
    them.

    ``arrays`` is a dict. Each value is an array, a tuple or dict of arrays, or a :class:`LazyItems`, whose items are
    read one by one. The result has the same keys and structures. ``progress(done, total)`` is called with numbers of
    items, and ``say(line)`` shows a line to the user. Raises :class:`UserError`, which names the node, if another node
    fails at reading or writing samples, and :class:`ClientError` if it is lost.
    """
    items = [tree for tree in arrays.values() if isinstance(tree, LazyItems)]
    ship_user_code(type(each.dataset) for each in items)
    here = ray.get_runtime_context().get_node_id()
    nodes = [_Node(node["NodeID"]) for node in living_nodes() if node["NodeID"] != here]

    digests = [(each, each.digest()) for each in items]

    def readers(path: Path) -> Sequence[Reader]:
        found = readers_here()
        for node in nodes:
            obstacle = next(filter(None, (node.obstacle(each, digest) for each, digest in digests)), None)
            say(f"{node.name} reads no samples: {obstacle}" if obstacle else f"{node.name} reads samples too")
            found += [] if obstacle else [node.load] * node.processors
        return found

    try:
        mapped = map_arrays(arrays, folder, progress, readers)
        columns = (folder / COLUMNS).read_text()
        without = [node for node in nodes if not node.ask("has", folder, columns)]
        if without:
            say(f"copying the files to {', '.join(node.name for node in without)} ...")
            _copy(mapped, folder, columns, without)
        return mapped
    finally:
        for node in nodes:
            ray.kill(node.actor)


def _copy(mapped: dict[str, Any], folder: Path, columns: str, nodes: Sequence[_Node]) -> None:
    """Copies the files of the ``mapped`` arrays in ``folder`` to other nodes, piece by piece."""
    files = [Path(shipped(leaf).path) for tree in mapped.values() for leaf in leaves(tree)]
    try:
        _each(nodes, "begin", folder, sum(file.stat().st_size for file in files))
        for file in files:
            with file.open("rb") as opened:
                while piece := opened.read(PIECE):
                    _each(nodes, "append", folder, file.name, ray.put(np.frombuffer(piece, np.uint8)))
        _each(nodes, "finish", folder, columns)
    finally:
        for node in nodes:
            ray.wait([node.begin("drop", folder)])


def _each(nodes: Sequence[_Node], method: str, *arguments: Any) -> None:
    for node, answer in [(node, node.begin(method, *arguments)) for node in nodes]:
        node.end(answer)


class _Node:
    """Another node of the cluster, whose Ray id is ``node``, with a :class:`NodeReader` on it."""

    def __init__(self, node: str) -> None:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "max_concurrency": 256, "scheduling_strategy": place, **NO_TASK_EVENTS}
        self.actor: Any = ray.remote(NodeReader).options(**options).remote()
        self.name = node
        self.name, self.processors = self.ask("about")
        self._fillings: dict[tuple[str, ...], Any] = {}
        self._lock = threading.Lock()

    def ask(self, method: str, *arguments: Any) -> Any:
        return self.end(self.begin(method, *arguments))

    def begin(self, method: str, *arguments: Any) -> Any:
        return getattr(self.actor, method).remote(*arguments)

    def end(self, answer: Any) -> Any:
        try:
            return ray.get(answer)
        except RayTaskError as error:
            raise UserError(f"on {self.name}: {error.cause}") if isinstance(error.cause, UserError) else error from None
        except RayActorError as error:
            raise ClientError(
                f"{self.name} was lost while it read samples ({first_line(error)}); the same command goes on"
            ) from None

    def obstacle(self, items: LazyItems, digest: str) -> str | None:
        """Returns the reason why this node can't read ``items``, the samples of a data set with this ``digest``, or
        None if it can."""
        try:
            found: str | None = self.ask("obstacle", items, digest)
            return found
        except RayTaskError as error:  # it could not make the data set there
            return first_line(error.cause or error)

    def load(self, filling: Filling, chunk: int) -> list[np.ndarray]:
        """Lets the node read a chunk of samples, and returns the chunk's arrays, one for each file of ``filling``.
        ``filling`` is the object that has the data set and reads chunks, and is sent to the node only once. ``chunk``
        is the chunk's number."""
        with self._lock:
            if filling.files not in self._fillings:
                self._fillings[filling.files] = ray.put(filling)
        found: list[np.ndarray] = self.ask("load", filling.files, [self._fillings[filling.files]], chunk)
        return found
