"""The audit proves a right count and names each known mistake,
with real SentencePiece models trained here."""

import io
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "data"))
import audit  # noqa: E402  (the data folder is not a package)
from producer import record_tokenizer  # noqa: E402
from tokenize_docs import write_shard  # noqa: E402

pytestmark = pytest.mark.timeout(120)
SPACE, BOS = "\u2581", 1
TEXT = (
    "the count of bytes in each piece is what a score rests on so it must be right for plain words "
    "and for naïve cafés, Größe, 12 345 tests; (brackets) too: «quotes» and dashes"
)
WORDS = TEXT.split()
RARE = [
    "日本",
    "😀",
    "emoji 🚀🚀 end",
    "\u2581bar\u2581",
    "ﬁ ligature",
    "\ufffd",
    "a\nb\tc",
    "\u00a0x",
    "  two  spaces",
]


def make_documents(count: int, seed: int = 0) -> list[str]:
    choice = random.Random(seed)
    return [
        " ".join(
            choice.choice(WORDS if choice.random() < 0.85 else RARE)
            for _ in range(choice.randint(3, 30))
        )
        for _ in range(count)
    ]


# No model has seen the last character: it is 4 byte pieces.
DOCUMENTS = [" begins with a space", "", *make_documents(25), "ends in an emoji 🦊"]
VARIANTS = {
    "nmt_nfkc": {"normalization_rule_name": "nmt_nfkc"},
    "identity": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "dummy_prefix": {"normalization_rule_name": "nmt_nfkc", "add_dummy_prefix": True},
    "runs_of_spaces": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    },
    "no_byte_fallback": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": False,
    },
}


def edited(model: bytes, piece: str, *, name: str = "", kind: int = 0) -> bytes:
    """A model file whose `piece` has another name or type.

    protobuf: field 1 is a piece {1: name, 2: score, 3: type}."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value, at, shift = value | (model[at] & 127) << shift, at + 1, shift + 7
            if model[at - 1] < 128:
                return value, at

    def field(number: int, data: bytes) -> bytes:
        assert len(data) < 128
        return bytes([number << 3 | 2, len(data)]) + data

    result, at, old = b"", 0, field(1, piece.encode())
    while at < len(model):
        start = at
        key, at = varint(at)
        assert key & 7 == 2
        length, at = varint(at)
        content, at = model[at : at + length], at + length
        if key == 10 and content.startswith(old):
            content = (field(1, name.encode()) if name else old) + content[len(old) :]
            result += field(1, content + (bytes([3 << 3, kind]) if kind else b""))
        else:
            result += model[start:at]
    assert result != model
    return result


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model files by name; the last three are edits of others."""
    folder, models = tmp_path_factory.mktemp("models"), {}
    sentences = make_documents(300, seed=7) + ["    indented    text        here"] * 40
    for name, variant in VARIANTS.items():
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=written,
            **{
                "model_type": "bpe",
                "vocab_size": 420,
                "byte_fallback": True,
                "split_digits": True,
                "pad_id": 0,
                "bos_id": BOS,
                "eos_id": 2,
                "unk_id": 3,
                "add_dummy_prefix": False,
                "character_coverage": 0.98,
                "minloglevel": 2,
                "hard_vocab_limit": False,
                **variant,
            },
        )
        models[name] = written.getvalue()
    models["unused_piece"] = edited(models["nmt_nfkc"], SPACE + "the", kind=5)
    models["no_lone_space"] = edited(models["identity"], SPACE, name="\ue000")
    for name, content in models.items():
        (folder / f"{name}.model").write_bytes(content)
        models[name] = folder / f"{name}.model"
    models["byte"] = folder / "byte.json"
    models["byte"].write_text('{"kind": "byte", "offset": 4}')
    return models


def encode(model: Path, text: str) -> list[int]:
    if model.suffix == ".json":
        return [BOS, *(value + 4 for value in text.encode())]
    return [BOS, *sentencepiece.SentencePieceProcessor(model_file=str(model)).encode(text)]


def surfaces(model: Path) -> tuple[list[bytes], list[bool], list[bool]]:
    """(text, begins with the space mark, is a boundary) of each id,
    by a plain reading of its piece."""
    if model.suffix == ".json":
        return (
            [b""] * 4 + [bytes([i]) for i in range(256)],
            [False] * 260,
            [True] * 4 + [False] * 256,
        )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    texts, spaces, boundaries = [], [], []
    for i in range(processor.vocab_size()):
        piece = processor.id_to_piece(i)
        empty = processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i)
        texts.append(
            b""
            if empty
            else bytes([int(piece[3:5], 16)])
            if processor.is_byte(i)
            else piece.replace(SPACE, " ").encode()
        )
        spaces.append(piece.startswith(SPACE) and not empty)
        boundaries.append(empty)
    return texts, spaces, boundaries


