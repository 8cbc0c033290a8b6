import json

import pytest

from real_jax.data.records import Answer, Pair, Prompt, read
from real_jax.spec.errors import UsageError
from real_jax.spec.files import PRESETS


def test_jsonl_of_each_kind(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(
        '{"id": 1, "prompt": "a", "answer": "b", "pos_answers": ["c", "d"], "neg_answers": ["e"], "note": "x"}\n'
        "\n"
        '{"id": "two", "prompt": "ü\\u2028", "answer": "g", "pos_answers": ["h"], "neg_answers": ["i"]}'
    )
    assert read(Prompt, file) == [Prompt(1, "a"), Prompt("two", "ü\u2028")]
    assert read(Answer, file) == [Answer(1, "a", "b"), Answer("two", "ü\u2028", "g")]
    assert read(Pair, str(file))[0] == Pair(1, "a", ("c", "d"), ("e",))


def test_json_list(tmp_path):
    file = tmp_path / "data.json"
    file.write_text(json.dumps([{"id": 0, "prompt": "a"}, {"id": 1, "prompt": "b"}], indent=1))
    assert read(Prompt, file) == [Prompt(0, "a"), Prompt(1, "b")]
    file.write_text('{"id": 0, "prompt": "a"}')
    with pytest.raises(UsageError, match="JSON list"):
        read(Prompt, file)


@pytest.mark.parametrize(
    ("kind", "line", "named"),
    [
        (Prompt, '{"id": 2}', "'prompt' is missing"),
        (Prompt, '{"prompt": "a"}', "'id' is missing"),
        (Prompt, '{"id": 2, "prompt": ""}', "prompt is ''"),
        (Prompt, '{"id": 2, "prompt": 7}', "prompt is 7"),
        (Prompt, '{"id": 2.5, "prompt": "a"}', "id is 2.5"),
        (Prompt, '{"id": true, "prompt": "a"}', "id is True"),
        (Prompt, '{"id": 1, "prompt": "a"}', "id 1 stands already in line 1"),
        (Prompt, '["a"]', "must be an object"),
        (Prompt, '{"id": 2,', "not valid JSON"),
        (Answer, '{"id": 2, "prompt": "a", "answer": null}', "answer is None"),
        (Pair, '{"id": 2, "prompt": "a", "pos_answers": [], "neg_answers": ["b"]}', r"pos_answers is \[\]"),
        (Pair, '{"id": 2, "prompt": "a", "pos_answers": ["b"], "neg_answers": "c"}', "neg_answers is 'c'"),
        (Pair, '{"id": 2, "prompt": "a", "pos_answers": ["b"], "neg_answers": ["c", 1]}', "neg_answers is"),
    ],
)
def test_bad_records_name_file_line_and_key(tmp_path, kind, line, named):
    good = {"id": 1, "prompt": "a", "answer": "b", "pos_answers": ["c"], "neg_answers": ["d"]}
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(good) + "\n\n" + line + "\n")
    with pytest.raises(UsageError, match=named) as error:
        read(kind, file)
    assert f"{file}, line 3" in str(error.value)


def test_files_without_records(tmp_path):
    with pytest.raises(UsageError, match="no file.*none.jsonl"):
        read(Prompt, tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(UsageError, match="empty.jsonl holds no records"):
        read(Prompt, tmp_path / "empty.jsonl")
    with pytest.raises(UsageError, match="cannot be read"):
        read(Prompt, tmp_path)


def test_prompts_of_the_sentiment_preset():
    prompts = read(Prompt, PRESETS / "sentiment_prompts.jsonl")
    assert len(prompts) == len({p.prompt for p in prompts}) == 200
    assert max(len(p.prompt.split()) for p in prompts) <= 16
