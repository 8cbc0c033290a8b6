"""Text <-> token ids, one class for every source: a Hugging Face folder, a GGUF file, or a list of words."""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from real_jax.models import gguf_file
from real_jax.spec.errors import UsageError

# GGUF token types (ggml's llama_token_type).
_CONTROL, _USER_DEFINED = 3, 4


class Tokenizer:
    """Encodes and decodes text, renders chats, and knows the special ids.

    Attributes:
      eos_id: id of the end token.
      pad_id: id written into padding; the end token's where the model has none of its own. Padding is known by lengths,
        never by comparing with it.
      bos_id: id of the begin token, or None.
      adds_bos: whether the model wants every text to begin with `bos_id`.
      vocab_size: one more than the largest id.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_id: int,
        pad_id: int | None = None,
        bos_id: int | None = None,
        adds_bos: bool = False,
        chat_template: str | None = None,
    ):
        self._backend = backend
        self.eos_id = eos_id
        self.pad_id = eos_id if pad_id is None else pad_id
        self.bos_id = bos_id
        self.adds_bos = adds_bos and bos_id is not None
        self.chat_template = chat_template
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values())
        # The words of a vocabulary that has no token for unknown ones; None where every text can be encoded.
        closed = isinstance(backend.model, models.WordLevel) and backend.model.unk_token not in vocab
        self._words = frozenset(vocab) if closed else None

    @classmethod
    def load(cls, source: Path | str) -> "Tokenizer":
        """From a Hugging Face folder, a GGUF file or `package:NAME`; UsageError where there is no tokenizer."""
        return cls.from_gguf(source) if gguf_file.is_gguf(source) else cls.from_folder(source)

    @classmethod
    def from_folder(cls, path: Path | str) -> "Tokenizer":
        """From a Hugging Face folder, through transformers."""
        folder = Path(path)
        if not folder.is_dir():
            raise UsageError(f"There is no folder {str(path)!r}. Check the path of the model.")
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise UsageError(f"Folder {str(path)!r} has no tokenizer (no tokenizer.json, tokenizer.model, vocab.json).")
        from transformers import AutoTokenizer  # three seconds, which the built-in task need not wait for

        try:
            source = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UsageError(f"The tokenizer in {str(path)!r} cannot be read: {' '.join(str(error).split())}") from None
        if source.eos_token_id is None:
            raise UsageError(
                f"The tokenizer in {str(path)!r} has no end token; add eos_token to tokenizer_config.json."
            )
        bos = source.bos_token_id
        template = source.chat_template
        return cls(
            source.backend_tokenizer,
            eos_id=source.eos_token_id,
            pad_id=source.pad_token_id,
            bos_id=bos,
            adds_bos=bos is not None and source("a").input_ids[:1] == [bos],
            chat_template=template.get("default") if isinstance(template, dict) else template,
        )

    @classmethod
    def from_gguf(cls, source: Path | str) -> "Tokenizer":
        """From the metadata of a GGUF file or `package:NAME`: a byte-level BPE with the file's own pre-tokenizer."""
        header = gguf_file.read_header(source)
        meta, where = header.metadata, header.path
        for key, known in (("tokenizer.ggml.model", ("gpt2",)), ("tokenizer.ggml.pre", tuple(_SPLITS))):
            if meta.get(key) not in known:
                raise UsageError(
                    f"{where}: {key} is {meta.get(key)!r}; tokenizers of {', '.join(map(repr, known))} can be read. "
                    "Use the model's Hugging Face folder instead."
                )
        for key in ("tokens", "merges", "token_type", "eos_token_id"):
            if f"tokenizer.ggml.{key}" not in meta:
                raise UsageError(f"{where}: metadata key 'tokenizer.ggml.{key}' is missing.")
        tokens = meta["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
        backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        backend.pre_tokenizer = _SPLITS[meta["tokenizer.ggml.pre"]]()
        backend.decoder = decoders.ByteLevel()
        for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True):
            if kind in (_CONTROL, _USER_DEFINED):
                backend.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
        return cls(
            backend,
            eos_id=meta["tokenizer.ggml.eos_token_id"],
            pad_id=meta.get("tokenizer.ggml.padding_token_id"),
            bos_id=meta.get("tokenizer.ggml.bos_token_id"),
            adds_bos=meta.get("tokenizer.ggml.add_bos_token", False),
            chat_template=meta.get("tokenizer.chat_template"),
        )

    @classmethod
    def words(cls, words: Iterable[str]) -> "Tokenizer":
        """Word level: id 0 is padding, id 1 the end token, then the words in their order. Text is split at spaces."""
        tokens = ["<pad>", "<eos>", *words]
        if len(set(tokens)) != len(tokens):
            twice = next(token for token in tokens if tokens.count(token) > 1)
            raise UsageError(f"Word {twice!r} stands twice in the vocabulary.")
        backend = Backend(models.WordLevel({token: i for i, token in enumerate(tokens)}))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens(tokens[:2])
        return cls(backend, eos_id=1, pad_id=0)

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Token ids of `text`, beginning with the begin token exactly where the model wants one.

        With `continues`, `text` goes on after other tokens (an answer after its prompt), so none is added. Raises
        UsageError for a word that a word-level vocabulary lacks.
        """
        if self._words is not None:
            for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(text):
                if word not in self._words:
                    raise UsageError(f"Text {text!r} cannot be tokenized: the vocabulary has no word {word!r}.")
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self.adds_bos and not continues and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a chat under the model's template, up to where the assistant's reply begins.

        `messages` are {role, content} mappings. A begin token that the template writes is not added again.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt))

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat under the model's template; UsageError where the model has none or refuses the chat."""
        if not self.chat_template:
            raise UsageError("data.chat is set, but the model's tokenizer has no chat template. Unset data.chat.")
        names = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        special = {name: self._backend.id_to_token(i) for name, i in names.items() if i is not None}
        try:
            template = _environment().from_string(self.chat_template)
            return template.render(
                messages=list(messages), tools=None, documents=None, add_generation_prompt=add_generation_prompt, **special
            )  # fmt: skip
        except jinja2.TemplateError as error:
            raise UsageError(f"The chat template cannot render {list(messages)!r}: {error}.") from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder: Path | str) -> None:
        """Writes tokenizer.json and tokenizer_config.json, from which transformers makes the same tokenizer."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        token = self._backend.id_to_token
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": token(self.eos_id),
            "pad_token": token(self.pad_id),
        }
        if self.bos_id is not None:
            config["bos_token"] = token(self.bos_id)
        if self.chat_template:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        self._with_post_processor().save(str(folder / "tokenizer.json"))

    def _with_post_processor(self) -> Backend:
        """The backend with a rule that adds the begin token, so that transformers adds it exactly where `encode` does."""
        copy = Backend.from_str(self._backend.to_str())
        if self.adds_bos:
            begin = copy.id_to_token(self.bos_id)
            copy.post_processor = processors.TemplateProcessing(
                single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, self.bos_id)]
            )
        else:
            copy.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
        return copy


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> pre_tokenizers.PreTokenizer:
    """Every digit is a piece of its own before GPT-2's rule is applied."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


# tokenizer.ggml.pre -> how text is cut before merging (llama.cpp, src/llama-vocab.cpp).
_SPLITS = {"gpt-2": _gpt2_split, "smollm": _smollm_split}


def _environment() -> jinja2.Environment:
    """The environment that transformers renders chat templates in: sandboxed, with blocks trimmed."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def refuse(message: str):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