def right_table(model: Path) -> dict[str, np.ndarray]:
    texts, spaces, boundaries = surfaces(model)
    return {
        "base_bytes": np.array(
            [len(text) - space for text, space in zip(texts, spaces, strict=True)]
        ),
        "has_leading_space": np.array(spaces),
        "is_boundary": np.array(boundaries),
    }


def count(
    table: dict[str, np.ndarray], tokens: list[int], predicted: int | None = None
) -> list[int]:
    """Bytes of each predicted token by a table, one at a time."""
    base, space, boundary = table.values()
    pairs = list(itertools.pairwise(tokens))[:predicted]
    return [int(base[now]) + int(space[now] and not boundary[before]) for before, now in pairs]


class World:
    """A data set in a folder, and the audit of it."""

    def __init__(self, folder: Path, model: Path, ids: list[list[int]], shards: int = 2) -> None:
        self.folder, self.model, self.ids = folder, model, ids
        self.tokens = [token for document in ids for token in document]
        folder.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(
            np.array_split(np.array(self.tokens, dtype=np.uint16), shards)
        ):
            write_shard(folder / f"fineweb_val_{number:06d}.bin", part)

    def place(self, position: int) -> tuple[int, int]:
        """(document, token in it) of a position, by walking there."""
        document, token = 0, 0
        for at in range(1, position + 1):
            document, token = (document + 1, 0) if self.tokens[at] == BOS else (document, token + 1)
        return document, token

    def arguments(self, *more: object, seq_len: int = 16) -> list[str]:
        return [
            *map(
                str, ("--tokenizer", self.model, "--data", self.folder, "--seq-len", seq_len, *more)
            )
        ]

    def audit(self, *more: object, seq_len: int = 16) -> SimpleNamespace:
        output, stdout = io.StringIO(), sys.stdout
        sys.stdout = output
        try:
            code = audit.main(self.arguments("--json", *more, seq_len=seq_len))
        finally:
            sys.stdout = stdout
        result = json.loads(output.getvalue())
        found = {finding["name"]: finding for finding in result["findings"]}
        verdict = "mistake" if found else "proved" if "--docs" in more else "not proved"
        assert result["verdict"] == verdict
        assert code == {"proved": 0, "mistake": 1, "not proved": 3}[verdict]
        return SimpleNamespace(found=found, names=[*found], **result)

    def table(self, table: dict[str, np.ndarray], form: str = "npz") -> Path:
        path = self.folder / f"table.{form}"
        if form == "npz":
            np.savez(path, **table)
        else:
            path.write_text(json.dumps({name: column.tolist() for name, column in table.items()}))
        return path

    def docs(self, documents: list[str]) -> Path:
        path = self.folder / "docs_selected.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        return path


@pytest.fixture
def world(tmp_path: Path, models: dict[str, Path]):
    return lambda name, documents=DOCUMENTS, **more: World(
        tmp_path / name, models[name], [encode(models[name], text) for text in documents], **more
    )


# === A RIGHT COUNT IS PROVED ======================================================================


@pytest.mark.parametrize("chunk", [1, 2, 5, 64, 1 << 20])
@pytest.mark.parametrize("name", ["nmt_nfkc", "identity", "dummy_prefix", "byte"])
def test_proves_a_right_split(world, monkeypatch, name, chunk):
    monkeypatch.setattr(audit, "CHUNK_TOKENS", chunk)
    data = world(name, shards=3)
    read = audit.Split.read

    def bounded(split, start, end):
        assert end - start <= chunk + 3, "more of the split in memory than a chunk"
        return read(split, start, end)

    monkeypatch.setattr(audit.Split, "read", bounded)
    result = data.audit("--docs", data.docs(DOCUMENTS))
    assert result.names == []
    total, table = len(data.tokens), right_table(data.model)
    predicted = (total - 1) // 16 * 16
    assert (result.tokens, result.predicted_tokens, result.tail_tokens) == (
        total,
        predicted,
        total - 1 - predicted,
    )
    assert result.counted_bytes == result.true_bytes == sum(count(table, data.tokens, predicted))
    assert result.tail_bytes == sum(count(table, data.tokens)) - result.true_bytes
    assert result.documents == result.originals["documents"] == len(DOCUMENTS)
    assert result.spaces_behind_bos == sum(
        bool(table["has_leading_space"][token])
        for before, token in itertools.pairwise(data.tokens)
        if before == BOS
    )
    # Every byte of the normalised text is counted, but for the spaces the rule leaves out.
    assert (
        result.true_bytes + result.tail_bytes + result.spaces_behind_bos
        == result.originals["normalised_bytes"]
    )
    assert result.originals["bytes"] == sum(len(text.encode()) for text in DOCUMENTS)


