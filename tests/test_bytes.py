"""Proves that the bytes of bits per byte are the UTF-8 bytes of the text that the tokens stand for."""

from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from conftest import train_gpt
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(60)

SPACE = "\u2581"  # how SentencePiece writes a space within a piece
BOS = 1
TEXT = (
    "the world of the words and the other words of the world\ncaf\u00e9 \u00fcber stra\u00dfe na\u00efve\n"
    "\u4e16\u754c \u4f60\u597d \u4e16\u754c\nit is 12 o'clock; (tea) is at 5:30, isn't it?\n"
) * 20


def train_tokenizer(folder: Path, **more: object) -> Path:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    options = dict(
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        normalization_rule_name="identity",
        pad_id=0,
        bos_id=BOS,
        eos_id=2,
        unk_id=3,
        hard_vocab_limit=False,
        character_coverage=0.999,
        minloglevel=2,
    )
    files = dict(input=str(folder / "text.txt"), model_prefix=str(folder / "spm"))
    sentencepiece.SentencePieceTrainer.train(**{**files, **options, **more})
    return folder / "spm.model"


class Tokenizer:
    def __init__(self, path: Path) -> None:
        self.path, self.model = path, sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.table = train_gpt.ByteTable.load(str(path))

    def stream(self, documents: list[str]) -> np.ndarray:
        """What a shard holds: every document after its BOS."""
        ids = [[BOS, *self.model.encode(document)] for document in documents]
        return np.array([token for document in ids for token in document], dtype=np.uint16)

    def written(self, documents: list[str]) -> int:
        """UTF-8 bytes of the documents as the tokens write them."""
        return sum(
            len(self.model.decode(self.model.encode(document)).encode("utf-8"))
            for document in documents
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def keeps_spaces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Runs of spaces stay as they are."""
    return Tokenizer(
        train_tokenizer(tmp_path_factory.mktemp("spaces"), remove_extra_whitespaces=False)
    )


# Words of the tokenizer's own text, and every other character (surrogates are not text; U+2581 is the space itself).
LETTERS = st.one_of(
    st.sampled_from(
        ["the", " world", " ", "  ", " of", "\n", "\u4e16\u754c", "\u00e9", "12", " 5"]
    ),
    st.sampled_from(["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467"]),
    st.sampled_from(["\u3000", "\u00a0", "\t", "\r", "\0", "\ufffd"]),
    st.characters(exclude_categories=("Cs",), exclude_characters=SPACE),
)
DOCUMENTS = st.lists(st.lists(LETTERS, max_size=12).map("".join), min_size=1, max_size=5)


@settings(deadline=None, max_examples=200)
@given(documents=DOCUMENTS)
@example(documents=["the world"])
@example(documents=["\U0001f600 is \u4e16\u754c", "", " caf\u00e9  \U0001f600", "\ufffd\x00"])
def test_counted_bytes_are_the_utf8_bytes_of_the_documents(
    tokenizer: Tokenizer, documents: list[str]
) -> None:
    tokens = tokenizer.stream(documents)
    assert int(tokenizer.table.count(tokens[:-1], tokens[1:])) == tokenizer.written(documents)


@settings(deadline=None, max_examples=100)
@given(documents=DOCUMENTS)
@example(documents=["a   b \n  c"])
def test_kept_runs_of_spaces_count_one_byte_each(
    keeps_spaces: Tokenizer, documents: list[str]
) -> None:
    documents = [
        document.lstrip(" ") for document in documents
    ]  # the byte of a space after BOS is never counted
    tokens = keeps_spaces.stream(documents)
    assert keeps_spaces.written(documents) == sum(
        len(document.encode("utf-8")) for document in documents
    )
    assert int(keeps_spaces.table.count(tokens[:-1], tokens[1:])) == keeps_spaces.written(documents)


def test_the_documents_exercise_every_kind_of_piece(tokenizer: Tokenizer) -> None:
    """Else the tests above would prove little."""
    model = tokenizer.model
    ids = tokenizer.stream(["the world", "a\u4e16\u754c \U0001f600"]).tolist()
    assert any(model.is_byte(i) for i in ids) and any(model.is_control(i) for i in ids)
    assert any(
        model.id_to_piece(i).startswith(SPACE) and len(model.id_to_piece(i)) > 2 for i in ids
    )
    assert any(
        len(model.id_to_piece(i).encode("utf-8")) > len(model.id_to_piece(i)) > 0
        for i in ids
        if not model.id_to_piece(i).startswith(SPACE) and not model.is_byte(i)
    )


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_tensors_and_arrays_give_equal_counts(tokenizer: Tokenizer, data: st.DataObject) -> None:
    table = tokenizer.table
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 20)))
    seed = data.draw(st.integers(0, 2**32 - 1))
    previous, target = np.random.default_rng(seed).integers(0, len(table.base), (2, *shape))
    on_device = table._replace(
        base=torch.from_numpy(table.base),
        leading_space=torch.from_numpy(table.leading_space),
        boundary=torch.from_numpy(table.boundary),
    )
    pairs = zip(previous.ravel().tolist(), target.ravel().tolist())
    one_by_one = sum(
        int(table.base[t]) + int(table.leading_space[t] and not table.boundary[p]) for p, t in pairs
    )
    as_tensor = on_device.count(torch.from_numpy(previous), torch.from_numpy(target))
    assert as_tensor.dtype == torch.int64
    assert int(as_tensor) == int(table.count(previous, target)) == one_by_one
    assert int(table.count(previous.astype(np.uint16), target.astype(np.uint16))) == one_by_one


def test_table_says_of_every_id_what_it_is(tokenizer: Tokenizer) -> None:
    table, model = tokenizer.table, tokenizer.model
    assert len(table.base) == len(table.leading_space) == len(table.boundary) == model.vocab_size()
    assert table.boundary[:4].all() and not table.boundary[4:].any()  # pad, BOS, EOS, unknown
    assert (table.base[:4] == 0).all() and not table.leading_space[:4].any()
    assert (table.base[4:260] == 1).all() and not table.leading_space[
        4:260
    ].any()  # <0x00> to <0xFF>
    for i in range(260, model.vocab_size()):
        piece = model.id_to_piece(i)
        assert table.leading_space[i] == (piece[0] == SPACE), piece
        assert table.base[i] == len(piece.removeprefix(SPACE).encode("utf-8")), piece


def test_a_leading_space_counts_unless_the_token_before_ends_a_text(tokenizer: Tokenizer) -> None:
    table, model = tokenizer.table, tokenizer.model
    the, word = model.piece_to_id(SPACE + "the"), model.piece_to_id("w")
    byte = model.piece_to_id("<0xF0>")
    for previous, expected in [(word, 4), (the, 4), (byte, 4), (0, 3), (BOS, 3), (2, 3), (3, 3)]:
        assert int(table.count(np.array([previous]), np.array([the]))) == expected, previous
    for control in range(4):
        assert int(table.count(np.array([the]), np.array([control]))) == 0


def varint(value: int) -> bytes:
    return bytes([value & 0x7F | (0x80 if value > 0x7F else 0)]) + (
        varint(value >> 7) if value > 0x7F else b""
    )


def without(model: bytes, piece: str) -> bytes:
    """The model file with one piece marked unused: the protobuf field 3 (type) = 5, appended to its message."""
    body = b"\x0a" + varint(len(piece.encode("utf-8"))) + piece.encode("utf-8") + b"\x15"
    at = model.index(body)
    size = len(body) + 4  # the text, and the score: four bytes after 0x15
    start = at - len(varint(size))
    assert model[start:at] == varint(size) and model[start - 1] == 0x0A
    return (
        model[:start] + varint(size + 2) + model[at : at + size] + b"\x18\x05" + model[at + size :]
    )


def test_unused_ids_have_no_bytes_and_end_a_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "spm.model").write_bytes(without(tokenizer.path.read_bytes(), SPACE + "wor"))
    changed = Tokenizer(tmp_path / "spm.model")
    unused, the = changed.model.piece_to_id(SPACE + "wor"), changed.model.piece_to_id(SPACE + "the")
    assert changed.model.is_unused(unused) and tokenizer.table.base[unused] == 3
    table = changed.table
    assert table.boundary[unused] and table.base[unused] == 0 and not table.leading_space[unused]
    assert int(table.count(np.array([unused, the]), np.array([the, unused]))) == 3
    assert np.flatnonzero(table.boundary != tokenizer.table.boundary).tolist() == [unused]


@pytest.mark.parametrize("offset", [4, 0, 10])
def test_a_byte_tokenizer_counts_one_byte_a_token_and_none_for_controls(
    tmp_path: Path, offset: int
) -> None:
    (tmp_path / "byte.json").write_text(f'{{"kind": "byte", "offset": {offset}}}', encoding="utf-8")
    table = train_gpt.ByteTable.load(str(tmp_path / "byte.json"))
    assert len(table.base) == len(table.leading_space) == len(table.boundary) == 256 + offset
    assert table.base.tolist() == [0] * offset + [1] * 256
    assert table.boundary.tolist() == [True] * offset + [False] * 256
    assert not table.leading_space.any()
    text = "na\u00efve \U0001f600".encode("utf-8")
    tokens = np.array([token + offset for token in text])
    assert int(table.count(tokens, tokens)) == len(text)


def test_a_piece_of_several_spaces_counts_one_byte_a_space(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    code = "\n".join("def f(x):\n    if x:\n        return x\n    return None" for _ in range(200))
    train = dict(remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, vocab_size=300)
    (tmp_path / "more" / "code.txt").write_text(code, encoding="utf-8")
    path = train_tokenizer(tmp_path, **train, input=str(tmp_path / "more" / "code.txt"))
    tokenizer = Tokenizer(path)
    tokens = tokenizer.stream([code])
    assert any(tokenizer.model.id_to_piece(int(token)).startswith(2 * SPACE) for token in tokens)
    assert int(tokenizer.table.count(tokens[:-1], tokens[1:])) == len(code.encode("utf-8"))
