"""All data of an experiment: what its stages are fed with, held-out prompts, and the function that judges them."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from real_jax.data import records, reviews, rewards
from real_jax.data.batches import (
    AnswerBatches,
    Ids,
    Limits,
    PairBatches,
    PromptBatches,
    TextEncoder,
    encode_answers,
    encode_pairs,
    encode_prompts,
)
from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Batches by step, and held-out prompts.

    Attributes:
      prompts, answers, pairs: batches of each stage; None where the stage is left out.
      prompt_texts: text of each prompt that `prompts` numbers.
      held_out, held_out_texts: token ids and texts of the prompts kept for evaluation.
      judge: (prompts, responses) -> scores, for evaluation; None where only a reward model can score.
      judge_name: what `judge` is, in words.
    """

    prompts: PromptBatches
    answers: AnswerBatches | None
    pairs: PairBatches | None
    prompt_texts: list[str]
    held_out: list[Ids]
    held_out_texts: list[str]
    judge: Callable[[Sequence[str], Sequence[str]], list[float]] | None
    judge_name: str

    def held_out_batch(self, first: int, batch: int, prompt_length: int, pad_id: int) -> dict[str, np.ndarray]:
        """Held-out prompts from `first` on, as a generate call reads them; the last ones come again to fill the batch."""
        rows = [min(first + i, len(self.held_out) - 1) for i in range(batch)]
        tokens = np.full((batch, prompt_length), pad_id, np.int32)
        for row, number in enumerate(rows):
            tokens[row, : len(self.held_out[number])] = self.held_out[number]
        lengths = np.array([len(self.held_out[number]) for number in rows], np.int32)
        # Row ids of evaluation lie in the upper half, so that it never shares a random number with training.
        ids = (np.arange(first, first + batch, dtype=np.int64) + 2**31).astype(np.uint32)
        return {"prompt_tokens": tokens, "prompt_lengths": lengths, "row_ids": ids}


def _records(e: Experiment):
    """(prompts, held out, answers, pairs) as records; empty lists for stages that are left out."""
    d = e.data
    if d.task == "reviews" and not d.prompts:
        made = reviews.make(e.seed, d.held_out_size)
        return made.prompts, made.held_out, made.answers, made.pairs
    if not d.prompts:
        raise UsageError(
            "data.prompts is empty and so is data.task. Give a file of prompts, or the built-in task 'reviews'."
        )
    prompts = records.read(records.Prompt, d.prompts)
    if d.held_out:
        held_out = records.read(records.Prompt, d.held_out)
    else:
        if not 0 < d.held_out_size < len(prompts):
            raise UsageError(
                f"data.held_out_size is {d.held_out_size}, but {d.prompts} has {len(prompts)} prompts. "
                "Keep back fewer, or name a file in data.held_out."
            )
        prompts, held_out = prompts[: -d.held_out_size], prompts[-d.held_out_size :]
    found = {}
    for stage, field, kind in (("sft", "answers", records.Answer), ("preference", "pairs", records.Pair)):
        path = getattr(d, field)
        if getattr(e, stage).steps and not path:
            raise UsageError(
                f"data.{field} is empty, but {stage}.steps is {getattr(e, stage).steps}. Name a file, or set it to 0."
            )
        found[field] = records.read(kind, path) if getattr(e, stage).steps else []
    return prompts, held_out, found["answers"], found["pairs"]


def load_corpus(e: Experiment, tokenizer: TextEncoder, vocab: int, pad_id: int) -> Corpus:
    """Reads, tokenizes and checks all data of `e`. Raises UsageError as the readers do."""
    d = e.data
    prompts, held_out, answers, pairs = _records(e)
    limits = Limits(vocab, d.prompt_length, e.generation.response_length, d.drop_long)
    length = d.prompt_length + e.generation.response_length
    kept, ids = encode_prompts(prompts, tokenizer, limits, d.chat)
    kept_out, held_ids = encode_prompts(held_out, tokenizer, limits, d.chat)
    sft = pref = None
    if e.sft.steps:
        sft = AnswerBatches(encode_answers(answers, tokenizer, limits, d.chat), e.sft.batch, length, e.seed + 1, pad_id)
    if e.preference.steps and not e.reward.function:
        pref = PairBatches(
            encode_pairs(pairs, tokenizer, limits, d.chat), e.preference.batch, length, e.seed + 2, pad_id
        )
    if e.reward.function:
        judge, name = rewards.resolve(e.reward.function), e.reward.function
    elif d.task == "reviews" and not d.prompts:
        judge, name = reviews.gold_reward, "the task's own rule"
    else:
        judge, name = None, "the reward model"
    return Corpus(
        prompts=PromptBatches(ids, e.batch, d.prompt_length, e.seed, pad_id),
        answers=sft,
        pairs=pref,
        prompt_texts=[r.prompt for r in kept],
        held_out=held_ids,
        held_out_texts=[r.prompt for r in kept_out],
        judge=judge,
        judge_name=name,
    )