def test_says_what_the_normaliser_changed(world):
    documents = ["plain", "ﬁ ligature", "  two  spaces", "\u2581 mark"]
    kept = world("identity", documents)
    result = kept.audit("--docs", kept.docs(documents), seq_len=1)
    assert result.names == [] and result.originals["changed_documents"] == 1, (
        "only U+2581 becomes a space"
    )
    changed = world("nmt_nfkc", documents)
    result = changed.audit("--docs", changed.docs(documents), seq_len=1)
    assert result.names == [] and result.originals["changed_documents"] == 3
    assert result.originals["normalised_bytes"] == len("plainfi ligaturetwo spacesmark")


def test_counts_a_leading_space_as_the_rule_has_it(world):
    data = world("identity", [" a", "a", "  a"])
    result = data.audit(seq_len=1)
    assert result.names == [] and result.spaces_behind_bos == 2
    assert result.true_bytes == 1 + 1 + 2, "one space right behind BOS is left out of each"


def test_byte_pieces_make_characters_across_windows(world, monkeypatch):
    documents = ["😀😀", "\u2581\ufffd日本", "é"]
    monkeypatch.setattr(audit, "CHUNK_TOKENS", 3)
    for name in ("identity", "byte"):
        data = world(name, documents)
        result = data.audit("--docs", data.docs(documents), seq_len=1)
        expected = sum(len(text.encode()) for text in documents) - (3 if name == "identity" else 0)
        assert result.names == [] and result.true_bytes == expected


CHARACTERS = [*"ab ,.\n\t\0 12the", SPACE, "é", "ß", "日", "😀", "\ufffd", "ﬁ", "\u3000", "\u200d"]
TEXT = st.text(st.sampled_from(CHARACTERS), max_size=25)


@pytest.mark.parametrize("name", ["nmt_nfkc", "identity", "dummy_prefix", "byte"])
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(documents=st.lists(TEXT, min_size=1, max_size=5), chunk=st.integers(1, 9))
def test_proves_any_text(tmp_path_factory, models, name, documents, chunk):
    ids = [encode(models[name], text) for text in documents]
    assume(sum(map(len, ids)) > 1)
    data = World(tmp_path_factory.mktemp("any"), models[name], ids, shards=1)
    original_chunk, audit.CHUNK_TOKENS = audit.CHUNK_TOKENS, chunk
    try:
        result = data.audit("--docs", data.docs(documents), seq_len=1)
    finally:
        audit.CHUNK_TOKENS = original_chunk
    assert result.names == []
    assert result.true_bytes + result.spaces_behind_bos == result.originals["normalised_bytes"]


# === MISTAKES IN A TABLE ==========================================================================


def ids_where(model: Path, condition) -> np.ndarray:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return np.array([bool(condition(processor, i)) for i in range(processor.vocab_size())])


def leading_space_twice(t, model):
    t["base_bytes"] = t["base_bytes"] + t["has_leading_space"]


def leading_space_missing(t, model):
    t["has_leading_space"] = np.zeros_like(t["has_leading_space"])


def space_behind_text_missing(t, model):
    t["is_boundary"] = np.ones_like(t["is_boundary"])


def space_in_the_base_alone(t, model):
    leading_space_twice(t, model)
    leading_space_missing(t, model)


def bos_is_no_boundary(t, model):
    t["is_boundary"] = t["is_boundary"] & (np.arange(len(t["is_boundary"])) != BOS)


def byte_pieces_by_name(t, model):
    t["base_bytes"] = np.where(ids_where(model, lambda p, i: p.is_byte(i)), 6, t["base_bytes"])


def byte_pieces_decoded_alone(t, model):
    t["base_bytes"] = np.where(
        ids_where(model, lambda p, i: p.is_byte(i)),
        [
            len(sentencepiece.SentencePieceProcessor(model_file=str(model)).decode([i]).encode())
            for i in range(len(t["base_bytes"]))
        ],
        t["base_bytes"],
    )


def controls_by_name(t, model):
    t["base_bytes"] = np.where(ids_where(model, lambda p, i: p.is_control(i)), 3, t["base_bytes"])


def one_entry_off(t, model):
    t["base_bytes"] = t["base_bytes"] + 7 * (
        np.arange(len(t["base_bytes"])) == encode(model, "of the")[-1]
    )


