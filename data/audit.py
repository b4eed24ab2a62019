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
If export.json is there, all shards must be those that it lists, or nothing else is looked at.

Then it looks in the training shards, or the first --train-shards of them, for validation documents:
one with the same tokens there, more than BOS, is a mistake.

Exit code: 0 proved, 1 a mistake found, 2 wrong usage, 3 no mistake found and nothing proved.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # not there with python3 -P
import dataset
from dataset import cli
from tokenize_docs import SPACE, Source, Tokenizer, compute_digest

# isort: split
import numpy as np

BLOCK_TOKENS = 1 << 23  # of the training shards that are read at once
CASE_MARKS = "\ue001\ue002\ue003\ue004"


class Vocabulary:
    """What ids stand for, by the tokenizer's own library, and the table of their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.size, self.bos = tokenizer.vocab_size, tokenizer.bos_id
        self.processor, self.offset = tokenizer.processor, tokenizer.offset
        self.marks_case = False
        ids = list(range(self.size))
        if self.processor is None:
            self.boundary = np.arange(self.size) < self.offset
            self.unknown = self.space = np.zeros_like(self.boundary)
            self.base = (~self.boundary).astype(np.int64)
            return
        self.pieces = self.processor.id_to_piece(ids)
        self.marks_case = set(CASE_MARKS) <= set(self.pieces)
        self.unknown = np.array(self.processor.is_unknown(ids)) | self.processor.is_unused(ids)
        self.boundary = self.unknown | self.processor.is_control(ids)
        lengths = [len(piece.replace(SPACE, " ").encode("utf-8")) for piece in self.pieces]
        self.space = np.array([p.startswith(SPACE) for p in self.pieces]) & ~self.boundary
        self.base = np.where(self.processor.is_byte(ids), 1, lengths) * ~self.boundary - self.space
        # Decoding may drop a space from the start of a text: these ids stand before it.
        self.guard = self.processor.encode("a")
        self.guard_length = len(self.processor.decode(self.guard))

    def spaces(self, previous: np.ndarray, target: np.ndarray, after_boundary: bool) -> np.ndarray:
        """Where a target's leading space is counted, or, after a boundary, not counted."""
        return self.space[target] & (self.boundary[previous] == after_boundary)

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
        paths = dataset.require_shards(folder, "val")
        has_bytes = dataset.shard_paths(folder, "val_bytes")
        byte_paths = dataset.require_shards(folder, "val_bytes") if has_bytes else []
        sizes, others = ([*map(dataset.count_shard_tokens, files)] for files in (paths, byte_paths))
        if others and sizes != others:
            what = f"fineweb_val_*.bin have {sizes} tokens"
            what += f", fineweb_val_bytes_*.bin {others} numbers: get the files of one set"
            raise cli.ToolError(f"{folder}: {what}")
        return cls(paths, byte_paths, sum(sizes))

    def documents(self, bos: int) -> Iterator[np.ndarray]:
        """The tokens of each document, with BOS, and in a second row their bytes, if known."""
        shards = [*zip(*filter(None, [self.paths, self.byte_paths]), strict=True)]
        for _, rows, edges in document_blocks(shards, bos):
            yield from (rows[:, a:b].astype(np.int64) for a, b in pairwise(edges))


def document_blocks(shards: list[tuple], bos: int, longest: int = 1 << 60) -> Iterator[tuple]:
    """(file, rows of tokens, where documents begin and the last one ends) of each block. A shard is
    one file, or several of one length. A document with more than `longest` tokens may be cut.
    """
    rest = np.empty((len(shards[0]), 0), "<u2")  # a document that goes on in the next block
    for paths in shards:
        for start in range(0, dataset.count_shard_tokens(paths[0]), BLOCK_TOKENS):
            place = dataset.HEADER_BYTES + 2 * start
            block = [np.fromfile(path, "<u2", BLOCK_TOKENS, offset=place) for path in paths]
            rows = np.hstack([rest, np.stack(block)])
            begins = np.flatnonzero(rows[0] == bos)
            edges = begins if begins.size and begins[0] == 0 else np.append(0, begins)
            yield paths[0], rows, edges
            rest = rows[:, edges[-1] : edges[-1] + longest + 1]
    yield paths[0], rest, np.array([0, rest.shape[1]])


def originals(source: Source, vocabulary: Vocabulary, sums: dict[str, int]) -> Iterator[tuple]:
    """(text as the tokenizer's normaliser leaves it, bytes as written) of each document. `sums` has
    what was read so far.
    """
    processor = vocabulary.processor
    for document in source.documents():
        text = document.decode()
        size = len(text.encode("utf-8"))
        if vocabulary.marks_case:
            text = re.sub("[A-Z]+", lambda found: found[0].lower(), text)
        normal = processor.normalize(text).replace(SPACE, " ") if processor else text
        sums["bytes"] += size
        sums["normalised_bytes"] += len(normal.encode("utf-8"))
        sums["changed"] += normal != text
        yield normal, size


