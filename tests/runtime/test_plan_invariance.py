"""A plan never changes a result; a view is never stale; a second iteration compiles nothing."""

import itertools

import jax
import numpy as np
import pytest
import support

from real_jax.runtime.weights import StaleView
from real_jax.spec.experiment import GenerationConfig, PPOConfig


@pytest.fixture(scope="module")
def reference():
    return support.run(support.make_engine(support.make_build(), support.PLANS["one device"]))


@pytest.fixture(scope="module", params=[name for name in support.PLANS if name != "one device"])
def engine(request):
    return support.make_engine(support.make_build(), support.PLANS[request.param])


@pytest.fixture(scope="module")
def record(engine):
    return support.run(engine)


def test_every_plan_samples_the_same_tokens_and_losses(reference, record):
    np.testing.assert_array_equal(record.tokens, reference.tokens)
    np.testing.assert_allclose(record.losses, reference.losses, rtol=1e-4, atol=1e-6)


def test_sampled_log_probabilities_equal_the_inference_call(record):
    """At iteration 0 actor and reference are the same weights under different calls: KL 0, ratio 1."""
    first = record.batches[0]
    lengths, prompts = first["lengths"], support.inputs(0)["prompt_lengths"]
    column = np.arange(first["log_probs"].shape[1])[None]
    mask = (column >= prompts[:, None] - 1) & (column < lengths[:, None] - 1)
    np.testing.assert_allclose(first["log_probs"][mask], first["reference_log_probs"][mask], rtol=0, atol=1e-4)
    assert abs(record.metrics[0]["actor_train"]["kl"]) < 1e-4
    for metrics in record.metrics:
        assert abs(metrics["actor_train"]["importance_ratio"][0] - 1) < 1e-4


def test_views_follow_their_model_and_the_reference_survives_the_actors_donation(engine, record):
    store = engine.store
    for call in support.CALLS:
        model = engine.graph.call(call).model
        if not store.has_view(call):
            store.make_view(call)
        view, home = store.params_for(call), store.home(model).params
        for name in home:
            np.testing.assert_array_equal(np.asarray(view[name]), np.asarray(home[name]))
            assert view[name].sharding.is_equivalent_to(engine.programs[call].weights[name], view[name].ndim)
    start = support.initial_params(support.make_build())
    for name, value in start["reference"].items():
        np.testing.assert_array_equal(np.asarray(store.home("reference").params[name]), value)
        assert not np.array_equal(np.asarray(store.home("actor").params["norm"]), start["actor"]["norm"])


def test_a_model_in_host_memory_is_brought_in_when_nothing_else_runs_there():
    """The planner counts its memory for its own call alone."""
    calls = support.same(support.Placement(data=2)).placements
    plan = {**calls, "reference_inference": support.Placement(data=2, offload=True)}
    engine = support.make_engine(support.make_build(), support.ExecutionPlan("cpu-8", plan))
    brought, make_view = [], engine.store.make_view

    def watched(call):
        assert all(p.done.done() for p in engine._watched), "brought in beside what runs"
        brought.append(call)
        return make_view(call)

    engine.store.make_view = watched
    support.run(engine, iterations=3)
    assert brought == ["reference_inference"] * 3
    assert not engine.store.home("reference").views


def test_calls_on_disjoint_meshes_overlap_in_the_timeline():
    engine = support.make_engine(support.make_build(), support.PLANS["disjoint"])
    overlaps = set()
    for i in range(3):
        events = [e for e in engine.run_iteration(i, support.inputs(i)).events if e.kind != "reallocation"]
        for a, b in itertools.combinations(events, 2):
            if a.start < b.end and b.start < a.end:
                assert not set(a.devices) & set(b.devices)  # a device does one thing at a time
                overlaps.add(frozenset((a.name, b.name)))
    assert {"actor_train", "critic_train"} in overlaps


def test_a_second_iteration_compiles_nothing(engine, record):
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiles.append(name) if name.endswith("backend_compile_duration") else None
    )
    support.run(engine, iterations=2)
    assert compiles == []
    jax.jit(lambda x: x * 3.25)(np.float32(1))
    assert len(compiles) == 1  # the listener does hear compiles


ETA = 0.25


@pytest.fixture(scope="module")
def follower():
    return support.make_build(PPOConfig(minibatches=1, reference_eta=ETA, kl_coef=0.5))


