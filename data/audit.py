"""Prove bits per byte: are the bytes counted for a validation split the bytes of its documents?

    python3 data/audit.py --tokenizer data/tokenizers/fineweb_1024_bpe.model \\
        --data data/datasets/fineweb10B_sp1024 --docs data/docs_selected.jsonl
    # without the documents: looks for mistakes, and proves nothing
    python3 data/audit.py --tokenizer M --data DIR

Trainers count with a table of three columns, one entry per id:

    bytes(previous -> target) = base_bytes[target]
                              + (has_leading_space[target] and not is_boundary[previous])

The tool decodes each document with the tokenizer's own library. Its text must be as long in UTF-8
as the table says, except for a space directly after BOS, which the rule does not count, and it must
be the text of the original document. If the tokenizer's normaliser changes text, the changed
documents are compared, and the last line says so.

With fineweb_val_bytes_*.bin beside the shards, which have the bytes of each validation token, these
are counted instead of the table, and must be in sum the bytes of each original document. If the
tokenizer has the four pieces of CaseOps (U+E001 to U+E004: title, capitals, next letter, escape),
texts are compared without them and without the case of a to z.

Before that, if export.json is there, all shards must be those that it lists.

Exit code: 0 proved, 1 a mistake found, 2 wrong usage, 3 no mistake found and nothing proved.
"""

from __future__ import annotations

import argparse
import os
import re
import string
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import dataset
from dataset import cli
from tokenize_docs import PROGRESS_SECONDS, SPACE, Source, Tokenizer

# isort: split
import numpy as np

# Published validation splits: tokens predicted -> bytes, worked out from logs, whose digits leave
# one byte open.
CASE_MARKS = "\ue001\ue002\ue003\ue004"
LOWER_CASE = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
PUBLISHED = {62_021_632: 151_080_362, 40_540_160: 151_078_221, 45_508_608: 151_074_052}


class Table(NamedTuple):
    """A table that counts bytes: three arrays with one entry per id."""

    base: np.ndarray  # int64: bytes, without a leading space
    space: np.ndarray  # bool: begins with a space, counted unless the token before is a boundary
    boundary: np.ndarray  # bool

    def count(self, previous: np.ndarray, target: np.ndarray) -> np.ndarray:
        return self.base[target] + (self.space[target] & ~self.boundary[previous])


