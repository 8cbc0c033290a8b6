"""The baselines: what rule each follows, that every plan of theirs can be run, and what is said where none fits."""

import dataclasses

import pytest
from planner_instances import PPO, analytic_costs, make_cluster, make_work, ppo_70b

from real_jax.planner import memory
from real_jax.planner.heuristics import HEURISTICS, heuristic
from real_jax.planner.simulate import iteration_seconds
from real_jax.spec.arch import ARCHS
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.errors import UsageError
from real_jax.spec.plan import ExecutionPlan, Placement, validate

SFT = Graph("sft", (Call("train", "train", "actor", ("tokens",)),), ("tokens",))
INFERENCE = ("reward_inference", "reference_inference", "critic_inference")


@pytest.fixture(scope="module")
def seven():
    """Four 7B models, batch 64, one node of 8 with plenty of memory."""
    work, cluster = make_work(PPO, ARCHS["llama-7b"], 64, compute_bytes=2), make_cluster(1, 8, memory_gib=2000)
    return PPO, work, cluster, analytic_costs(PPO, work, cluster)


def meshes(plan):
    return {call: (p.first, p.data, p.fsdp, p.tensor) for call, p in plan.placements.items()}


@pytest.mark.parametrize("name", HEURISTICS)
def test_every_plan_is_valid_and_fits(name, seven):
    plan = heuristic(name, *seven)
    validate(plan, *seven[:3])
    assert memory.check(plan, *seven) is None
    assert plan.origin == f"heuristic:{name}"


def test_symmetric_has_one_layout_and_is_the_fastest_that_has(seven):
    plan = heuristic("symmetric", *seven)
    assert len({p.layout for p in plan.placements.values()}) == 1
    megatron = heuristic("megatron", *seven)
    assert iteration_seconds(plan, *seven) <= iteration_seconds(megatron, *seven)


def test_megatron_is_tensor_within_the_node_and_data_as_far_as_the_memory_goes(seven):
    assert set(meshes(heuristic("megatron", *seven)).values()) == {(0, 1, 1, 8)}
    graph, work, cluster = ppo_70b(nodes=16)
    plan = heuristic("megatron", graph, work, cluster, analytic_costs(graph, work, cluster))
    assert {p.tensor for p in plan.placements.values()} == {8} and {p.count for p in plan.placements.values()} == {128}
    # Four models in bfloat16 over 8 devices are 64 GiB, which leaves no room for two optimizers: training is split first, then
    # inference, and generation, which would gather the weights for every token, not at all.
    assert plan["actor_generate"].fsdp == 1
    assert plan["actor_train"].fsdp >= plan["reference_inference"].fsdp > 1
    unsplit = {
        call: dataclasses.replace(p, data=16, fsdp=1) if call in INFERENCE else p for call, p in plan.placements.items()
    }
    costs = analytic_costs(graph, work, cluster)
    assert memory.check(ExecutionPlan("test", unsplit), graph, work, cluster, costs) is not None


def test_real_node_puts_actor_and_critic_on_halves(seven):
    plan = meshes(heuristic("real-node", *seven))
    assert plan["actor_generate"] == plan["reference_inference"] == (0, 8, 1, 1)
    assert plan["actor_train"] == (0, 2, 1, 2) and plan["critic_train"] == (4, 2, 1, 2)
    assert plan["reward_inference"][0] == 0 and plan["critic_inference"][0] == 4


def test_disaggregated_generates_on_its_own_half(seven):
    plan = heuristic("disaggregated", *seven)
    assert list(plan["actor_generate"].devices) == [0, 1, 2, 3]
    others = {p.layout for call, p in plan.placements.items() if call != "actor_generate"}
    assert len(others) == 1 and list(others.pop().devices) == [4, 5, 6, 7]


def test_colocated_fsdp_splits_training_over_all_that_the_batch_allows(seven):
    plan = meshes(heuristic("colocated-fsdp", *seven))
    assert {plan[c] for c in (*INFERENCE, "actor_train", "critic_train")} == {(0, 1, 8, 1)}
    assert plan["actor_generate"] == (0, 8, 1, 1)
    graph, work, cluster, _ = seven
    work = dataclasses.replace(work, minibatches={"actor_train": 16, "critic_train": 16})  # 4 sequences a step
    plan = meshes(heuristic("colocated-fsdp", graph, work, cluster, analytic_costs(graph, work, cluster)))
    assert plan["actor_train"] == (0, 1, 4, 2)


def test_heads_that_no_power_of_two_divides():
    arch = ARCHS["smollm2-135m"]  # 9 heads
    work, cluster = make_work(PPO, arch, 16), make_cluster(1, 4)
    plan = heuristic("megatron", PPO, work, cluster, analytic_costs(PPO, work, cluster))
    assert set(meshes(plan).values()) == {(0, 4, 1, 1)}


def test_a_graph_of_one_train_call():
    work, cluster = make_work(SFT, ARCHS["llama-7b"], 64), make_cluster(1, 8)
    costs = analytic_costs(SFT, work, cluster)
    for name in ("symmetric", "megatron", "real-node", "colocated-fsdp"):
        assert heuristic(name, SFT, work, cluster, costs)["train"].count == 8
    with pytest.raises(UsageError, match="'disaggregated' makes no plan.*generation call"):
        heuristic("disaggregated", SFT, work, cluster, costs)


def test_micro_batches_that_fit_are_taken():
    fast, lean = Placement(fsdp=4), Placement(fsdp=4, micro_batches=2)
    costs = CostTable({("train", fast): Cost(1, 5000, "analytic"), ("train", lean): Cost(2, 2500, "analytic")})
    state = 12 * 728 // 4
    for room, want in ((5000, fast), (4999, lean)):
        cluster = make_cluster(memory_gib=(state + room) / 2**30)
        assert heuristic("symmetric", SFT, make_work(SFT), cluster, costs)["train"] == want
    with pytest.raises(UsageError, match="'symmetric' makes no plan.*Device 0 would need"):
        heuristic("symmetric", SFT, make_work(SFT), make_cluster(memory_gib=(state + 100) / 2**30), costs)


def test_an_unknown_heuristic_names_the_known():
    with pytest.raises(UsageError, match="'best'. Heuristics: symmetric, megatron, real-node, disaggregated"):
        heuristic("best", PPO, make_work(PPO), make_cluster(), CostTable())
