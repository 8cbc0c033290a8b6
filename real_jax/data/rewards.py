"""Reward functions: any Python function of (prompts, responses), and a sentiment score that needs no download."""

import functools
import importlib
import math
from collections.abc import Callable, Sequence

from real_jax.spec.errors import UsageError

RewardFunction = Callable[[Sequence[str], Sequence[str]], list[float]]


def vader_sentiment(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """VADER's compound sentiment of each response, in [-1, 1] (Hutto and Gilbert 2014); the prompts are not read."""
    analyzer = _vader()
    return [float(analyzer.polarity_scores(response)["compound"]) for response in responses]


@functools.cache
def _vader():
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise UsageError(
            "reward.function vader_sentiment needs the package vaderSentiment. Run: pip install vaderSentiment"
        ) from None
    return SentimentIntensityAnalyzer()


def resolve(name: str) -> RewardFunction:
    """The function that `module:function` names, wrapped so that each use checks its result.

    Raises UsageError where the module or the function cannot be found, and on use where the function does not return
    one finite number per response. What the function itself raises passes through.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise UsageError(f"reward.function is {name!r}. Write module:function, such as my_rewards:length_penalty.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"reward.function is {name!r}, but module {module_name!r} cannot be imported ({error}). "
            "Run from its folder, or add that folder to PYTHONPATH."
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        names = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        raise UsageError(
            f"reward.function is {name!r}, but module {module_name!r} has no function {function_name!r}. "
            f"It has: {', '.join(names) or 'none'}."
        )

    @functools.wraps(function)
    def checked(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return _check_scores(name, function(prompts, responses), len(responses))

    return checked


def _check_scores(name: str, scores, count: int) -> list[float]:
    try:
        values = [float(score) for score in scores]
    except (TypeError, ValueError) as error:
        raise UsageError(f"Reward function {name} must return one number per response: {error}.") from None
    if len(values) != count:
        raise UsageError(f"Reward function {name} returned {len(values)} scores for {count} responses.")
    for row, value in enumerate(values):
        if not math.isfinite(value):
            raise UsageError(f"Reward function {name} returned {value} for response {row}; scores must be finite.")
    return values
