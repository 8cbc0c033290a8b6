"""Search against exhaustive enumeration, and against the heuristics."""

import itertools
import random

import pytest
from planner_instances import PPO, analytic_costs, make_cluster, make_work, ppo_70b

from real_jax.planner import memory
from real_jax.planner.heuristics import HEURISTICS, heuristic, symmetric
from real_jax.planner.search import search
from real_jax.planner.simulate import iteration_seconds
from real_jax.spec.arch import ARCHS
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.errors import UsageError
from real_jax.spec.plan import ExecutionPlan, Placement, validate

SHORT = Graph(
    "short",
    (
        Call("generate", "generate", "actor", ("x",), ("tokens",)),
        Call("reward", "inference", "reward", ("tokens",), ("scores",)),
        Call("reference", "inference", "reference", ("tokens",), ("logprobs",)),
        Call("train", "train", "actor", ("tokens", "scores", "logprobs")),
    ),
    ("x",),
)
LAYOUTS = [Placement(0), Placement(1), Placement(2, data=2), Placement(0, fsdp=2), Placement(0, tensor=4)]


def random_costs(graph, seed):
    """Costs without any pattern, so that the best plan has to be found and not guessed."""
    rng = random.Random(seed)
    costs = CostTable()
    for call in graph.calls:
        for p in LAYOUTS:
            costs.add(call.name, p, Cost(rng.uniform(1, 2), rng.randrange(10000), "analytic"))
    return costs


def brute_force(graph, work, cluster, costs):
    """The best feasible seconds over every plan."""
    calls = [c.name for c in graph.calls]
    best = float("inf")
    for placements in itertools.product(*(costs.placements(c) for c in calls)):
        plan = ExecutionPlan("test", dict(zip(calls, placements, strict=True)))
        if memory.check(plan, graph, work, cluster, costs) is None:
            best = min(best, iteration_seconds(plan, graph, work, cluster, costs))
    return best


@pytest.mark.parametrize(("seed", "shared_cores"), [(0, 0.0), (1, 0.0), (2, 2.0)])
def test_small_spaces_are_searched_exactly_and_chains_come_close(seed, shared_cores):
    work, cluster = make_work(SHORT), make_cluster(1, 4, shared_cores, memory_gib=24000 / 2**30)
    costs = random_costs(SHORT, seed)
    optimum = brute_force(SHORT, work, cluster, costs)
    exact = search(SHORT, work, cluster, costs)
    assert exact.exact and exact.top[0][1] == optimum
    chain = search(SHORT, work, cluster, costs, evaluations=150, seed=seed)
    assert not chain.exact and chain.evaluated <= 160
    assert optimum <= chain.top[0][1] <= 1.02 * optimum


def test_results_are_feasible_distinct_sorted_and_reproducible():
    work, cluster = make_work(PPO, batch=8), make_cluster(1, 4, memory_gib=30000 / 2**30)
    costs = analytic_costs(PPO, work, cluster)
    found = search(PPO, work, cluster, costs, evaluations=300, keep=5, seed=3)
    assert len(found.top) == 5 and found.best is found.top[0][0]
    assert [s for _, s in found.top] == sorted(s for _, s in found.top)
    assert len({tuple(p.placements.items()) for p, _ in found.top}) == 5
    for plan, seconds in found.top:
        validate(plan, PPO, work, cluster)
        assert memory.check(plan, PPO, work, cluster, costs) is None
        assert iteration_seconds(plan, PPO, work, cluster, costs) == seconds
    again = search(PPO, work, cluster, costs, evaluations=300, keep=5, seed=3)
    assert again == found
    assert "seed 3" in found.best.origin and found.best.cluster == "test"


def test_an_initial_plan_is_never_better_than_the_result():
    graph, work, cluster = ppo_70b(nodes=8)
    costs = analytic_costs(graph, work, cluster, max_micro_batches=8)
    start = symmetric(graph, work, cluster, costs)
    found = search(graph, work, cluster, costs, evaluations=60, initial=[start])
    assert found.top[0][1] <= iteration_seconds(start, graph, work, cluster, costs)


@pytest.mark.parametrize("seed", range(3))
def test_symmetric_never_beats_an_exact_search(seed):
    work, cluster = make_work(SHORT), make_cluster(1, 4)
    costs = random_costs(SHORT, seed)
    plan = symmetric(SHORT, work, cluster, costs)
    assert set(plan.placements.values()) == {Placement(0, tensor=4)}
    assert search(SHORT, work, cluster, costs).top[0][1] <= iteration_seconds(plan, SHORT, work, cluster, costs)


