"""Turn documents into a tokenizer and training shards.

    python3 data/tokenize_docs.py novel.txt --name novel
    python3 data/tokenize_docs.py notes/ --name notes --bytes
    python3 data/tokenize_docs.py docs.jsonl --name mine --model my_bpe.model
    python3 data/tokenize_docs.py data/docs_selected.jsonl --normalization nmt_nfkc

Input: files or folders. A .jsonl or .json file has one {"text": "..."} per line. Any other file is
UTF-8 text and one document, but a single text file is cut into documents after its blank lines, or
by size if it has none. Of a folder, all files are read whose names do not begin with a dot.
The first --num-val-docs documents (default: a tenth, at most 50,000) are the validation split.
Tokenizers are trained on the others only, and a later document that repeats a validation document
is left out.

The tokens of a document can be decoded to its exact text: spaces, tabs and line ends stay.
--normalization nmt_nfkc changes text first, as the published tokenizers do: runs of white space,
line ends and tabs become one space, and some characters become others. Bits per byte are then those
of the changed text.

It writes tokenizers/<name>_<vocabulary>_bpe.model (or <name>_byte260.json) and, in
datasets/<name>_sp<vocabulary>/ (or <name>_byte260/), fineweb_val_*.bin, fineweb_train_*.bin,
export.json and tokenizer.sha256, under --out.

If the command was stopped, run it again: it continues after the last complete shard. Training may
start before the last shard is made: see data/README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # not there with python3 -P
import dataset
from dataset import DATA, cli

# isort: split
import numpy as np  # after cli, which says in one line what is to be installed
import sentencepiece

BYTE_TOKENIZER = {"kind": "byte", "offset": 4}
BYTE_BOS_ID = 1
LEAST_VOCABULARY = 256 + 4 + 1  # bytes; pad, BOS, EOS, unknown; a space
MOST_VOCABULARY = 1 << 16  # a token is a uint16
MAX_VAL_DOCS = 50_000  # the challenge's number
MAX_DOCUMENT_BYTES = 16 << 20  # SentencePiece takes about 45 bytes of memory for each
BATCH_BYTES = 1 << 20  # of documents that are encoded together
PASSAGE_BYTES = 1 << 14  # a document cut from a single text file has no more
BLANK_LINES = re.compile(rb"\n[ \t\r]*\n\s*")
SPACE = "\u2581"  # SentencePiece's mark for a space
SPACE_BYTES = "<0xE2>", "<0x96>", "<0x81>"  # the same as byte pieces
SENTENCE_CHARACTERS = 4000  # at most 16,000 bytes: SentencePiece drops longer sentences silently
SAMPLE_BYTES = 50_000_000  # of input that a tokenizer is trained on


# === DOCUMENTS ====================================================================================


class Place(NamedTuple):  # where a document begins
    number: int = 0  # of the document in the whole input, from 0
    file: int = 0  # index of its file
    offset: int = 0  # its first byte in that file
    line: int = 1  # its first line


BEGINNING = Place()


class Document(NamedTuple):
    place: Place
    path: str
    data: bytes  # with all that separates it from the next one, as in the file

    def text(self) -> str:
        """Raises ToolError with file and line number."""
        try:
            text = self.data.decode("utf-8")
            if is_json_lines(self.path):
                text = text_in_line(text.removeprefix("\ufeff"))
            elif text.count("\0") > len(text) // 3:
                raise cli.ToolError(f"{self.path}: UTF-16? Run iconv -f UTF-16LE -t UTF-8 on it")
            text.encode("utf-8")  # JSON may hold half a surrogate pair
        except UnicodeDecodeError as error:
            line = self.place.line + self.data.count(b"\n", 0, error.start)
            is_utf16 = self.data.startswith((b"\xff\xfe", b"\xfe\xff"))
            name = "UTF-16" if is_utf16 else "WINDOWS-1252"
            convert = f"iconv -f {name} -t UTF-8 {shlex.quote(self.path)} > NEW_FILE"
            fault = f"not UTF-8 ({error.reason}); if it is text, convert it: {convert}"
            if b"\0" in self.data and not is_utf16:
                fault = "a binary file, no text; name text files or .jsonl files"
            raise cli.ToolError(f"{self.path}:{line}: {fault}") from None
        except (ValueError, RecursionError) as error:
            fault = f'not an object like {{"text": "..."}} on one line ({error})'
            remedy = "mend that; plain text needs a name such as .txt"
            raise cli.ToolError(f"{self.path}:{self.place.line}: {fault}; {remedy}") from None
        return text


def text_in_line(line: str) -> str:
    """The text in a line of JSON. Raises ValueError, in words."""
    if line.lstrip().startswith("["):
        raise ValueError("an array: `jq -c '.[]' FILE > NEW.jsonl` writes a line for each entry")
    value = json.loads(line)
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        keys = ", ".join(map(str, value)) if isinstance(value, dict) else cli.one_line(value)
        raise ValueError(f'it has {keys[:80]}, and no "text" that is a string')
    return value["text"]


def is_json_lines(path: str) -> bool:
    return path.endswith((".jsonl", ".json"))


def digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


def passages(file: BinaryIO) -> Iterator[bytes]:
    """A single text file as documents; reading may start at any of them and gives the same ones."""
    data, more = b"", b"-"
    while more:
        more = file.read(BATCH_BYTES)
        data += more
        start = 0
        while start < len(data) and (not more or len(data) > start + PASSAGE_BYTES):
            end = passage_end(data, start)
            yield data[start:end]
            start = end
        data = data[start:]


def passage_end(data: bytes, start: int) -> int:
    """After the next blank lines; if there are none near, after a line, a word or a character."""
    limit = start + PASSAGE_BYTES
    if blank := BLANK_LINES.search(data, start, limit):
        return blank.end()
    if len(data) <= limit:
        return len(data)
    for separator in (b"\n", b" "):
        if end := data.rfind(separator, start, limit) + 1:
            return end
    while data[limit] & 0xC0 == 0x80 and limit > start + 1:  # inside a character
        limit -= 1
    return limit


def input_files(paths: list[str]) -> tuple[list[str], list[str]]:
    """(the files to read, those of folders in order; what else is in the folders)"""
    files: list[str] = []
    left_out: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            inside, others = files_inside(path)
            if not inside:
                raise cli.ToolError(f"{path}: a folder without files: name text or .jsonl files")
            files += inside
            left_out += others
        elif os.path.isfile(path):
            files.append(path)
        else:
            what = "not a regular file" if os.path.lexists(path) else "no such file"
            raise cli.ToolError(f"{path}: {what}: name text files, .jsonl files or folders")
    if twice := [path for path, n in Counter(map(os.path.realpath, files)).items() if n > 1]:
        raise cli.ToolError(f"{twice[0]}: named twice: name it once")
    return files, left_out


def files_inside(folder: str) -> tuple[list[str], list[str]]:
    """The regular files in a folder and below it, and what else is there, but for hidden names."""

    def refuse(error: OSError) -> None:
        raise error

    files, others = [], []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for path in [Path(place, n) for n in [*names, *links] if not n.startswith(".")]:
            (files if path.is_file() else others).append(path)
    return [str(path) for path in sorted(files)], [str(path) for path in sorted(others)]


class Source:
    """The documents of the input files, in order. The first num_val_docs are for validation."""

    def __init__(self, paths: list[str], num_val_docs: int | None = None) -> None:
        self.files, self.left_out = input_files(paths)
        self.stamps = self.stamps_now()  # before anything is read
        self.bytes = sum(size for _, size, _ in self.stamps)
        self.num_val_docs = self.count_val_docs() if num_val_docs is None else num_val_docs

    def documents(self, start: Place = BEGINNING) -> Iterator[Document]:
        """The documents from that place on. Raises ToolError for one that is too large."""
        number, first, offset, line = start
        for index in range(first, len(self.files)):
            path = self.files[index]
            with open(path, "rb") as file:
                file.seek(offset)
                for data in self.parts(file, path):
                    place = Place(number, index, offset, line)
                    if len(data) > MAX_DOCUMENT_BYTES:
                        limit = f"a document over {MAX_DOCUMENT_BYTES:,} bytes"
                        raise cli.ToolError(f"{path}:{line}: {limit}; split it")
                    if data.strip() or not is_json_lines(path):
                        yield Document(place, path, data)
                        number += 1
                    offset += len(data)
                    line += data.count(b"\n")
            offset, line = 0, 1

    def parts(self, file: BinaryIO, path: str) -> Iterator[bytes]:
        """The documents of a file from its position on; each has at most one byte too many."""
        if not is_json_lines(path) and len(self.files) == 1:
            return passages(file)
        read = file.readline if is_json_lines(path) else file.read
        return iter(lambda: read(MAX_DOCUMENT_BYTES + 1), b"")

    def count_val_docs(self) -> int:
        """A tenth of the documents, at most MAX_VAL_DOCS and at least one."""
        count = sum(1 for _ in islice(self.documents(), 10 * MAX_VAL_DOCS))
        return max(1, count // 10)

    def val_digests(self) -> frozenset[bytes]:
        """Digests of the validation documents. Raises ToolError if none is left for training."""
        first = islice(self.documents(), self.num_val_docs + 1)
        digests = [digest_of(document.text()) for document in first]
        if len(digests) > self.num_val_docs:
            return frozenset(digests[:-1])
        count, remedy = len(digests), "separate documents by blank lines, or give more files"
        remedy = f"set --num-val-docs {max(1, count // 10)}" if count > 1 else remedy
        what = f"documents in all: {count}; validation takes the first {self.num_val_docs}"
        raise cli.ToolError(f"{self.files[0]}: {what}: none left for training: {remedy}")

    def stamps_now(self) -> list[list[Any]]:
        """What changes if somebody writes to an input file."""
        states = [(path, os.stat(path)) for path in self.files]
        return [[os.path.abspath(path), s.st_size, s.st_mtime_ns] for path, s in states]

    def share_before(self, place: Place) -> float:
        """The share of all input before that place."""
        read = sum(size for _, size, _ in self.stamps[: place.file]) + place.offset
        return read / max(1, self.bytes)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.data)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# === TOKENIZERS ===================================================================================


class Tokenizer:
    """A SentencePiece .model or a byte tokenizer's .json. Raises ToolError for anything else."""

    def __init__(self, path: Path) -> None:
        self.processor: sentencepiece.SentencePieceProcessor | None = None
        self.offset = 0  # of a byte tokenizer: byte b is token b + offset
        self.unknown_id, self.space_ids = -1, [-1, -1, -1]  # none
        try:
            data = path.read_bytes()
            if path.suffix == ".json":
                form = json.loads(data)
                self.offset = form["offset"] if "offset" in form else form["config"]["byte_offset"]
                self.vocab_size, self.bos_id = 256 + self.offset, BYTE_BOS_ID
            else:
                self.processor = sentencepiece.SentencePieceProcessor(model_proto=data)
                self.vocab_size, self.bos_id = len(self.processor), self.processor.bos_id()
                self.unknown_id = self.processor.unk_id()
                ids = [self.processor.piece_to_id(piece) for piece in SPACE_BYTES]
                self.space_ids = ids if self.processor.is_byte(ids[0]) else self.space_ids
        except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
            reason = getattr(error, "strerror", "") or cli.one_line(error)
            reason = "no SentencePiece model" if type(error) is RuntimeError else reason
            remedy = "give a SentencePiece .model, or a byte tokenizer's .json"
            raise cli.ToolError(f"{path}: not a usable tokenizer ({reason}); {remedy}") from None
        if self.bos_id < 0 or self.vocab_size > MOST_VOCABULARY:
            fault = f"{self.vocab_size} pieces and BOS id {self.bos_id}"
            remedy = f"shards need a BOS piece and at most {MOST_VOCABULARY:,} pieces"
            raise cli.ToolError(f"{path}: {fault}: {remedy}")

    def has_space(self) -> bool:
        """Has it a piece for a single space? Without one, bytes are counted wrongly."""
        encode = self.processor.encode
        spaces = {*encode(" ")} | ({*encode("a b")} - {*encode("ab")})
        return self.unknown_id not in spaces and self.space_ids[0] not in spaces

    def count_wrong(self, ids: np.ndarray) -> int:
        """How many of the tokens are unknown, or a space that is written as three byte pieces."""
        first, second, third = self.space_ids
        is_space = (ids[:-2] == first) & (ids[1:-1] == second) & (ids[2:] == third)
        return int((ids == self.unknown_id).sum() + is_space.sum())

    def changes_text(self) -> str:
        """What its normaliser changes, in words; empty if nothing."""
        probe = " a  b\tc\n\nd\r\n\u00a0e\ufb01 "
        if not self.processor or self.processor.normalize(probe).replace(SPACE, " ") == probe:
            return ""
        changes = "runs of white space, line ends and tabs become one space, and some characters"
        why = "bits per byte are those of the changed text"
        return f"its normaliser changes text: {changes} become others; {why}"

    def encode(self, texts: list[str], threads: int = 1) -> list[np.ndarray]:
        """BOS and the tokens of each document, as uint16."""
        if self.processor:
            many = self.processor.encode(texts, add_bos=True, out_type="numpy", num_threads=threads)
            return [ids.astype(np.uint16) for ids in many]
        bos, offset = np.array([self.bos_id], np.uint16), np.uint16(self.offset)
        contents = [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]
        return [np.concatenate([bos, content + offset]) for content in contents]


