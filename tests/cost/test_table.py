import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from support import here

from real_jax.algorithms import ppo
from real_jax.cost import parallel
from real_jax.cost.compile import Piece, program
from real_jax.cost.hlo import summarize
from real_jax.cost.parallel import compile_all
from real_jax.cost.roofline import volume_factor
from real_jax.cost.store import Store
from real_jax.cost.summary import Linear
from real_jax.cost.table import fill_costs, measurement_key, optimizer_step, pieces, summed_over_data
from real_jax.runtime.build import Build, compile_programs
from real_jax.runtime.calls import ModelProgramConfig
from real_jax.runtime.optimizer import make_optimizer
from real_jax.spec.arch import Arch
from real_jax.spec.experiment import GenerationConfig, OptimizerConfig, PPOConfig
from real_jax.spec.hardware import Chip, Cluster, Link
from real_jax.spec.plan import ExecutionPlan, Placement, Workload

ARCH = Arch(layers=2, d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=128, vocab=96, context=64)
CLUSTER = Cluster(
    name="cpu-8", platform="cpu", nodes=1, devices_per_node=8, chip=Chip("cpu", 1.5, 0.1, 10.0, 50.0, 1.0),
    within_node=Link(1.0, 100.0), between_nodes=Link(1.0, 100.0), host_link=Link(5.0, 100.0), shared_cores=2.0,
)  # fmt: skip
GRAPH = ppo.graph()
WORK = Workload(
    archs=dict.fromkeys(GRAPH.models, ARCH),
    heads={m: "lm" if m in ("actor", "reference") else "scalar" for m in GRAPH.models},
    batch=32,
    prompt_length=8,
    response_length=8,
    minibatches={"actor_train": 2, "critic_train": 2},
)
P = Placement
ONE = P()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


def costs(store, call: str, *placements: Placement, work=WORK, cluster=CLUSTER, **more):
    found = fill_costs(GRAPH, work, cluster, {call: placements}, store, here(), **more)
    return [found[call, p] for p in placements]


def part(cost, resource: str) -> float:
    return dict(cost.parts)[resource]


def test_every_call_and_placement_has_a_cost(store):
    options = {c.name: [P(), P(first=4, data=2), P(tensor=2)] for c in GRAPH.calls}
    found = fill_costs(GRAPH, WORK, CLUSTER, options, store, here())
    assert len(found) == 18
    for call, placements in options.items():
        for placement in placements:
            cost = found[call, placement]
            assert cost.source == "compiled"
            assert cost.seconds == pytest.approx(sum(s for _, s in cost.parts))
            assert cost.work_bytes > 0


def test_a_host_call_is_costed_without_being_asked_for(store):
    graph = ppo.graph(reward_function=True)
    found = fill_costs(graph, WORK, CLUSTER, {"actor_generate": [P()]}, store, here())
    assert found["reward_function", P()].source == "analytic"
    assert found["reward_function", P()].work_bytes == 0


def test_placements_that_differ_in_their_start_cost_the_same(store):
    a, b, c = costs(store, "reference_inference", P(data=2), P(first=6, data=2), P(data=2, offload=True))
    assert a == b == c


def test_layers_double_what_blocks_cost(store):
    def matrix(layers: int) -> float:
        archs = dict.fromkeys(GRAPH.models, dataclasses.replace(ARCH, layers=layers))
        return part(costs(store, "critic_inference", P(), work=dataclasses.replace(WORK, archs=archs))[0], "matrix")

    two, four, six = matrix(2), matrix(4), matrix(6)
    assert six - four == pytest.approx(four - two, rel=0.01)
    assert four == pytest.approx(2 * two, rel=0.03)  # the head of one number per position is next to nothing


def test_micro_batches_change_neither_operations_nor_results_but_overhead_and_memory(store):
    one, four = costs(store, "actor_train", P(), P(micro_batches=4))
    fast = dataclasses.replace(CLUSTER, chip=dataclasses.replace(CLUSTER.chip, memory_gb_per_s=1e5))
    flops = [part(c, "matrix") for c in costs(store, "actor_train", P(), P(micro_batches=4), cluster=fast)]
    assert flops[0] == pytest.approx(flops[1])
    assert part(four, "overhead") > 3 * part(one, "overhead")
    assert four.work_bytes < one.work_bytes


