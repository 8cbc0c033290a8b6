"""Peak memory added up by hand. SMALL has 728 parameters with a language-model head, 608 with a scalar head."""

import pytest
from planner_instances import PPO, SMALL, make_cluster, make_work

from real_jax.algorithms import ppo
from real_jax.planner.memory import check, device_bytes, home, model_shard_bytes
from real_jax.spec.arch import parameter_count
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.plan import ExecutionPlan, Placement

LM, SCALAR = 728, 608
ON_0, ON_1, BOTH = Placement(0), Placement(1), Placement(0, data=2)


def ppo_plan(**changes):
    calls = dict.fromkeys((c.name for c in PPO.calls), ON_0)
    return ExecutionPlan("test", calls | changes)


def fixed_costs(plan, work_bytes):
    return CostTable({(c, p): Cost(1.0, work_bytes.get(c, 0), "analytic") for c, p in plan.placements.items()})


def test_parameter_counts_behind_the_numbers_below():
    assert parameter_count(SMALL) == LM and parameter_count(SMALL, "scalar") == SCALAR


def test_everything_on_one_device_in_float32():
    plan = ppo_plan()
    costs = fixed_costs(plan, {"actor_generate": 5000, "actor_train": 7000})
    # Actor and critic: parameters and two moments; reward and reference: parameters. The largest call's work on top.
    assert device_bytes(plan, PPO, make_work(PPO), costs) == {0: 12 * (LM + SCALAR) + 4 * (LM + SCALAR) + 7000}


def test_views_in_another_layout_and_work_per_device():
    plan = ppo_plan(actor_generate=BOTH, critic_inference=ON_1, critic_train=ON_1)
    costs = fixed_costs(plan, {"actor_generate": 100, "actor_train": 200, "critic_train": 50})
    got = device_bytes(plan, PPO, make_work(PPO), costs)
    assert got == {
        0: 12 * LM + 4 * LM + 4 * (LM + SCALAR) + 200,  # actor's home and view, reference and reward
        1: 4 * LM + 12 * SCALAR + 100,  # actor's view; the critic needs none where it trains
    }


def test_a_narrow_compute_type_needs_a_view_also_at_home():
    plan = ppo_plan()
    got = device_bytes(plan, PPO, make_work(PPO, compute_bytes=2), fixed_costs(plan, {}))
    assert got == {0: (12 + 2) * (LM + SCALAR) + 2 * (LM + SCALAR)}


def test_sharding_divides_but_for_what_is_replicated():
    # fsdp 2 halves every weight, as each has one model-width dimension; tensor 2 leaves the 24 norm scales whole.
    work = make_work(PPO)
    assert model_shard_bytes("actor", work, Placement(fsdp=2), 1) == LM // 2
    assert model_shard_bytes("actor", work, Placement(tensor=2), 1) == (LM - 24) // 2 + 24
    assert model_shard_bytes("actor", work, Placement(data=2), 1) == LM


def test_an_offloaded_model_counts_only_while_its_call_runs():
    away = Placement(0, offload=True)
    plan = ppo_plan(reference_inference=away)
    work, base = make_work(PPO), 12 * (LM + SCALAR) + 4 * SCALAR
    assert device_bytes(plan, PPO, work, fixed_costs(plan, {"reference_inference": 10})) == {0: base + 4 * LM + 10}
    assert device_bytes(plan, PPO, work, fixed_costs(plan, {"actor_train": 9000})) == {0: base + 9000}


def test_a_moving_average_is_kept_in_float32_besides_what_its_calls_take():
    graph = ppo.graph(reference_eta=0.1)
    plan = ppo_plan(reference_inference=ON_1)
    assert device_bytes(plan, graph, make_work(graph), fixed_costs(plan, {}))[1] == 4 * LM
    assert device_bytes(plan, graph, make_work(graph, compute_bytes=2), fixed_costs(plan, {}))[1] == (4 + 2) * LM


def test_a_frozen_model_holds_one_view_per_layout():
    calls = (Call("a", "inference", "reward", ("x",), ("y",)), Call("b", "inference", "reward", ("y",), ("z",)))
    graph = Graph("twice", calls, ("x",))
    work = make_work(graph)
    same = ExecutionPlan("test", {"a": ON_0, "b": Placement(0, micro_batches=2)})
    assert device_bytes(same, graph, work, fixed_costs(same, {})) == {0: 4 * SCALAR}
    two = ExecutionPlan("test", {"a": ON_0, "b": BOTH})
    assert device_bytes(two, graph, work, fixed_costs(two, {})) == {0: 8 * SCALAR, 1: 4 * SCALAR}
    assert home("reward", graph, two) == ON_0


def test_home_is_where_the_model_trains():
    plan = ppo_plan(actor_generate=BOTH, actor_train=Placement(1, micro_batches=4, remat=True))
    assert home("actor", PPO, plan) == ON_1


def test_check_names_what_is_short_and_what_would_fit():
    gib = 2**30
    plan, work = ppo_plan(), make_work(PPO)
    costs = fixed_costs(plan, {"actor_train": 3 * gib, "critic_train": gib})
    assert check(plan, PPO, work, make_cluster(memory_gib=4), costs) is None
    costs.add("actor_train", Placement(0, micro_batches=2), Cost(1.5, gib * 3 // 2, "analytic"))
    costs.add("actor_train", Placement(0, micro_batches=4), Cost(2.0, gib, "analytic"))
    message = check(plan, PPO, work, make_cluster(memory_gib=2), costs)
    assert message.startswith("Device 0 would need 3 GiB, 1 GiB more than the 2 GiB of a chip")
    assert "working memory of actor_train 3 GiB" in message
    assert message.endswith("It would fit with micro_batches 2 for actor_train.")


def test_check_advises_splitting_where_no_micro_batch_helps():
    plan = ppo_plan()
    message = check(plan, PPO, make_work(PPO), make_cluster(memory_gib=10000 / 2**30), fixed_costs(plan, {}))
    assert "parameters and optimizer state of actor" in message and "Split the models" in message


@pytest.mark.parametrize("memory_gib", [20000 / 2**30, 30000 / 2**30])
def test_check_agrees_with_device_bytes(memory_gib):
    plan, work = ppo_plan(), make_work(PPO)
    costs = fixed_costs(plan, {"actor_train": 1000})
    short = max(device_bytes(plan, PPO, work, costs).values()) > memory_gib * 2**30
    assert (check(plan, PPO, work, make_cluster(memory_gib=memory_gib), costs) is not None) == short