def test_host_calls_are_priced_but_not_placed():
    calls = (
        Call("generate", "generate", "actor", ("x",), ("tokens",)),
        Call("judge", "host", "", ("tokens",), ("scores",)),
    )
    graph = Graph("host", calls, ("x",))
    costs = CostTable(
        {("generate", Placement()): Cost(1, 0, "analytic"), ("judge", Placement()): Cost(2, 0, "analytic")}
    )
    found = search(graph, make_work(graph), make_cluster(), costs)
    assert found.exact and found.best.placements == {"generate": Placement()}
    with pytest.raises(UsageError, match="'judge'"):
        search(graph, make_work(graph), make_cluster(), CostTable({("generate", Placement()): Cost(1, 0, "analytic")}))


def test_what_does_not_fit_is_said():
    work = make_work(SHORT)
    # The actor's optimizer state alone: 12 bytes for 728 parameters, split by four but for 24 norm scales: 2400 bytes.
    fixed = CostTable({(c.name, LAYOUTS[-1]): Cost(1, 0, "analytic") for c in SHORT.calls})
    with pytest.raises(UsageError, match=r"No placement of call 'train' fits: the leanest \(tensor 4.*GiB more than"):
        search(SHORT, work, make_cluster(memory_gib=2200 / 2**30), fixed)
    # Each call fits by itself, but not together.
    one = CostTable({(c.name, Placement(0)): Cost(1, 0, "analytic") for c in SHORT.calls})
    with pytest.raises(UsageError, match=r"No plan for 'short'.*Device 0 would need.*optimizer state of actor"):
        search(SHORT, work, make_cluster(memory_gib=9000 / 2**30), one)
    with pytest.raises(UsageError, match="No cost is known for call 'generate'"):
        search(SHORT, work, make_cluster(), CostTable())


def test_heuristics_by_hand():
    work, cluster = make_work(PPO, ARCHS["llama-7b"], 64), make_cluster(1, 8, memory_gib=2000)
    costs = analytic_costs(PPO, work, cluster)
    data = heuristic("data-parallel", PPO, work, cluster, costs)
    assert {p.layout for p in data.placements.values()} == {Placement(0, data=8)}
    tensor = heuristic("tensor-parallel", PPO, work, cluster, costs)
    assert {p.layout for p in tensor.placements.values()} == {Placement(0, tensor=8)}
    best = heuristic("symmetric", PPO, work, cluster, costs)
    assert len({p.layout for p in best.placements.values()}) == 1
    seconds = {
        n: iteration_seconds(heuristic(n, PPO, work, cluster, costs), PPO, work, cluster, costs) for n in HEURISTICS
    }
    assert seconds["symmetric"] == min(seconds.values())
    for plan in (data, tensor, best):
        validate(plan, PPO, work, cluster)
    assert best.origin == "heuristic:symmetric"


def test_tensor_parallel_takes_what_divides_the_heads():
    arch = ARCHS["smollm2-135m"]  # 9 heads: no power of two divides them
    work, cluster = make_work(PPO, arch, 16), make_cluster(1, 4)
    costs = analytic_costs(PPO, work, cluster)
    plan = heuristic("tensor-parallel", PPO, work, cluster, costs)
    assert {p.layout for p in plan.placements.values()} == {Placement(0, data=4)}


def test_symmetric_takes_micro_batches_that_fit():
    graph = Graph("sft", (Call("train", "train", "actor", ("tokens",)),), ("tokens",))
    fast, lean = Placement(0, fsdp=4), Placement(0, fsdp=4, micro_batches=2)
    costs = CostTable({("train", fast): Cost(1, 5000, "analytic"), ("train", lean): Cost(2, 2500, "analytic")})
    state = 12 * 728 // 4
    for room, want in ((5000, fast), (4999, lean)):
        cluster = make_cluster(memory_gib=(state + room) / 2**30)
        assert symmetric(graph, make_work(graph), cluster, costs)["train"] == want
    with pytest.raises(UsageError, match="'symmetric' makes no plan.*Device 0 would need"):
        symmetric(graph, make_work(graph), make_cluster(memory_gib=(state + 100) / 2**30), costs)


def test_an_unknown_heuristic_names_the_known():
    with pytest.raises(UsageError, match="'megatron'. Heuristics: symmetric, data-parallel, tensor-parallel"):
        heuristic("megatron", PPO, make_work(PPO), make_cluster(), CostTable())