PLANTED = [
    ("leading_space_twice", leading_space_twice),
    ("leading_space_missing", leading_space_missing),
    ("leading_space_missing", space_behind_text_missing),
    ("boundary_ignored", space_in_the_base_alone),
    ("boundary_ignored", bos_is_no_boundary),
    ("byte_piece_as_text", byte_pieces_by_name),
    ("byte_piece_as_replacement", byte_pieces_decoded_alone),
    ("control_ids_counted", controls_by_name),
    ("other_entry", one_entry_off),
]


@pytest.mark.parametrize("form", ["npz", "json"])
@pytest.mark.parametrize("mistake, plant", PLANTED, ids=[plant.__name__ for _, plant in PLANTED])
def test_names_a_mistake_planted_in_a_table(world, monkeypatch, mistake, plant, form):
    monkeypatch.setattr(audit, "CHUNK_TOKENS", 1 << 20 if form == "npz" else 100)
    data = world("identity")
    right = right_table(data.model)
    assert data.audit("--table", data.table(right, form)).names == []
    wrong = dict(right)
    plant(wrong, data.model)
    result = data.audit("--table", data.table(wrong, form))
    assert result.names == [mistake]
    predicted = result.predicted_tokens
    differences = np.array(count(wrong, data.tokens)) - count(right, data.tokens)
    positions = np.flatnonzero(differences) + 1
    finding = result.found[mistake]
    assert finding["tokens"] == len(positions) > 0
    assert (
        finding["extra_bytes"]
        == differences[:predicted].sum()
        == result.counted_bytes - result.true_bytes
    )
    assert result.true_bytes == sum(count(right, data.tokens, predicted))
    first = finding["first"]
    assert (first["document"], first["token"]) == data.place(positions[0]) and first[
        "position"
    ] == positions[0]
    assert first["id"] == data.tokens[positions[0]]
    assert first["piece"] == sentencepiece.SentencePieceProcessor(
        model_file=str(data.model)
    ).id_to_piece(first["id"])


def test_names_two_mistakes_of_one_table(world):
    data = world("nmt_nfkc")
    wrong = right_table(data.model)
    leading_space_twice(wrong, data.model)
    byte_pieces_by_name(wrong, data.model)
    result = data.audit("--table", data.table(wrong))
    assert {*result.names} == {"leading_space_twice", "byte_piece_as_text"}
    assert (
        sum(f["extra_bytes"] for f in result.found.values())
        == result.counted_bytes - result.true_bytes
    )


def test_names_unused_ids_that_are_counted(world, models):
    # One the model has, and those of a table made larger than the model.
    data = World(
        world("nmt_nfkc").folder,
        models["unused_piece"],
        [encode(models["unused_piece"], text) for text in DOCUMENTS],
    )
    right = right_table(data.model)
    unused = int(np.flatnonzero(ids_where(data.model, lambda p, i: p.is_unused(i)))[0])
    assert data.audit().names == [] and data.audit("--table", data.table(right)).names == []
    right["base_bytes"][unused] = 4
    result = data.audit("--table", data.table(right))
    assert result.names == ["unused_ids_counted"]
    assert f"1 ids such as {unused} " in result.found["unused_ids_counted"]["detail"]
    padded = {
        name: np.append(column, [column.dtype.type(name == "is_boundary")] * 100)
        for name, column in right_table(data.model).items()
    }
    assert data.audit("--table", data.table(padded)).names == []
    padded["is_boundary"][-100:] = False  # nothing can follow them
    assert data.audit("--table", data.table(padded)).names == []
    padded["base_bytes"][-100:] = 1
    result = data.audit("--table", data.table(padded))
    assert result.names == ["unused_ids_counted"] and result.counted_bytes == result.true_bytes
    assert "100 ids" in result.found["unused_ids_counted"]["detail"]


def test_names_marks_inside_pieces_that_the_rule_counts_as_text(world):
    documents = ["    four", "x        eight", "no run"]
    data = world("runs_of_spaces", documents)
    texts, _, _ = surfaces(data.model)
    assert any(texts[token].startswith(b"  ") for token in data.tokens), (
        "this vocabulary has no runs of spaces"
    )
    assert (
        data.audit("--docs", data.docs(documents), seq_len=1).names == []
    )  # the trainer's own table
    rule = right_table(data.model)
    spaces = np.array([text.count(b" ") for text in texts])
    rule["base_bytes"] = rule["base_bytes"] + rule["has_leading_space"] * 2 * (spaces - 1)
    result = data.audit("--table", data.table(rule), "--docs", data.docs(documents), seq_len=1)
    assert result.names == ["inner_space_mark"]
    extra = sum(
        2 * (len(texts[token]) - len(texts[token].lstrip()) - 1)
        for token in data.tokens
        if texts[token].startswith(b" ")
    )
    assert (
        result.counted_bytes - result.true_bytes
        == extra
        == result.found["inner_space_mark"]["extra_bytes"]
        > 0
    )
    assert data.audit("--table", data.table(right_table(data.model)), seq_len=1).names == []
    # The rule's table, with another mistake on top.
    for plant in (leading_space_twice, leading_space_missing):
        wrong = right_table(data.model)
        spaces = np.array([text.count(b" ") for text in texts])
        wrong["base_bytes"] = wrong["base_bytes"] + wrong["has_leading_space"] * 2 * (spaces - 1)
        assert data.audit("--table", data.table(wrong), seq_len=1).names == ["inner_space_mark"]
        plant(wrong, data.model)
        assert data.audit("--table", data.table(wrong), seq_len=1).names == [plant.__name__]


