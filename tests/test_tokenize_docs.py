"""Documents to shards: order, format, the split, the tokenizers, faults by file and line,
restart, memory."""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from conftest import ROOT, SMALL_MODEL

SCRIPT = ROOT / "data" / "tokenize_docs.py"
sys.path.insert(0, str(SCRIPT.parent))
import audit  # noqa: E402  (rooms are folders of scripts, not packages)
import tokenize_docs  # noqa: E402  (rooms are folders of scripts, not packages)

pytestmark = pytest.mark.timeout(120)


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Short texts with every kind of character that a tokenizer treats apart."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 8))) for _ in range(300)]
    extras = ["naïve", "日本", "🙂", "2024", "\t", "\n\n", "  x", "a\u2028b"]
    return [
        f"{number} " + " ".join(rng.choices(words + extras, k=rng.randint(1, 60)))
        for number in range(count)
    ]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"text": text, "url": "x"}, ensure_ascii=number % 2 == 0) + "\n"
            for number, text in enumerate(texts)
        ),
        encoding="utf-8",
    )
    return path


def run(*arguments: object, code: int = 0) -> str:
    """The command in this process; returns what it wrote to stderr."""
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        try:
            result = tokenize_docs.main()
        except SystemExit as stop:
            result = stop.code
    assert result == code, errors.getvalue()
    return errors.getvalue()


def read_shards(folder: Path, split: str) -> list[np.ndarray]:
    """Tokens of each shard in name order; the header and the exact size are checked by hand."""
    shards = []
    for number, path in enumerate(sorted(folder.glob(f"fineweb_{split}_*.bin"))):
        assert path.name == f"fineweb_{split}_{number:06d}.bin"
        content = path.read_bytes()
        assert np.frombuffer(content[:12], "<i4").tolist() == [
            20240520,
            1,
            (len(content) - 1024) // 2,
        ]
        assert not any(content[12:1024]) and len(content) % 2 == 0
        shards.append(np.frombuffer(content[1024:], "<u2"))
    return shards


def cut_documents(tokens: np.ndarray) -> list[list[int]]:
    """The documents of a split: each begins with BOS, which appears nowhere else."""
    starts = np.flatnonzero(tokens == 1)
    assert starts[0] == 0
    return [part.tolist() for part in np.split(tokens, starts[1:])]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return make_texts(400)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """400 documents in one file."""
    return write_jsonl(tmp_path_factory.mktemp("documents") / "docs.jsonl", texts)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, documents: Path) -> Path:
    """What the command makes of them: two vocabularies and bytes, 40 validation documents,
    shards of 1,000 tokens."""
    out = tmp_path_factory.mktemp("exported")
    command = [
        sys.executable,
        SCRIPT,
        documents,
        "--out",
        out,
        "--num-val-docs",
        "40",
        "--vocab-size",
        "380",
        "420",
        "--bytes",
        "--shard-tokens",
        "1000",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


# === SHARDS AND THE SPLIT =========================================================================


@pytest.mark.parametrize("size", [380, 420])
def test_shards_are_the_documents_in_order(exported: Path, texts: list[str], size: int) -> None:
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(exported / f"tokenizers/docs_{size}_bpe.model")
    )
    assert model.vocab_size() == size
    for split, part in (("val", texts[:40]), ("train", texts[40:])):
        expected = np.concatenate([[1, *model.encode(text)] for text in part])
        shards = read_shards(exported / f"datasets/docs_sp{size}", split)
        assert np.array_equal(np.concatenate(shards), expected)
        assert {len(shard) for shard in shards[:-1]} == {1000} and 0 < len(shards[-1]) <= 1000


def test_the_byte_tokenizer(exported: Path, texts: list[str]) -> None:
    assert json.loads((exported / "tokenizers/docs_byte260.json").read_text()) == {
        "kind": "byte",
        "offset": 4,
    }
    for split, part in (("val", texts[:40]), ("train", texts[40:])):
        tokens = np.concatenate(read_shards(exported / "datasets/docs_byte260", split))
        assert [
            bytes(token - 4 for token in document[1:]).decode()
            for document in cut_documents(tokens)
        ] == part


def test_the_tokenizer_is_recorded_beside_the_shards(exported: Path) -> None:
    for folder in (exported / "datasets").iterdir():
        check = subprocess.run(["sha256sum", "-c", "tokenizer.sha256"], cwd=folder, text=True)
        assert check.returncode == 0
        digest, path = (folder / "tokenizer.sha256").read_text().removesuffix("\n").split("  ")
        tokenizer = (folder / path).resolve()
        assert tokenizer.stem.replace("_bpe", "").split("_")[1] in folder.name
        assert digest == hashlib.sha256(tokenizer.read_bytes()).hexdigest()