def training_sentences(source: Source, faults: list[BaseException]) -> Iterator[str]:
    """Training documents, all or an even sample of SAMPLE_BYTES, as sentences that SentencePiece
    accepts. What is raised is in `faults`, too: SentencePiece makes a RuntimeError of it.
    """
    try:
        val_digests = source.val_digests()
        threshold = SAMPLE_BYTES / max(1, source.bytes) * 2**32
        for document in source.documents():
            # The choice depends only on the number: a repeated command trains the same tokenizer.
            if zlib.crc32(b"%d" % document.place.number) >= threshold:
                continue
            text = document.text()
            if digest_of(text) not in val_digests:
                # SentencePiece drops sentences that hold these.
                text = text.replace("\0", " ").replace("\t", " ")
                for at in range(0, len(text), SENTENCE_CHARACTERS):
                    yield text[at : at + SENTENCE_CHARACTERS]
    except (cli.ToolError, OSError, KeyboardInterrupt) as fault:
        faults.append(fault)
        raise


def train_tokenizer(source: Source, vocab_size: int, normalization: str) -> bytes:
    """Trains a SentencePiece BPE model on the training documents; returns the file's bytes.

    "identity" keeps every character, white space too; "nmt_nfkc" changes text, as the published
    tokenizers do. Raises ToolError if the documents are too small for such a vocabulary.
    """
    model = io.BytesIO()
    lossless = normalization == "identity"
    faults: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=training_sentences(source, faults),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=0.999,
            byte_fallback=True,
            split_digits=True,
            add_dummy_prefix=False,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            normalization_rule_name=normalization,
            remove_extra_whitespaces=not lossless,
            allow_whitespace_only_pieces=lossless,
            # Without a lone U+2581 a single space would become, and count as, three byte pieces.
            required_chars=SPACE,
            max_sentence_length=4 * SENTENCE_CHARACTERS,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise (faults[0] if faults else too_small(source, vocab_size, str(error))) from None
    return model.getvalue()


