import dataclasses
import json
import threading

import pytest

from real_jax.cost.compile import Compiled
from real_jax.cost.store import Store, default_folder
from real_jax.cost.summary import Collective, Kernel, Linear, Summary
from real_jax.spec.hardware import Chip, Cluster, Link

COMPILED = Compiled(
    summary=Summary(
        kernels=(Kernel(Linear(1.5, 2.5), Linear(3, 4), 5.0), Kernel(Linear(), Linear(6, 7), 1.0)),
        collectives=(Collective("all-gather", 4, 2, Linear(9, 10), 11.0, Linear(12.0), Linear(13, 14)),),
        steps=8.0,
    ),
    rows=13,
    temp_bytes=1000,
    fixed_bytes=100,
)
CLUSTER = Cluster(
    name="cpu-8", platform="cpu", nodes=1, devices_per_node=8, chip=Chip("cpu", 1.5, 0.1, 10.0),
    within_node=Link(1.0, 100.0), between_nodes=Link(1.0, 100.0), host_link=Link(5.0, 100.0), shared_cores=2.0,
)  # fmt: skip


def test_round_trips(tmp_path):
    store = Store(tmp_path / "new" / "folder")
    assert store.compiled("k") is None
    assert store.cluster("k") is None
    assert store.measured("k") is None
    store.record_compiled("k", COMPILED)
    store.record_cluster("k", CLUSTER)
    store.record("k", 0.25)
    again = Store(store.folder)
    assert again.compiled("k") == COMPILED
    assert again.cluster("k") == CLUSTER
    assert again.measured("k") == 0.25


def test_the_median_of_the_last_measurements(tmp_path):
    store = Store(tmp_path)
    for seconds in (100.0, 3.0, 1.0, 2.0):
        store.record("k", seconds, keep=3)
    assert store.measured("k") == 2.0
    store.record("other", 1.0)
    store.record("other", 2.0)
    assert store.measured("other") == 1.5


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": "k"}', '{"key": "k", "value": {"rows": 1}}', "\x00\xff"])
def test_damaged_entries_count_as_absent_and_are_replaced(tmp_path, damage):
    store = Store(tmp_path)
    store.record_compiled("k", COMPILED)
    store.record_cluster("k", CLUSTER)
    store.record("k", 1.0)
    for path in tmp_path.rglob("*.json"):
        path.write_text(damage, encoding="latin-1")
    assert (store.compiled("k"), store.cluster("k"), store.measured("k")) == (None, None, None)
    store.record("k", 2.0)
    store.record_compiled("k", COMPILED)
    assert store.measured("k") == 2.0
    assert store.compiled("k") == COMPILED


def test_a_cluster_whose_numbers_cannot_be_right_counts_as_absent(tmp_path):
    store = Store(tmp_path)
    store.record_cluster("k", dataclasses.replace(CLUSTER, chip=dataclasses.replace(CLUSTER.chip, memory_gib=1e9)))
    assert store.cluster("k") is None


def test_an_entry_under_another_key_is_not_taken(tmp_path):
    """Names of files are cut and cleaned, so two keys may meet in one; the key inside decides."""
    store = Store(tmp_path)
    store.record("a/b", 1.0)
    assert store.measured("a/b") == 1.0
    assert store.measured("a_b") is None
    store.record("../../outside", 1.0)
    assert {p.parent.name for p in tmp_path.rglob("*.json")} == {"measured"}
    assert not list(tmp_path.parent.glob("outside*"))


def test_readers_never_see_half_an_entry(tmp_path):
    """Many writers and a reader: each read gives a whole value or none, and nothing is left over."""
    store, seen = Store(tmp_path), []
    values = [dataclasses.replace(COMPILED, temp_bytes=i) for i in range(4)]

    def write(value):
        for _ in range(50):
            store.record_compiled("k", value)

    def read():
        while any(w.is_alive() for w in writers):
            seen.append(store.compiled("k"))

    writers = [threading.Thread(target=write, args=(v,)) for v in values]
    reader = threading.Thread(target=read)
    store.record_compiled("k", values[0])
    for thread in (*writers, reader):
        thread.start()
    for thread in (*writers, reader):
        thread.join()
    assert seen and all(s in values for s in seen)
    assert [p.name for p in (tmp_path / "pieces").iterdir()] == ["k.json"]
    assert json.loads((tmp_path / "pieces" / "k.json").read_text())["key"] == "k"


def test_a_failed_write_leaves_the_old_entry(tmp_path):
    store = Store(tmp_path)
    store.record("k", 1.0)
    with pytest.raises(TypeError):
        store._write("measured", "k", {"not": object()})
    assert store.measured("k") == 1.0
    assert len(list((tmp_path / "measured").iterdir())) == 1


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("REAL_JAX_CACHE", str(tmp_path))
    assert default_folder() == tmp_path == Store().folder
    monkeypatch.delenv("REAL_JAX_CACHE")
    assert default_folder().parts[-2:] == (".cache", "real_jax")
