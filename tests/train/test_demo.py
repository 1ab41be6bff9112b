"""The corpus: disjoint, deterministic splits; prompts that end with whole lines."""

import pytest
from tokenizers import Tokenizer

from jaxspec.demo import corpus
from tests.fixtures.demo.make import END_OF_TEXT, save_tokenizer, token_stream, train_tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A library of 200 small modules and some files that the corpus must leave out."""
    root = tmp_path_factory.mktemp("library")
    for index in range(200):
        lines = [f"    value_{line} = {index} + {line}  # some words to make the line longer\n" for line in range(8)]
        (root / f"module_{index}.py").write_text(f"def function_{index}(argument):\n{''.join(lines)}    return value_0\n")
    (root / "table.py").write_text("TABLE = [" + "0x1234567890, " * 100 + "]\n")
    (root / "latin.py").write_bytes(b"name = '\xe9'\n" * 100)
    (root / "copy_of_module_3.py").write_text((root / "module_3.py").read_text())
    (root / "encodings").mkdir()
    (root / "encodings" / "code.py").write_text((root / "module_1.py").read_text().replace("value", "other"))
    return root


def test_splits_are_disjoint_complete_and_in_a_fixed_order(root):
    train, heldout = (list(corpus.documents(heldout, root)) for heldout in (False, True))
    assert {document.path for document in train + heldout} >= {f"module_{index}.py" for index in range(200) if index != 3}
    assert not {document.path for document in train} & {document.path for document in heldout}
    assert 1 <= len(heldout) <= 20
    assert train == list(corpus.documents(False, root))
    assert not any("table" in document.path or "latin" in document.path or "code" in document.path for document in train)


def test_a_text_that_occurs_twice_is_learnt_once(root):
    texts = [document.text for document in corpus.documents(False, root)]
    assert len(texts) == len(set(texts))


def test_stdlib_split_holds_out_four_percent():
    paths = [f"package/module_{index}.py" for index in range(5000)]
    assert 0.03 < sum(corpus.is_heldout(path.encode()) for path in paths) / len(paths) < 0.05


def test_prompts_start_at_definitions_and_end_at_the_end_of_a_line(monkeypatch, root):
    text = (
        "import os\n\n\nclass First:\n"
        + "    # a comment that fills the prompt up\n" * 4
        + "    def method(self):\n        return 1\n" * 3
    )
    library = [corpus.Document("a.py", text), corpus.Document("b.py", text[:30])]
    monkeypatch.setattr(corpus, "documents", lambda heldout: library)
    (prompt,) = corpus.heldout_prompts(1)
    assert prompt.startswith("class First:\n") and prompt.endswith("    def method(self):")
    assert 130 <= len(prompt) <= 320
    with pytest.raises(ValueError, match="contain 1 prompts; 2 were requested"):
        corpus.heldout_prompts(2)


def test_tokenizer_is_lossless_and_loads_in_transformers(root, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer([document.text for document in corpus.documents(False, root)], vocab_size=300)
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("def f(x):\n\n    return  x . y , n't\t\n", " leading", "é 漢 🙂 \x00", "a \n \n  b"):
        ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
        assert loaded.encode(text) == ids
        assert loaded.decode(ids) == text
    assert loaded.eos_token_id == loaded.pad_token_id == tokenizer.token_to_id(END_OF_TEXT) == 0


def test_stream_separates_documents_by_end_of_text(root):
    tokenizer = train_tokenizer([document.text for document in corpus.documents(False, root)], vocab_size=300)
    stream = token_stream(tokenizer, ["a = 1\n", "b = 2\n", "c = 3\n"])
    assert (stream == 0).sum() == 3 and stream[-1] == 0
    assert sorted(tokenizer.decode(stream.tolist(), skip_special_tokens=False).split(END_OF_TEXT)) == [
        "", "a = 1\n", "b = 2\n", "c = 3\n",
    ]  # fmt: skip