class Vocabulary:
    """What ids stand for, by the tokenizer's own library; `table` has the bytes of their text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.size, self.bos = tokenizer.vocab_size, tokenizer.bos_id
        self.processor, self.offset = tokenizer.processor, tokenizer.offset
        self.marks_case = False
        if self.processor is None:
            boundary = np.arange(self.size) < self.offset
            self.pieces = [f"byte {i - self.offset}" for i in range(self.size)]
            self.table = Table((~boundary).astype(np.int64), np.zeros_like(boundary), boundary)
            self.unknown = np.zeros_like(boundary)
            return
        ids = list(range(self.size))
        self.pieces = self.processor.id_to_piece(ids)
        self.marks_case = set(CASE_MARKS) <= set(self.pieces)
        self.unknown = np.array(self.processor.is_unknown(ids)) | self.processor.is_unused(ids)
        boundary = self.unknown | self.processor.is_control(ids)
        lengths = [len(piece.replace(SPACE, " ").encode("utf-8")) for piece in self.pieces]
        base = np.where(self.processor.is_byte(ids), 1, lengths) * ~boundary
        space = np.array([piece.startswith(SPACE) for piece in self.pieces]) & ~boundary
        self.table = Table(base - space, space, boundary)
        # Decoding may drop a space from the start of a text; after these ids nothing is at the
        # start.
        self.guard = self.processor.encode("a")
        self.guard_length = len(self.processor.decode(self.guard))

    def text(self, ids: np.ndarray) -> str:
        if self.processor is None:
            kept = ids[ids >= self.offset] - self.offset
            return bytes(kept.tolist()).decode("utf-8", "ignore")
        text = self.processor.decode([*self.guard, *ids.tolist()])
        return text[self.guard_length :].replace(SPACE, " ")


class Split(NamedTuple):
    """The validation shards, and those of the bytes of their tokens, if the set has them."""

    paths: list[Path]
    byte_paths: list[Path]
    tokens: int

    @classmethod
    def of(cls, folder: Path) -> Split:
        paths = dataset.shards_of(folder, "val")
        has_bytes = dataset.shard_paths(folder, "val_bytes")
        byte_paths = dataset.shards_of(folder, "val_bytes") if has_bytes else []
        return cls(paths, byte_paths, sum(map(dataset.shard_tokens, paths)))

    def fault(self) -> str:
        """Why the bytes cannot be those of the tokens; empty if they can, or if there are none."""
        sizes = [dataset.shard_tokens(path) for path in self.paths]
        others = [dataset.shard_tokens(path) for path in self.byte_paths]
        if not others or sizes == others:
            return ""
        return f"fineweb_val_bytes_*.bin have {others} numbers, fineweb_val_*.bin {sizes} tokens"

    def documents(self, bos: int) -> Iterator[np.ndarray]:
        """The tokens of each document, with BOS, and in a second row their bytes, if known."""
        rest = np.empty((1 + bool(self.byte_paths), 0), "<u2")
        for number, path in enumerate(self.paths):
            files = [path, *self.byte_paths[number : number + 1]]
            rows = np.stack([np.fromfile(f, "<u2", offset=dataset.HEADER_BYTES) for f in files])
            parts = np.split(rows, np.flatnonzero(rows[0] == bos), axis=1)
            parts[0] = np.concatenate([rest, parts[0]], axis=1)  # what is before the first BOS
            yield from (part.astype(np.int64) for part in parts[:-1] if part.size)
            rest = parts[-1]
        yield rest.astype(np.int64)


class Original(NamedTuple):
    text: str  # as the tokenizer's normaliser leaves it, to compare with the decoded text
    bytes: int  # as it was written


def originals(files: list[str], vocabulary: Vocabulary, sums: dict[str, int]) -> Iterator[Original]:
    """The documents. `sums` has what was read so far."""
    processor = vocabulary.processor
    for document in Source(files, 0).documents():
        text = document.text()
        size = len(text.encode("utf-8"))
        if vocabulary.marks_case:
            text = text.translate(LOWER_CASE)
        normal = processor.normalize(text).replace(SPACE, " ") if processor else text
        sums["bytes"] += size
        sums["normalised_bytes"] += len(normal.encode("utf-8"))
        sums["changed"] += normal != text
        yield Original(normal, size)


def without_marks(text: str) -> str:
    """A text in CaseOps without its marks; what an escape stands before is no mark."""
    return re.sub("\ue004(.)|[\ue001-\ue003]", r"\1", text, flags=re.DOTALL)


class Audit:
    """Compares a split's documents with the table and with the originals. `mistakes`: sentences."""

    def __init__(self, vocabulary: Vocabulary, docs: list[str]) -> None:
        self.vocabulary = vocabulary
        self.originals_read = {"bytes": 0, "normalised_bytes": 0, "changed": 0}
        self.originals = originals(docs, vocabulary, self.originals_read) if docs else None
        self.mistakes: list[str] = []
        self.documents = self.position = self.wrong_documents = 0
        self.counted = self.expected = 0  # bytes of all documents, as counted and by their text
        self.scored = self.scored_by_table = 0  # bytes of the predicted tokens
        self.spaces_after_bos = 0

    def run(self, split: Split, predicted: int) -> None:
        """Audits the split, of which `predicted` tokens after the first are scored."""
        began = told = time.monotonic()
        before = self.vocabulary.bos
        for rows in split.documents(self.vocabulary.bos):
            ids = rows[0]
            self.documents += 1
            if ids.max() >= self.vocabulary.size:
                words = "a damaged shard, or another tokenizer made it"
                self.find(f"id {ids.max()} is not in the vocabulary: {words}")
                return
            if ids[0] != self.vocabulary.bos:
                self.find("it does not begin with BOS")
            self.audit_document(rows, np.append(before, ids[:-1]), predicted)
            before = ids[-1]
            self.position += len(ids)
            now = time.monotonic()
            if now - told > PROGRESS_SECONDS:
                told = now
                left = (now - began) * (split.tokens - self.position) / self.position
                share = self.position / split.tokens
                print(f"audited {share:.0%}, {left:.0f} s left", file=sys.stderr, flush=True)
        if self.wrong_documents > 1:
            self.mistakes.append(f"bytes are counted wrongly in {self.wrong_documents:,} documents")

    def find(self, mistake: str) -> None:
        self.mistakes.append(f"document {self.documents:,}: {mistake}")

    def audit_document(self, rows: np.ndarray, previous: np.ndarray, predicted: int) -> None:
        rule, ids = self.vocabulary.table, rows[0]
        by_table = rule.count(previous, ids)
        text = self.vocabulary.text(ids)
        original = next(self.originals, None) if self.originals else None
        if len(rows) == 1:
            counted, spaces = by_table, int((rule.space[ids] & rule.boundary[previous]).sum())
            self.spaces_after_bos += spaces
            expected, whose = len(text.encode("utf-8")) - spaces, "its text"
        else:
            counted = rows[1]
            expected, whose = original.bytes if original else int(counted.sum()), "the original"
            if counted[0] and ids[0] == self.vocabulary.bos:
                self.find(f"its BOS has {counted[0]} bytes")
        self.counted += int(counted.sum())
        self.expected += expected
        # The first token is never predicted.
        scored = slice(0 if self.position else 1, max(0, predicted + 1 - self.position))
        self.scored += int(counted[scored].sum())
        self.scored_by_table += int(by_table[scored].sum())
        if counted.sum() != expected:
            self.wrong_documents += 1
            if self.wrong_documents == 1:
                why = f": {self.cause(ids)}" if len(rows) == 1 else ""
                self.find(f"{counted.sum():,} bytes are counted, {whose} has {expected:,}{why}")
        if self.originals:
            self.compare(without_marks(text) if self.vocabulary.marks_case else text, original)

    def cause(self, ids: np.ndarray) -> str:
        """Why a document's bytes are not those of its text."""
        vocabulary = self.vocabulary
        lost = ids[vocabulary.unknown[ids]]
        if len(lost):
            return f"id {lost[0]} {vocabulary.pieces[lost[0]]!r} stands for text that is lost"
        return "byte pieces form no character, or stand for a space"

    def compare(self, text: str, original: Original | None) -> None:
        """Compares a document with its original; after a difference no more are compared."""
        there = original.text if original else ""
        if original and text == there:
            return
        self.originals = None
        if original is None:
            self.find("the split has more documents than the files of --docs")
        elif there.startswith(text):
            self.find(f"its text ends {len(there) - len(text):,} characters too early")
        elif text.startswith(there) and there:
            self.find("its text does not end where the original ends: BOS is missing")
        else:
            at = len(os.path.commonprefix([text, there]))
            here, there = text[at : at + 20], there[at : at + 20]
            words = f"after {at:,} characters its text is {here!r}, the original {there!r}"
            self.find(f"{words}: are --docs and the shards of one set, in its order?")


