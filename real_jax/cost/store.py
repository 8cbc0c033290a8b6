"""On-disk cache by content: cluster probes, compiled pieces, bytes of calls, measured seconds, plans. One small JSON file an entry."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from real_jax.cost.compile import Compiled
from real_jax.spec.errors import UsageError
from real_jax.spec.files import from_data, to_data
from real_jax.spec.hardware import Cluster, check_cluster

ENVIRONMENT = "REAL_JAX_CACHE"


def default_folder() -> Path:
    """$REAL_JAX_CACHE, or .cache/real_jax in the home folder."""
    return Path(os.environ.get(ENVIRONMENT) or Path.home() / ".cache" / "real_jax")


class Store:
    """Entries in `folder`, made on the first write. Any number of processes may read and write at the same time.

    A file is written whole under another name and then renamed, so no reader sees a part of it; one that cannot be read
    (cut off, edited, of an older version) counts as absent. The key of an entry stands in it and is compared.
    """

    def __init__(self, folder: Path | str | None = None):
        self.folder = Path(folder) if folder is not None else default_folder()

    def cluster(self, key: str) -> Cluster | None:
        """The cluster that was probed under `key`."""
        data = self._read("clusters", key)
        try:
            return None if data is None else check_cluster(from_data(Cluster, data, key))
        except UsageError:
            return None

    def record_cluster(self, key: str, cluster: Cluster) -> None:
        self._write("clusters", key, to_data(cluster))

    def compiled(self, key: str) -> Compiled | None:
        """The piece with content hash `key`."""
        data = self._read("pieces", key)
        try:
            return None if data is None else from_data(Compiled, data, "the cache")
        except UsageError:
            return None

    def record_compiled(self, key: str, compiled: Compiled) -> None:
        self._write("pieces", key, to_data(compiled))

    def footprint(self, key: str) -> int | None:
        """Bytes of a compiled call."""
        data = self._read("footprints", key)
        return data if isinstance(data, int) and not isinstance(data, bool) and data >= 0 else None

    def record_footprint(self, key: str, bytes_: int) -> None:
        self._write("footprints", key, int(bytes_))

    def plan(self, key: str) -> dict | None:
        """What a search found, as it was recorded."""
        data = self._read("plans", key)
        return data if isinstance(data, dict) else None

    def record_plan(self, key: str, data: dict) -> None:
        self._write("plans", key, data)

    def measured(self, key: str) -> float | None:
        """Median of the seconds recorded under `key`; None where there are none."""
        data = self._read("measured", key)
        if not isinstance(data, list):
            return None
        seconds = sorted(x for x in data if isinstance(x, (int, float)) and x > 0)
        if not seconds:
            return None
        middle = len(seconds) // 2
        return float(seconds[middle] if len(seconds) % 2 else (seconds[middle - 1] + seconds[middle]) / 2)

    def record(self, key: str, seconds: float, keep: int = 16) -> None:
        """Adds a measurement; the last `keep` of a key are kept."""
        data = self._read("measured", key)
        self._write("measured", key, [*(data if isinstance(data, list) else []), float(seconds)][-keep:])

    def _path(self, kind: str, key: str) -> Path:
        # Keys are words and hashes; whatever else one holds must not lead out of the folder.
        return self.folder / kind / ("".join(c if c.isalnum() or c in "-_=." else "_" for c in key)[:180] + ".json")

    def _read(self, kind: str, key: str) -> Any:
        try:
            entry = json.loads(self._path(kind, key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return entry.get("value") if isinstance(entry, dict) and entry.get("key") == key else None

    def _write(self, kind: str, key: str, value) -> None:
        path = self._path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"key": key, "value": value}, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
