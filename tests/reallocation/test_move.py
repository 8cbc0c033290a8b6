"""Weights move between layouts bit for bit, into memory of their own."""

import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from real_jax.reallocation.memories import on_hosts
from real_jax.reallocation.move import Mover
from real_jax.runtime.meshes import devices, make_mesh
from real_jax.runtime.shardings import weight_shardings
from real_jax.spec.arch import EMBED, KV_HEADS, LAYERS, MLP, VOCAB, Weight
from real_jax.spec.plan import Placement

# What the layouts do to a weight: split over both, over one, replicated over tensor, over nothing.
TABLE = {
    "both": Weight((8, 16), (EMBED, MLP), 8),
    "embed": Weight((16, 8), (VOCAB, EMBED), 8),
    "norm": Weight((8,), (EMBED,), 0),
    "few heads": Weight((2, 8, 2), (LAYERS, EMBED, KV_HEADS), 8),
}
LAYOUTS = {
    "all data": Placement(data=8),
    "all fsdp": Placement(fsdp=8),
    "all tensor": Placement(tensor=8),
    "mixed": Placement(data=2, fsdp=2, tensor=2),
    "first half": Placement(0, fsdp=2, tensor=2),
    "second half": Placement(4, data=2, tensor=2),
    "last two": Placement(6, fsdp=2),
    "first": Placement(0),
    "fourth": Placement(3),
}
NAMES = [name for name in LAYOUTS if name not in ("all tensor", "fourth")]
PAIRS = [
    *itertools.product(NAMES, repeat=2),
    ("all fsdp", "all tensor"),
    ("all tensor", "first half"),
    ("fourth", "all data"),
]


def values(dtype=np.float32):
    """Every bit pattern matters: huge, tiny, negative zero, and numbers without a short form."""
    random = np.random.default_rng(0)
    made = {k: random.normal(size=w.shape).astype(np.float32) for k, w in TABLE.items()}
    made["norm"][:4] = [np.float32(1e38), -0.0, np.float32(1e-42), 1 / 3]
    return {k: v.astype(dtype) for k, v in made.items()}


def shardings(placement):
    return weight_shardings(TABLE, placement, make_mesh(placement))


@pytest.fixture(scope="module")
def movers():
    """One that reads shards where they lie, as on a CPU, and one that does as with accelerators."""
    return {shared: Mover(shared_memory=shared) for shared in (True, False)}


@pytest.fixture
def mover(movers):
    return movers[True]


@functools.cache
def copier(sharding):
    return jax.jit(jnp.copy, out_shardings=sharding)


def same_bits(moved, wanted, target):
    """Looks at copies: a numpy view of an array would keep its memory from being donated."""
    assert moved.keys() == wanted.keys()
    for name, array in moved.items():
        assert array.sharding.is_equivalent_to(target[name], array.ndim), name
        assert array.dtype == wanted[name].dtype
        x = copier(array.sharding)(array)
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), wanted[name].view(np.uint8), err_msg=name)
        for shard in x.addressable_shards:  # each device holds its own part, not only the assembled array
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[name][shard.index])


def pointers(tree):
    return {shard.data.unsafe_buffer_pointer() for x in tree.values() for shard in x.addressable_shards}


@functools.cache
def overwriter(layout):
    return jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 7, t), donate_argnums=0, out_shardings=dict(layout))


def donate(tree):
    """Writes over a tree's memory and deletes it, as a train call does with its weights. While a move still reads a leaf
    jax writes elsewhere."""
    jax.block_until_ready(overwriter(tuple((k, x.sharding) for k, x in tree.items()))(tree))


@pytest.mark.parametrize(
    ("shared", "pair"),
    [(True, pair) for pair in PAIRS] + [(False, pair) for pair in PAIRS[::7]],
    ids=lambda x: " to ".join(x) if isinstance(x, tuple) else f"shared {x}",
)
def test_there_and_back_bit_for_bit_and_without_sharing_memory(movers, shared, pair):
    mover = movers[shared]
    home, away = (shardings(LAYOUTS[name]) for name in pair)
    wanted = values()
    first = mover.move(values(), home, np.float32)
    same_bits(first, wanted, home)
    second = mover.move(first, away, np.float32)
    assert not pointers(first) & pointers(second)
    donate(first)
    same_bits(second, wanted, away)
    back = mover.move(second, home, np.float32)
    donate(second)
    same_bits(back, wanted, home)