def test_threads_and_files_change_nothing(tmp_path: Path, documents: Path, exported: Path) -> None:
    lines = documents.read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:37]))
    (tmp_path / "b.jsonl").write_bytes(b"".join(lines[37:]).removesuffix(b"\n"))
    run(
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
        "--out",
        tmp_path,
        "--num-val-docs",
        40,
        "--vocab-size",
        380,
        "--shard-tokens",
        1000,
        "--workers",
        3,
    )
    for name, content in snapshot(exported).items():
        if "docs_sp380/fineweb" in name or name == "tokenizers/docs_380_bpe.model":
            assert (tmp_path / name).read_bytes() == content


def test_blocks_cover_the_input_and_any_document_can_be_gone_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_docs, "BLOCK_BYTES", 300)
    files = [
        write_jsonl(tmp_path / "a.jsonl", make_texts(30)),
        tmp_path / "b.txt",
        tmp_path / "empty.txt",
        write_jsonl(tmp_path / "none.jsonl", []),
        write_jsonl(tmp_path / "c.jsonl", make_texts(20, seed=1)),
    ]
    files[1].write_text("one\ntext\n")
    files[2].write_text("")
    source = tokenize_docs.Source(tuple(map(str, files)), 1)
    expected = [*make_texts(30), "one\ntext\n", "", *make_texts(20, seed=1)]

    def read(*place: int) -> list[tuple[int, str, list[int]]]:
        return [
            (block.number + index, block.parse(index)[0], block.place(index))
            for block in source.blocks(*place)
            for index in range(len(block.documents))
        ]

    whole = read()
    assert [text for _, text, _ in whole] == expected
    assert [number for number, _, _ in whole] == list(range(52))
    assert len(list(source.blocks())) > 10
    for number, _, place in whole:
        assert read(*place) == whole[number:]


def test_validation_never_appears_in_training(tmp_path: Path) -> None:
    texts = make_texts(60)
    repeated = [*texts, texts[3], "new one", texts[19], texts[3]]
    run(
        write_jsonl(tmp_path / "docs.jsonl", repeated),
        "--out",
        tmp_path,
        "--num-val-docs",
        20,
        "--bytes",
    )
    split = {
        name: cut_documents(np.concatenate(read_shards(tmp_path / "datasets/docs_byte260", name)))
        for name in ("val", "train")
    }
    assert [len(split["val"]), len(split["train"])] == [20, 41]
    assert not {tuple(document) for document in split["val"]} & {
        tuple(document) for document in split["train"]
    }
    (entry,) = json.loads((tmp_path / "manifest.json").read_text())["datasets"]
    assert entry["stats"]["docs_repeats_of_val_left_out"] == 3
    assert entry["stats"]["docs_val"] == 20 and entry["stats"]["docs_train"] == 41


def test_the_tokenizer_has_not_seen_validation(tmp_path: Path) -> None:
    texts = make_texts(80)
    marked = [text + " qzqzqz" * 50 if number < 10 else text for number, text in enumerate(texts)]
    pieces = {}
    for name, documents in (("in_val", [*marked, marked[0]]), ("in_train", marked[::-1])):
        source = tokenize_docs.Source(
            (str(write_jsonl(tmp_path / f"{name}.jsonl", documents)),), 10
        )
        model = sentencepiece.SentencePieceProcessor(
            model_proto=tokenize_docs.train_tokenizer(source, 400, "nmt_nfkc")
        )
        pieces[name] = {model.id_to_piece(index) for index in range(400)}
    assert not any("qz" in piece for piece in pieces["in_val"])
    assert any("qz" in piece for piece in pieces["in_train"])


@pytest.mark.parametrize("normalization", ["nmt_nfkc", "identity"])
def test_tokenizer_settings(
    tmp_path: Path, documents: Path, texts: list[str], normalization: str
) -> None:
    source = tokenize_docs.Source((str(documents),), 40)
    model = sentencepiece.SentencePieceProcessor(
        model_proto=tokenize_docs.train_tokenizer(source, 400, normalization)
    )
    assert [model.pad_id(), model.bos_id(), model.eos_id(), model.unk_id()] == [0, 1, 2, 3]
    assert sum(model.is_byte(index) for index in range(400)) == 256
    assert "\u2581" in [model.id_to_piece(index) for index in range(400)]
    assert not model.encode("tea", out_type=str)[0].startswith("\u2581")
    round_trip = [model.decode(model.encode(text)) == text for text in texts]
    assert all(round_trip) if normalization == "identity" else not all(round_trip)


def test_digits_and_rare_spaces_are_pieces_of_their_own(tmp_path: Path) -> None:
    """A year in every line does not become a piece;
    a space in none of thousands of letters still has one."""
    texts = ["year2024" * 10] * 500 + ["two words"]
    source = tokenize_docs.Source(
        (str(write_jsonl(tmp_path / "docs.jsonl", ["validation", *texts])),), 1
    )
    model = sentencepiece.SentencePieceProcessor(
        model_proto=tokenize_docs.train_tokenizer(source, 272, "identity")
    )
    pieces = [model.id_to_piece(index) for index in range(272)]
    assert "year" in pieces and "\u2581" in pieces
    assert not [
        piece for piece in pieces if len(piece) > 1 and not piece.startswith("<0x") and "2" in piece
    ]