def too_small(source: Source, vocab_size: int, words: str) -> cli.ToolError:
    """SentencePiece's refusal of a vocabulary, with what to do."""
    reason = words.rpartition("] ")[2].strip()
    if not reason:
        fault = "all training documents are empty or repeat validation documents"
        return cli.ToolError(f"{source.files[0]}: {fault}; add others")
    most, least = re.search(r"<= (\d+)", reason), re.search(r"\d+ vs (\d+)", reason)
    remedy = f"set --vocab-size {most[1]} or less, or " if most else ""
    remedy += "give more text, or --bytes"
    remedy = f"set --vocab-size {least[1]} or more, or give --bytes" if least else remedy
    fault = f"no vocabulary of {vocab_size} fits these documents ({reason.partition('.')[0]})"
    return cli.ToolError(f"{source.files[0]}: {fault}: {remedy}")


# === EXPORT =======================================================================================


class DataSet(NamedTuple):
    folder: Path
    tokenizer: Path


def new_state(settings: dict[str, Any]) -> dict[str, Any]:
    """The content of export.json: the state of an export after its last complete shard."""
    return {
        "settings": settings,
        "tokenizer_sha256": "",
        "complete": False,
        # The next document, and how many of its tokens are in complete shards.
        "place": list(BEGINNING),
        "tokens_done": 0,
        "shards": {"val": {}, "train": {}},  # split -> file name -> dataset.entry_of
        "docs": {"val": 0, "train": 0, "repeats_of_val_left_out": 0},
        "miscounted_tokens": {"val": 0, "train": 0},
    }


