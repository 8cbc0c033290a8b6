"""Moves between meshes by compiled collectives, in one process: any layout to any other, bit for bit."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from real_jax.reallocation.exchange import Exchange, in_turn
from real_jax.reallocation.route import route
from real_jax.reallocation.transfers import plan_transfers
from real_jax.runtime.meshes import make_mesh
from real_jax.runtime.shardings import weight_shardings
from real_jax.spec.arch import EMBED, LAYERS, MLP, VOCAB, Weight
from real_jax.spec.plan import Placement

TABLE = {
    "stacked": Weight((4, 16, 32), (LAYERS, EMBED, MLP), 16),
    "embedding": Weight((32, 16), (VOCAB, EMBED), 16),
    "norm": Weight((16,), (EMBED,), 0),
}
PAIRS = [
    (Placement(data=2, tensor=2), Placement(first=4, fsdp=4)),
    (Placement(fsdp=4, tensor=2), Placement(tensor=4)),
    (Placement(tensor=2), Placement(data=2, fsdp=2, tensor=2)),
    (Placement(first=2, fsdp=4), Placement(first=4, tensor=4)),
    (Placement(first=6), Placement(data=8)),
    (Placement(data=4), Placement(first=2, fsdp=2)),
    (Placement(fsdp=8), Placement(first=5)),
    (Placement(first=1), Placement(first=6, tensor=2)),
]


def tree(placement, dtype=jnp.float32):
    shardings = weight_shardings(TABLE, placement, make_mesh(placement))
    random = np.random.default_rng(3)
    values = {k: random.normal(size=w.shape).astype(np.float32) for k, w in TABLE.items()}
    return values, {k: jax.device_put(jnp.asarray(x, dtype), shardings[k]) for k, x in values.items()}


def exchange_of(before, after, chunk_bytes=2**20, devices_per_node=8):
    return Exchange(make_mesh(before), make_mesh(after), chunk_bytes, devices_per_node)


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_there_and_back_bit_for_bit(number):
    """Every second pair with small nodes and in parts."""
    (before, after), small = PAIRS[number], number % 2
    devices_per_node, chunk_bytes = (2, 300) if small else (8, 2**20)
    values, arrays = tree(before)
    for a, b in ((before, after), (after, before)):
        target = weight_shardings(TABLE, b, make_mesh(b))
        arrays = exchange_of(a, b, chunk_bytes, devices_per_node).move(arrays, target, jnp.float32)
        for name, x in arrays.items():
            assert x.sharding == target[name]
            for shard in x.addressable_shards:  # each copy, not just one of each part
                np.testing.assert_array_equal(np.asarray(shard.data), values[name][shard.index])


@pytest.mark.parametrize("devices_per_node", [8, 4, 2, 1])
@pytest.mark.parametrize("before, after", PAIRS + [(b, a) for a, b in PAIRS])
def test_bytes_sent_are_the_least_there_can_be(before, after, devices_per_node):
    _, arrays = tree(before)
    target = weight_shardings(TABLE, after, make_mesh(after))
    exchange = exchange_of(before, after, devices_per_node=devices_per_node)
    sent, between = collections.Counter(), 0
    union = sorted({*before.devices, *after.devices})
    for name, x in arrays.items():
        way, cell = route(x.shape, x.sharding, target[name])
        schedule = exchange.schedule(way)
        for r in (*schedule.first, *schedule.second):
            for (sender, receiver), cells in r.messages.items():
                volume = 4 * len(cells) * int(np.prod(cell))
                sent[union[receiver]] += volume
                between += volume * (union[sender] // devices_per_node != union[receiver] // devices_per_node)
    wanted = plan_transfers(TABLE, before, after, 4, devices_per_node)
    assert {d: b for d, b in wanted.bytes_received.items() if b} == dict(sent)
    assert between == wanted.bytes_between_nodes


@pytest.mark.parametrize("before, after", PAIRS)
def test_senders_have_what_they_send(before, after):
    _, arrays = tree(before)
    target = weight_shardings(TABLE, after, make_mesh(after))
    exchange = exchange_of(before, after, devices_per_node=2)
    union = sorted({*before.devices, *after.devices})
    for name, x in arrays.items():
        way, _ = route(x.shape, x.sharding, target[name])

        def cells(ranges, placement, grid=way.grid):
            found = {}
            for device, box in zip(placement.devices, ranges, strict=True):
                places = np.stack(np.meshgrid(*(range(a, b) for a, b in box), indexing="ij"), -1).reshape(-1, len(box))
                found[union.index(device)] = {int(np.ravel_multi_index(p, grid)) for p in places}
            return found

        held, wanted = cells(way.source, before), cells(way.destination, after)
        schedule = exchange.schedule(way)
        has = {d: set(c) for d, c in schedule.kept.items()}
        for r in schedule.first:
            for (sender, receiver), sent in r.messages.items():
                assert set(sent) <= held[sender] and len(sent) == r.length
                has[receiver] |= set(sent)
        for r in schedule.second:
            for (sender, receiver), sent in r.messages.items():
                assert set(sent) <= has[sender] and len(sent) == r.length
        for r in schedule.second:
            for (_, receiver), sent in r.messages.items():
                has[receiver] |= set(sent)
        assert has == wanted


def test_a_device_packs_a_cell_once_and_all_of_a_node_are_gates():
    """Each device of two nodes has an eighth, and all want all of it."""
    before, after = Placement(fsdp=8), Placement(data=8)
    _, arrays = tree(before)
    target = weight_shardings(TABLE, after, make_mesh(after))
    x = arrays["norm"]
    way, _ = route(x.shape, x.sharding, target["norm"])
    schedule = exchange_of(before, after, devices_per_node=4).schedule(way)
    assert dict(schedule.first_packing.cells) == {d: (d,) for d in range(8)}
    assert sorted(schedule.second_packing.cells) == [(d, ((d + 4) % 8,)) for d in range(8)]
    assert schedule.first_packing.slots == schedule.second_packing.slots == 1


def test_programs_of_one_process_are_not_waited_for(monkeypatch):
    """Calls on other devices run meanwhile."""

    def wait(arrays):
        raise AssertionError("waited")

    monkeypatch.setattr(jax, "block_until_ready", wait)
    assert in_turn("results") == "results"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(AssertionError, match="waited"):
        in_turn("results")


@pytest.mark.parametrize("before, after", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)])
def test_types_change_on_the_way(before, after):
    values, arrays = tree(PAIRS[0][0], before)
    target = weight_shardings(TABLE, PAIRS[0][1], make_mesh(PAIRS[0][1]))
    moved = exchange_of(*PAIRS[0]).move(arrays, target, after)
    for name, x in moved.items():
        assert x.dtype == after
        np.testing.assert_array_equal(np.asarray(x), np.asarray(jnp.asarray(values[name], before).astype(after)))


def test_scalars_flags_and_numbers():
    before, after = make_mesh(Placement(data=2)), make_mesh(Placement(first=4, data=4))
    spec = jax.sharding.PartitionSpec()
    for value in (np.float32(3.5), np.arange(8) % 3 == 0, np.arange(8, dtype=np.uint32)):
        x = jax.device_put(value, jax.sharding.NamedSharding(before, spec))
        target = jax.sharding.NamedSharding(after, spec)
        moved = Exchange(before, after, 2**20).move({"x": x}, {"x": target}, x.dtype)["x"]
        assert moved.dtype == x.dtype and moved.shape == x.shape
        np.testing.assert_array_equal(np.asarray(moved), value)