@pytest.mark.parametrize(("shared", "source", "target"), [
    (True, "all data", "all fsdp"), (True, "all data", "all data"), (True, "first half", "second half"), (True, "mixed", "first"),
    (True, "fourth", "all data"), (True, "first half", "first"), (False, "first half", "second half"), (False, "fourth", "all data"),
])  # fmt: skip
def test_a_change_of_type(movers, shared, source, target):
    """float32 to bfloat16 rounds as numpy does; bfloat16 to float32 and back loses nothing."""
    mover = movers[shared]
    home, away = shardings(LAYOUTS[source]), shardings(LAYOUTS[target])
    full = mover.move(values(), home, np.float32)
    half = mover.move(full, away, jnp.bfloat16)
    donate(full)
    same_bits(half, values(jnp.bfloat16), away)
    wide = mover.move(half, home, np.float32)
    donate(half)
    same_bits(wide, {k: v.astype(np.float32) for k, v in values(jnp.bfloat16).items()}, home)
    same_bits(mover.move(wide, away, jnp.bfloat16), values(jnp.bfloat16), away)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("pair", [
    ("all fsdp", "all fsdp"), ("all data", "all fsdp"), ("all fsdp", "all data"), ("mixed", "all tensor"), ("all fsdp", "first half"),
    ("first half", "second half"), ("first", "fourth"), ("mixed", "last two"), ("last two", "all data"),
], ids=" to ".join)  # fmt: skip
@pytest.mark.parametrize("half", [False, True])
def test_an_average_is_the_same_whatever_way_its_source_comes(movers, shared, pair, half):
    """eta x source + (1 - eta) x target, worked out by numpy; in the target's memory, the source left as it was."""
    mover, eta = movers[shared], 0.25
    home, away = (shardings(LAYOUTS[name]) for name in pair)
    new, old = values(), {k: 3 * v[::-1] + 1 for k, v in values().items()}
    new["norm"][0] = old["norm"][0] = 2.0  # 1e38 would leave no room
    kind = jnp.bfloat16 if half else np.float32
    source, target = mover.move(new, home, kind), mover.move(old, away, np.float32)
    averages = mover.average(target, source, eta)
    assert all(x.is_deleted() for x in target.values())
    new = {k: v.astype(kind) for k, v in new.items()}
    same_bits(source, new, home)
    for name, x in averages.items():
        assert x.dtype == np.float32 and x.sharding.is_equivalent_to(away[name], x.ndim)
        wanted = eta * new[name].astype(np.float64) + (1 - eta) * old[name].astype(np.float64)
        for shard in copier(x.sharding)(x).addressable_shards:
            np.testing.assert_allclose(np.asarray(shard.data), wanted[shard.index], rtol=3e-7, atol=1e-7, err_msg=name)
    donate(source)


def test_an_average_with_eta_one_is_the_source(movers):
    home, away = shardings(LAYOUTS["all fsdp"]), shardings(LAYOUTS["second half"])
    for mover in movers.values():
        source = mover.move(values(), home, np.float32)
        target = mover.move({k: v * 0 + 1 for k, v in values().items()}, away, np.float32)
        averages = jax.device_get(mover.average(target, source, 1.0))
        for name, x in values().items():  # arithmetic makes zeros of the tiny number and of the negative zero
            np.testing.assert_allclose(averages[name], x, rtol=0, atol=1e-37)
    with pytest.raises(ValueError, match="'norm'"):
        mover.average({k: x for k, x in source.items() if k != "norm"}, source, 0.5)


def test_leaves_of_different_types_come_out_in_one(mover):
    home, away = shardings(LAYOUTS["first half"]), shardings(LAYOUTS["second half"])
    mixed = mover.move(values(), home, np.float32)
    mixed["norm"] = mixed["norm"].astype(jnp.bfloat16)
    moved = mover.move(mixed, away, np.float32)
    wanted = values()
    wanted["norm"] = wanted["norm"].astype(jnp.bfloat16).astype(np.float32)
    same_bits(moved, wanted, away)


def test_from_host_memory_it_is_a_copy(mover):
    """For a float32 array on one CPU device jax could use the numpy memory itself."""
    source, target = values(), shardings(LAYOUTS["first"])
    moved = mover.move(source, target, np.float32)
    for x in source.values():
        x[...] = 5
    same_bits(moved, values(), target)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "pair", [("mixed", "mixed"), ("all fsdp", "second half"), ("first half", "fourth")], ids=" to ".join
)
def test_to_host_memory_and_back(movers, shared, pair):
    """Out of numpy's memory or a device's, into the device's or another layout, as it was or in another type; always into
    memory of its own."""
    mover = movers[shared]
    home, away = (shardings(LAYOUTS[name]) for name in pair)
    waiting = mover.move(values(), on_hosts(home), np.float32)
    put_aside = mover.move(mover.move(values(), away, np.float32), on_hosts(home), np.float32)
    for source in (waiting, put_aside):
        assert {x.sharding.memory_kind for x in source.values()} == {"pinned_host"}
        same_bits(mover.move(source, home, np.float32), values(), home)
        same_bits(mover.move(source, away, np.float32), values(), away)
        same_bits(mover.move(source, away, jnp.bfloat16), values(jnp.bfloat16), away)
    awake = mover.move(waiting, home, np.float32)
    assert {x.sharding.memory_kind for x in awake.values()} == {"device"}
    assert not pointers(awake) & pointers(waiting)
    donate(awake)
    same_bits(mover.move(waiting, home, np.float32), values(), home)