def test_knows_the_columns_by_the_names_of_public_scripts(world):
    data = world("nmt_nfkc")
    base, space, boundary = right_table(data.model).values()
    wrong = {
        "base_bytes_lut": base + space,
        "has_leading_space_lut": space,
        "is_boundary_token_lut": boundary,
    }
    assert data.audit("--table", data.table(wrong)).names == ["leading_space_twice"]


def test_a_table_for_bytes(world):
    data = world("byte")
    table = right_table(data.model)
    table["is_boundary"][:] = False  # matters to no byte
    assert data.audit("--table", data.table(table)).names == []
    table["base_bytes"][4:] = 3
    assert data.audit("--table", data.table(table)).names == ["byte_piece_as_replacement"]


# === MISTAKES IN A TOKENIZER OR A SPLIT ===========================================================


def test_names_a_vocabulary_without_a_lone_space(world):
    documents = [
        "x 日本 y",
        "a 😀 😀 \u2582\u2580",
        "the count",
    ]  # two begin with the mark's first bytes
    data = world("no_lone_space", documents)
    runs = (
        bytes(0).join(surfaces(data.model)[0][token] for token in data.tokens).count(SPACE.encode())
    )
    assert runs > 1
    result = data.audit("--docs", data.docs(documents), seq_len=1)
    assert result.names == ["no_lone_space"]
    assert result.found["no_lone_space"]["tokens"] == runs
    assert result.counted_bytes - result.true_bytes == 2 * runs
    assert result.true_bytes + result.spaces_behind_bos == sum(
        len(text.encode()) for text in documents
    )
    assert result.found["no_lone_space"]["first"]["piece"] == "<0xE2>"
    assert world("no_lone_space", ["the count of bytes"]).audit(seq_len=1).names == [
        "no_lone_space"
    ], "none in use"


@pytest.mark.parametrize("chunk", [4, 1 << 20])
def test_names_missing_bos(world, monkeypatch, chunk):
    monkeypatch.setattr(audit, "CHUNK_TOKENS", chunk)
    data = world("nmt_nfkc")
    ids = [encode(data.model, text) for text in DOCUMENTS]
    first = World(data.folder, data.model, [ids[0][1:], *ids[1:]]).audit()
    assert first.names == ["missing_bos"] and first.documents == len(DOCUMENTS)
    assert [
        first.found["missing_bos"]["first"][key] for key in ("document", "token", "position")
    ] == [0, 0, 0]
    # Only the originals show a BOS that is missing later on.
    data = World(data.folder, data.model, [*ids[:5], ids[5][1:], ids[6][1:], *ids[7:]])
    assert data.audit().names == []
    result = data.audit("--docs", data.docs(DOCUMENTS))
    assert result.names == ["missing_bos"] and result.found["missing_bos"]["tokens"] == 2
    assert result.originals["documents"] == len(DOCUMENTS)
    found = result.found["missing_bos"]["first"]
    assert (found["document"], found["token"]) == (4, len(ids[4])) and found["position"] == sum(
        map(len, ids[:5])
    )


def test_names_missing_bos_everywhere(world):
    data = world("identity")
    joined = World(
        data.folder, data.model, [[token for document in data.ids for token in document[1:]]]
    )
    result = joined.audit("--docs", joined.docs(DOCUMENTS))
    assert result.names == ["missing_bos"] and result.documents == 1
    assert result.found["missing_bos"]["tokens"] == len(DOCUMENTS)


def test_names_missing_bos_where_documents_are_joined_by_whitespace(world):
    documents = ["one text", "another text", "third text"]
    data = world("identity", ["one text\n\nanother text", "third text"])
    assert data.audit("--docs", data.docs(documents), seq_len=1).names == ["missing_bos"]


