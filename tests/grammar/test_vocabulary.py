"""Added tokens under grammars: which are text, in tokenizers of every kind."""

import json
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jaxspec.grammar.compiling import compiled
from jaxspec.grammar.matcher import Bans, Grammar, Matcher
from jaxspec.grammar.vocabulary import Vocabulary, holds, source_of
from tests.server.fakes import TAGS, byte_tokenizer, sentencepiece_tokenizer, with_tags

START, END = "<|im_start|>", "<|im_end|>"


def unigram_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "<th"]
    tokenizer = Tokenizer(models.Unigram([(word, 0.0) for word in words], unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Its merges make a tag and a special token, too."""
    form = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    vocabulary, merges = form["model"]["vocab"], form["model"]["merges"]
    for word in (START, TAGS[0]):
        for end in range(2, len(word) + 1):
            vocabulary.setdefault(word[:end], len(vocabulary))
            merges.append([word[: end - 1], word[end - 1]])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(form)))


@pytest.fixture(params=[byte_tokenizer, merging_tokenizer, sentencepiece_tokenizer, unigram_tokenizer])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    make: Callable[[], PreTrainedTokenizerFast] = request.param
    return with_tags(make(), START, END)


def matcher(tokenizer: PreTrainedTokenizerFast, regex: str, end: str = END) -> Matcher:
    ends = [tokenizer.convert_tokens_to_ids(end)]
    vocabulary = Vocabulary(source_of(tokenizer, len(tokenizer) + 3, ends))
    return Matcher(Grammar(compiled(vocabulary.tokenizer, "regex", regex), 1), vocabulary, Bans(ends))


def allowed(walker: Matcher) -> list[int]:
    return [token for token in range(32 * len(walker.step.words)) if holds(walker.step.words, token)]


def test_a_forced_tag_is_its_own_token(tokenizer):
    """As the model writes it, in masks and in drafts."""
    text = "a<tool_call>b</tool_call><think></think>"
    walker, written = matcher(tokenizer, text), tokenizer.encode(text, add_special_tokens=False)
    assert len(written) == 6 and walker.legal([], [])[1] == {-1: written}
    for token in written:
        assert allowed(walker) == [token]
        walker.advance([token], None)
    walker.check()
    assert walker.step.is_end


def test_a_tag_is_text_like_any_other(tokenizer):
    spelled = [tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "<a"]
    walker = matcher(tokenizer, "(a|<think>)(.|\n)*</think>")
    assert {*spelled, tokenizer.convert_tokens_to_ids("<think>")} <= {*allowed(walker)}
    walker.advance([tokenizer.convert_tokens_to_ids("<think>")], None)
    tags = [tokenizer.convert_tokens_to_ids(tag) for tag in TAGS]
    assert {*spelled, *tags} <= {*allowed(walker)}
    assert [index for index, is_legal in enumerate(walker.legal(tags, [-1] * 4)[0]) if is_legal] == [0, 1, 2, 3]
    walker.advance(tags[3:], None)
    assert tokenizer.convert_tokens_to_ids(END) in allowed(walker)


def test_a_special_token_is_no_text_and_its_name_is(tokenizer):
    special = {tokenizer.convert_tokens_to_ids(name) for name in (START, END)}
    assert special.isdisjoint(allowed(matcher(tokenizer, "(.|\n)+")))
    for name in (START, END):
        walker = matcher(tokenizer, f"x{name.replace('|', '[|]')}y")
        written = []
        while not walker.step.is_end:
            [token, *_] = allowed(walker)
            assert token not in special
            written.append(token)
            walker.advance([token], None)
            walker.check()
        assert tokenizer.decode(written) == f"x{name}y"


def test_tags_are_text_even_where_they_are_special_tokens():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([*TAGS, "<|python_tag|>", END], special_tokens=True)
    assert {*range(256, 260)} <= {*allowed(matcher(tokenizer, "(.|\n)+"))} <= {*range(260)}


def test_a_tag_that_ends_texts_is_none():
    assert allowed(matcher(with_tags(byte_tokenizer()), "</think>x", "</think>")) == [ord("<")]