def tokens_of(state: dict[str, Any], split: str) -> int:
    return sum(entry["tokens"] for entry in state["shards"][split].values())


class ShardWriter:
    """Cuts each split's tokens into shards of shard_tokens; only the last may be shorter."""

    def __init__(self, folder: Path, state: dict[str, Any], shard_tokens: int) -> None:
        self.folder, self.state = folder, state
        self.buffer = np.empty(shard_tokens, dtype="<u2")
        self.used = 0

    def add(self, split: str, tokens: np.ndarray, done: int, place: Place) -> None:
        """Appends the tokens, from `done` on, of the document at that place."""
        while done < len(tokens):
            part = tokens[done : done + len(self.buffer) - self.used]
            self.buffer[self.used : self.used + len(part)] = part
            self.used += len(part)
            done += len(part)
            if self.used == len(self.buffer):
                self.flush(split, place, done)

    def flush(self, split: str, place: Place, tokens_done: int = 0, complete: bool = False) -> None:
        """Writes what is buffered as the split's next shard, then notes where to continue."""
        shards = self.state["shards"][split]
        if self.used:
            name = f"fineweb_{split}_{len(shards):06d}.bin"
            header = np.zeros(dataset.HEADER_BYTES // 4, dtype="<i4")
            header[:3] = dataset.SHARD_MAGIC, dataset.SHARD_VERSION, self.used
            dataset.write_atomic(self.folder / name, header, self.buffer[: self.used])
            shards[name] = dataset.entry_of(self.folder / name)
            self.used = 0
        self.state |= {"place": list(place), "tokens_done": tokens_done, "complete": complete}
        dataset.write_json(self.folder / dataset.EXPORT, self.state)


def export_documents(
    source: Source, made: DataSet, state: dict[str, Any], producing: dataset.Producing, threads: int
) -> None:
    """Writes both splits' shards from where `state` stands; it is saved after each shard."""
    val_digests = source.val_digests()
    tokenizer = Tokenizer(made.tokenizer)
    writer = ShardWriter(made.folder, state, state["settings"]["shard_tokens"])
    begin, done = Place(*state["place"]), state["tokens_done"]
    docs, wrong = state["docs"], state["miscounted_tokens"]
    producing.touch(val_complete=begin.number >= source.num_val_docs)
    progress = cli.Progress(made.folder.name, source.share_before(begin))
    for batch in batches(source.documents(begin)):
        texts = [document.text() for document in batch]
        many = tokenizer.encode(texts, threads)
        for document, text, tokens in zip(batch, texts, many, strict=True):
            split = "val" if document.place.number < source.num_val_docs else "train"
            if document.place.number == source.num_val_docs and not done:
                writer.flush("val", document.place)
                producing.touch(val_complete=True)
            if split == "train" and digest_of(text) in val_digests:
                docs["repeats_of_val_left_out"] += 1
                continue
            if not done:  # else it was counted before the interruption
                docs[split] += 1
                wrong[split] += tokenizer.count_wrong(tokens)
            writer.add(split, tokens, done, document.place)
            done = 0
        producing.touch()
        progress.show(source.share_before(batch[-1].place))
    if not docs["train"]:
        fault = "all training documents repeat validation documents"
        raise cli.ToolError(f"{source.files[0]}: {fault}: add others")
    for before, now in zip(source.stamps, source.stamps_now(), strict=True):
        if before != now:
            raise cli.ToolError(f"{now[0]}: it was changed while it was read: {start_anew(made)}")
    writer.flush("train", BEGINNING, complete=True)


def start_anew(made: DataSet) -> str:
    """What to do about a data set that cannot be continued."""
    return f"choose another --name, or move {made.folder} and {made.tokenizer} away"


def open_state(made: DataSet, settings: dict[str, Any]) -> dict[str, Any]:
    """The export to begin or to continue. Raises ToolError if the folder holds something else."""
    state = dataset.read_export(made.folder)
    if state is None:
        for other in [*made.folder.glob("fineweb_*.bin"), made.tokenizer]:
            if os.path.lexists(other):
                raise cli.ToolError(f"{other}: was not made by this command: {start_anew(made)}")
        return new_state(settings)
    was = state["settings"]
    if changed := [key for key in settings if was.get(key) != settings[key]]:
        old, new = ({key: s.get(key) for key in changed} for s in (was, settings))
        others = "other input files, or they have changed since"
        what = others if "inputs" in changed else f"{old}, now {new}"
        raise cli.ToolError(f"{made.folder}: made with {what}: {start_anew(made)}")
    for split in ("val", "train"):
        for name, entry in state["shards"][split].items():
            try:
                dataset.check_shard(made.folder / name, entry)
            except cli.ToolError as error:
                raise cli.ToolError(f"{error}, or {start_anew(made)}") from None
    wanted = state["tokenizer_sha256"]
    if wanted and made.tokenizer.exists() and dataset.sha256_of(made.tokenizer) != wanted:
        raise cli.ToolError(f"{made.tokenizer}: it was changed: {start_anew(made)}")
    return state


def make_tokenizer(source: Source, made: DataSet, state: dict[str, Any]) -> None:
    """Writes the tokenizer unless it is there. Raises ToolError if it comes out otherwise."""
    recipe = state["settings"]["tokenizer"]
    if not made.tokenizer.exists():
        if "model" in recipe:
            content = Path(recipe["model"]).read_bytes()
        elif "bytes" in recipe:
            content = json.dumps(BYTE_TOKENIZER).encode() + b"\n"
        else:
            print(f"training a tokenizer of {recipe['vocab_size']} pieces ...", flush=True)
            content = train_tokenizer(source, **recipe)
        digest = hashlib.sha256(content).hexdigest()
        if state["tokenizer_sha256"] not in ("", digest):
            raise cli.ToolError(f"{made.tokenizer}: missing: restore it, or {start_anew(made)}")
        # First, so that the tokenizer is known as ours even if we are killed now.
        state["tokenizer_sha256"] = digest
        dataset.write_json(made.folder / dataset.EXPORT, state)
        dataset.write_atomic(made.tokenizer, content)
    dataset.record_tokenizer(made.folder, made.tokenizer)
    print(f"{made.tokenizer}: ready; training may start while shards are made", flush=True)


def make_data_set(options: argparse.Namespace) -> tuple[DataSet, dict[str, Any]]:
    """Makes a tokenizer and a data set, or what is missing of them."""
    for name in filter(os.path.isdir, options.files):
        if options.out.resolve().is_relative_to(Path(name).resolve()):
            where = f"--out {options.out}: it is in the input {name}"
            raise cli.ToolError(f"{where}: name another folder")
    label, recipe = tokenizer_recipe(options)
    source = Source(options.files, options.num_val_docs)
    source.val_digests()  # refuses too few documents before a tokenizer is trained
    kind = "json" if options.bytes else "model"
    stem = f"{options.name}_{label}" if options.bytes else f"{options.name}_{label[2:]}_bpe"
    folder = options.out / "datasets" / f"{options.name}_{label}"
    made = DataSet(folder, options.out / "tokenizers" / f"{stem}.{kind}")
    settings = {"inputs": source.stamps, "num_val_docs": source.num_val_docs}
    settings |= {"shard_tokens": options.shard_tokens, "tokenizer": recipe}
    if len(source.files) == 1 and not is_json_lines(source.files[0]):
        how = f"at blank lines, or after {PASSAGE_BYTES:,} bytes where none is near"
        print(f"{source.files[0]}: cut into documents {how}", flush=True)
    if source.left_out:
        count, first = len(source.left_out), source.left_out[0]
        print(f"note: left out: {count} that are no regular file, the first is {first}", flush=True)
    with dataset.locked(made.folder):
        state = open_state(made, settings)
        if not state["complete"]:
            make_tokenizer(source, made, state)
            if state["shards"]["val"]:
                print(f"continuing at document {state['place'][0] + 1:,}", flush=True)
            try:
                with dataset.Producing(made.folder) as producing:
                    export_documents(source, made, state, producing, options.workers)
            except cli.ToolError:
                if not any(state["shards"].values()):  # mended input may come next
                    made.tokenizer.unlink(missing_ok=True)
                    (made.folder / dataset.EXPORT).unlink(missing_ok=True)
                raise
        # A command that was killed may have left it.
        (made.folder / ".producing").unlink(missing_ok=True)
    docs, val, train = state["docs"], tokens_of(state, "val"), tokens_of(state, "train")
    said = f"{docs['val']:,} validation documents with {val:,} tokens"
    said += f", {docs['train']:,} training documents with {train:,}"
    said += f"; {docs['repeats_of_val_left_out']:,} repeats of validation left out"
    print(f"{made.folder}: {said}", flush=True)
    return made, state


def tokenizer_recipe(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """(the end of the data set's name, what its tokenizer is made from)"""
    if options.bytes:
        return f"byte{256 + BYTE_TOKENIZER['offset']}", {"bytes": True}
    if options.model:
        tokenizer, digest = Tokenizer(options.model), dataset.sha256_of(options.model)
        if not tokenizer.has_space():
            fault = "it has no piece for a single space: bits per byte would be wrong"
            remedy = "train it with required_chars='\u2581' and byte_fallback, or leave out --model"
            raise cli.ToolError(f"--model {options.model}: {fault}: {remedy}")
        return f"sp{tokenizer.vocab_size}", {"model": str(options.model), "sha256": digest}
    recipe = {"vocab_size": options.vocab_size, "normalization": options.normalization}
    return f"sp{options.vocab_size}", recipe


def remarks(made: DataSet, state: dict[str, Any]) -> Iterator[str]:
    """What to know about a data set, with remedies."""
    if loss := Tokenizer(made.tokenizer).changes_text():
        yield f"note: {made.tokenizer}: {loss}"
    val, train = state["miscounted_tokens"].values()
    if val or train:
        what = f"{val:,} validation tokens and {train:,} training tokens have wrong byte counts"
        why = f"unknown to {made.tokenizer}, or a space as three byte pieces"
        yield f"WARNING: {what} ({why}): use a tokenizer with byte_fallback and a piece for a space"
    val, train = tokens_of(state, "val"), tokens_of(state, "train")
    if val > (val + train) / 5:
        remedy = "name smaller documents first, or set --num-val-docs (and another --name)"
        yield f"WARNING: validation has {val / (val + train):.0%} of all tokens: {remedy}"


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add, count = parser.add_argument, cli.number(int, 1)
    add("files", nargs="+", metavar="FILE", help="text files, .jsonl files or folders of them")
    add("--out", type=Path, default=DATA, help="where to write (default: %(default)s)")
    add("--name", default="docs", help="the beginning of all names (default: docs)")
    one_of = parser.add_mutually_exclusive_group().add_argument
    pieces = cli.number(int, LEAST_VOCABULARY, MOST_VOCABULARY)
    one_of("--vocab-size", type=pieces, default=1024, metavar="N", help="pieces (default: 1024)")
    one_of("--model", type=Path, metavar="M", help="use this SentencePiece model instead")
    one_of("--bytes", action="store_true", help="use the byte tokenizer of 260 ids instead")
    add("--num-val-docs", type=count, metavar="N", help="default: a tenth, at most 50000")
    tokens, text = cli.number(int, 1, 2**31 - 1), "tokens per shard (default: %(default)s)"
    add("--shard-tokens", type=tokens, default=100_000_000, metavar="N", help=text)
    text = "how text is changed (default: identity, which keeps it; nmt_nfkc: see above)"
    add("--normalization", choices=("identity", "nmt_nfkc"), help=text)
    cpus = "threads (default: the CPUs that it may use, %(default)s)"
    add("--workers", type=count, default=dataset.usable_cpus(), metavar="N", help=cpus)
    options = parser.parse_args(words)
    if not re.fullmatch(r"\w[\w.-]*", options.name):
        parser.error(f"--name {options.name}: it names files; give letters, digits, '.', '_', '-'")
    if options.model and options.model.suffix == ".json":
        parser.error(f"--model {options.model}: a byte tokenizer; give --bytes")
    if options.normalization and (options.model or options.bytes):
        parser.error("--normalization: does nothing with --model or --bytes; leave it out")
    options.normalization = options.normalization or "identity"
    return options


def main() -> None:
    made, state = make_data_set(parse_arguments(sys.argv[1:]))
    for remark in remarks(made, state):
        print(remark)
    print(dataset.how_to_train(*made, Tokenizer(made.tokenizer).vocab_size))


if __name__ == "__main__":
    dataset.run_tool(main, "the same command continues after the last complete shard")
