"""Tests of bits per byte.

The counted bytes are the UTF-8 bytes of the text that the tokens stand for, for every kind of piece
and tokenizer. Arrays and tensors give the same counts. val_bpb is bits divided by bytes.
"""

import hashlib
import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from running import (
    SMALL_MODEL,
    Corpus,
    make_config,
    make_log,
    make_runtime,
    open_data,
    train_tokenizer,
    write_split,
)
from running import train_gpt as tg

SPACE = "\u2581"  # how SentencePiece writes a space within a piece
BOS = 1
TEXT = (
    "the world of the words and the other words of the world\n"
    "caf\u00e9 \u00fcber stra\u00dfe na\u00efve\n"
    "\u4e16\u754c \u4f60\u597d \u4e16\u754c\nit is 12 o'clock; (tea) is at 5:30, isn't it?\n"
    "def f(x):\n    if x:\n        return x\n    return None\n"
) * 20
LINES = TEXT.splitlines()


class Tokenizer:
    """A SentencePiece tokenizer with the trainer's table of bytes."""

    def __init__(self, path: Path) -> None:
        self.path, self.model = path, sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.table = tg.byte_table(str(path), path.read_bytes())

    def stream(self, documents: list[str]) -> np.ndarray:
        """Return the tokens of a shard: each document after a BOS."""
        ids = [[BOS, *self.model.encode(document)] for document in documents]
        return np.array([token for document in ids for token in document], dtype=np.uint16)

    def count_document_bytes(self, documents: list[str]) -> int:
        tokens = self.stream(documents)
        return int(self.table.count_bytes(tokens[:-1], tokens[1:].astype(np.int64)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Train a tokenizer that keeps runs of spaces and has pieces for them."""
    path = tmp_path_factory.mktemp("tokenizer") / "spm.model"
    return Tokenizer(train_tokenizer(path, LINES, allow_whitespace_only_pieces=True))


# Words of the text that the tokenizer was trained on, and every other character, except surrogates,
# which are not text, and U+2581, which stands for a space.
LETTERS = st.one_of(
    st.sampled_from(["the", " world", " ", "  ", " of", "\n", "\u4e16\u754c", "\u00e9", "12"]),
    st.sampled_from(["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "        x"]),
    st.sampled_from(["\u3000", "\u00a0", "\t", "\r", "\0", "\ufffd"]),
    st.characters(exclude_categories=("Cs",), exclude_characters=SPACE),
)
DOCUMENTS = st.lists(st.lists(LETTERS, max_size=12).map("".join), min_size=1, max_size=5)


@settings(deadline=None, max_examples=100)
@given(documents=DOCUMENTS)
@example(documents=["a   b \n  c", TEXT])
@example(documents=["\U0001f600 is \u4e16\u754c", "", " caf\u00e9  \U0001f600", "\ufffd\x00"])
def test_counted_bytes_are_the_bytes_of_the_documents(
    tokenizer: Tokenizer, documents: list[str]
) -> None:
    documents = [text.lstrip(" ") for text in documents]  # a space after BOS is never counted
    expected = sum(len(text.encode("utf-8")) for text in documents)
    assert tokenizer.count_document_bytes(documents) == expected


def test_a_leading_space_counts_unless_the_token_before_ends_a_text(tokenizer: Tokenizer) -> None:
    table, model = tokenizer.table, tokenizer.model
    the, letter, byte = (model.piece_to_id(p) for p in (SPACE + "the", "w", "<0xF0>"))
    expected = {letter: 4, the: 4, byte: 4, 0: 3, BOS: 3, 2: 3, 3: 3}
    for previous, count in expected.items():
        assert table.count_bytes(np.array([previous]), np.array([the])) == count, previous


def test_an_unused_piece_has_no_bytes(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "spm.model", LINES, user_defined_symbols=["<x>"])
    kind = b"<x>\x15\0\0\0\0\x18"  # then the type of the piece: 4 is user-defined, 5 unused
    data = path.read_bytes()
    path.write_bytes(data.replace(kind + b"\4", kind + b"\5"))
    changed = Tokenizer(path)
    unused, the = (changed.model.piece_to_id(piece) for piece in ("<x>", SPACE + "the"))
    assert changed.table.count_bytes(np.array([the]), np.array([unused])) == 0
    assert changed.table.count_bytes(np.array([unused]), np.array([the])) == 3


@settings(deadline=None, max_examples=50)
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 20)), seed=st.integers(0, 2**32 - 1))
def test_tensors_and_arrays_give_the_same_counts(
    tokenizer: Tokenizer, shape: tuple[int, int], seed: int
) -> None:
    """VAL_BYTECOUNT_DEVICE=cuda counts with tensors."""
    table = tokenizer.table
    previous, target = np.random.default_rng(seed).integers(0, len(table.base), (2, *shape))
    on_device = tg.ByteTable(*map(torch.tensor, table))
    for scored in (target, np.where(target % 2, target, -100)):
        one_by_one = 0
        for before, after in zip(previous.ravel(), scored.ravel(), strict=True):
            space = table.leading_space[after] and not table.boundary[before]
            one_by_one += (int(table.base[after]) + int(space)) * (after >= 0)
        assert table.count_bytes(previous, scored) == one_by_one
        tensors = torch.from_numpy(previous), torch.from_numpy(scored)
        assert on_device.count_bytes(*tensors) == one_by_one


@pytest.mark.parametrize(
    ("offset", "form"), [(4, {"kind": "byte", "offset": 4}), (10, {"config": {"byte_offset": 10}})]
)
def test_a_byte_tokenizer_counts_one_byte_a_token(tmp_path: Path, offset: int, form: dict) -> None:
    """In the documented form, and in the form that the challenge's own tool writes."""
    path = tmp_path / "byte.json"
    path.write_text(json.dumps(form), encoding="utf-8")
    table = tg.byte_table(str(path), path.read_bytes())
    assert table.base.tolist() == [0] * offset + [1] * 256
    assert table.boundary.tolist() == [True] * offset + [False] * 256
    assert len(table.leading_space) == len(table.base) and not table.leading_space.any()
    text = np.frombuffer("na\u00efve \U0001f600".encode(), np.uint8) + np.int64(offset)
    assert table.count_bytes(text, text) == len(text)


def test_a_tokenizer_that_did_not_make_the_shards_is_refused(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Another tokenizer of the same size would give a meaningless number of bytes, and score."""
    data = shutil.copytree(corpus.folder, tmp_path / "datasets" / "made")
    right, wrong = (
        hashlib.sha256(text).hexdigest() for text in (corpus.tokenizer.read_bytes(), b"")
    )
    env = {**SMALL_MODEL, **corpus.env, "DATA_PATH": data, "RUN_ID": "r"}
    for recorded, refused in ((right, False), (wrong, True)):
        line = f"{recorded}  ../../tokenizers/right.model\n"
        (data / "tokenizer.sha256").write_text(line)
        faults, _ = tg.check_settings(make_config(**env), {})
        assert len(faults) == refused, faults
    what = "is not the tokenizer that made the shards"
    remedy = f"set or restore {data}/../../tokenizers/right.model"
    assert faults == [f"TOKENIZER_PATH={corpus.tokenizer} {what}; {remedy}"]


@pytest.mark.parametrize("masked", [False, True])
def test_bits_per_byte_are_bits_divided_by_bytes_of_the_scored_targets(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    """The last batch is not full. If `fill_xy` masks every other target, only the others count."""
    fill_xy = tg.BatchPlan.fill_xy

    def every_other(plan: tg.BatchPlan, rows: range, tokens: Any, x: Any, y: Any) -> None:
        fill_xy(plan, rows, tokens, x, y)
        y[:, ::2] = -100

    if masked:
        monkeypatch.setattr(tg.BatchPlan, "fill_xy", every_other)
    config = make_config(**{**SMALL_MODEL, **corpus.env, "VAL_BATCH_SIZE": 32 * 7})
    data = open_data(config)
    validation = tg.Validation(
        config, make_runtime(config), make_log(), lambda _: nullcontext(), data
    )
    rows = (len(corpus.val) - 1) // 32
    assert rows % 7 and validation.targets == 32 * rows

    def mean_nats(model: None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y[y >= 0].float().mean() / 100  # a hundredth of the target

    validation.mean_nats = mean_nats
    table = tg.byte_table(str(corpus.tokenizer), corpus.tokenizer.read_bytes())
    tokens = corpus.val[: 32 * rows + 1]
    pairs = list(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    pairs = pairs[1::2] if masked else pairs
    spaces = table.leading_space
    size = sum(int(table.base[t]) + bool(spaces[t] and not table.boundary[p]) for p, t in pairs)
    nats = sum(target for _, target in pairs) / 100
    for _ in range(2):
        val_loss, val_bpb, _ = validation.evaluate(torch.nn.Module(), "step_0")
        assert val_loss == pytest.approx(nats / len(pairs), rel=1e-6)
        assert val_bpb == pytest.approx(nats / math.log(2) / size, rel=1e-6)


def test_a_tokenizer_without_a_piece_for_a_space_is_refused(tmp_path: Path) -> None:
    """A space would be three byte pieces, and bits per byte would be too low."""
    path = train_tokenizer(tmp_path / "spm.model", LINES)
    tg.byte_table(str(path), path.read_bytes())
    for byte_fallback in (True, False):  # a space is three byte pieces, or unknown
        lines = [line.replace(" ", "") for line in LINES]
        train_tokenizer(path, lines, byte_fallback=byte_fallback)
        with pytest.raises(tg.RunError, match="no piece for a single space"):
            tg.read_tokenizer(make_config(TOKENIZER_PATH=path, DATA_PATH=tmp_path))


def test_unknown_targets_are_counted_and_reported_with_the_score(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "spm.model", LINES, byte_fallback=False)
    tokenizer = Tokenizer(path)
    tokens = tokenizer.stream(["the world \u0416 of the \u0416\u0416 words of the world"])
    for split in ("train", "val"):
        write_split(tmp_path, split, tokens, [])
    data = {"DATA_PATH": tmp_path, "TOKENIZER_PATH": tokenizer.path, "TRAIN_SEQ_LEN": 8}
    config = make_config(**{**SMALL_MODEL, **data, "VOCAB_SIZE": len(tokenizer.model)})
    data = open_data(config)
    validation = tg.Validation(
        config, make_runtime(config), make_log(), lambda _: nullcontext(), data
    )
    validation.mean_nats = lambda *_: torch.tensor(1.0)
    validation.evaluate(torch.nn.Module(), "final")
    assert validation.unknown == 2, "two neighbouring unknown characters are one token"
    run = SimpleNamespace(scorer=validation, validation=validation, step=1, log=make_log())
    run.log.files = {"": None}
    tg.log_score(run, 1.0, 1.0, 1.0)
    assert "WARNING: 2 targets of the validation set are unknown to the tokenizer" in "\n".join(
        run.log.lines
    )
    assert run.log.events[-1]["unknown_targets"] == 2