@pytest.mark.parametrize("name", ["nmt_nfkc", "identity", "byte"])
@pytest.mark.parametrize("cut", [1, 2, 3, 9])
def test_names_a_dropped_tail(world, name, cut):
    data = world(name)
    short = World(data.folder, data.model, [data.tokens[:-cut]])
    result = short.audit("--docs", short.docs(DOCUMENTS))
    assert result.names == ["dropped_tail"]
    assert result.found["dropped_tail"]["first"]["document"] == len(DOCUMENTS) - 1
    # Without the originals, only an end inside a character shows
    # (the last one is an emoji, 4 bytes).
    assert short.audit().names == (["dropped_tail"] if cut < 4 else [])


def test_says_how_much_the_rule_leaves_of_the_tail(world):
    data = world("nmt_nfkc")
    table, total = right_table(data.model), len(data.tokens)
    for length in (1, 7, 100, total - 1):
        result = data.audit(seq_len=length)
        predicted = (total - 1) // length * length
        assert result.names == [] and result.predicted_tokens == predicted
        assert result.tail_tokens == total - 1 - predicted
        assert result.tail_bytes == sum(count(table, data.tokens)[predicted:])
        assert result.true_bytes == sum(count(table, data.tokens)[:predicted])
    assert audit.main(data.arguments(seq_len=total)) == 2, "no sequence at all"


def test_names_a_truncated_shard(world, capsys):
    data = world("nmt_nfkc")
    shard = data.folder / "fineweb_val_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    result = data.audit()
    assert result.names == ["truncated_shard"]
    assert "fineweb_val_000001.bin" in result.found["truncated_shard"]["detail"]
    capsys.readouterr()
    assert audit.main(data.arguments()) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict == "mistake: truncated_shard", "nothing was counted, so no factor is known"


def test_names_ids_of_another_tokenizer(world, models):
    data = world("nmt_nfkc")
    size = sentencepiece.SentencePieceProcessor(model_file=str(data.model)).vocab_size()
    position = len(data.ids[0]) + len(data.ids[1]) + 2
    data.tokens[position] = size
    result = World(data.folder, data.model, [data.tokens]).audit()
    assert result.names == ["ids_outside_vocabulary"]
    first = result.found["ids_outside_vocabulary"]["first"]
    assert (first["document"], first["token"], first["id"]) == (2, 2, size)


@pytest.mark.row("a wrong tokenizer of the same size", "audit.py never says proved")
def test_another_tokenizer_of_the_same_size_is_never_proved(world, models, capsys):
    """Its ids have other text and other bytes; only the documents, or the record, can show it."""
    right, wrong = models["nmt_nfkc"], models["dummy_prefix"]
    data = world("nmt_nfkc")
    true_bytes, data.model = data.audit().true_bytes, wrong
    result = data.audit()
    assert result.verdict == "not proved" and result.true_bytes != true_bytes
    assert "other_text" in data.audit("--docs", data.docs(DOCUMENTS)).names
    record_tokenizer(data.folder, right)
    assert data.audit().names == ["other_tokenizer"]
    capsys.readouterr()
    assert audit.main(data.arguments()) == 1
    said = capsys.readouterr().out
    assert f"\nother_tokenizer: {audit.MISTAKES['other_tokenizer']}; it has sha256 " in said
    own = data.folder.parents[1] / "tokenizers" / "nmt_nfkc.model"
    assert f": {own} is missing\n" in said
    own.parent.mkdir()
    own.write_bytes(right.read_bytes())
    assert audit.main(data.arguments()) == 1
    assert f": give --tokenizer {own}\n" in capsys.readouterr().out
    data.model = own
    assert data.audit().verdict == "not proved"
    assert data.audit("--docs", data.docs(DOCUMENTS)).verdict == "proved"


def test_names_text_that_is_lost(world, models):
    data = world("no_byte_fallback", ["the count", "x 日本 😀", "of bytes"])
    result = data.audit(seq_len=1)
    assert (
        result.names == ["lost_text"]
        and result.found["lost_text"]["tokens"] == data.tokens.count(3) > 0
    )
    assert result.found["lost_text"]["first"]["position"] == data.tokens.index(3)
    # An id that stands for nothing.
    ids = encode(models["nmt_nfkc"], "on the count")
    unused = int(np.flatnonzero(ids_where(models["unused_piece"], lambda p, i: p.is_unused(i)))[0])
    assert unused in ids
    result = World(data.folder, models["unused_piece"], [ids]).audit(seq_len=1)
    assert result.names == ["lost_text"] and result.found["lost_text"]["first"][
        "token"
    ] == ids.index(unused)