@pytest.mark.parametrize("plan", ["one device", "fsdp", "disjoint"])
def test_a_reference_follows_the_actor_under_every_plan(follower, plan):
    engine = support.make_engine(follower, support.PLANS[plan])
    wanted = support.initial_params(follower)["reference"]
    scored = []
    for i in range(3):
        result = engine.run_iteration(i, support.inputs(i), support.KEEP)
        scored.append(result.batch["reference_log_probs"])
        actor = engine.fetch(engine.store.home("actor").params)
        wanted = {k: ETA * actor[k] + (1 - ETA) * v for k, v in wanted.items()}
        found = engine.fetch(engine.store.home("reference").params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), found, wanted)
    assert np.abs(scored[1]).max() > 0
    frozen = support.make_engine(support.make_build(PPOConfig(minibatches=1, kl_coef=0.5)), support.PLANS["one device"])
    kept = [frozen.run_iteration(i, support.inputs(i), support.KEEP).batch["reference_log_probs"] for i in range(3)]
    np.testing.assert_allclose(scored[0], kept[0], atol=1e-5)
    assert np.abs(scored[1] - kept[1]).max() > 1e-3  # the call does see the average


def test_iterations_dispatched_ahead_see_the_same_averages(follower):
    """`run` dispatches an iteration before the last has ended; the averages are those of one after another."""
    step_by_step = support.make_engine(follower, support.PLANS["disjoint"])
    for i in range(3):
        step_by_step.run_iteration(i, support.inputs(i))
    ahead = support.make_engine(follower, support.PLANS["disjoint"])
    record = support.run(ahead)
    assert [e for e in ahead.run_iteration(3, support.inputs(3)).events if e.name == "actor to reference_inference"]
    assert len(record.losses) == 6
    step_by_step.run_iteration(3, support.inputs(3))
    for model in ("actor", "reference"):
        one, other = (e.fetch(e.store.home(model).params) for e in (step_by_step, ahead))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), one, other)


def test_a_stale_view_is_refused():
    build = support.make_build()
    engine = support.make_engine(build, support.PLANS["disjoint"])
    engine.store.make_view("actor_generate")
    home = engine.store.home("actor")
    views = dict(home.views)
    engine.store.update("actor", home.params, home.optimizer_state)
    home.views.update(views)  # as a fault would leave them
    assert not engine.store.has_view("actor_generate")
    with pytest.raises(StaleView, match="actor_generate: weights of version 0, but actor is at 1"):
        engine.store.params_for("actor_generate")


@pytest.mark.parametrize(
    "generation",
    [
        GenerationConfig(response_length=8, temperature=0.7, top_k=10),
        GenerationConfig(response_length=8, temperature=0.7, top_p=0.8),
        GenerationConfig(response_length=8, temperature=0.7, top_k=10, top_p=0.9, min_length=3),
    ],
    ids=["top-k", "top-p", "both"],
)
def test_first_importance_ratio_is_one_under_truncated_sampling(generation):
    build = support.make_build(PPOConfig(minibatches=1), generation)
    record = support.run(support.make_engine(build, support.same(support.Placement(data=2))), iterations=1)
    metrics = record.metrics[0]["actor_train"]
    assert abs(metrics["importance_ratio"][0] - 1) < 1e-4
    assert metrics["clip_fraction"][0] == 0
    assert abs(metrics["kl"]) < 1e-4
    lengths, prompts = record.batches[0]["lengths"], support.inputs(0)["prompt_lengths"]
    assert ((lengths - prompts) >= generation.min_length).all()


def test_bfloat16_ratio_and_kl_stay_close():
    """The same weights in two layouts, computed in bfloat16: the largest log-ratio stays below 0.05."""
    import jax.numpy as jnp

    build = support.make_build(PPOConfig(minibatches=1), compute_type=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention mixes types on its way back
        record = support.run(support.make_engine(build, support.PLANS["disjoint"]), iterations=1)
    first = record.batches[0]
    column = np.arange(first["log_probs"].shape[1])[None]
    mask = (column >= support.inputs(0)["prompt_lengths"][:, None] - 1) & (column < first["lengths"][:, None] - 1)
    assert np.abs(first["log_probs"] - first["reference_log_probs"])[mask].max() < 0.05
    assert abs(record.metrics[0]["actor_train"]["importance_ratio"][0] - 1) < 0.02
