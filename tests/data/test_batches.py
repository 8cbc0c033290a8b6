import dataclasses

import numpy as np
import pytest

from real_jax.data.batches import (
    AnswerBatches,
    Limits,
    PairBatches,
    PromptBatches,
    encode_answers,
    encode_pairs,
    encode_prompts,
)
from real_jax.data.records import Answer, Pair, Prompt
from real_jax.models.tokenizer import Tokenizer
from real_jax.spec.errors import UsageError

WORDS = Tokenizer.words(["a", "b", "c", "d", "e"])  # ids 2 to 6; 0 is padding, 1 the end token
LIMITS = Limits(vocab=7, prompt_length=4, response_length=3)


@dataclasses.dataclass(frozen=True)
class Chatting:
    """A tokenizer whose chat puts 6 before a prompt and 5 after it."""

    eos_id: int = 1

    def encode(self, text, continues=False):
        return WORDS.encode(text)

    def chat(self, messages):
        assert [m["role"] for m in messages] == ["user"]
        return [6, *WORDS.encode(messages[0]["content"]), 5]


def prompts_of(count):
    return [[2 + i % 5] * (1 + i % 4) for i in range(count)]


def test_a_batch_is_what_it_says():
    prompts = prompts_of(10)
    batch = PromptBatches(prompts, batch=4, prompt_length=6, seed=3)[0]
    assert {key: (v.shape, v.dtype.name) for key, v in batch.items()} == {
        "prompt_tokens": ((4, 6), "int32"), "prompt_lengths": ((4,), "int32"), "prompt_ids": ((4,), "int32"),
    }  # fmt: skip
    for tokens, length, row in zip(*batch.values(), strict=True):
        assert tokens[:length].tolist() == prompts[row]
        assert not tokens[length:].any()


def test_batches_are_a_function_of_the_step():
    def make(seed=7):
        return PromptBatches(prompts_of(23), batch=5, prompt_length=4, seed=seed)

    walked, fresh = make(), make()
    passed = [walked[step] for step in range(12)]
    for step in (5, 11, 0, 5):
        for key in passed[step]:
            assert np.array_equal(fresh[step][key], passed[step][key])
    rows = [make(seed)[0]["prompt_ids"].tolist() for seed in (7, 8)]
    assert rows[0] != rows[1]
    with pytest.raises(UsageError, match="Step -1"):
        make()[-1]


