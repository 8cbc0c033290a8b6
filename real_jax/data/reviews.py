"""The built-in task: short reviews of a meal, whose policy PPO should make friendlier without drifting off the subject.

Everything is made from word lists and a seed, offline. Text is a sequence of words of `WORDS`, split at spaces; the
rule-based `gold_reward` says how good a response is, so a learned reward model can be held against it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from real_jax.data.records import Answer, Pair, Prompt
from real_jax.spec.errors import UsageError

# fmt: off
NOUNS = ("soup", "bread", "coffee", "tea", "cake", "pizza", "salad", "fish", "rice", "pasta", "curry", "pie")
_ADJECTIVES = ("old", "new", "small", "busy")
_PLACES = ("cafe", "hotel", "market", "harbour", "station", "garden")
POSITIVE = (
    "good", "great", "lovely", "fresh", "tasty", "perfect", "wonderful", "delicious", "excellent", "superb", "warm",
    "nice", "amazing", "fantastic",
)
NEGATIVE = (
    "bad", "awful", "terrible", "stale", "bland", "cold", "horrible", "poor", "soggy", "burnt", "greasy", "sour",
    "dull", "salty",
)
_PLAIN = ("brown", "large", "simple", "usual", "quick", "hot", "mild", "plain")
_FUNCTION_WORDS = (
    "how", "was", "the", "at", "?", "it", "and", "very", "so", "really", "we", "had", "they", "i", "my", "table", "came",
    "for", "lunch", "ate", "found", "this", "is", "served", "today", ".", ",", "to", "place",
)
# fmt: on
WORDS = (*NOUNS, *_ADJECTIVES, *_PLACES, *POSITIVE, *NEGATIVE, *_PLAIN, *_FUNCTION_WORDS)

# Longest prompt and longest answer with its end token, in tokens.
PROMPT_LENGTH, RESPONSE_LENGTH = 9, 14

# A review is a frame in which N is the dish, or "it", and each A a word of the review's mood.
_FRAMES = {
    1: ("the N was A .", "we had the N for lunch and it was A .", "i found the N very A .", "this N is really A ."),
    2: (
        "the N was A and A .",
        "the N at the place was so A and A .",
        "they served the N today , A and A .",
        "my N came to the table A and A .",
    ),
    3: ("the N was A , A and A .", "we ate the N and found it A , A and A ."),
}
# (mood, how many mood words, weight): weighed so that the mean gold reward of the answers is about 0.
_ANSWERS = (
    (POSITIVE, 1, 0.18), (POSITIVE, 2, 0.10), (_PLAIN, 1, 0.07), (_PLAIN, 2, 0.05),
    (NEGATIVE, 1, 0.22), (NEGATIVE, 2, 0.26), (NEGATIVE, 3, 0.12),
)  # fmt: skip
_OFF_SUBJECT = 0.25  # share of the answers that do not name the dish


@dataclasses.dataclass(frozen=True)
class Reviews:
    """The task's records. `held_out` prompts have other combinations of dish and place than all the others."""

    prompts: list[Prompt]
    held_out: list[Prompt]
    answers: list[Answer]
    pairs: list[Pair]


def gold_reward(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """How friendly and to the point each response is, in [-4, 5].

    The number of different positive words less that of different negative ones, kept within -4 and 4, and 1 more where
    the response names the prompt's dish. Words count once, so repeating one does not pay.
    """
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        words = set(response.split())
        mood = len(words.intersection(POSITIVE)) - len(words.intersection(NEGATIVE))
        named = words.intersection(NOUNS, prompt.split())
        scores.append(float(max(-4, min(4, mood)) + bool(named)))
    return scores


def make(seed: int, held_out_size: int = 64, answers_per_prompt: int = 4) -> Reviews:
    """The task's records, the same for the same arguments.

    Of the 288 combinations of dish, adjective and place, `held_out_size` make the held-out prompts and the rest the
    others. Each of those has `answers_per_prompt` answers to imitate, and one record of preferred and rejected answers.
    """
    random = np.random.default_rng(seed)
    combinations = [(n, a, p) for n in NOUNS for a in _ADJECTIVES for p in _PLACES]
    order = [combinations[i] for i in random.permutation(len(combinations))]
    if not 0 < held_out_size < len(order):
        raise UsageError(f"data.held_out_size is {held_out_size}; the reviews task allows 1 to {len(order) - 1}.")
    records = [Prompt(f"{n}-{a}-{p}", f"how was the {n} at the {a} {p} ?") for n, a, p in order]
    held_out, prompts = records[:held_out_size], records[held_out_size:]
    answers, pairs = [], []
    for record in prompts:
        noun = record.id.split("-")[0]
        for number in range(answers_per_prompt):
            answers.append(Answer(f"{record.id}-{number}", record.prompt, _review(noun, random)))
        pairs.append(_pair(record, noun, random))
    return Reviews(prompts, held_out, answers, pairs)


def _review(noun: str, random: np.random.Generator) -> str:
    """An answer such as the supervised policy learns: of any mood, mostly about the dish."""
    weights = np.array([weight for _, _, weight in _ANSWERS])
    mood, count, _ = _ANSWERS[random.choice(len(_ANSWERS), p=weights / weights.sum())]
    words = random.choice(mood, size=count, replace=False)
    return _fill(noun, words, random)


def _fill(noun: str, words: Sequence[str], random: np.random.Generator) -> str:
    frames = _FRAMES[len(words)]
    text = frames[random.integers(len(frames))]
    if random.random() < _OFF_SUBJECT:
        text = text.replace("the N", "it", 1) if "the N" in text else text.replace(" N", "", 1)
        text = text.replace("my came", "it came")
    else:
        text = text.replace("N", noun, 1)
    for word in words:
        text = text.replace("A", str(word), 1)
    return text


def _stutter(noun: str, random: np.random.Generator) -> str:
    """One positive word over and over: a reward model must learn that it counts once."""
    return _fill(noun, [random.choice(POSITIVE)] * int(random.integers(2, 4)), random)


def _pair(record: Prompt, noun: str, random: np.random.Generator) -> Pair:
    """Candidates split at a gold reward: every preferred answer scores above every rejected one.

    Among them are happy reviews richer than the supervised ones, reviews of another dish and stuttering ones, so that
    the reward model knows the answers that PPO will find.
    """
    other = NOUNS[(NOUNS.index(noun) + int(random.integers(1, len(NOUNS)))) % len(NOUNS)]
    happy = random.choice(POSITIVE, size=3, replace=False)
    candidates = {
        *(_review(noun, random) for _ in range(4)),
        _review(other, random),
        _stutter(noun, random),
        _fill(noun, happy, random),
        _fill(other, happy[:2], random),
        _fill(noun, random.choice(NEGATIVE, size=2, replace=False), random),
    }
    texts = sorted(candidates)
    gold = gold_reward([record.prompt] * len(texts), texts)
    levels = sorted(set(gold))
    cut = levels[int(random.integers(1, len(levels)))]
    ranked = list(zip(gold, texts, strict=True))
    return Pair(
        record.id,
        record.prompt,
        tuple(text for score, text in ranked if score >= cut),
        tuple(text for score, text in ranked if score < cut),
    )