def test_a_train_call_grows_with_the_batch_and_not_with_the_minibatches(store):
    fast = dataclasses.replace(CLUSTER, chip=dataclasses.replace(CLUSTER.chip, memory_gb_per_s=1e5))

    def matrix(**changes) -> float:
        work = dataclasses.replace(WORK, **changes)
        return part(costs(store, "actor_train", P(), work=work, cluster=fast)[0], "matrix")

    assert matrix(batch=64) == pytest.approx(2 * matrix())
    assert matrix(rows=2) == pytest.approx(2 * matrix())
    assert matrix(minibatches={"actor_train": 4}) == pytest.approx(matrix())


def test_remat_trades_memory_for_time(store):
    for placement in (P(), P(fsdp=2), P(data=2, fsdp=2)):
        plain, again = costs(store, "actor_train", placement, dataclasses.replace(placement, remat=True))
        assert part(again, "matrix") > 1.1 * part(plain, "matrix")
        assert again.work_bytes < plain.work_bytes


def test_virtual_devices_gain_nothing_past_the_cores(store):
    fast = dataclasses.replace(CLUSTER, chip=dataclasses.replace(CLUSTER.chip, memory_gb_per_s=1e5))
    found = costs(store, "critic_inference", P(), P(data=2), P(data=8), cluster=fast)
    one, two, eight = (part(c, "matrix") for c in found)
    assert two == pytest.approx(one / 2, rel=0.01)
    assert eight == pytest.approx(two, rel=0.01)


def test_calls_on_equal_models_share_their_programs():
    calls = {c.name: c for c in GRAPH.calls}
    forward = pieces(calls["critic_inference"], WORK, P(data=2, tensor=2))
    assert forward == pieces(calls["reward_inference"], WORK, P(tensor=2, micro_batches=4))
    assert set(forward.values()) == {Piece("forward", ARCH, "scalar", 1, 2, 16)}
    assert pieces(calls["actor_train"], WORK, P(fsdp=2, remat=True)) == {
        "gradient": Piece("gradient", ARCH, "lm", 2, 1, 16, remat=True),
        "optimizer": Piece("optimizer", ARCH, "lm", 1, 1, 0),
    }
    sums = pieces(calls["actor_train"], WORK, P(data=4, tensor=2))["sums"]
    assert sums == Piece("gradient", ARCH, "lm", 2, 2, 16)


def test_what_is_in_the_store_is_not_compiled_again(store, monkeypatch):
    seen = []
    before = costs(store, "reward_inference", P(tensor=4), progress=lambda *step: seen.append(step))
    assert seen == [(1, 1, "forward over tensor 4")]

    def refuse(piece, target):
        raise AssertionError(f"compiles {piece}")

    monkeypatch.setattr(parallel, "compile_piece", refuse)
    assert costs(Store(store.folder), "reward_inference", P(tensor=4)) == before


def test_a_measurement_takes_the_place_of_seconds(store, tmp_path):
    own = Store(tmp_path)
    (before,) = costs(own, "actor_train", P(data=2))
    call = GRAPH.call("actor_train")
    own.record(measurement_key(call, WORK, P(first=2, data=2), CLUSTER.name), 0.125)
    (after,) = costs(own, "actor_train", P(data=2))
    assert (after.seconds, after.source) == (0.125, "measured")
    assert after.work_bytes == before.work_bytes
    assert costs(own, "actor_train", P())[0].source == "compiled"


def test_measurement_keys():
    calls = {c.name: c for c in GRAPH.calls}

    def key(name="actor_train", work=WORK, placement=ONE, cluster="cpu-8"):
        return measurement_key(calls[name], work, placement, cluster)

    assert key() == key(placement=P(first=3)) == key(placement=P(offload=True))
    assert key("critic_inference") == key("reward_inference")
    others = [
        key("critic_train"), key("actor_generate"), key(placement=P(data=2)), key(placement=P(remat=True)),
        key(placement=P(micro_batches=2)), key(cluster="other"), key(work=dataclasses.replace(WORK, batch=64)),
        key(work=dataclasses.replace(WORK, minibatches={"actor_train": 4})),
        key(work=dataclasses.replace(WORK, compute_bytes=2)), key(work=dataclasses.replace(WORK, rows=2)),
    ]  # fmt: skip
    assert len({key(), *others}) == len(others) + 1


