"""Records -> token ids, once; token ids -> batches that are a function of the step alone, so a run resumes anywhere.

Which positions are padding is told by lengths. The value written there has no meaning, and may be a real token's id.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from real_jax.data.records import Answer, Pair, Prompt
from real_jax.spec.errors import UsageError

Ids = list[int]


class TextEncoder(Protocol):
    """What batches need of a tokenizer; `real_jax.models.tokenizer.Tokenizer` is one."""

    eos_id: int

    def encode(self, text: str, continues: bool = False) -> Ids: ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Ids: ...


@dataclasses.dataclass(frozen=True)
class Limits:
    """What token sequences must fit.

    Attributes:
      vocab: ids lie below it.
      prompt_length: longest prompt (P).
      response_length: longest answer, with its end token (R).
      drop_long: whether records that are too long are left out, instead of being an error.
    """

    vocab: int
    prompt_length: int
    response_length: int = 0
    drop_long: bool = False


def encode_prompts(
    records: Sequence[Prompt], tokenizer: TextEncoder, limits: Limits, chat: bool = False
) -> tuple[list[Prompt], list[Ids]]:
    """The records that are kept, and the token ids of each one's prompt.

    Raises UsageError naming the id, the length and the remedy for a prompt that is too long or empty, and for a token
    id outside the vocabulary.
    """
    kept, prompts = [], []
    for record in records:
        ids = _prompt(record, tokenizer, limits, chat)
        if ids is not None:
            kept.append(record)
            prompts.append(ids)
    _need_any(kept, records, "data.prompt_length")
    return kept, prompts


def encode_answers(
    records: Sequence[Answer], tokenizer: TextEncoder, limits: Limits, chat: bool = False
) -> list[tuple[Ids, Ids]]:
    """(prompt, answer with its end token) as token ids, for the records that are kept. Errors as `encode_prompts`."""
    examples = []
    for record in records:
        prompt = _prompt(record, tokenizer, limits, chat)
        answer = _answer(record.id, record.answer, tokenizer, limits)
        if prompt is not None and answer is not None:
            examples.append((prompt, answer))
    _need_any(examples, records, "data.prompt_length or generation.response_length")
    return examples


def encode_pairs(
    records: Sequence[Pair], tokenizer: TextEncoder, limits: Limits, chat: bool = False
) -> list[tuple[Ids, list[Ids], list[Ids]]]:
    """(prompt, preferred answers, rejected answers) as token ids, for the records that are kept.

    Answers end with the end token. With `drop_long`, single answers are left out too. Errors as `encode_prompts`.
    """
    examples = []
    for record in records:
        prompt = _prompt(record, tokenizer, limits, chat)
        sides = [
            [ids for text in texts if (ids := _answer(record.id, text, tokenizer, limits)) is not None]
            for texts in (record.pos_answers, record.neg_answers)
        ]
        if prompt is not None and all(sides):
            examples.append((prompt, *sides))
    _need_any(examples, records, "data.prompt_length or generation.response_length")
    return examples


def _prompt(record, tokenizer: TextEncoder, limits: Limits, chat: bool) -> Ids | None:
    """Token ids of a record's prompt; None where it is to be dropped."""
    text = record.prompt
    ids = tokenizer.chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    if not ids:
        raise UsageError(f"The prompt of record {record.id!r} has no tokens. Remove the record.")
    _check_ids(ids, limits.vocab, record.id)
    if len(ids) <= limits.prompt_length:
        return ids
    if limits.drop_long:
        return None
    raise UsageError(
        f"The prompt of record {record.id!r} has {len(ids)} tokens; data.prompt_length is {limits.prompt_length}. "
        "Raise it, or set data.drop_long to leave such prompts out."
    )


def _answer(record_id, text: str, tokenizer: TextEncoder, limits: Limits) -> Ids | None:
    ids = [*tokenizer.encode(text, continues=True), tokenizer.eos_id]
    _check_ids(ids, limits.vocab, record_id)
    if len(ids) <= limits.response_length:
        return ids
    if limits.drop_long:
        return None
    raise UsageError(
        f"An answer of record {record_id!r} has {len(ids)} tokens with its end token; generation.response_length is "
        f"{limits.response_length}. Raise it, or set data.drop_long to leave such answers out."
    )


def _check_ids(ids: Ids, vocab: int, record_id) -> None:
    """On the device an id outside the table would be clamped silently."""
    if min(ids) < 0 or max(ids) >= vocab:
        raise UsageError(
            f"Record {record_id!r} has token id {max(ids) if max(ids) >= vocab else min(ids)}; the model's vocabulary "
            f"has {vocab}. The tokenizer belongs to another model."
        )