@pytest.mark.parametrize(("count", "batch"), [(24, 6), (23, 5), (3, 8)])
def test_every_epoch_holds_every_prompt_once_in_a_new_order(count, batch):
    batches = PromptBatches(prompts_of(count), batch, prompt_length=4, seed=0)
    rows = np.concatenate([batches[step]["prompt_ids"] for step in range(4 * count // batch + 1)])
    epochs = rows[: 4 * count].reshape(4, count)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(count), (4, 1)))
    if count > 3:
        assert len({tuple(e) for e in epochs}) == 4


def test_padding_that_equals_the_end_token_hides_nothing():
    prompt, answer = [2, 1, 3, 1], [4, 1]  # the end token also stands inside and at the end of the prompt
    batch = PromptBatches([prompt], batch=2, prompt_length=6, seed=0, pad_id=1)[0]
    assert batch["prompt_lengths"].tolist() == [4, 4]
    assert batch["prompt_tokens"].tolist() == [[2, 1, 3, 1, 1, 1]] * 2
    batch = AnswerBatches([(prompt, answer)], batch=1, length=8, seed=0, pad_id=1)[0]
    assert batch["tokens"].tolist() == [[2, 1, 3, 1, 4, 1, 1, 1]]
    assert (batch["prompt_lengths"].tolist(), batch["lengths"].tolist()) == ([4], [6])


def test_answers():
    records = [Answer(0, "a b", "c"), Answer(1, "d", "e e")]
    examples = encode_answers(records, WORDS, LIMITS)
    assert examples == [([2, 3], [4, 1]), ([5], [6, 6, 1])]
    batches = AnswerBatches(examples, batch=2, length=7, seed=1)
    batch = batches[3]
    order = np.argsort(batch["prompt_lengths"])
    assert batch["tokens"][order].tolist() == [[5, 6, 6, 1, 0, 0, 0], [2, 3, 4, 1, 0, 0, 0]]
    assert batch["prompt_lengths"][order].tolist() == [1, 2]
    assert batch["lengths"].tolist() == [4, 4]
    assert {v.dtype.name for v in batch.values()} == {"int32"}
    again = AnswerBatches(examples, batch=2, length=7, seed=1)[3]
    assert all(np.array_equal(again[key], batch[key]) for key in batch)


def test_pairs_draw_every_combination_and_keep_the_sides():
    records = [Pair("x", "a", ("b", "b b"), ("c", "d", "e")), Pair("y", "e", ("a",), ("d d",))]
    examples = encode_pairs(records, WORDS, LIMITS)
    assert examples[0] == ([2], [[3, 1], [3, 3, 1]], [[4, 1], [5, 1], [6, 1]])

    def make():
        return PairBatches(examples, batch=4, length=5, seed=2)

    batches, drawn = make(), set()
    for step in range(40):
        batch = batches[step]
        assert batch["tokens"].shape == (4, 2, 5) and batch["lengths"].shape == (4, 2)
        for tokens, lengths in zip(batch["tokens"], batch["lengths"], strict=True):
            sides = [tuple(t[:n].tolist()) for t, n in zip(tokens, lengths, strict=True)]
            assert not any(t[n:].any() for t, n in zip(tokens, lengths, strict=True))
            drawn.add(tuple(sides))
    expected = {((2, *p), (2, *n)) for p in [(3, 1), (3, 3, 1)] for n in [(4, 1), (5, 1), (6, 1)]}
    assert drawn == expected | {((6, 2, 1), (6, 5, 5, 1))}
    assert np.array_equal(make()[17]["tokens"], batches[17]["tokens"])


def test_chat_wraps_the_prompt_only():
    assert encode_prompts([Prompt(0, "a")], Chatting(), LIMITS, chat=True)[1] == [[6, 2, 5]]
    assert encode_answers([Answer(0, "a", "b")], Chatting(), LIMITS, chat=True) == [([6, 2, 5], [3, 1])]
    assert encode_prompts([Prompt(0, "a")], Chatting(), LIMITS)[1] == [[2]]


def test_long_records_are_errors_by_name_or_dropped():
    records = [Prompt("short", "a b"), Prompt("long", "a b c d e")]
    with pytest.raises(UsageError, match="'long' has 5 tokens; data.prompt_length is 4.*data.drop_long"):
        encode_prompts(records, WORDS, LIMITS)
    dropping = dataclasses.replace(LIMITS, drop_long=True)
    assert encode_prompts(records, WORDS, dropping) == (records[:1], [[2, 3]])
    with pytest.raises(UsageError, match="None of the 1 records"):
        encode_prompts(records[1:], WORDS, dropping)

    answers = [Answer("long", "a", "a b c"), Answer("short", "a", "a b")]
    with pytest.raises(UsageError, match="'long' has 4 tokens.*generation.response_length is 3.*drop_long"):
        encode_answers(answers, WORDS, LIMITS)
    assert encode_answers(answers, WORDS, dropping) == [([2], [2, 3, 1])]
    pairs = [Pair(0, "a", ("b", "b b b"), ("c",)), Pair(1, "a", ("b",), ("c c c",))]
    assert encode_pairs(pairs, WORDS, dropping) == [([2], [[3, 1]], [[4, 1]])]


def test_ids_outside_the_vocabulary_are_found_on_the_host():
    with pytest.raises(UsageError, match="'r' has token id 6; the model's vocabulary has 6"):
        encode_prompts([Prompt("r", "a e")], WORDS, dataclasses.replace(LIMITS, vocab=6))
    with pytest.raises(UsageError, match="token id 6"):
        encode_answers([Answer("r", "a", "e")], WORDS, dataclasses.replace(LIMITS, vocab=6))


def test_datasets_that_cannot_be_batched():
    with pytest.raises(UsageError, match="dataset is empty"):
        PromptBatches([], batch=2, prompt_length=4, seed=0)
    with pytest.raises(UsageError, match="batch is 0"):
        PromptBatches([[2]], batch=0, prompt_length=4, seed=0)
    with pytest.raises(UsageError, match="Row 1 has 5 tokens.*prompt_length = 4"):
        PromptBatches([[2], [2] * 5], batch=1, prompt_length=4, seed=0)
    with pytest.raises(UsageError, match="Row 0 has 0 tokens"):
        PromptBatches([[]], batch=1, prompt_length=4, seed=0)
    with pytest.raises(UsageError, match="Row 0 has 4 tokens.*length = 3"):
        PairBatches([([2], [[3, 1]], [[4, 4, 1]])], batch=1, length=3, seed=0)
