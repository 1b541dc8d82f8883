"""Bytes, BPE and tokenizers from files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.tokenizer import SEPARATOR, ByteTokenizer, load_tokenizer, train_bpe
from paceline.errors import PacelineError

TEXTS = ["the cat sat on the mat, the cat ran\n" * 20, "na\u00efve \u20ac5\n" * 10]


@given(text=st.text())
def test_bytes_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert list(tokenizer.encode_bytes(text.encode())) == ids


def test_what_is_no_text_still_decodes() -> None:
    assert ByteTokenizer().decode([97, 0xFF, 256, -1, 98]) == "a\ufffd\ufffd\ufffdb"


@given(text=st.text())
def test_trained_bpe_gives_text_back(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


BPE = train_bpe(TEXTS, 280)


def test_bpe_is_trained_to_the_size_asked_for_and_the_same_each_time() -> None:
    assert BPE.vocab_size == 280
    assert BPE.definition == train_bpe(TEXTS, 280).definition
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert BPE.separator_id is not None
    assert BPE.decode([BPE.separator_id]) == SEPARATOR


def test_the_separators_name_in_a_text_is_just_text() -> None:
    ids = BPE.encode(f"a{SEPARATOR}b")
    assert BPE.separator_id not in ids
    assert BPE.decode(ids) == f"a{SEPARATOR}b"


def test_bytes_that_are_not_utf8_become_the_replacement_character() -> None:
    assert BPE.decode(list(BPE.encode_bytes(b"ca\xfft"))) == "ca\ufffdt"


def test_too_little_text_for_the_vocabulary() -> None:
    with pytest.raises(PacelineError) as caught:
        train_bpe(["abababab"], 5000)
    assert caught.value.code == "PL206"
    fitting = int(caught.value.fix.split("=")[1].split(" ")[0])
    assert train_bpe(["abababab"], fitting).vocab_size == fitting


def test_a_file_with_truncation_padding_and_template(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"[PAD]": 0, "</s>": 1, "a": 2, "b": 3, "[UNK]": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=16)
    tokenizer.add_tokens(["extra"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode("a b a b") == [2, 3, 2, 3]
    assert loaded.separator_id == 1
    assert loaded.vocab_size == 6


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": 3}', "\xff\xfe"])
def test_no_tokenizer_there(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(PacelineError) as caught:
        load_tokenizer(path)
    assert caught.value.code == "PL203"
    assert str(path) in caught.value.saw
