"""Edges of PPO's graph written out by hand, and graphs that are refused."""

import pytest

from real_jax.algorithms import ppo, preference, sft
from real_jax.spec.dataflow import Average, Call, Edge, Graph
from real_jax.spec.errors import UsageError


def test_edges_of_ppo():
    generate, reward, reference = "actor_generate", "reward_inference", "reference_inference"
    values, actor, critic = "critic_inference", "actor_train", "critic_train"
    wanted = {Edge(generate, c, "tokens") for c in (reward, reference, values, actor, critic)}
    wanted |= {Edge(generate, c, "lengths") for c in (reward, actor, critic)}
    for train in (actor, critic):
        wanted |= {Edge(generate, train, key) for key in ("ended", "log_probs")}
        wanted |= {
            Edge(reference, train, "reference_log_probs"), Edge(reward, train, "scores"), Edge(values, train, "values"),
            Edge(actor, train, "kl_coef", lag=1), Edge(critic, train, "value_norm", lag=1),
        }  # fmt: skip
    for model, train, other in (("actor", actor, generate), ("critic", critic, values)):
        key = f"parameters of {model}"
        wanted |= {Edge(train, other, key, lag=1), Edge(other, train, key), Edge(train, train, key, lag=1)}
    graph = ppo.graph()
    assert set(graph.edges) == wanted
    assert len(graph.edges) == len(wanted)
    assert not any(e.lag == 0 and {e.source, e.target} == {actor, critic} for e in graph.edges)  # neither waits


def test_a_reference_that_follows_the_actor_waits_for_its_training():
    graph = ppo.graph(reference_eta=0.1)
    key = "parameters of reference"
    assert set(graph.edges) - set(ppo.graph().edges) == {
        Edge("actor_train", "reference_inference", key, lag=1), Edge("reference_inference", "actor_train", key),
    }  # fmt: skip
    assert graph.average("reference") == Average("reference", "actor", 0.1) and graph.average("actor") is None
    assert [m for m in graph.models if graph.changes(m)] == ["actor", "reference", "critic"]
    assert hash(graph) != hash(ppo.graph())


@pytest.mark.parametrize(
    ("target", "source", "eta", "message"),
    [
        ("critic", "actor", 0.5, "'critic' is to be an average of 'actor'. The first must be"),
        ("reference", "reward", 0.5, "'reference' is to be an average of 'reward'. The first must be"),
        ("nobody", "actor", 0.5, "'nobody' is to be an average of 'actor'"),
        ("reference", "actor", 0.0, r"eta of 'reference' is 0. It must lie in \(0, 1\]"),
        ("reference", "actor", 1.5, r"eta of 'reference' is 1.5. It must lie in \(0, 1\]"),
    ],
)
def test_refused_averages(target, source, eta, message):
    ppo_graph = ppo.graph()
    with pytest.raises(UsageError, match=message):
        Graph("g", ppo_graph.calls, ppo_graph.inputs, ppo_graph.carried, (Average(target, source, eta),))


def test_ppo_in_order():
    graph = ppo.graph()
    assert [c.name for c in graph.order] == [c.name for c in graph.calls]
    assert graph.models == ("actor", "reward", "reference", "critic")
    assert [m for m in graph.models if graph.trains(m)] == ["actor", "critic"]
    assert graph.last_read("values") == "critic_train"
    assert graph.last_read("row_ids") == "actor_generate"
    assert graph.last_read("nothing") is None


def test_single_call_graphs():
    for graph, model in ((sft.GRAPH, "actor"), (preference.GRAPH, "reward")):
        call = graph.calls[0]
        assert graph.edges == (Edge(call.name, call.name, f"parameters of {model}", lag=1),)


A = Call("a", "inference", "m", ("x",), ("y",))


def test_order_follows_edges_and_not_the_declaration():
    late = Call("z", "host", "", ("y",), ("w",))
    graph = Graph("g", (late, Call("t", "train", "m", ("w",)), A), ("x",))
    assert [c.name for c in graph.order] == ["a", "z", "t"]


def test_a_train_call_waits_for_its_models_other_calls_even_where_no_key_joins_them():
    graph = Graph("g", (Call("t", "train", "m", ("x",)), A), ("x",))
    assert [c.name for c in graph.order] == ["a", "t"]
    assert Edge("t", "a", "parameters of m", lag=1) in graph.edges


def test_a_carried_key_is_read_from_the_iteration_before():
    """A call may read what it writes itself, and before its writer."""
    graph = Graph(
        "g", (Call("first", "host", "", ("c",), ("x",)), Call("second", "host", "", ("x", "c"), ("c",))), (), ("c",)
    )
    assert Edge("second", "first", "c", lag=1) in graph.edges
    assert Edge("second", "second", "c", lag=1) in graph.edges
    assert [c.name for c in graph.order] == ["first", "second"]


@pytest.mark.parametrize(
    ("calls", "inputs", "carried", "message"),
    [
        ((A, A), ("x",), (), "Graph 'g': two calls are named 'a'"),
        ((A, Call("b", "inference", "m", ("x",), ("y",))), ("x",), (), "calls 'a' and 'b' both write 'y'"),
        ((Call("a", "inference", "m", ("x",), ("x",)),), ("x",), (), "call 'a' writes 'x', which the data loader gives"),
        ((A,), (), (), "call 'a' reads 'x', which no call writes and no input gives"),
        ((A,), ("x",), ("c",), "'c' is carried to the next iteration but no call writes it"),
        ((Call("a", "host", "m", ("x",)),), ("x",), (), "call 'a' is of kind 'host' and names model 'm'"),
        ((Call("a", "train", "", ("x",)),), ("x",), (), "call 'a' is of kind 'train' and names model ''"),
        (
            (Call("a", "host", "", ("y",), ("x",)), Call("b", "host", "", ("x",), ("y",)), Call("c", "host", "", ())),
            (), (), "calls a, b wait for each other in a circle",
        ),
        ((Call("a", "host", "", ("y",), ("y",)),), (), (), "calls a wait for each other in a circle"),
        # The train call waits for the model's other calls, so what it writes cannot feed them in the same iteration.
        (
            (Call("t", "train", "m", ("x",), ("w",)), Call("i", "inference", "m", ("w",))),
            ("x",), (), "calls i, t wait for each other in a circle",
        ),
    ],
)  # fmt: skip
def test_refused_graphs(calls, inputs, carried, message):
    with pytest.raises(UsageError, match=message):
        Graph("g", calls, inputs, carried)
