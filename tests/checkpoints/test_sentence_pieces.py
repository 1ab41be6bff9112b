"""SentencePiece's tokenizer.model: read without its library, and split as it does."""

import json
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import SentencePieceBPETokenizer

from jaxspec.checkpoints.sentence_pieces import Pieces, read_pieces
from jaxspec.text.tokenizer import load_tokenizer


def pieces() -> Pieces:
    """Trained on this file: <unk>, <s>, </s>, 256 bytes, what was merged in its order, and single characters. Runs of spaces have
    one score, the lowest, as in Llama 2."""
    trained = SentencePieceBPETokenizer()
    trained.train_from_iterator([Path(__file__).read_text()], vocab_size=900, show_progress=False)
    state = json.loads(trained.to_str())["model"]
    merged = [token for token in map("".join, state["merges"]) if token.strip("\u2581")]
    known = [*dict.fromkeys(merged), *(token for token in state["vocab"] if len(token) == 1)]
    spaces = ["\u2581" * size for size in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11)]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(known))] + [-1e9] * len(spaces)
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(known + spaces)
    return Pieces([*special, *known, *spaces], scores, kinds)


def merged_one_by_one(text: str, pieces: Pieces) -> list[int]:
    """SentencePiece's algorithm as its paper has it: again and again, the two neighbours that make the best token."""
    normal = [kind == 1 for kind in pieces.kinds]
    score = {token: score for token, score, is_normal in zip(pieces.tokens, pieces.scores, normal, strict=True) if is_normal}
    symbols = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [(score[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    number = {token: number for number, token in enumerate(pieces.tokens)}
    spelt = ([number[each]] if each in score else [3 + byte for byte in each.encode()] for each in symbols)
    return [token for each in spelt for token in each]


def message(fields: Iterable[tuple[int, int | float | bytes]]) -> bytes:
    """In Protocol Buffers' format."""
    return b"".join(
        varint(key << 3) + varint(value) if isinstance(value, int)
        else varint(key << 3 | 5) + struct.pack("<f", value) if isinstance(value, float)
        else varint(key << 3 | 2) + varint(len(value)) + value
        for key, value in fields
    )  # fmt: skip


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def written(pieces: Pieces, trainer: dict[int, int], normalizer: dict[int, int | bytes]) -> bytes:
    """As SentencePiece writes it, with fields that are not read, one of them with eight bytes."""
    rows = zip(pieces.tokens, pieces.scores, pieces.kinds, strict=True)
    parts = [(1, message([(1, token.encode()), (2, score), *([(3, kind)] if kind != 1 else [])])) for token, score, kind in rows]
    double = varint(10 << 3 | 1) + struct.pack("<d", 0.5)
    return message([*parts, (2, message(trainer.items()) + double), (3, message([(1, b"identity"), *normalizer.items()]))])


LLAMA: tuple[dict[int, int], dict[int, int | bytes]] = ({3: 2, 35: 1, 40: 0, 41: 1}, {2: b"", 3: 1, 4: 0})
"""The settings of Llama 2's."""
SETTINGS = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_a_file_is_read_as_it_was_written(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(written(pieces(), *LLAMA))
    found = read_pieces(tmp_path / "tokenizer.model")
    assert tuple(map(list, found[:3])) == pieces()[:3] and found[3:] == (0, True)


@pytest.mark.parametrize("legacy", [True, False, None])
def test_vicuna_needs_no_tokenizer_json(tmp_path: Path, legacy: bool | None):
    """Unless `legacy` is false, a space begins each text after special tokens."""
    vocabulary = pieces()
    (tmp_path / "tokenizer.model").write_bytes(written(vocabulary, *LLAMA))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SETTINGS | {"legacy": legacy}))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("the  the\n\ntheme", "f\u00f6x \U0001f98a", *(f"a{' ' * size}the" for size in range(2, 40))):
        assert (found := tokenizer.encode(text)) == [1, *merged_one_by_one(text, vocabulary)]
        assert tokenizer.decode(found[1:]) == text
    word = merged_one_by_one("the", vocabulary)
    behind = tokenizer.encode("the</s>the")[len(word) + 2 :]
    assert (behind == word) == (legacy is not False) and tokenizer.decode(behind) == "the"
    assert Path(tokenizer.name_or_path) == tmp_path and tokenizer.eos_token_id == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"IQ== 0\nIg== 1\n", "tokenizer.model is not a file of SentencePiece; a tokenizer.json is needed"),
        (b"", "is not a file of SentencePiece"),
        (b"\x0a" + b"\xff" * 100, "is not a file of SentencePiece"),
        (written(pieces(), *LLAMA)[:-3], "is not a file of SentencePiece"),
        (written(pieces(), LLAMA[0] | {3: 1}, LLAMA[1]), "is not SentencePiece's BPE of text as it is; a tokenizer.json is needed"),
        (written(pieces(), LLAMA[0], {2: b"rules", 4: 0}), "is not SentencePiece's BPE of text as it is"),
        (written(pieces(), LLAMA[0], {}), "is not SentencePiece's BPE of text as it is"),
        (bytes(16 << 20 | 1), "tokenizer.model has 16777217 bytes; expected at most 16777216"),
    ],
)  # fmt: skip
def test_other_files_are_refused_in_a_line(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=f"can't be read: .*{message}") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