def test_from_an_array_without_a_mesh(mover):
    """Arrays as a jitted function outside any mesh leaves them, on a device that is part of the target and one that is not."""
    for device in (0, 7):
        source = jax.device_put(values(), SingleDeviceSharding(devices()[device]))
        for name in ("first half", "first"):
            target = shardings(LAYOUTS[name])
            moved = mover.move(source, target, np.float32)
            same_bits(moved, values(), target)
        donate(source)
        same_bits(moved, values(), target)


def test_the_same_devices_in_another_order(mover):
    """Meshes over the same devices in another order do not mix in one program."""
    placement = Placement(fsdp=8)
    home = shardings(placement)
    away = weight_shardings(TABLE, placement, make_mesh(placement, among=devices()[::-1]))
    moved = mover.move(mover.move(values(), home, np.float32), away, np.float32)
    same_bits(moved, values(), away)


def test_a_pair_of_layouts_is_compiled_once():
    mover = Mover()
    home, away = shardings(Placement(data=8)), shardings(Placement(fsdp=8))
    for _ in range(3):
        mover.move(mover.move(values(), home, np.float32), away, np.float32)
    assert len(mover._programs) == 1


def test_a_tree_with_other_weights_is_refused(mover):
    target = shardings(LAYOUTS["first"])
    short = {k: v for k, v in values().items() if k != "norm"}
    with pytest.raises(ValueError, match="'norm'"):
        mover.move(short, target, np.float32)
    with pytest.raises(ValueError, match="'more'"):
        mover.move(values() | {"more": np.zeros(2, np.float32)}, target, np.float32)


def test_the_fault_that_the_copy_guards_against():
    """`device_put` alone shares the memory of a leaf whose shard stays where it is; when that ends, so may the copy."""
    mesh = make_mesh(Placement(0, data=2))
    source = jax.device_put(np.arange(4.0, dtype=np.float32), NamedSharding(mesh, PartitionSpec()))
    alias = jax.device_put(source, NamedSharding(make_mesh(Placement(0)), PartitionSpec()), may_alias=False)
    assert pointers({"x": alias}) <= pointers({"x": source})
    moved = Mover().move({"x": source}, {"x": alias.sharding}, np.float32)
    assert not pointers(moved) & pointers({"x": source})


@pytest.mark.parametrize("pair", [("all fsdp", "all tensor"), ("mixed", "last two"), ("first", "second half")])
def test_a_source_can_be_given_away_at_once_and_for_good(mover, pair):
    """Large enough that a train step would begin while the move still reads; afterwards nothing holds the source."""
    home, away = ({"w": shardings(LAYOUTS[name])["both"]} for name in pair)
    w = np.random.default_rng(1).normal(size=(1024, 2048)).astype(np.float32)
    for _ in range(5):
        source = mover.move({"w": w}, home, np.float32)
        moved = mover.move(source, away, np.float32)
        donate(source)
        same_bits(moved, {"w": w}, away)
    source = mover.move({"w": w}, home, np.float32)
    jax.block_until_ready(mover.move(source, away, np.float32))
    for _ in range(100):
        donate(source)
        if source["w"].is_deleted():
            break
        time.sleep(0.05)  # the runtime lets go of what a program read a moment after its results are there
    assert source["w"].is_deleted()


def test_a_reshard_that_would_need_much_memory_goes_in_chunks():
    """XLA gathers all of an array to change the axes that split it; the exchange does not."""
    table = {"w": Weight((64, 256, 256), (LAYERS, EMBED, MLP), 256)}
    home, away = (
        weight_shardings(table, p, make_mesh(p)) for p in (Placement(data=2, fsdp=2, tensor=2), Placement(fsdp=8))
    )
    w = np.random.default_rng(1).normal(size=(64, 256, 256)).astype(np.float32)
    moves = {bound: Mover(bound, shared_memory=False) for bound in (2**30, 2**18)}
    for mover in moves.values():
        source = mover.move({"w": w}, home, np.float32)
        same_bits(mover.move(source, away, np.float32), {"w": w}, away)
    assert not moves[2**30]._exchanges and moves[2**18]._exchanges


@pytest.fixture
def no_gather(monkeypatch):
    """jax's way between device sets of different sizes: the whole array in host memory, and from there to the devices."""
    from jax._src import array

    def gather(*args):
        raise AssertionError("a move entered the host gather")

    monkeypatch.setattr(array, "shard_sharded_device_array_slow_path", gather)


def test_no_move_gathers_on_the_host(no_gather, movers):
    source = movers[True].move(values(), shardings(LAYOUTS["all fsdp"]), np.float32)
    with pytest.raises(AssertionError, match="host gather"):
        jax.device_put(source, shardings(LAYOUTS["first half"]))
    for pair in PAIRS:
        home, away = (shardings(LAYOUTS[name]) for name in pair)
        source = movers[True].move(values(), home, np.float32)
        jax.block_until_ready(movers[True].move(source, away, np.float32))
    for home, away in [("mixed", "last two"), ("first", "second half")]:
        source = movers[False].move(values(), shardings(LAYOUTS[home]), np.float32)
        jax.block_until_ready(movers[False].move(source, shardings(LAYOUTS[away]), np.float32))