def test_the_tokenizer_sample_is_even_and_leaves_none_too_long(tmp_path: Path) -> None:
    """A small sample reaches the end of the input, and a single endless line still counts."""
    texts = [f"filler{number % 7} words" for number in range(4000)] + ["endless " * 5000] * 400
    source = tokenize_docs.Source((str(write_jsonl(tmp_path / "docs.jsonl", texts)),), 5)
    sampled = list(tokenize_docs.training_sentences(source, 1_000_000))
    assert 500_000 < sum(map(len, sampled)) < 1_500_000
    assert max(len(sentence.encode()) for sentence in sampled) <= 16_000
    assert any("endless" in sentence for sentence in sampled) and any(
        "filler" in sentence for sentence in sampled
    )


ODD_SPACE = [
    "To be,\n   or not\nto be",
    "\ttabs\t\tand  runs   of    spaces ",
    "\n\n\nleading and trailing line ends\n\n",
    "windows\r\nlines\r\n\r\n",
    "no line end at the end",
    "no\u00a0break\u3000wide\u2003em\u200bzero\u2028line\x0bfeed\x0c",
    "   ",
    "\n",
    "e\u0301 \ufb01 \u2460 \uff21 \u00bd \ufeff",
    "a\0b",
]


def decoded(out: Path, name: str) -> list[str]:
    """The texts of a data set of 400 pieces, validation first."""
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(out / f"tokenizers/{name}_400_bpe.model")
    )
    folder = out / f"datasets/{name}_sp400"
    split = [cut_documents(np.concatenate(read_shards(folder, part))) for part in ("val", "train")]
    return [model.decode(ids[1:]) for part in split for ids in part]