@pytest.mark.parametrize("placement", [P(data=4), P(data=2, tensor=2), P(data=2, fsdp=2)], ids=P.describe)
def test_sums_of_gradients_over_data_are_what_the_compiler_makes(store, placement):
    """Programs are compiled without `data`; what it adds is derived, and here held against a compile with it."""
    call = GRAPH.call("actor_train")
    parts = pieces(call, WORK, placement)
    compiled = compile_all(list(parts.values()), here(), store)
    derived = summed_over_data(compiled[parts["gradient"]].summary, compiled[parts["sums"]].summary, placement)
    function, inputs = program(parts["gradient"], placement, 13)
    whole = summarize(function.lower(*inputs).compile(compiler_options=_fast()).as_text(), 13)

    def sent(summary) -> float:
        reductions = [c for c in summary.collectives if c.kind in ("all-reduce", "reduce-scatter")]
        return sum(c.count * c.bytes.fixed * volume_factor(c.kind, c.group) for c in reductions)

    assert sent(derived) == pytest.approx(sent(whole), rel=0.15)
    assert max(c.group for c in derived.collectives) == placement.data * placement.fsdp


def _fast():
    return {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def test_an_optimizer_step_is_cut_like_the_weights(store):
    call = GRAPH.call("actor_train")
    piece = pieces(call, WORK, P())["optimizer"]
    whole = compile_all([piece], here(), store)[piece].summary
    assert optimizer_step(call, WORK, P(), whole).bytes == whole.bytes
    half = optimizer_step(call, WORK, P(fsdp=2), whole)
    assert half.bytes.fixed == pytest.approx(whole.bytes.fixed / 2)
    assert half.steps == whole.steps
    assert {(c.kind, c.group, c.bytes) for c in half.collectives} == {("all-reduce", 2, Linear(4))}


@pytest.mark.parametrize(
    "train, inference, generate",
    [
        (P(data=2, micro_batches=2, remat=True), P(), P()),
        (P(fsdp=2, tensor=2), P(data=4, micro_batches=2), P(tensor=2)),
    ],
)
def test_bytes_are_about_those_of_the_compiled_calls(store, train, inference, generate):
    """Working memory of the real programs of PPO's calls on the actor and the reference, as the compiler planned it."""
    algorithm = ppo.algorithm(PPOConfig())
    shapes = {"prompt_tokens": (WORK.batch, 8), "prompt_lengths": (WORK.batch,)}
    inputs = {key: jax.ShapeDtypeStruct(shape, jnp.int32) for key, shape in shapes.items()}
    inputs["row_ids"] = jax.ShapeDtypeStruct((WORK.batch,), jnp.uint32)
    optimizer = make_optimizer(OptimizerConfig())
    build = Build(
        algorithm,
        {m: ModelProgramConfig(ARCH, WORK.heads[m]) for m in GRAPH.models},
        inputs,
        {"actor": optimizer, "critic": optimizer},
        WORK.minibatches,
        generation=GenerationConfig(response_length=8),
    )
    kinds = {"train": train, "inference": inference, "generate": generate}
    plan = {c.name: kinds[c.kind] for c in GRAPH.calls}
    checked = ("actor_generate", "reference_inference", "actor_train")
    # What counts as known already is not compiled.
    shapes = {
        "reward_inference": {"scores": jax.ShapeDtypeStruct((WORK.batch,), jnp.float32)},
        "critic_inference": {"values": jax.ShapeDtypeStruct((WORK.batch, WORK.length), jnp.float32)},
        "critic_train": {},
    }
    others = {call: SimpleNamespace(call=GRAPH.call(call), written=written) for call, written in shapes.items()}
    assert {*others, *checked} == set(plan)
    programs = compile_programs(build, ExecutionPlan("cpu-8", plan), known=others)
    found = fill_costs(GRAPH, WORK, CLUSTER, {c: [plan[c]] for c in checked}, store, here())
    for call in checked:
        ratio = found[call, plan[call]].work_bytes / programs[call].work_bytes
        assert 0.95 <= ratio <= 1.4, (call, ratio)