def without_marks(text: str) -> str:
    """A text in CaseOps without its marks; what an escape stands before is no mark."""
    return re.sub("\ue004(.)|[\ue001-\ue003]", r"\1", text, flags=re.DOTALL)


class Audit:
    """Compares a split's documents with the table and with the originals. `mistakes`: sentences."""

    def __init__(self, vocabulary: Vocabulary, source: Source | None) -> None:
        self.vocabulary = vocabulary
        self.originals_read = {"bytes": 0, "normalised_bytes": 0, "changed": 0}
        self.originals = originals(source, vocabulary, self.originals_read) if source else None
        self.mistakes: list[str] = []
        self.documents = self.position = self.wrong_documents = 0
        self.counted = self.expected = 0  # bytes of all documents, as counted and by their text
        self.scored = self.scored_by_table = 0  # bytes of the predicted tokens
        self.spaces_after_bos = 0
        # Of documents with more than BOS: digest -> numbers, and (length << 16) + a middle token.
        self.digests: dict[bytes, list[int]] = {}
        self.keys = {0}

    def run(self, split: Split, predicted: int) -> None:
        """Audits the split, of which `predicted` tokens after the first are scored."""
        progress = cli.progress("audited tokens", split.tokens)
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
            if len(ids) > 1:
                self.keys.add((len(ids) << 16) + int(ids[len(ids) // 2]))
                digest = compute_digest(ids.astype("<u2").tobytes())
                self.digests.setdefault(digest, []).append(self.documents)
            before = ids[-1]
            self.position += len(ids)
            progress.update(len(ids))
        if self.wrong_documents > 1:
            self.mistakes.append(f"bytes are counted wrongly in {self.wrong_documents:,} documents")

    def find(self, mistake: str) -> None:
        self.mistakes.append(f"document {self.documents:,}: {mistake}")

    def audit_document(self, rows: np.ndarray, previous: np.ndarray, predicted: int) -> None:
        ids, spaces = rows[0], self.vocabulary.spaces
        by_table = self.vocabulary.base[ids] + spaces(previous, ids, after_boundary=False)
        text = self.vocabulary.text(ids)
        original, size = next(self.originals, (None, 0)) if self.originals else (None, 0)
        if len(rows) == 1:
            counted, lost = by_table, int(spaces(previous, ids, after_boundary=True).sum())
            self.spaces_after_bos += lost
            expected, whose = len(text.encode("utf-8")) - lost, "its text"
        else:
            counted = rows[1]
            expected, whose = int(counted.sum()) if original is None else size, "the original"
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
        lost = ids[self.vocabulary.unknown[ids]]
        if not len(lost):
            return "byte pieces form no character, or stand for a space"
        return f"id {lost[0]} {self.vocabulary.pieces[lost[0]]!r} stands for text that is lost"

    def compare(self, text: str, original: str | None) -> None:
        """Compares a document with its original; after a difference no more are compared."""
        if text == original:
            return
        self.originals = None
        if original is None:
            self.find("the split has more documents than the files of --docs")
        elif original.startswith(text):
            self.find(f"its text ends {len(original) - len(text):,} characters too early")
        elif text.startswith(original) and original:
            self.find("its text does not end where the original ends: BOS is missing")
        else:
            at = len(os.path.commonprefix([text, original]))
            here, there = text[at : at + 20], original[at : at + 20]
            words = f"after {at:,} characters its text is {here!r}, the original {there!r}"
            self.find(f"{words}: are --docs and the shards of one set, in its order?")


def leaks(audit: Audit, paths: list[Path]) -> dict[int, str]:
    """{number of a validation document: the training shard that has it, too}"""
    known, longest = np.array([*audit.keys]), max(audit.keys) >> 16
    progress = cli.progress("training tokens", sum(map(dataset.count_shard_tokens, paths)))
    found: dict[int, str] = {}
    shards = [(path,) for path in paths]
    for path, rows, edges in document_blocks(shards, audit.vocabulary.bos, longest):
        tokens, lengths = rows[0], np.diff(edges)
        keys = (lengths << 16) + tokens[edges[:-1] + lengths // 2]
        for index in np.flatnonzero(np.isin(keys, known)):
            document = tokens[edges[index] : edges[index + 1]]
            same = audit.digests.get(compute_digest(document.tobytes()), [])
            found |= {number: found.get(number, path.name) for number in same}
        progress.update(BLOCK_TOKENS)
    return found


def faults_of_shards(folder: Path) -> tuple[str, list[str]]:
    """(what was compared with export.json, the shards that differ), in words"""
    export = dataset.read_export(folder)
    if export is None:
        return "", []
    listed = export["shards"]["val"] | export["shards"]["train"]
    here = dataset.shard_paths(folder, "val") + dataset.shard_paths(folder, "train")
    faults = [f"{path}: export.json does not list it" for path in here if path.name not in listed]
    for name, entry in listed.items():
        try:
            dataset.check_shard(folder / name, entry, whole=True)
        except cli.ToolError as error:
            faults.append(str(error))
    if not export["complete"]:
        faults.append(f"{folder}: not complete: run the command that makes it again")
    return f"shards     {len(listed):,} are compared with export.json\n", faults


def search_training(options: argparse.Namespace, audit: Audit) -> str:
    """Looks for the split's documents in the training shards; says what was compared."""
    paths = dataset.shard_paths(options.data, "train")
    train = paths[: options.train_shards]
    if not train:
        return "; they were not looked for in training shards"
    if found := leaks(audit, train):
        first, share = min(found), len(found) / audit.documents
        what = f"{len(found):,} of {audit.documents:,} validation documents ({share:.2%})"
        where = f"the first is document {first:,}, in {found[first]}"
        audit.mistakes.append(f"{what} are also in the training shards: {where}")
    first = f"first {len(train):,} of " if len(train) < len(paths) else ""
    return f", and none of them is in the {first}{len(paths):,} training shards"


def verdict(audit: Audit, split: Split, has_docs: bool, compared: str) -> str:
    if audit.mistakes:
        factor = ""
        if audit.counted != audit.expected and audit.counted and audit.expected:
            ratio = audit.counted / audit.expected
            factor = f"; the true val_bpb is {ratio:.4f} times the counted one"
        return f"mistake: {len(audit.mistakes)} found{factor}"
    if not has_docs:
        why = "no mistake was found, but another tokenizer of this size would show none"
        return f"not proved: {why}; give the documents with --docs"
    read, note = audit.originals_read, ""
    if read["changed"] and not split.byte_paths:
        note = (
            f"; the tokenizer's normaliser changed {read['changed']:,} of them: {read['bytes']:,} "
        )
        note += f"bytes as written are {read['normalised_bytes']:,}, which are counted"
    documents = f"the text of all {audit.documents:,} documents"
    return f"proved: {documents} has the bytes that are counted{compared}{note}"


def audit_split(options: argparse.Namespace) -> int:
    vocabulary = Vocabulary(Tokenizer(options.tokenizer))
    split = Split.of(options.data)
    predicted = (split.tokens - 1) // options.seq_len * options.seq_len
    if predicted < 1:
        raise cli.ToolError(f"{options.data}: {split.tokens} tokens: give a --seq-len below that")
    vocabulary.marks_case &= bool(split.byte_paths)  # a table would count the marks, too
    settings = (dataset.read_export(options.data) or {}).get("settings", {})
    one_document = settings.get("one_document", False)
    source = Source(options.docs, 0, one_document) if options.docs else None
    audit = Audit(vocabulary, source)
    audit.run(split, predicted)
    compared = search_training(options, audit)
    digest, own = dataset.find_recorded_tokenizer(options.data) or ("", "")
    if digest not in ("", dataset.file_sha256(options.tokenizer)):
        other = "the shards were made with another tokenizer"
        audit.mistakes.append(f"{other}: give --tokenizer {own}")
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
    print(verdict(audit, split, bool(options.docs), compared))
    return 1 if audit.mistakes else 0 if options.docs else 3


def main() -> int:
    parser = cli.Parser(description=__doc__)
    add, length = parser.add_argument, cli.number(int, 1)
    model, folder = "a SentencePiece .model or a byte .json", "folder of fineweb_val_*.bin"
    add("--tokenizer", type=Path, required=True, metavar="M", help=model)
    add("--data", type=Path, required=True, metavar="DIR", help=folder)
    add("--docs", nargs="+", default=[], metavar="FILE", help="what the split was made from")
    add("--seq-len", type=length, default=1024, metavar="T", help="TRAIN_SEQ_LEN (default: 1024)")
    shards = "training shards in which validation documents are looked for (default: all)"
    add("--train-shards", type=cli.number(int, 0), metavar="N", help=shards)
    options = parser.parse_args()
    said, faults = faults_of_shards(options.data)
    print(said + "".join(f"found      {fault}\n" for fault in faults), end="")
    if faults:
        print(f"mistake: {len(faults)} found; the split is not audited")
        return 1
    return audit_split(options)


if __name__ == "__main__":
    dataset.run_tool(main)