@pytest.mark.row("odd white space in documents of one's own", "decoding gives the exact text")
@pytest.mark.parametrize("form", ["jsonl", "files", "one file"])
def test_text_comes_back_as_it_was(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the tool's defaults, from whatever form of input."""
    texts = [*ODD_SPACE, *make_texts(200)]
    if form == "jsonl":
        files = [write_jsonl(tmp_path / "docs.jsonl", texts)]
    elif form == "files":
        files = [tmp_path / f"{number:03d}.txt" for number in range(len(texts))]
        for path, text in zip(files, texts, strict=True):
            path.write_bytes(text.encode())
    else:
        files = [tmp_path / "one.txt"]
        files[0].write_bytes("\r\n \n".join(texts).encode())
    run(*files, "--name", "odd", "--out", tmp_path, "--num-val-docs", 5, "--vocab-size", 400)
    found = decoded(tmp_path, "odd")
    if form == "one file":
        assert "".join(found) == files[0].read_bytes().decode()
    else:
        assert found == texts
    assert "normaliser" not in capsys.readouterr().out


def test_a_normaliser_that_changes_text_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, of a tokenizer that is trained and of one that is given; audit.py agrees."""
    documents = write_jsonl(tmp_path / "docs.jsonl", [*ODD_SPACE, *make_texts(200)])
    common = [documents, "--out", tmp_path, "--num-val-docs", 5]
    nmt = ["--vocab-size", 400, "--normalization", "nmt_nfkc"]
    run(*common, "--name", "nmt", *nmt)
    model = tmp_path / "tokenizers/nmt_400_bpe.model"
    run(*common, "--name", "given", "--model", model)
    notes = re.findall(r"^note: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(notes) == 2 and all("line ends and tabs become one space" in note for note in notes)
    assert decoded(tmp_path, "nmt")[0] == "To be, or not to be"
    run(*common, "--name", "kept", "--vocab-size", 400)
    for name, words in (("nmt", "those of the changed text"), ("kept", "bytes that are counted")):
        tokenizer, folder = f"tokenizers/{name}_400_bpe.model", f"datasets/{name}_sp400"
        arguments = ["--tokenizer", tmp_path / tokenizer, "--data", tmp_path / folder]
        arguments += ["--docs", documents, "--seq-len", 8]
        capsys.readouterr()
        assert audit.main([str(word) for word in arguments]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("proved: ") and last.endswith(words)


# === MANIFEST =====================================================================================


def test_manifest_counts_and_hashes(exported: Path, texts: list[str]) -> None:
    manifest = json.loads((exported / "manifest.json").read_text())
    tokenizers = {entry["name"]: entry for entry in manifest["tokenizers"]}
    chains = {}
    for split, part in (("val", texts[:40]), ("train", texts[40:])):
        chains[split] = ""
        for text in part:
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            chains[split] = hashlib.sha256(chains[split].encode() + digest).hexdigest()
    assert sorted(entry["name"] for entry in manifest["datasets"]) == [
        "docs_byte260",
        "docs_sp380",
        "docs_sp420",
    ]
    for entry in manifest["datasets"]:
        tokenizer = tokenizers[entry["tokenizer_name"]]
        tokenizer_path = exported / tokenizer.get("model_path", tokenizer.get("path"))
        assert hashlib.sha256(tokenizer_path.read_bytes()).hexdigest() == tokenizer["sha256"]
        assert entry["docs_sha256"] == chains
        for split, count in (("val", 40), ("train", 360)):
            shards = read_shards(exported / entry["path"], split)
            assert entry["stats"][f"docs_{split}"] == count
            assert entry["stats"][f"files_{split}"] == len(shards)
            assert entry["stats"][f"tokens_{split}"] == sum(map(len, shards))
            for name, shard in entry["shards"][split].items():
                assert (
                    hashlib.sha256((exported / entry["path"] / name).read_bytes()).hexdigest()
                    == shard["sha256"]
                )


def test_the_manifest_of_others_is_kept(tmp_path: Path, documents: Path) -> None:
    published = {
        "version": "10B",
        "datasets": [{"name": "fineweb10B_sp1024", "stats": {"files_train": 103}}],
        "tokenizers": [{"name": "sp_bpe_1024", "model_path": "tokenizers/fineweb_1024_bpe.model"}],
    }
    (tmp_path / "manifest.json").write_text(json.dumps(published))
    run(documents, "--out", tmp_path, "--num-val-docs", 4, "--bytes")
    run(documents, "--out", tmp_path, "--num-val-docs", 4, "--bytes")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["version"] == "10B" and manifest["tokenizers"][0] == published["tokenizers"][0]
    assert [entry["name"] for entry in manifest["datasets"]] == [
        "fineweb10B_sp1024",
        "docs_byte260",
    ]


# === FAULTS =======================================================================================

GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    "bad, words",
    [
        (b"{'text': 1}\n", "not JSON"),
        (b"\n", "not JSON"),
        (b'{"text": "cut\n', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"body": "x"}\n', 'no "text"'),
        (b'{"text": null}\n', 'no "text"'),
        (b'["text"]\n', 'no "text"'),
        (b"7\n", 'no "text"'),
        (b'{"text": "\xff"}\n', "not UTF-8"),
        (b'{"text": "\\ud800"}\n', "not UTF-8"),
    ],
)
@pytest.mark.parametrize("lines_before", [2, 700])
def test_a_bad_line_is_named(tmp_path: Path, bad: bytes, words: str, lines_before: int) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_bytes(GOOD.replace(b"good", b"val") + GOOD * (lines_before - 1) + bad + GOOD * 3)
    error = run(path, "--out", tmp_path, "--num-val-docs", 1, "--bytes", code=1)
    assert (
        error.startswith(f"error: {path}:{lines_before + 1}: ")
        and words in error
        and error.count("\n") == 1
    )
    assert not (tmp_path / "manifest.json").exists()


def test_a_text_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\nthr\xe9e\n")
    error = run(
        tmp_path / "a.txt",
        tmp_path / "b.txt",
        "--out",
        tmp_path,
        "--num-val-docs",
        1,
        "--bytes",
        code=1,
    )
    assert error.startswith(f"error: {tmp_path / 'b.txt'}:3: not UTF-8") and error.count("\n") == 1
    assert f"convert it: iconv -f WINDOWS-1252 -t UTF-8 {tmp_path / 'b.txt'} > NEW_FILE" in error


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["{docs}", "--num-val-docs", "400"], 1, "none left for training; set --num-val-docs 4"),
        (
            ["{docs}", "--num-val-docs", "4", "--vocab-size", "60000"],
            1,
            "too small for a vocabulary of 60000",
        ),
        (["{docs}", "--num-val-docs", "4", "--model", "{docs}"], 1, "not a usable tokenizer"),
        (["{docs}", "--num-val-docs", "4", "--model", "nowhere.model"], 1, "nowhere.model"),
        (["{docs}", "--num-val-docs", "4", "--model", "."], 1, ".: a folder; name a file in it"),
        (["nowhere.jsonl"], 2, "nowhere.jsonl: no such file"),
        (["{docs}", "--bytes", "--num-val-docs", "4", "--name", "a" * 250], 1, "folder with --out"),
        (["--model", "x.model", "{docs}"], 2, "no FILE is named; name it in front of --model"),
        (["{docs}", "--", __file__], 2, "a command after -- needs --live: --live -- "),
        (["{docs}", "--vocab", "many"], 2, "--help"),
        (["{docs}", "--vocab_size", "512"], 2, "--vocab_size 512; did you mean --vocab-size?"),
        (["{docs}", "{docs}"], 2, "named 2 times; name it once"),
        (["."], 2, ".: a folder; name its files, such as ./*.txt"),
        (["{docs}", "--name", "a/b"], 2, "it names files"),
        (["{docs}", "--shard-tokens", "3000000000"], 2, "--shard-tokens 3000000000"),
    ],
)
def test_wrong_use_is_one_line(
    tmp_path: Path, documents: Path, arguments: list[str], code: int, words: str
) -> None:
    error = run(*[word.format(docs=documents) for word in arguments], "--out", tmp_path, code=code)
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "name, words",
    [
        ("array.json", "one JSON value; give .jsonl"),
        ("DOCS.CSV", "a table; give .jsonl"),
        ("docs.tsv", "a table"),
        ("docs.parquet", "a table"),
        ("train.bin", "tokens, no text; give .jsonl"),
        ("docs.jsonl.gz", "packed; unpack it"),
        ("docs.zip", "packed; unpack it"),
    ],
)
def test_other_formats_are_not_taken_for_text(tmp_path: Path, name: str, words: str) -> None:
    good, path = write_jsonl(tmp_path / "docs.jsonl", make_texts(60)), tmp_path / name
    path.write_text('[{"text": "one"}]')
    error = run(good, path, "--out", tmp_path, "--num-val-docs", 4, "--bytes", code=2)
    assert error.startswith(f"error: {path}: {words}") and error.count("\n") == 1


def test_a_validation_split_of_a_wrong_size_is_told_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = write_jsonl(tmp_path / "docs.jsonl", make_texts(200))

    def warnings(num_val_docs: object) -> list[str]:
        options = ["--name", f"of_{num_val_docs}", "--bytes", "--num-val-docs", num_val_docs]
        run(docs, "--out", tmp_path, *options)
        out = capsys.readouterr().out
        assert re.search(r"^to train: .*\n +before .*on a CPU before .*quickstart\.py", out, re.M)
        return re.findall(r"^warning: (.*)$", out, re.MULTILINE)

    (large,) = warnings(90)
    share, fitting = re.match(
        r"validation has (\d+) % of all tokens: --num-val-docs (\d+) ", large
    ).groups()
    assert 30 < int(share) < 60 and warnings(fitting) == []
    (small,) = warnings(1)
    tokens, row = re.match(r"validation has (\d+) tokens, .* TRAIN_SEQ_LEN=(\d+),", small).groups()
    assert int(row) < int(tokens) <= 2 * int(row)


@pytest.mark.parametrize("size", [60000, 257])
def test_a_vocabulary_that_cannot_be_carried_names_one_that_can(tmp_path: Path, size: int) -> None:
    docs = write_jsonl(tmp_path / "docs.jsonl", make_texts(60))
    common = [docs, "--out", tmp_path, "--num-val-docs", 4, "--vocab-size"]
    error = run(*common, size, code=1)
    run(*common, re.search(r"; set --vocab-size (\d+) or (?:less|more), ", error)[1])


def test_a_document_beyond_the_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_docs, "MAX_DOCUMENT_BYTES", 5000)
    monkeypatch.setattr(tokenize_docs, "BLOCK_BYTES", 1000)
    path = write_jsonl(tmp_path / "docs.jsonl", ["short"] * 100 + ["long" * 3000, "short"])
    with pytest.raises(tokenize_docs.DataError, match=r"docs\.jsonl:101: .*over 5,000 bytes"):
        list(tokenize_docs.Source((str(path),), 1).blocks())


# === RESTART ======================================================================================

DYING_RUN = """
import os, signal, sys
sys.path.insert(0, {room!r})
import tokenize_docs
real, calls, when, moment = tokenize_docs.os.replace, [], {when}, {moment!r}
def replace(partial, path):
    calls.append(str(path).endswith(".bin"))
    last = sum(calls) == when and calls[-1]
    if last and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    real(partial, path)
    if (last and moment == "after") or (sum(calls) == when and not calls[-1] and moment == "noted"):
        os.kill(os.getpid(), signal.SIGKILL)
tokenize_docs.os.replace = replace
sys.argv = {argv!r}
sys.exit(tokenize_docs.main())
"""


@pytest.mark.parametrize("moment", ["before", "after", "noted"])
@pytest.mark.parametrize("when", [1, 9])
def test_a_killed_export_goes_on_to_the_same_files(
    tmp_path: Path, documents: Path, exported: Path, when: int, moment: str
) -> None:
    """Killed before the when-th shard has its name, after that, and after export.json noted it."""
    argv = [
        str(word)
        for word in (
            SCRIPT,
            documents,
            "--out",
            tmp_path,
            "--num-val-docs",
            40,
            "--vocab-size",
            380,
            "--shard-tokens",
            1000,
        )
    ]
    code = DYING_RUN.format(room=str(SCRIPT.parent), when=when, moment=moment, argv=argv)
    killed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = tmp_path / "datasets" / "docs_sp380"
    noted = json.loads((folder / "export.json").read_text())
    assert not noted["complete"] and sum(map(len, noted["shards"].values())) == when - (
        moment != "noted"
    )
    times = {
        name: (folder / name).stat().st_mtime_ns
        for split in noted["shards"].values()
        for name in split
    }
    run(*argv[1:])
    files = {path.name: path.read_bytes() for path in folder.glob("*.bin")}
    assert files == {
        path.name: path.read_bytes() for path in (exported / "datasets/docs_sp380").glob("*.bin")
    }
    assert times == {name: (folder / name).stat().st_mtime_ns for name in times}
    state, whole = (
        json.loads((place / "export.json").read_text())
        for place in (folder, exported / "datasets/docs_sp380")
    )
    assert {**state, "settings": 0} == {**whole, "settings": 0}


def test_a_complete_export_is_left_alone(tmp_path: Path, documents: Path) -> None:
    command = [
        documents,
        "--out",
        tmp_path,
        "--num-val-docs",
        40,
        "--vocab-size",
        380,
        "--shard-tokens",
        5000,
    ]
    run(*command)
    before = {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*.[bm]*")
    }
    run(*command)
    assert before == {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*.[bm]*")
    }
    error = run(*command[:-1], 6000, code=1)
    assert "another shard_tokens (5000, now 6000)" in error and error.count("\n") == 1
    assert before == {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*.[bm]*")
    }


@pytest.mark.parametrize(
    "damage", ["shard lost", "shard cut", "tokenizer lost", "tokenizer changed"]
)
def test_damage_is_made_good(tmp_path: Path, documents: Path, exported: Path, damage: str) -> None:
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    shard = tmp_path / "datasets/docs_sp420/fineweb_train_000002.bin"
    tokenizer = tmp_path / "tokenizers/docs_420_bpe.model"
    {
        "shard lost": shard.unlink,
        "shard cut": lambda: os.truncate(shard, 1500),
        "tokenizer lost": tokenizer.unlink,
        "tokenizer changed": lambda: tokenizer.write_bytes(b"x"),
    }[damage]()
    run(
        documents,
        "--out",
        tmp_path,
        "--num-val-docs",
        40,
        "--vocab-size",
        420,
        "--shard-tokens",
        1000,
    )
    assert {**snapshot(tmp_path), "manifest.json": b""} == {
        **snapshot(exported),
        "manifest.json": b"",
    }


def test_shards_of_others_are_not_touched(tmp_path: Path, documents: Path) -> None:
    theirs = tmp_path / "datasets/docs_byte260/fineweb_train_000000.bin"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"theirs")
    error = run(documents, "--out", tmp_path, "--num-val-docs", 4, "--bytes", code=1)
    assert f"{theirs}: was not made by this command" in error and theirs.read_bytes() == b"theirs"


# === MEMORY =======================================================================================


@pytest.mark.parametrize("large, bound", [(False, 4), (True, 1)])
def test_the_number_of_blocks_in_flight_is_bounded(
    documents: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, large: bool, bound: int
) -> None:
    """The consumer is slow: what is read ahead stays at two blocks a thread,
    however long the input; of the largest documents at one."""
    block = next(tokenize_docs.Source((str(documents),), 1).blocks())
    if large:
        monkeypatch.setattr(tokenize_docs, "MAX_DOCUMENT_BYTES", block.size())
    read = 0

    def endless() -> Iterator[tokenize_docs.Block]:
        nonlocal read
        while True:
            read += 1
            yield block

    tokenizer = tokenize_docs.Tokenizer(exported / "tokenizers/docs_byte260.json")
    results = tokenize_docs.encode_in_order(endless(), tokenizer, workers=2)
    for consumed in range(20):
        next(results)
        assert read - consumed <= bound
    results.close()


def test_a_reader_fault_arrives_and_leaves_no_thread(tmp_path: Path, exported: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_bytes(GOOD * 50_000 + b"bad\n")
    source = tokenize_docs.Source((str(path),), 1)
    before = threading.active_count()
    tokenizer = tokenize_docs.Tokenizer(exported / "tokenizers/docs_byte260.json")
    seen = 0
    with pytest.raises(tokenize_docs.DataError, match=":50001: not JSON"):
        for block, _, lengths, _ in tokenize_docs.encode_in_order(
            source.blocks(), tokenizer, workers=2
        ):
            assert block.number == seen
            seen += len(lengths)
    assert seen > 0 and threading.active_count() == before


# A child is charged with what its parent has when it is started, so a small one starts it.
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_bytes(*arguments: object) -> int:
    """The most memory that the command took."""
    command = [sys.executable, "-c", PEAK, sys.executable, SCRIPT, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=110)
    return int(done.stdout) * (1 if sys.platform == "darwin" else 1024)


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path) -> None:
    lines = [f'{{"text": "{number} {"word " * 80}"}}\n' for number in range(100_000)]
    (tmp_path / "docs.jsonl").write_text("".join(lines))
    less = tmp_path / "less.jsonl"
    less.write_text("".join(lines[:10_000]))
    options = ["--num-val-docs", "9", "--shard-tokens", "1000000", "--bytes", "--out"]
    small = peak_bytes(less, *options, tmp_path / "less")
    large = peak_bytes(tmp_path / "docs.jsonl", *options, tmp_path / "out")
    print(f"peak {small / 1e6:.0f} and {large / 1e6:.0f} MB")
    assert large < small + 30e6


@pytest.mark.slow
@pytest.mark.row("one huge document", "bounded memory")
def test_a_large_document_takes_few_bytes_of_memory_a_byte(tmp_path: Path, exported: Path) -> None:
    """So that one of 50 MB is done within a gigabyte; uncut, SentencePiece takes 45 a character."""
    size = 20_000_000
    write_jsonl(tmp_path / "docs.jsonl", ["validation", ("some words, " * size)[:size]])
    options = ["--num-val-docs", "1", "--model", exported / "tokenizers/docs_380_bpe.model"]
    peak = peak_bytes(tmp_path / "docs.jsonl", *options, "--out", tmp_path)
    print(f"peak {peak / 1e6:.0f} MB")
    assert peak < 120e6 + 15 * size


def trained(**settings: object) -> tokenize_docs.Tokenizer:
    """A tokenizer of SentencePiece's, of other settings than this tool's own."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_texts(200)),
        model_writer=model,
        minloglevel=2,
        **{"model_type": "bpe", "vocab_size": 600, **settings},
    )
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        file.write(model.getvalue())
        file.flush()
        return tokenize_docs.Tokenizer(Path(file.name))


