import sys

import pytest

from real_jax.data.rewards import resolve, vader_sentiment
from real_jax.spec.errors import UsageError


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rewards.py").write_text(
        "import numpy as np\n"
        "limit = 3\n"
        "def lengths(prompts, responses): return [len(r) for r in responses]\n"
        "def array(prompts, responses): return np.array([float(len(p)) for p in prompts], np.float32)\n"
        "def short(prompts, responses): return [1.0]\n"
        "def text(prompts, responses): return ['good' for r in responses]\n"
        "def nothing(prompts, responses): return None\n"
        "def nan(prompts, responses): return [0.0, float('nan')]\n"
        "def failing(prompts, responses): raise RuntimeError('the service is down')\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import a_package_that_is_not_there\n")
    yield "my_rewards"
    for name in ("my_rewards", "broken_rewards"):
        sys.modules.pop(name, None)


def test_a_users_function(module):
    assert resolve(f"{module}:lengths")(["p", "q"], ["abc", ""]) == [3.0, 0.0]
    scores = resolve(f"{module}:array")(["p", "qq"], ["a", "b"])
    assert scores == [1.0, 2.0] and all(type(s) is float for s in scores)
    assert resolve("real_jax.data.reviews:gold_reward")(["how was the tea ?"], ["the tea was good ."]) == [2.0]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("short", "returned 1 scores for 2 responses"),
        ("text", "one number per response"),
        ("nothing", "one number per response"),
        ("nan", "returned nan for response 1"),
    ],
)
def test_results_are_checked_on_use(module, name, named):
    function = resolve(f"{module}:{name}")
    with pytest.raises(UsageError, match=named) as error:
        function(["p", "q"], ["a", "b"])
    assert f"{module}:{name}" in str(error.value)


def test_what_a_users_function_raises_passes_through(module):
    with pytest.raises(RuntimeError, match="the service is down"):
        resolve(f"{module}:failing")(["p"], ["a"])


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("gold", "module:function"),
        (":f", "module:function"),
        ("m:", "module:function"),
        (".relative:f", "module:function"),
        ("nowhere_to_be_found:f", "'nowhere_to_be_found' cannot be imported"),
        ("broken_rewards:f", "a_package_that_is_not_there"),
        ("my_rewards:length", "no function 'length'.*lengths"),
        ("my_rewards:limit", "no function 'limit'"),
    ],
)
def test_names_that_lead_nowhere(module, name, named):
    with pytest.raises(UsageError, match=named):
        resolve(name)


def test_vader_sentiment():
    pytest.importorskip("vaderSentiment")
    # The lexicon rates "good" 1.9 and "terrible" -2.1; compound = x / sqrt(x^2 + 15), rounded to four digits.
    scores = resolve("real_jax.data.rewards:vader_sentiment")(["", "", ""], ["good", "terrible", "table"])
    assert scores == [0.4404, -0.4767, 0.0]


def test_vader_sentiment_without_its_package(monkeypatch):
    from real_jax.data import rewards

    rewards._vader.cache_clear()
    monkeypatch.setitem(sys.modules, "vaderSentiment", None)
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    with pytest.raises(UsageError, match="pip install vaderSentiment"):
        vader_sentiment([""], ["good"])
    rewards._vader.cache_clear()