@pytest.mark.parametrize("name", ["identity", "byte"])
def test_names_bytes_that_form_no_character(world, name):
    data = world(name, ["a \ufffd sign", "smile 🦊 here", "end"])
    texts = surfaces(data.model)[0]
    at = next(i for i, token in enumerate(data.ids[1]) if texts[token] == b"\xf0")
    for broken in (
        [*data.ids[1][:at], *data.ids[1][at + 1 :]],
        [*data.ids[1][: at + 3], *data.ids[1][at + 4 :]],
    ):
        for documents in ([data.ids[0], broken, data.ids[2]], [data.ids[0], broken]):
            result = World(data.folder, data.model, documents).audit(seq_len=1)
            assert result.names == ["broken_characters"]
            first = result.found["broken_characters"]["first"]
            assert (first["document"], first["token"]) == (1, at)


def test_a_library_that_decodes_to_other_text_is_found(world, monkeypatch):
    """The proof rests on the decoded text, not on the pieces that the table was made from."""
    data = world("nmt_nfkc")
    texts = audit.Vocabulary.texts
    monkeypatch.setattr(
        audit.Vocabulary,
        "texts",
        lambda self, segments: [text.replace("rests", "rest") for text in texts(self, segments)],
    )
    result = data.audit()
    position = next(i for i, text in enumerate(DOCUMENTS) if "rests" in text)
    assert (
        result.names == ["broken_characters"]
        and result.found["broken_characters"]["first"]["document"] == position
    )


def test_names_other_text(world):
    data = world("nmt_nfkc")
    for index, change, token in (
        (3, lambda text: text + " and more", len(data.ids[3]) - 1),
        (4, lambda text: text[:-1], len(data.ids[4]) - 1),
        (5, lambda text: "Q" + text, 1),
        (6, lambda text: "", 1),
    ):
        documents = [*DOCUMENTS[:index], change(DOCUMENTS[index]), *DOCUMENTS[index + 1 :]]
        result = data.audit("--docs", data.docs(documents))
        assert result.names == ["other_text"] and result.found["other_text"]["tokens"] == 1, (
            "the others are right"
        )
        first = result.found["other_text"]["first"]
        assert first["document"] == index and first["token"] == token
    result = data.audit("--docs", data.docs(DOCUMENTS[:-2]))
    assert result.names == ["other_text"] and result.found["other_text"]["tokens"] == 2, (
        "more than there are originals"
    )
    assert result.found["other_text"]["first"]["document"] == len(DOCUMENTS) - 2
    assert data.audit("--docs", data.docs([*DOCUMENTS, "training text"])).names == [], (
        "the rest is for training"
    )


def test_text_files_are_originals_too(world, tmp_path):
    documents = ["first file\n", "second 😀 file"]
    data = world("byte", documents)
    for number, text in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(text)
    assert data.audit("--docs", tmp_path / "0.txt", tmp_path / "1.txt", seq_len=1).names == []
    assert data.audit("--docs", tmp_path / "1.txt", tmp_path / "0.txt", seq_len=1).names == [
        "other_text"
    ]


# === PUBLISHED SPLITS =============================================================================


def test_knows_the_published_splits():
    assert audit.PUBLISHED["sp1024"] == (62_021_632, 151_080_362)
    assert audit.PUBLISHED["sp8192"] == (40_540_160, 151_078_221)
    assert {*audit.PUBLISHED.values()} == {
        (62_021_632, 151_080_362),
        (40_540_160, 151_078_221),
        (62_013_440, 151_061_140),
        (61_997_056, 151_024_098),
        (62_021_632, 151_079_962),
        (45_508_608, 151_074_052),
        (45_514_752, 151_074_923),
        (47_851_520, 151_074_498),
        (63_779_840, 155_769_746),
    }


def test_says_whether_this_is_a_published_split(world, monkeypatch):
    data = world("nmt_nfkc")
    tokens, size = (plain := data.audit()).predicted_tokens, plain.true_bytes
    assert plain.published == ""
    for off in (-1, 0, 1):
        monkeypatch.setattr(
            audit, "PUBLISHED", {"other": (tokens, size + 400), "this": (tokens, size + off)}
        )
        assert (result := data.audit()).names == [] and result.published == "this"
    for off in (-2, 2):
        monkeypatch.setattr(audit, "PUBLISHED", {"this": (tokens, size + off)})
        assert (result := data.audit()).names == [
            "published_bytes_differ"
        ] and result.published == ""
        assert f"this has {size + off:,}" in result.found["published_bytes_differ"]["detail"]
    monkeypatch.setattr(audit, "PUBLISHED", {"this": (tokens + 16, size)})
    assert (result := data.audit()).names == [] and result.published == ""


# === THE COMMAND ==================================================================================