@pytest.mark.parametrize(
    "settings",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"add_dummy_prefix": False, "byte_fallback": True},
        {
            "add_dummy_prefix": False,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "allow_whitespace_only_pieces": True,
        },
    ],
    ids=["plain", "as the published ones", "identity"],
)
@pytest.mark.row("a document cut for encoding (..)", "the ids of the whole")
def test_a_long_document_has_the_ids_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, settings: dict
) -> None:
    tokenizer, rng = trained(**settings), random.Random(5)
    words = [*make_texts(300, seed=4), "\ufdfa", "e\u0301", "\u200b", "a", "\u00a8", "ﬁ", "　"]
    monkeypatch.setattr(tokenize_docs, "CUT_CHARACTERS", 200)
    for _ in range(30):
        text = rng.choice(["", " ", "x"]).join(f" {word} "[rng.randint(0, 1) :] for word in words)
        rng.shuffle(words)
        assert 0 < tokenizer.cut(text, 0) < 2000
        whole = tokenizer.processor.encode(text, add_bos=True)
        assert tokenizer.encode(text).tolist() == whole


@pytest.mark.parametrize(
    "settings",
    [
        {"split_by_whitespace": False},
        {"user_defined_symbols": ["two words"]},
        {"treat_whitespace_as_suffix": True},
        {"model_type": "unigram", "vocab_size": 300},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_tokenizer_that_looks_across_spaces_gets_the_whole(settings: dict) -> None:
    assert trained(**settings).can_cut is False


# === A SINGLE TEXT FILE ===========================================================================


def sonnets(count: int, between: str) -> str:
    """Real lines of several lengths, in stanzas."""
    lines = [text[:60].replace("\n", " ") for text in make_texts(count * 3, seed=9)]
    return between.join("\n".join(lines[i : i + 3]) + "\n" for i in range(0, len(lines), 3))


@pytest.mark.parametrize("between", ["\n", " \n\n", "\r\n\n", ""], ids=repr)
def test_a_single_text_file_is_cut_into_documents(
    tmp_path: Path, between: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind its blank lines; without any, behind lines; it is told which.
    The error says what to set, and it helps. Together the documents are the file."""
    path = tmp_path / "play.txt"
    path.write_bytes(sonnets(1000, between).encode())
    error = run(path, "--out", tmp_path, "--bytes", code=1)
    documents, set_to = map(
        int, re.search(r"(\d+) documents in all.* set --num-val-docs (\d+)\n", error).groups()
    )
    lines, how = path.read_bytes().count(b"\n"), "at blank lines" if between else "by size"
    told = f"{path}: {lines:,} lines became {documents:,} documents: split {how}"
    assert capsys.readouterr().out.startswith(told)
    run(path, "--out", tmp_path, "--bytes", "--num-val-docs", set_to)
    folder = tmp_path / "datasets/docs_byte260"
    split = [cut_documents(np.concatenate(read_shards(folder, name))) for name in ("val", "train")]
    texts = [bytes(token - 4 for token in ids[1:]) for part in split for ids in part]
    assert b"".join(texts) == path.read_bytes() and len(split[0]) == set_to
    assert len(texts) == documents and all(text.endswith(b"\n") for text in texts)
    if between:
        assert documents == 1000
    else:
        size = path.stat().st_size / tokenize_docs.PASSAGE_BYTES
        assert size < documents < 1.1 * size + 1


def test_passages_are_the_same_from_any_of_them_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the file holds, and whatever is read at once."""
    monkeypatch.setattr(tokenize_docs, "PASSAGE_BYTES", 50)
    rng, path = random.Random(3), tmp_path / "text.txt"
    pieces = ["\n", "\n\n", " ", " \n \n", "word", "é日🙂" * 30, "x" * 70]
    for _ in range(20):
        path.write_text("".join(rng.choices(pieces, k=100)), encoding="utf-8")
        monkeypatch.setattr(tokenize_docs, "BLOCK_BYTES", rng.randint(1, 300))
        source = tokenize_docs.Source((str(path),), 1)
        whole = [
            (block.place(index), block.parse(index)[0])
            for block in source.blocks()
            for index in range(len(block.documents))
        ]
        assert "".join(text for _, text in whole) == path.read_text(encoding="utf-8")
        assert all(0 < len(text.encode()) <= 50 for _, text in whole)
        monkeypatch.setattr(tokenize_docs, "BLOCK_BYTES", 1000)
        for number, (place, _) in enumerate(whole):
            (block, *_) = source.blocks(*place)
            assert block.place(0) == place
            assert block.parse(0)[0] == whole[number][1]
            assert place[3] == 1 + "".join(text for _, text in whole[:number]).count("\n")


# === OTHER MACHINES ===============================================================================


@pytest.mark.row("paths and consoles that are not UTF-8", "no traceback")
def test_paths_and_consoles_that_are_not_utf8(tmp_path: Path, exported: Path) -> None:
    """A folder of a Latin-1 name, and a console that shows ASCII: tokenised and audited."""
    place = tmp_path / os.fsdecode(b"caf\xe9")
    place.mkdir()
    docs = write_jsonl(place / os.fsdecode(b"\xffdocs.jsonl"), make_texts(60))
    model = shutil.copy(exported / "tokenizers/docs_380_bpe.model", place / "é日.model")
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}

    def spoken(script: str, *arguments: object, code: int = 0) -> str:
        command = [sys.executable, SCRIPT.with_name(script), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, timeout=60)
        assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr
        return (done.stdout + done.stderr).decode("ascii")

    common = [docs, "--out", place, "--num-val-docs", "9"]
    assert "caf\\udce9" in spoken("tokenize_docs.py", *common, "--model", model)
    folder, made = place / "datasets/docs_sp380", place / "tokenizers/docs_380_bpe.model"
    audit = ["audit.py", "--tokenizer", made, "--data", folder, "--docs", docs, "--seq-len", 8]
    assert "proved: " in spoken(*map(str, audit))
    with open(docs, "ab") as handle:
        handle.write(b"{}\n")
    error = spoken("tokenize_docs.py", *common, "--bytes", code=1)
    assert error.startswith("error: ") and "udcffdocs.jsonl:61: no " in error


@pytest.mark.parametrize(
    "script, package",
    [
        ("tokenize_docs.py", "numpy"),
        ("quickstart.py", "sentencepiece"),
        ("cached_challenge_fineweb.py", "huggingface_hub"),
        ("cached_challenge_fineweb.py", "tqdm"),
        ("audit.py", "sentencepiece"),
    ],
)
def test_a_missing_package_is_one_line_with_the_command(script: str, package: str) -> None:
    code = f"import runpy, sys; sys.modules[{package!r}] = None; "
    code += f"sys.path.insert(0, {str(SCRIPT.parent)!r}); "
    code += f"runpy.run_path({str(SCRIPT.with_name(script))!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and package in done.stderr
    assert f"{sys.executable} -m pip install -r {ROOT}/requirements.txt" in done.stderr


# === THE TRAINER READS IT =========================================================================


@pytest.mark.slow
def test_the_trainer_takes_bytes_unchanged(tmp_path: Path, exported: Path) -> None:
    settings = {
        **SMALL_MODEL,
        "VOCAB_SIZE": 260,
        "ITERATIONS": 2,
        "VAL_LOSS_EVERY": 0,
        "RUN_ID": "t",
        "DATA_PATH": exported / "datasets/docs_byte260",
        "TOKENIZER_PATH": exported / "tokenizers/docs_byte260.json",
    }
    done = subprocess.run(
        [sys.executable, ROOT / "train_gpt.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, **{key: str(value) for key, value in settings.items()}},
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "tokenizer_kind=byte" in done.stdout
    assert "final_int8_zlib_roundtrip_exact val_loss:" in done.stdout