def other_tokenizer(folder: Path, tokenizer: Path) -> str:
    """What is wrong if the shards were made with another tokenizer; else empty."""
    digest, own = dataset.recorded_tokenizer(folder) or ("", "")
    if not digest and (export := dataset.read_export(folder)):
        digest, own = export.get("tokenizer_sha256"), f"the one of {folder / dataset.EXPORT}"
    if not digest or digest == dataset.sha256_of(tokenizer):
        return ""
    return f"the shards were made with another tokenizer: give --tokenizer {own}"


def faults_of_shards(folder: Path) -> tuple[str, list[str]]:
    """(what was compared with export.json, the shards that differ), in words"""
    export = dataset.read_export(folder)
    if export is None:
        return "", []
    listed = {**export["shards"]["val"], **export["shards"]["train"]}
    here = [*dataset.shard_paths(folder, "val"), *dataset.shard_paths(folder, "train")]
    faults = {
        name: dataset.fault_of_shard(folder / name, e, whole=True) for name, e in listed.items()
    }
    faults |= {path.name: "not listed in export.json" for path in here if path.name not in listed}
    if not export["complete"]:
        faults[dataset.EXPORT] = "the set is not complete: run the command that makes it again"
    plain = sum(not isinstance(entry, dict) for entry in listed.values())
    note = f"; of {plain:,} only the tokens are known" if plain else ""
    words = f"shards     {len(listed):,} are compared with export.json{note}\n"
    return words, [f"{folder / name}: {fault}" for name, fault in faults.items() if fault]


