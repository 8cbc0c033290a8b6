import numpy as np
import pytest

from real_jax.data import reviews
from real_jax.data.batches import Limits, encode_answers, encode_pairs, encode_prompts
from real_jax.data.reviews import gold_reward, make
from real_jax.models.tokenizer import Tokenizer
from real_jax.spec.arch import ARCHS
from real_jax.spec.errors import UsageError

PROMPT = "how was the soup at the old cafe ?"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("the soup was good .", 2),
        ("it was good .", 1),
        ("the soup was good , good and good .", 2),  # a word counts once
        ("the bread was good .", 1),  # another dish
        ("the soup was burnt and bad .", -1),
        ("the soup was good and bad .", 1),
        ("it was bad , awful , stale , cold and sour .", -4),
        ("soup good great lovely fresh tasty perfect", 5),
        ("good great lovely fresh tasty bad", 4),  # 5 - 1, then the cap
        ("the soup was brown .", 1),
        ("", 0),
        ("the old cafe", 0),  # words of the prompt that are not the dish
    ],
)
def test_gold_reward_by_hand(response, reward):
    assert gold_reward([PROMPT], [response]) == [reward]


def test_gold_reward_is_one_per_response():
    assert gold_reward([PROMPT, PROMPT], ["soup", "bad"]) == [1.0, -1.0]
    with pytest.raises(ValueError):
        gold_reward([PROMPT], [])


def test_vocabulary_fits_the_tiny_model_without_overlaps():
    tokenizer = Tokenizer.words(reviews.WORDS)
    assert tokenizer.vocab_size == len(reviews.WORDS) + 2 <= ARCHS["tiny"].vocab
    assert not set(reviews.POSITIVE) & set(reviews.NEGATIVE)


def test_the_task_is_a_function_of_its_seed():
    assert make(3) == make(3)
    assert make(3).answers != make(4).answers
    # Golden: the task of seed 0 stays what published results were made with.
    assert make(0).prompts[0].prompt == "how was the cake at the busy station ?"
    assert make(0).answers[0].answer == "it at the place was so bland and terrible ."


def test_held_out_prompts_are_other_combinations():
    task = make(0)
    assert (len(task.prompts), len(task.held_out), len(task.answers), len(task.pairs)) == (224, 64, 896, 224)
    train = {p.prompt for p in task.prompts}
    held_out = {p.prompt for p in task.held_out}
    assert len(train) == 224 and len(held_out) == 64 and not train & held_out
    assert {a.prompt for a in task.answers} | {p.prompt for p in task.pairs} == train
    for noun in reviews.NOUNS:  # every dish is met in training, so only the combination is new
        assert any(noun in p.split() for p in train)
    assert len(make(0, held_out_size=10).held_out) == 10
    for size in (0, 288):
        with pytest.raises(UsageError, match=f"held_out_size is {size}"):
            make(0, held_out_size=size)


@pytest.mark.parametrize("seed", range(5))
def test_answers_are_mixed_and_leave_room_above(seed):
    task = make(seed)
    gold = gold_reward([a.prompt for a in task.answers], [a.answer for a in task.answers])
    assert abs(np.mean(gold)) < 0.15
    share = {low: np.mean(np.array(gold) <= low) for low in (-1, 1)}
    assert 0.2 < share[-1] < 0.6 and share[1] < 0.9
    names_dish = [a.prompt.split()[3] in a.answer.split() for a in task.answers]
    assert 0.65 < np.mean(names_dish) < 0.85


@pytest.mark.parametrize("seed", range(3))
def test_preferred_answers_score_higher(seed):
    for pair in make(seed).pairs:
        assert pair.pos_answers and pair.neg_answers
        pos = gold_reward([pair.prompt] * len(pair.pos_answers), pair.pos_answers)
        neg = gold_reward([pair.prompt] * len(pair.neg_answers), pair.neg_answers)
        assert min(pos) > max(neg)


def test_everything_fits_its_lengths_and_the_vocabulary():
    tokenizer = Tokenizer.words(reviews.WORDS)
    limits = Limits(tokenizer.vocab_size, reviews.PROMPT_LENGTH, reviews.RESPONSE_LENGTH)
    task = make(1)
    _, prompts = encode_prompts([*task.prompts, *task.held_out], tokenizer, limits)
    answers = encode_answers(task.answers, tokenizer, limits)
    pairs = encode_pairs(task.pairs, tokenizer, limits)
    assert {len(p) for p in prompts} == {9}
    assert 5 <= min(len(a) for _, a in answers) and max(len(a) for _, a in answers) <= 14
    assert all(a[-1] == tokenizer.eos_id and tokenizer.eos_id not in a[:-1] for _, a in answers)
    assert tokenizer.decode(answers[0][1]) == task.answers[0].answer
    used = {t for ids in [*prompts, *(a for _, a in answers)] for t in ids}
    used |= {t for _, pos, neg in pairs for ids in [*pos, *neg] for t in ids}
    assert used == set(range(1, tokenizer.vocab_size))  # every word of the vocabulary occurs