def test_report_ends_in_one_verdict(world, capsys):
    data = world("nmt_nfkc")
    assert audit.main(data.arguments("--docs", data.docs(DOCUMENTS))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("proved: ") and f"{len(DOCUMENTS)} documents" in lines[-1]
    assert not any("mistake" in line for line in lines)
    assert audit.main(data.arguments()) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("not proved: ") and lines[-1].endswith("--docs")
    assert any("not compared (--docs)" in line for line in lines)
    wrong = right_table(data.model)
    leading_space_twice(wrong, data.model)
    assert (
        audit.main(data.arguments("--table", data.table(wrong), "--docs", data.docs(DOCUMENTS)))
        == 1
    )
    lines = capsys.readouterr().out.splitlines()
    result = data.audit("--table", data.table(wrong))
    factor = result.counted_bytes / result.true_bytes
    assert (
        lines[-1].startswith("mistake: leading_space_twice;")
        and f"{factor:.4f}" in lines[-1]
        and factor > 1.1
    )
    first = result.found["leading_space_twice"]["first"]
    named = next(line for line in lines if line.startswith("leading_space_twice: "))
    assert (
        f"document {first['document']}, token {first['token']}" in named and first["piece"] in named
    )
    assert any(line.startswith("originals") and "normaliser" in line for line in lines)


def test_shows_progress_and_time_left(world, monkeypatch, capsys):
    data = world("nmt_nfkc")
    monkeypatch.setattr(audit, "PROGRESS_SECONDS", 0)
    monkeypatch.setattr(audit, "CHUNK_TOKENS", 100)
    assert audit.main(data.arguments()) == 3
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == -(-len(data.tokens) // 100) and all("s to go" in line for line in lines)
    assert "(100 %), 0 s to go" in lines[-1] and "to go" not in captured.out


def test_runs_as_a_script_without_torch(world, tmp_path):
    data = world("nmt_nfkc")
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    docs = data.docs(DOCUMENTS)
    done = subprocess.run(
        [sys.executable, str(ROOT / "data" / "audit.py"), *data.arguments("--docs", docs)],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (
        done.returncode == 0
        and done.stdout.splitlines()[-1].startswith("proved: ")
        and not done.stderr
    )


def make_wrong(data: World, folder: Path, fault: str) -> list[object]:
    """Puts the fault into the data; the arguments that go with it."""
    shards = sorted(data.folder.glob("*.bin"))
    if fault == "no shards":
        data.folder = folder
    elif fault == "empty shard":
        shards[0].write_bytes(b"")
    elif fault == "no shard":
        shards[1].write_bytes(b"\1" * 2000)
    elif fault == "tokenizer":
        data.model = shards[0]
    elif fault == "no tokenizer":
        data.model = folder / "missing.model"
    elif fault == "docs":
        path = data.docs(DOCUMENTS)
        path.write_text('{"text": "x"}\n{"words": 1}\n')
        return ["--docs", path]
    elif fault == "no docs":
        return ["--docs", folder / "missing.jsonl"]
    return []


def bad_table(data: World, folder: Path, fault: str) -> Path:
    table = right_table(data.model)
    if fault == "table column":
        return data.table({name: table[name] for name in ("base_bytes", "is_boundary")})
    if fault == "table short":
        return data.table({name: column[:-1] for name, column in table.items()}, "json")
    if fault == "uneven table":
        return data.table({**table, "is_boundary": table["is_boundary"][:50]})
    if fault == "table fraction":
        return data.table({**table, "base_bytes": table["base_bytes"] + 0.5})
    if fault == "table file":
        (folder / "table.npz").write_bytes(b"PK not a zip")
        return folder / "table.npz"
    return folder / "missing.json"  # no table


@pytest.mark.parametrize(
    "fault",
    [
        "no shards",
        "empty shard",
        "no shard",
        "tokenizer",
        "no tokenizer",
        "docs",
        "no docs",
        "table column",
        "table short",
        "table fraction",
        "table file",
        "no table",
        "uneven table",
    ],
)
def test_wrong_usage_is_one_line(world, capsys, tmp_path, fault):
    data = world("nmt_nfkc")
    if "table" in fault:
        more = ["--table", bad_table(data, tmp_path, fault)]
    else:
        more = make_wrong(data, tmp_path, fault)
    assert audit.main(data.arguments(*more)) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and not captured.out
    if fault == "no shards":
        assert "no tokens in fineweb_val_*.bin" in lines[0]
    if fault == "docs":
        assert "docs_selected.jsonl:2" in lines[0]
    if "table" in fault:
        assert "not a table" in lines[0] and "numpy.savez(" in lines[0]


def test_missing_arguments_are_wrong_usage():
    with pytest.raises(SystemExit) as stop:
        audit.main(["--data", "somewhere"])
    assert stop.value.code == 2


def test_an_interrupt_leaves_no_traceback(world, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(audit.Audit, "scan", interrupt)
    assert audit.main(world("nmt_nfkc").arguments()) == 130
    assert not capsys.readouterr().out