def verdict(audit: Audit, split: Split, has_docs: bool) -> str:
    if audit.mistakes:
        factor = ""
        if audit.counted != audit.expected and audit.counted and audit.expected:
            ratio = audit.counted / audit.expected
            factor = f"; the true val_bpb is {ratio:.4f} times the counted one"
        return f"mistake: {len(audit.mistakes)} found{factor}"
    if not has_docs:
        return (
            "not proved: no mistake was found, but another tokenizer of this size would show none; "
            "give the documents with --docs"
        )
    read, note = audit.originals_read, ""
    if read["changed"] and not split.byte_paths:
        note = (
            f", after the tokenizer's normaliser changed {read['changed']:,} of them: "
            f"{read['bytes']:,} bytes as written are {read['normalised_bytes']:,}; "
            "bits per byte are those of the changed text"
        )
    documents = f"the text of all {audit.documents:,} documents"
    return f"proved: {documents} has the bytes that are counted{note}"


def audit_split(options: argparse.Namespace) -> int:
    vocabulary = Vocabulary(Tokenizer(options.tokenizer))
    split = Split.of(options.data)
    if fault := split.fault():
        raise cli.ToolError(f"{options.data}: {fault}: get the files of one set")
    predicted = (split.tokens - 1) // options.seq_len * options.seq_len
    if predicted < 1:
        raise cli.ToolError(f"{options.data}: {split.tokens} tokens: give a --seq-len below that")
    audit = Audit(vocabulary, options.docs)
    audit.run(split, predicted)
    if other := other_tokenizer(options.data, options.tokenizer):
        audit.mistakes.append(other)
    published = PUBLISHED.get(predicted, audit.scored)
    if abs(published - audit.scored) > 1:
        audit.mistakes.append(f"the published split of as many tokens has {published:,} bytes")
    how = f"{audit.spaces_after_bos:,} spaces after BOS are not counted"
    if split.byte_paths:
        how = f"by fineweb_val_bytes_*.bin; the table would count {audit.scored_by_table:,}"
    print(
        f"split      {audit.documents:,} documents, {split.tokens:,} tokens in {options.data}\n"
        f"predicted  {predicted:,} tokens in sequences of {options.seq_len:,}; "
        f"the last {split.tokens - 1 - predicted:,} are not\n"
        f"counted    {audit.scored:,} bytes; {how}"
    )
    print("".join(f"found      {mistake}\n" for mistake in audit.mistakes), end="")
    print(verdict(audit, split, bool(options.docs)))
    return 1 if audit.mistakes else 0 if options.docs else 3


def main() -> int:
    parser = cli.Parser(description=__doc__)
    add, length = parser.add_argument, cli.number(int, 1)
    model, folder = "a SentencePiece .model or a byte .json", "folder of fineweb_val_*.bin"
    add("--tokenizer", type=Path, required=True, metavar="M", help=model)
    add("--data", type=Path, required=True, metavar="DIR", help=folder)
    docs = "the documents that the split was made from"
    add("--docs", nargs="+", default=[], metavar="FILE", help=docs)
    add("--seq-len", type=length, default=1024, metavar="T", help="TRAIN_SEQ_LEN (default: 1024)")
    options = parser.parse_args()
    said, faults = faults_of_shards(options.data)
    print(said + "".join(f"found      {fault}\n" for fault in faults), end="")
    if faults:
        print(f"mistake: {len(faults)} found; the split is not audited")
        return 1
    return audit_split(options)


if __name__ == "__main__":
    dataset.run_tool(main)
