"""The audit proves a right count and names each mistake, with SentencePiece models trained here."""

import json
import math
import os
import random
import re
import shutil
from pathlib import Path

import audit
import dataset
import numpy as np
import pytest
import sentencepiece
import tokenize_docs
from cli import ToolError
from running import SMALL_MODEL, TRAINER, call_tool, run_script, train_tokenizer, write_split

SPACE, BOS = "\u2581", 1
TEXT = (
    "the count of bytes in each piece is what a score rests on so it must be right for plain words "
    "and for naïve cafés, Größe, 12 345 tests; (brackets) too: «quotes» and dashes"
)
RARE = ["日本", "😀", "\u2581bar\u2581", "ﬁ", "\ufffd", "a\nb\tc", "\u00a0x\u3000", "  two"]
VARIANTS = {
    "nmt_nfkc": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "identity": {},
    "no_byte_fallback": {"byte_fallback": False},
}
VARIANTS["dummy_prefix"] = VARIANTS["nmt_nfkc"] | {"add_dummy_prefix": True}
MARKS = ["\ue001", "\ue002", "\ue003", "\ue004"]
VARIANTS["caseops"] = VARIANTS["nmt_nfkc"] | {"user_defined_symbols": MARKS}


def make_documents(count: int, seed: int = 0) -> list[str]:
    choice = random.Random(seed)
    return [
        " ".join(
            choice.choice(TEXT.split() if choice.random() < 0.85 else RARE)
            for _ in range(choice.randint(3, 30))
        )
        for _ in range(count)
    ]