def _need_any(kept: Sequence, records: Sequence, remedy: str) -> None:
    if not kept:
        raise UsageError(f"None of the {len(records)} records is short enough to be kept. Raise {remedy}.")


class _Order:
    """Row numbers by step: every epoch a new seeded shuffle of all rows, batches running on over its end."""

    def __init__(self, rows: int, batch: int, seed: int):
        import grain  # seconds to import, which the other commands need not wait for

        if rows < 1:
            raise UsageError("The dataset is empty. Give at least one record.")
        if batch < 1:
            raise UsageError(f"batch is {batch}. It must be at least 1.")
        self.batch = batch
        self.seed = seed
        self._rows = grain.MapDataset.range(rows).seed(seed).shuffle().repeat()

    def __getitem__(self, step: int) -> np.ndarray:
        """Rows [B] int32 of batch `step`."""
        if step < 0:
            raise UsageError(f"Step {step} is before the first.")
        first = step * self.batch
        return np.array([self._rows[i] for i in range(first, first + self.batch)], np.int32)

    def random(self, step: int) -> np.random.Generator:
        """The random numbers of batch `step`."""
        return np.random.default_rng((self.seed, step))


def _padded(sequences: Sequence[Ids], length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N, length] int32 padded on the right, and lengths [N] int32."""
    tokens = np.full((len(sequences), length), pad_id, np.int32)
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids)] = ids
    return tokens, np.array([len(ids) for ids in sequences], np.int32)


def _check_lengths(lengths: Sequence[int], limit: int, name: str) -> None:
    for row, length in enumerate(lengths):
        if not 0 < length <= limit:
            raise UsageError(f"Row {row} has {length} tokens; it must have 1 to {name} = {limit}.")


class PromptBatches:
    """Batches of prompts: `batches[step]` is the same whenever and in whichever process it is asked for.

    Each is {prompt_tokens [B, P] int32, padded on the right; prompt_lengths [B] int32; prompt_ids [B] int32, the row in
    `prompts`}. Every epoch holds each prompt once.
    """

    def __init__(self, prompts: Sequence[Ids], batch: int, prompt_length: int, seed: int, pad_id: int = 0):
        _check_lengths([len(p) for p in prompts], prompt_length, "prompt_length")
        self._prompts, self._length, self._pad = prompts, prompt_length, pad_id
        self._order = _Order(len(prompts), batch, seed)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        rows = self._order[step]
        tokens, lengths = _padded([self._prompts[r] for r in rows], self._length, self._pad)
        return {"prompt_tokens": tokens, "prompt_lengths": lengths, "prompt_ids": rows}


class AnswerBatches:
    """Batches for supervised fine-tuning, by step.

    Each is {tokens [B, T] int32, prompt then answer, padded on the right; prompt_lengths [B] int32; lengths [B] int32
    of both together}.
    """

    def __init__(self, examples: Sequence[tuple[Ids, Ids]], batch: int, length: int, seed: int, pad_id: int = 0):
        _check_lengths([len(prompt) + len(answer) for prompt, answer in examples], length, "length")
        self._examples, self._length, self._pad = examples, length, pad_id
        self._order = _Order(len(examples), batch, seed)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        examples = [self._examples[row] for row in self._order[step]]
        tokens, lengths = _padded([[*prompt, *answer] for prompt, answer in examples], self._length, self._pad)
        prompts = np.array([len(prompt) for prompt, _ in examples], np.int32)
        return {"tokens": tokens, "prompt_lengths": prompts, "lengths": lengths}


class PairBatches:
    """Batches of preference pairs, by step; of a record's answers, one preferred and one rejected are drawn at random.

    Each is {tokens [B, 2, T] int32, prompt then answer, padded on the right; lengths [B, 2] int32}; on axis 1 the
    preferred answer comes first.
    """

    def __init__(
        self, examples: Sequence[tuple[Ids, list[Ids], list[Ids]]], batch: int, length: int, seed: int, pad_id: int = 0
    ):
        longest = [len(prompt) + max(map(len, [*pos, *neg])) for prompt, pos, neg in examples]
        _check_lengths(longest, length, "length")
        self._examples, self._length, self._pad = examples, length, pad_id
        self._order = _Order(len(examples), batch, seed)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        random = self._order.random(step)
        rows = []
        for row in self._order[step]:
            prompt, *sides = self._examples[row]
            rows += [[*prompt, *side[random.integers(len(side))]] for side in sides]
        tokens, lengths = _padded(rows, self._length, self._pad)
        batch = self._order.batch
        return {"tokens": tokens.reshape(batch, 2, self._length), "lengths": lengths.reshape(batch, 2)}
