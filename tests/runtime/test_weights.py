"""Homes and views of weights, with programs that hold nothing but a layout."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from real_jax.algorithms import ppo
from real_jax.runtime.meshes import make_mesh
from real_jax.runtime.shardings import weight_shardings
from real_jax.runtime.weights import WeightStore
from real_jax.spec.arch import EMBED, MLP, Weight
from real_jax.spec.plan import Placement

TABLE = {"w": Weight((8, 8), (EMBED, MLP), 8), "norm": Weight((8,), (EMBED,), 0)}
GRAPH = ppo.graph()


def make_store(half_precision=False, graph=GRAPH, **placements):
    """PPO on one device, but for the calls in `placements`."""
    programs = {}
    for call in GRAPH.calls:
        placement = placements.get(call.name, Placement())
        shardings = weight_shardings(TABLE, placement, make_mesh(placement))
        small = half_precision and call.kind != "train"
        programs[call.name] = types.SimpleNamespace(
            call=call, placement=placement, weights=shardings, stored_type=jnp.bfloat16 if small else jnp.float32,
            initial_optimizer_state=lambda params: {k: x * 0 for k, x in params.items()}, optimizer_state_shardings=shardings,
        )  # fmt: skip
    return WeightStore(graph, programs)


def values(seed=0):
    random = np.random.default_rng(seed)
    return {k: random.normal(size=w.shape).astype(np.float32) for k, w in TABLE.items()}


def equal(tree, wanted):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(tree), wanted)


def test_a_model_lives_where_it_trains_or_is_first_called():
    assert make_store().home_call == {
        "actor": "actor_train", "critic": "critic_train", "reward": "reward_inference", "reference": "reference_inference"
    }  # fmt: skip
    assert make_store().trained == ("actor", "critic")  # in the order of the graph, alike in every process


def test_calls_in_the_homes_layout_take_the_home_itself():
    """Micro-batches and remat do not move parameters."""
    store = make_store(actor_train=Placement(fsdp=2, micro_batches=4, remat=True), actor_generate=Placement(fsdp=2))
    store.put("actor", values())
    assert store.is_home("actor_generate") and store.has_view("actor_generate")
    assert store.params_for("actor_generate") is store.home("actor").params


def test_a_view_in_another_type_is_no_home():
    store = make_store(half_precision=True)
    store.put("actor", values())
    assert not store.is_home("actor_generate") and not store.has_view("actor_generate")
    view = store.make_view("actor_generate")
    equal(view, {k: v.astype(jnp.bfloat16) for k, v in values().items()})
    assert store.has_view("actor_generate")
    assert store.home("actor").params["w"].dtype == np.float32


def test_an_update_makes_every_view_stale_and_the_next_view_is_of_the_new_weights():
    store = make_store(actor_generate=Placement(data=2, tensor=2))
    store.put("actor", values())
    equal(store.make_view("actor_generate"), values())
    assert store.params_for("actor_generate") is store.home("actor").views[next(iter(store.home("actor").views))].params
    for version in (1, 2):
        home = store.home("actor")
        moved = {k: x * 2 for k, x in home.params.items()}
        store.update("actor", moved, home.optimizer_state)
        assert store.home("actor").version == version
        assert not store.has_view("actor_generate") and not store.home("actor").views
        equal(store.make_view("actor_generate"), {k: v * 2**version for k, v in values().items()})


@pytest.mark.parametrize("half_precision", [False, True])
def test_a_moving_average_follows_each_update_before_it_is_used(half_precision):
    """In float32, whatever the calls take: steps of a thousandth would be lost in bfloat16."""
    store = make_store(
        half_precision, ppo.graph(reference_eta=0.001), actor_train=Placement(fsdp=2), reference_inference=Placement(2)
    )
    store.put("actor", values(1))
    store.put("reference", values())
    assert store.averages == ("reference",) and store.follows("reference") == "actor"
    kind, wanted = jnp.bfloat16 if half_precision else np.float32, values()
    for _ in range(3):
        if not store.has_view("reference_inference"):
            store.make_view("reference_inference")
        shown = jax.device_get(store.params_for("reference_inference"))
        assert {x.dtype for x in shown.values()} == {np.dtype(kind)}
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x, y.astype(kind)),
            shown,
            jax.device_get(store.home("reference").params),
        )
        actor = store.home("actor")
        store.update("actor", {k: x * 2 for k, x in actor.params.items()}, actor.optimizer_state)
        assert store.is_behind("reference") and not store.has_view("reference_inference")
        assert len(store.awaited("reference_inference")) == len(TABLE)  # what it follows, on other devices
        wanted = {k: 0.999 * v + 0.001 * jax.device_get(store.home("actor").params[k]) for k, v in wanted.items()}
        home = jax.device_get(store.home("reference").params)
        assert not store.is_behind("reference")
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), home, wanted)
    assert store.home("reference").version == 3


def test_put_takes_a_copy():
    """Of host arrays and of device arrays; writing over or donating the originals changes nothing."""
    store = make_store()
    host = values()
    store.put("actor", host)
    host["w"][...] = 7
    equal(store.home("actor").params, values())
    on_device = jax.device_put(values(), {k: x.sharding for k, x in store.home("actor").params.items()})
    store.put("actor", on_device)
    jax.block_until_ready(jax.jit(lambda t: jax.tree.map(lambda x: x * 0, t), donate_argnums=0)(on_device))
    equal(store.home("actor").params, values())


def test_views_survive_the_donation_of_their_home():
    """The view keeps a shard where it was; the reference is the same weights under the same layout as the actor."""
    store = make_store(actor_train=Placement(data=2), actor_generate=Placement())
    for model in ("actor", "reference"):
        store.put(model, values())
    store.put("reference", store.home("actor").params)
    view = store.make_view("actor_generate")
    jax.block_until_ready(
        jax.jit(lambda t: jax.tree.map(lambda x: x * 0, t), donate_argnums=0)(store.home("actor").params)
    )
    equal(view, values())
    equal(store.home("reference").params, values())


def test_an_optimizer_state_is_made_where_none_is_given():
    store = make_store(actor_train=Placement(fsdp=2))
    store.put("actor", values(), version=5)
    assert store.home("actor").version == 5
    equal(store.home("actor").optimizer_state, {k: v * 0 for k, v in values().items()})
    given = values(1)
    store.put("actor", values(), given)
    equal(store.home("actor").optimizer_state, given)
    assert len(store.home("actor").optimizer_state["w"].sharding.device_set) == 2
    store.put("reference", values())
    assert store.home("reference").optimizer_state is None


def test_an_offloaded_model_waits_in_host_memory():
    store = make_store(reference_inference=Placement(fsdp=2, offload=True))
    store.put("reference", values())
    home = store.home("reference")
    assert {x.sharding.memory_kind for x in home.params.values()} == {"pinned_host"}
    assert home.params["w"].sharding.shard_shape((8, 8)) == (4, 8)  # each device's host has its part
    assert not store.is_home("reference_inference") and not store.has_view("reference_inference")
    assert store.awaited("reference_inference") == []
    view = store.make_view("reference_inference")
    assert {x.sharding.memory_kind for x in view.values()} == {"device"}
    equal(view, values())
    assert store.has_view("reference_inference")
    store.release("reference_inference")
    assert not store.has_view("reference_inference")
    equal(home.params, values())


def test_release_leaves_other_views_alone():
    store = make_store(critic_inference=Placement(data=2))
    store.put("critic", values())
    store.make_view("critic_inference")
    store.release("critic_inference")  # it does not offload
    assert store.has_view("critic_inference")
    store.drop_views("critic")
    assert not store.has_view("critic_inference")


@pytest.mark.parametrize(
    ("placement", "waits"),
    [(Placement(data=2), True), (Placement(2, fsdp=2), True), (Placement(data=4), True), (Placement(fsdp=2), False)],
)
def test_a_move_that_reads_other_devices_awaits_its_source(placement, waits):
    store = make_store(actor_train=Placement(fsdp=2), actor_generate=placement)
    store.put("actor", values())
    assert len(store.awaited("actor_generate")) == (len(TABLE) if waits else 0)