# No model has seen the last character: it is 4 byte pieces.
DOCUMENTS = [" begins with a space", "", *make_documents(25), "ends in an emoji 🦊"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sentences = make_documents(300, seed=7) + ["    indented    text        here"] * 40
    models = {"byte": folder / "byte.json"}
    models["byte"].write_text('{"config": {"byte_offset": 4}}')  # as the challenge's tool writes it
    for name, variant in VARIANTS.items():
        path = folder / f"{name}.model"
        models[name] = train_tokenizer(path, sentences, character_coverage=0.98, **variant)
    return models


def encode(model: Path, text: str) -> list[int]:
    if model.suffix == ".json":
        return [BOS, *(value + 4 for value in text.encode())]
    return [BOS, *sentencepiece.SentencePieceProcessor(model_file=str(model)).encode(text)]


class World:
    """A data set of a tokenizer in a folder, and the audit of it."""

    def __init__(self, folder: Path, model: Path, documents: list[str]) -> None:
        self.folder, self.model, self.documents = folder, model, documents
        self.ids = [encode(model, text) for text in documents]
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"text": text}) + "\n" for text in documents]
        self.docs = folder / "docs.jsonl"
        self.docs.write_text("".join(lines))
        self.write()

    def write(self) -> None:
        tokens = np.array([token for ids in self.ids for token in ids], dtype=np.uint16)
        write_split(self.folder, "val", tokens, [len(tokens) // 3, len(tokens) // 2])

    def audit(self, *more: object, docs: bool = True, seq_len: int = 1) -> tuple[int, str]:
        """(exit code, what it printed)"""
        words = ["--tokenizer", self.model, "--data", self.folder, "--seq-len", seq_len, *more]
        words += ["--docs", self.docs] if docs else []
        code, said = call_tool(audit.main, *words)
        last_line = said.splitlines()[-1]
        assert last_line.startswith({0: "proved", 1: "mistake", 3: "not proved"}[code])
        return code, said


@pytest.fixture
def world(tmp_path: Path, models: dict[str, Path]):
    return lambda name, documents=DOCUMENTS: World(tmp_path / name, models[name], documents)


def counted(said: str, what: str = "counted") -> int:
    return int(re.search(rf"^{what} +([\d,]+)", said, re.MULTILINE)[1].replace(",", ""))


@pytest.mark.parametrize("name", ["nmt_nfkc", "identity", "dummy_prefix", "byte"])
def test_a_right_split_is_proved(world, name: str) -> None:
    data = world(name)
    code, said = data.audit()
    assert code == 0, said
    assert f"all {len(DOCUMENTS)} documents has the bytes" in said
    if name == "identity":  # of all bytes, those of a space after BOS alone are not counted
        texts = [text.replace(SPACE, " ") for text in DOCUMENTS]
        after_bos = sum(text.startswith(" ") for text in texts)
        assert counted(said) == sum(len(text.encode()) for text in texts) - after_bos
        assert f"{after_bos} spaces after BOS are not counted" in said and after_bos
    assert data.audit(docs=False)[0] == 3


def test_what_the_normaliser_changed_is_told(world) -> None:
    documents = ["plain", "ﬁ ligature", "  two  spaces", "\u2581 mark"]
    said = world("nmt_nfkc", documents).audit()[1]
    assert "normaliser changed 3 of them: 38 bytes as written are 30" in said
    assert counted(said) == len("plainfi ligaturetwo spacesmark")
    assert "changed 1 of them" in world("identity", documents).audit()[1]  # U+2581


@pytest.mark.parametrize("name", ["identity", "byte"])
def test_the_trainer_counts_the_same_bytes(world, tmp_path: Path, name: str) -> None:
    """From the score of a run: val_bpb / val_loss is tokens / bytes / ln 2."""
    data = world(name, DOCUMENTS * 3)
    write_split(data.folder, "train", np.full(5000, BOS), [])
    vocab_size = 260 if name == "byte" else audit.Tokenizer(data.model).vocab_size
    settings = {**SMALL_MODEL, "ITERATIONS": 1, "RUN_ID": "r", "VOCAB_SIZE": vocab_size}
    settings |= {"DATA_PATH": data.folder, "TOKENIZER_PATH": data.model, "TRAIN_SEQ_LEN": 16}
    done = run_script(TRAINER, tmp_path / "run", **settings)
    assert done.code == 0, done.err
    [score] = done.events("score")
    code, said = data.audit(seq_len=16)
    assert code == 0
    wanted = counted(said, "predicted") * score["val_loss"] / math.log(2) / score["val_bpb"]
    assert counted(said) == pytest.approx(wanted, rel=1e-9)


SPLIT_MISTAKES = {  # an edit of the documents' tokens, and what is said
    "no BOS": (
        lambda ids: ids[3].pop(0),
        "document 3: its text does not end where the original ends: BOS is missing",
    ),
    "no tail": (
        lambda ids: ids[-1].__delitem__(slice(5, None)),
        r"document 28: its text ends \d+ characters too early",
    ),
    "half a character": (
        lambda ids: ids[-1].pop(),
        r"document 28: \d+ bytes are counted, .* form no character",
    ),
    "foreign id": (
        lambda ids: ids[5].__setitem__(2, 50_000),
        "document 6: id 50000 is not in the vocabulary",
    ),
    "another word": (
        lambda ids: ids[6].__setitem__(slice(1, 3), ids[7][1:3]),
        r"document 7: after \d characters its text is",
    ),
}


@pytest.mark.parametrize("name", ["identity", "byte"])
@pytest.mark.parametrize("mistake", SPLIT_MISTAKES)
def test_a_mistake_in_a_split_is_named(world, name: str, mistake: str) -> None:
    data, (make, words) = world(name), SPLIT_MISTAKES[mistake]
    make(data.ids)
    data.write()
    code, said = data.audit()
    assert code == 1 and re.search(words, said), said


def test_a_tokenizer_that_loses_text_is_named(world) -> None:
    code, said = world("no_byte_fallback", ["some words, " * 9 + "日本"]).audit(docs=False)
    assert code == 1 and "stands for text that is lost" in said, said
    few, right = map(int, re.search(r"(\d+) bytes are counted, its text has (\d+)", said).groups())
    assert few < right and f"the true val_bpb is {few / right:.4f} times the counted one" in said


def test_another_tokenizer_is_found(world, models: dict[str, Path]) -> None:
    """By the documents, and without them by tokenizer.sha256."""
    data = world("identity")
    dataset.record_tokenizer(data.folder, data.model)
    assert data.audit(docs=False)[0] == 3
    data.model = models["dummy_prefix"]
    code, said = data.audit(docs=False)
    assert code == 1 and f"give --tokenizer {models['identity']}" in said
    (data.folder / "tokenizer.sha256").unlink()
    assert data.audit(docs=False)[0] == 3
    assert data.audit()[0] == 1


@pytest.mark.parametrize("block", [5, 1 << 20])
@pytest.mark.parametrize("name", ["identity", "byte"])
def test_ten_leaked_documents_are_found(world, name: str, block: int, monkeypatch) -> None:
    """Also those that go on in the next block or shard; not those of BOS alone."""
    monkeypatch.setattr(audit, "BLOCK_TOKENS", block)
    data = world(name)
    others = [encode(data.model, text) for text in ["", *make_documents(100, seed=9)]]
    train = [*others[:50], *data.ids[3:12], *others[50:], data.ids[12]]
    first, size = sum(map(len, others[:50])), len(data.ids[3])
    write_split(data.folder, "train", np.concatenate(train), [first, size + 5])
    for docs in (True, False):
        code, said = data.audit(docs=docs)
        assert code == 1 and "proved" not in said, said
        assert "10 of 28 validation documents (35.71%) are also in the training shards" in said
        assert "the first is document 4, in fineweb_train_000001.bin" in said
    code, said = data.audit("--train-shards", 1)
    assert code == 0 and "none of them is in the first 1 of 3 training shards" in said, said
    write_split(data.folder, "train", np.concatenate(others), [first, 9])
    assert "and none of them is in the 3 training shards" in data.audit()[1]


@pytest.fixture
def made(world, tmp_path: Path):
    """A set of bytes as tokenize_docs.py makes it, with several shards of each split."""
    data = world("byte", [text * 200 for text in make_documents(40, seed=3)])
    words = [data.docs, "--bytes", "--name", "made", "--out", tmp_path, "--shard-tokens", 70_000]
    options = tokenize_docs.parse_arguments([str(word) for word in words])
    data.folder, data.model = tokenize_docs.make_data_set(options)[0]
    return data


def in_the_middle(path: Path) -> None:
    """One byte. The trainer's identity is of the first and the last 64 KiB."""
    before = dataset.describe_shard(path)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"?")
    assert dataset.describe_shard(path)["identity"] == before["identity"]


SHARD_MISTAKES = {
    "missing": (Path.unlink, "{}: is missing"),
    "one byte": (in_the_middle, "{}: its content differs from export.json"),
    "a folder": (
        lambda path: (path.unlink(), path.mkdir()),
        r"{}: cannot be read \(Is a directory",
    ),
    "cut": (
        lambda path: os.truncate(path, 1500),
        r"{}: is truncated or not a shard \(1,500 bytes\)",
    ),
    "another": (
        lambda path: shutil.copy(path, path.with_name("fineweb_train_000099.bin")),
        "fineweb_train_000099.bin: export.json does not list it",
    ),
}


@pytest.mark.parametrize("split", ["val", "train"])
@pytest.mark.parametrize("mistake", SHARD_MISTAKES)
def test_a_shard_that_is_not_the_one_made_is_named(made, split: str, mistake: str) -> None:
    """Without --docs. The last one is missing, so that no number is left out."""
    make, words = SHARD_MISTAKES[mistake]
    path = sorted(made.folder.glob(f"fineweb_{split}_*.bin"))[-1 if mistake == "missing" else 0]
    make(path)
    code, said = made.audit(docs=False)
    assert code == 1 and re.search(words.format(path.name), said), said
    assert "mistake: 1 found" in said


def test_a_text_that_was_kept_together_is_proved(made, tmp_path: Path) -> None:
    made.docs = tmp_path / "novel.txt"
    made.docs.write_text("\n\n".join(make_documents(40, seed=3)))
    words = [made.docs, "--one-document", "--bytes", "--name", "one", "--out", tmp_path]
    options = tokenize_docs.parse_arguments([str(word) for word in words])
    made.folder, made.model = tokenize_docs.make_data_set(options)[0]
    assert "proved: the text of all 1 documents" in made.audit()[1]


def test_shards_are_compared_with_export_json(made) -> None:
    code, said = made.audit(docs=False)
    assert code == 3 and re.search(r"^shards +\d+ are compared with export.json$", said, re.M), said
    path = made.folder / "export.json"
    for damage in ("", "[]", '{"shards": {"val": {"a": 1}, "train": {}}, "complete": true}'):
        path.write_text(damage)
        with pytest.raises(
            ToolError, match="export.json: is damaged .* restore it, or make the data set"
        ):
            made.audit()


def in_caseops(text: str) -> str:
    """A text in lower case, with marks: title, capitals, next letter, escape."""
    text = re.sub("[\ue001-\ue004]", lambda found: "\ue004" + found[0], text)

    def mark(found: re.Match) -> str:
        word = found[0]
        if word[1:].islower() or len(word) == 1:
            return word if word.islower() else "\ue001" + word.lower()
        if word.isupper():
            return "\ue002" + word.lower()
        return re.sub("[A-Z]", lambda capital: "\ue003" + capital[0].lower(), word)

    return re.sub("[A-Za-z]+", mark, text)


CASED = ["The NASA Launch of OpenAI", "iPhone, E\u0301tude, XE\u0301", "a\ue001b \ue004C"]
CASED += ["Größe I'M 日本🦊"]
CASED += [text.title() if len(text) % 2 else text for text in make_documents(20, seed=5)]


@pytest.fixture
def cased(world):
    """A set in CaseOps with the bytes of the original text of each token."""
    data = world("caseops", [in_caseops(text) for text in CASED])
    data.docs.write_text("".join(json.dumps({"text": text}) + "\n" for text in CASED))
    data.bytes = []
    for ids, text in zip(data.ids, CASED, strict=True):
        # How they are spread over a document's tokens is not the audit's matter.
        each, more = divmod(len(text.encode()), len(ids) - 1)
        data.bytes += [0, *[each] * (len(ids) - 2), each + more]

    def write_bytes() -> None:
        total = len(data.bytes)
        write_split(data.folder, "val_bytes", np.array(data.bytes), [total // 3, total // 2])

    data.write_bytes = write_bytes
    write_bytes()
    return data


def test_bytes_beside_the_tokens_are_proved_by_document(cased) -> None:
    code, said = cased.audit()
    assert code == 0, said
    assert counted(said) == sum(len(text.encode()) for text in CASED)
    assert "by fineweb_val_bytes_*.bin; the table would count " in said
    assert cased.audit(docs=False)[0] == 3


def test_wrong_bytes_beside_the_tokens_are_named(cased) -> None:
    """A byte that moves to the next document, where the sum of all stays; BOS; another text."""
    end = len(cased.ids[0])
    cased.bytes[end - 1 : end + 2] = cased.bytes[end - 1] - 1, 2, cased.bytes[end + 1] - 1
    cased.ids[4][1:3] = cased.ids[5][1:3]
    cased.write()
    cased.write_bytes()
    code, said = cased.audit()
    assert code == 1
    assert "document 1: 24 bytes are counted, the original has 25" in said
    assert "bytes are counted wrongly in 2 documents" in said
    assert "document 2: its BOS has 2 bytes" in said
    assert "document 5: after " in said


def test_files_of_another_set_and_missing_ones_are_found(cased) -> None:
    cased.bytes.pop()
    cased.write_bytes()
    with pytest.raises(ToolError, match="fineweb_val_bytes_.* numbers: get the files of one set"):
        cased.audit()
    for path in cased.folder.glob("fineweb_val_bytes_*.bin"):
        path.unlink()
    assert cased.audit()[0] == 1, "the table does not count the original's bytes"
    (cased.folder / "fineweb_val_000000.bin").unlink()
    with pytest.raises(
        ToolError, match="fineweb_val_000001.bin: the next shard must have the number 000000"
    ):
        cased.audit(docs=False)
