"""Prove that bits per byte are computed correctly for a validation split.

    python3 data/audit.py --tokenizer data/tokenizers/fineweb_1024_bpe.model \\
        --data data/datasets/fineweb10B_sp1024 --docs data/docs_selected.jsonl
    # without the documents: searches for mistakes, but proves nothing
    python3 data/audit.py --tokenizer M --data DIR

A score in bits per byte is right only if the trainer counts exactly the bytes of the validation
documents. Trainers count them with a table that has three columns and one entry per token id:

    bytes(previous -> target) = base_bytes[target]
                              + (has_leading_space[target] and not is_boundary[previous])

The program decodes each validation document with the tokenizer's own library. In UTF-8, the text
must be as long as the table says, except for a space directly after BOS, which the rule above does
not count. The text must also be that of the original document. If the tokenizer's normaliser
changes text, the changed documents are compared, and the last line of the output says so.

If there are fineweb_val_bytes_*.bin beside the shards, they contain the bytes of each validation
token. The program then counts these instead of the table, and their sum over a document must be the
number of bytes of the original document. If the tokenizer has the four marks of CaseOps (U+E001 to
U+E004: title, capitals, next letter, escape), texts are compared without the marks, and without the
case of the letters a to z.

If the data set has an export.json, all shards must be those that it lists. Otherwise the program
reports these mistakes and stops.

Finally the program reads the training shards, or the first --train-shards of them. A token that is
not in the vocabulary is a mistake. A validation document with more than BOS whose tokens are also a
training document is a mistake, too.

Exit code: 0 proved, 1 a mistake was found, 2 wrong usage, 3 no mistake found and nothing proved.
"""

# Builds on dataset.py (files of a data set), on tokenize_docs.py (reading documents and
# tokenizers), on cli.py of tools/, and on numpy.

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

# python3 -P does not put the folder of the script on the path.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import dataset
from dataset import cli


def make_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    text = "the tokenizer of the data set: a SentencePiece .model, or a byte tokenizer's .json"
    add("--tokenizer", type=Path, required=True, metavar="M", help=text)
    text = "folder of the data set, with fineweb_val_*.bin"
    add("--data", type=Path, required=True, metavar="DIR", help=text)
    text = "files with the original documents, those of the validation split first, in its order"
    add("--docs", nargs="+", default=[], metavar="FILE", help=text)
    text = "tokens per sequence, as TRAIN_SEQ_LEN (default: 1024)"
    add("--seq-len", type=cli.number(int, 1), default=1024, metavar="T", help=text)
    text = "number of training shards to search for validation documents (default: all)"
    add("--train-shards", type=cli.number(int, 0), metavar="N", help=text)
    return parser


if __name__ == "__main__":
    make_parser().parse_args()  # before the imports below, so that --help needs no packages

import numpy as np  # noqa: E402
from tokenize_docs import SPACE, Source, Tokenizer, compute_digest  # noqa: E402

BLOCK_TOKENS = 1 << 23  # tokens of a shard that are read at a time
CASE_MARKS = "\ue001\ue002\ue003\ue004"
UNLIMITED = 1 << 60


class Vocabulary:
    """The tokenizer's own decoder, and the table with which trainers count bytes.

    The table's columns are arrays with one entry per id: `base_bytes` (number of bytes without a
    leading space), `has_leading_space` and `is_boundary` (True for tokens without text, such as
    BOS, and for unknown and unused tokens).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.size, self.bos = tokenizer.vocab_size, tokenizer.bos_id
        self.processor, self.offset = tokenizer.processor, tokenizer.offset
        self.marks_case = False  # True if the tokenizer has the marks of CaseOps
        if self.processor is None:
            self._build_table_of_bytes()
        else:
            self._build_table_of_pieces()

    def _build_table_of_bytes(self) -> None:
        """Build the table of a byte tokenizer: each token from `offset` on is one byte."""
        self.is_boundary = np.arange(self.size) < self.offset
        self.is_unknown = np.zeros_like(self.is_boundary)
        self.has_leading_space = np.zeros_like(self.is_boundary)
        self.base_bytes = (~self.is_boundary).astype(np.int64)

    def _build_table_of_pieces(self) -> None:
        """Build the table of a SentencePiece model from the texts of its tokens."""
        ids = list(range(self.size))
        self.pieces = self.processor.id_to_piece(ids)
        self.marks_case = set(CASE_MARKS) <= set(self.pieces)
        self.is_unknown = np.array(self.processor.is_unknown(ids)) | self.processor.is_unused(ids)
        self.is_boundary = self.is_unknown | self.processor.is_control(ids)
        begins_with_space = np.array([piece.startswith(SPACE) for piece in self.pieces])
        self.has_leading_space = begins_with_space & ~self.is_boundary
        lengths = [len(piece.replace(SPACE, " ").encode("utf-8")) for piece in self.pieces]
        num_bytes = np.where(self.processor.is_byte(ids), 1, lengths)
        self.base_bytes = num_bytes * ~self.is_boundary - self.has_leading_space
        # Decoding may drop a space at the beginning of a text. `decode` puts these ids in front, so
        # that the beginning of the text is not the beginning of what is decoded.
        self.prefix_ids = self.processor.encode("a")
        self.prefix_length = len(self.processor.decode(self.prefix_ids))

    def leading_spaces(
        self, previous: np.ndarray, target: np.ndarray, after_boundary: bool
    ) -> np.ndarray:
        """Return a bool array: True for each target with a leading space.

        With after_boundary=True, only the targets after a boundary token are True: trainers do not
        count their spaces. With after_boundary=False, only the other targets are True: trainers
        count their spaces.
        """
        return self.has_leading_space[target] & (self.is_boundary[previous] == after_boundary)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of tokens, as the tokenizer's own library decodes it."""
        if self.processor is None:
            content = ids[ids >= self.offset] - self.offset
            return bytes(content.tolist()).decode("utf-8", "ignore")
        text = self.processor.decode([*self.prefix_ids, *ids.tolist()])
        return text[self.prefix_length :].replace(SPACE, " ")


class ValidationSplit(NamedTuple):
    """The validation shards of a data set, and the files of byte counts if it has them."""

    paths: list[Path]
    byte_paths: list[Path]  # empty, or as many files as `paths`
    tokens: int

    @classmethod
    def find(cls, folder: Path) -> ValidationSplit:
        """Find the files in a folder.

        Raises ToolError if a shard is missing, or if the shards and the files of byte counts do not
        have the same lengths.
        """
        paths = dataset.require_shards(folder, "val")
        byte_paths: list[Path] = []
        if dataset.shard_paths(folder, "val_bytes"):
            byte_paths = dataset.require_shards(folder, "val_bytes")
        sizes = [dataset.count_shard_tokens(path) for path in paths]
        byte_sizes = [dataset.count_shard_tokens(path) for path in byte_paths]
        if byte_paths and sizes != byte_sizes:
            raise cli.ToolError(
                f"{folder}: fineweb_val_*.bin have {sizes} tokens, but fineweb_val_bytes_*.bin "
                f"have {byte_sizes} numbers; get all files from the same data set"
            )
        return cls(paths, byte_paths, sum(sizes))

    def documents(self, bos: int) -> Iterator[np.ndarray]:
        """Yield each document as an int64 array of shape (1, n), or (2, n) with byte counts.

        The first row contains the n tokens, with BOS; the second row the bytes of each token.
        """
        if self.byte_paths:
            shards = list(zip(self.paths, self.byte_paths, strict=True))
        else:
            shards = [(path,) for path in self.paths]
        for _, rows, edges in iter_blocks(shards, bos):
            yield from (rows[:, a:b].astype(np.int64) for a, b in pairwise(edges))


def iter_blocks(
    shards: list[tuple], bos: int, max_document_tokens: int = UNLIMITED
) -> Iterator[tuple]:
    """Read shards in blocks of whole documents.

    Each entry of `shards` is a tuple with the path of a shard, and perhaps of other files of the
    same length. Yields (path of the shard, rows of shape (files per shard, n), edges): document i
    of the block is rows[:, edges[i]:edges[i + 1]]. A document with more than max_document_tokens
    may be cut off.
    """
    rest = np.empty((len(shards[0]), 0), "<u2")  # a document that continues in the next block
    for paths in shards:
        for start in range(0, dataset.count_shard_tokens(paths[0]), BLOCK_TOKENS):
            offset = dataset.HEADER_BYTES + 2 * start
            block = [np.fromfile(path, "<u2", BLOCK_TOKENS, offset=offset) for path in paths]
            rows = np.hstack([rest, np.stack(block)])
            edges = np.flatnonzero(rows[0] == bos)
            begins_with_bos = edges.size and edges[0] == 0
            if not begins_with_bos:
                edges = np.append(0, edges)
            yield paths[0], rows, edges
            rest = rows[:, edges[-1] : edges[-1] + max_document_tokens + 1]
    yield paths[0], rest, np.array([0, rest.shape[1]])


def iter_originals(
    source: Source, vocabulary: Vocabulary, totals: dict[str, int]
) -> Iterator[tuple[str, int]]:
    """Yield (text after the tokenizer's normaliser, bytes as written) of each original document.

    `totals` is updated with the sums over the documents that were read: "bytes" as written,
    "normalised_bytes", and "changed", the number of documents that the normaliser changes.
    """
    processor = vocabulary.processor
    for document in source.documents():
        text = document.decode()
        num_bytes = len(text.encode("utf-8"))
        if vocabulary.marks_case:
            text = re.sub("[A-Z]+", lambda found: found[0].lower(), text)
        normalised = processor.normalize(text).replace(SPACE, " ") if processor else text
        totals["bytes"] += num_bytes
        totals["normalised_bytes"] += len(normalised.encode("utf-8"))
        totals["changed"] += normalised != text
        yield normalised, num_bytes


def remove_case_marks(text: str) -> str:
    """Return a CaseOps text without its marks. A character after the escape mark is kept."""
    return re.sub("\ue004(.)|[\ue001-\ue003]", r"\1", text, flags=re.DOTALL)


class Audit:
    """Compares the documents of a validation split with the table and with the original documents.

    `mistakes` are sentences for the user. `source` is None if the originals are not known.
    """

    def __init__(self, vocabulary: Vocabulary, source: Source | None) -> None:
        self.vocabulary = vocabulary
        self.original_totals = {"bytes": 0, "normalised_bytes": 0, "changed": 0}
        self.originals = None
        if source:
            self.originals = iter_originals(source, vocabulary, self.original_totals)
        self.mistakes: list[str] = []
        self.documents = 0  # audited so far
        self.position = 0  # tokens before the current document
        self.wrong_documents = 0
        self.counted = 0  # bytes of all documents, as they are counted
        self.expected = 0  # bytes of all documents, according to their text
        self.scored = 0  # bytes of the scored tokens, as they are counted
        self.scored_by_table = 0  # bytes of the scored tokens, according to the table
        self.spaces_after_bos = 0
        # To find the documents in training shards, except those of BOS alone: {digest of the
        # tokens: numbers of the documents}, and a set of keys, each the document's
        # (length << 16) + its middle token. Keys are compared first, because that is fast.
        self.digests: dict[bytes, list[int]] = {}
        self.keys = {0}

    def run(self, split: ValidationSplit, num_scored: int) -> None:
        """Audit all documents of the split; the trainer scores its first `num_scored` targets."""
        progress = cli.progress("audited tokens", split.tokens)
        previous_token = self.vocabulary.bos
        for rows in split.documents(self.vocabulary.bos):
            ids = rows[0]
            self.documents += 1
            if ids.max() >= self.vocabulary.size:
                self.add_mistake(
                    f"id {ids.max()} is not in the vocabulary; "
                    "the shard is damaged, or another tokenizer made it"
                )
                return
            if ids[0] != self.vocabulary.bos:
                self.add_mistake("it does not begin with BOS")
            self.audit_document(rows, np.append(previous_token, ids[:-1]), num_scored)
            if len(ids) > 1:
                self.keys.add((len(ids) << 16) + int(ids[len(ids) // 2]))
                digest = compute_digest(ids.astype("<u2").tobytes())
                self.digests.setdefault(digest, []).append(self.documents)
            previous_token = ids[-1]
            self.position += len(ids)
            progress.update(len(ids))
        if self.wrong_documents > 1:
            self.mistakes.append(f"bytes are counted wrongly in {self.wrong_documents:,} documents")

    def add_mistake(self, mistake: str) -> None:
        """Note a mistake in the current document."""
        self.mistakes.append(f"document {self.documents:,}: {mistake}")

    def audit_document(self, rows: np.ndarray, previous: np.ndarray, num_scored: int) -> None:
        """Compare the counted bytes of a document with its text, and the text with the original.

        `rows` is a document of ValidationSplit.documents; `previous` contains the token before each
        of its tokens.
        """
        ids = rows[0]
        vocabulary = self.vocabulary
        counted_spaces = vocabulary.leading_spaces(previous, ids, after_boundary=False)
        by_table = vocabulary.base_bytes[ids] + counted_spaces
        text = vocabulary.decode(ids)
        original, original_bytes = None, 0
        if self.originals:
            original, original_bytes = next(self.originals, (None, 0))
        has_byte_counts = len(rows) > 1
        if has_byte_counts:
            counted = rows[1]
            expected = int(counted.sum()) if original is None else original_bytes
            if counted[0] and ids[0] == vocabulary.bos:
                self.add_mistake(f"its BOS has {counted[0]} bytes instead of 0")
        else:
            counted = by_table
            spaces = int(vocabulary.leading_spaces(previous, ids, after_boundary=True).sum())
            self.spaces_after_bos += spaces
            expected = len(text.encode("utf-8")) - spaces
        self.counted += int(counted.sum())
        self.expected += expected
        self.add_scored_bytes(counted, by_table, num_scored)
        if counted.sum() != expected:
            self.wrong_documents += 1
            if self.wrong_documents == 1:
                whose = "the original" if has_byte_counts else "its text"
                why = "" if has_byte_counts else f": {self.explain_wrong_count(ids)}"
                self.add_mistake(
                    f"{counted.sum():,} bytes are counted, but {whose} has {expected:,}{why}"
                )
        if self.originals:
            text = remove_case_marks(text) if vocabulary.marks_case else text
            self.compare_with_original(text, original)

    def add_scored_bytes(self, counted: np.ndarray, by_table: np.ndarray, num_scored: int) -> None:
        """Add the bytes of the tokens that the trainer scores.

        Scored are the tokens 1 to num_scored of the split: token 0 has no token before it.
        """
        start = 0 if self.position else 1
        end = max(0, num_scored + 1 - self.position)
        self.scored += int(counted[start:end].sum())
        self.scored_by_table += int(by_table[start:end].sum())

    def explain_wrong_count(self, ids: np.ndarray) -> str:
        """Return the reason why the table's bytes of a document are not those of its text."""
        lost = ids[self.vocabulary.is_unknown[ids]]
        if not len(lost):
            return "byte tokens do not form a character, or stand for a space"
        return f"id {lost[0]} {self.vocabulary.pieces[lost[0]]!r} stands for text that is lost"

    def compare_with_original(self, text: str, original: str | None) -> None:
        """Compare a document with its original; `original` is None if there are no more.

        After the first difference no more documents are compared, because all would differ.
        """
        if text == original:
            return
        self.originals = None
        if original is None:
            self.add_mistake("the validation split has more documents than the files of --docs")
        elif original.startswith(text):
            self.add_mistake(f"its text ends {len(original) - len(text):,} characters too early")
        elif text.startswith(original) and original:
            self.add_mistake("its text goes on after the end of the original; a BOS is missing")
        else:
            at = len(os.path.commonprefix([text, original]))
            self.add_mistake(
                f"after {at:,} characters its text is {text[at : at + 20]!r}, but the original is "
                f"{original[at : at + 20]!r}; check that --docs are the documents of this data "
                "set, in the same order"
            )


def find_leaked_documents(audit: Audit, paths: list[Path]) -> dict[int, str]:
    """Return {number of a validation document: name of the first training shard that has it}.

    Only documents that are also in one of the training shards `paths` are returned. If a token of
    these shards is not in the vocabulary, this is added to the mistakes of `audit`.
    """
    known_keys = np.array([*audit.keys])
    longest = max(audit.keys) >> 16
    progress = cli.progress("training tokens", sum(map(dataset.count_shard_tokens, paths)))
    found: dict[int, str] = {}
    foreign: dict[Path, None] = {}  # shards that may have tokens that are not in the vocabulary
    shards = [(path,) for path in paths]
    for path, rows, edges in iter_blocks(shards, audit.vocabulary.bos, longest):
        tokens = rows[0]
        if tokens.max(initial=0) >= audit.vocabulary.size:
            foreign[path] = None
        lengths = np.diff(edges)
        middle_tokens = tokens[edges[:-1] + lengths // 2]
        keys = (lengths << 16) + middle_tokens
        for index in np.flatnonzero(np.isin(keys, known_keys)):
            document = tokens[edges[index] : edges[index + 1]]
            for number in audit.digests.get(compute_digest(document.tobytes()), []):
                found.setdefault(number, path.name)
        progress.update(BLOCK_TOKENS)
    audit.mistakes += describe_foreign_tokens(list(foreign), audit.vocabulary.size)
    return found


def describe_foreign_tokens(paths: list[Path], size: int) -> Iterator[str]:
    """Yield a sentence for each shard with ids from `size` on, which are not in the vocabulary."""
    for path in paths:
        tokens = np.fromfile(path, "<u2", offset=dataset.HEADER_BYTES)
        places = np.flatnonzero(tokens >= size)
        if len(places):  # otherwise they are at the end of the shard before this one
            yield (
                f"{path}: tokens that are not among the {size:,} ids of the tokenizer: "
                f"{len(places):,}, the first is id {tokens[places[0]]} at token {places[0]:,}; "
                "the shard is damaged, or another tokenizer made it"
            )


def compare_with_export(folder: Path) -> tuple[int | None, list[str]]:
    """Compare the shards of a data set with its export.json.

    Returns (number of shards that export.json lists, mistakes). The number is None without
    export.json.
    """
    export = dataset.read_export(folder)
    if export is None:
        return None, []
    listed = export["shards"]["val"] | export["shards"]["train"]
    paths = dataset.shard_paths(folder, "val") + dataset.shard_paths(folder, "train")
    mistakes = [
        f"{path}: is not listed in export.json" for path in paths if path.name not in listed
    ]
    for name, entry in listed.items():
        try:
            dataset.check_shard(folder / name, entry, whole=True)
        except cli.ToolError as error:
            mistakes.append(str(error))
    if not export["complete"]:
        mistakes.append(f"{folder}: is not complete; run the command that makes it again")
    return len(listed), mistakes


def search_training_shards(options: argparse.Namespace, audit: Audit) -> str:
    """Search training shards for validation documents and for tokens that are not in the
    vocabulary; add mistakes to `audit` if any are found.

    Returns a clause for the last line of the output, which says what was searched.
    """
    paths = dataset.shard_paths(options.data, "train")
    searched = paths[: options.train_shards]
    if not searched:
        return "; no training shard was searched for the documents"
    found = find_leaked_documents(audit, searched)
    if found:
        first, share = min(found), len(found) / audit.documents
        audit.mistakes.append(
            f"{len(found):,} of {audit.documents:,} validation documents ({share:.2%}) are also in "
            f"the training shards; the first is document {first:,}, in {found[first]}"
        )
    some = f"first {len(searched):,} of " if len(searched) < len(paths) else ""
    shards = f"the {some}{len(paths):,} training shards"
    return f"; none of the documents is in {shards}, whose tokens are all in the vocabulary"


def describe_result(audit: Audit, split: ValidationSplit, has_docs: bool, searched: str) -> str:
    """Return the last line of the output. `searched` is what search_training_shards returned."""
    if audit.mistakes:
        factor = ""
        if audit.counted != audit.expected and audit.counted and audit.expected:
            ratio = audit.counted / audit.expected
            factor = f"; the true val_bpb is {ratio:.4f} times the counted val_bpb"
        return f"mistake: {len(audit.mistakes)} found{factor}"
    if not has_docs:
        return (
            "not proved: no mistake was found, but a wrong tokenizer of the same size would not "
            "show up either; give the original documents with --docs"
        )
    totals, note = audit.original_totals, ""
    if totals["changed"] and not split.byte_paths:
        note = (
            f"; the tokenizer's normaliser changed {totals['changed']:,} of the documents: all "
            f"documents have {totals['bytes']:,} bytes as written, and "
            f"{totals['normalised_bytes']:,} bytes after the change; bits per byte are those of "
            "the changed text"
        )
    return (
        f"proved: the counted bytes are those of the text of all {audit.documents:,} documents"
        f"{searched}{note}"
    )


def audit_split(options: argparse.Namespace) -> int:
    """Audit the validation split, print the result, and return the exit code."""
    vocabulary = Vocabulary(Tokenizer(options.tokenizer))
    split = ValidationSplit.find(options.data)
    num_scored = (split.tokens - 1) // options.seq_len * options.seq_len
    if num_scored < 1:
        raise cli.ToolError(
            f"{options.data}: the validation split has only {split.tokens} tokens; "
            f"give a --seq-len below {split.tokens}"
        )
    if not split.byte_paths:
        vocabulary.marks_case = False  # the table counts the marks, so they belong to the text
    settings = (dataset.read_export(options.data) or {}).get("settings", {})
    one_document = settings.get("one_document", False)
    source = Source(options.docs, 0, one_document) if options.docs else None
    audit = Audit(vocabulary, source)
    audit.run(split, num_scored)
    searched = search_training_shards(options, audit)
    digest, recorded_path = dataset.find_recorded_tokenizer(options.data) or ("", "")
    if digest not in ("", dataset.file_sha256(options.tokenizer)):
        audit.mistakes.append(
            f"the shards were made with another tokenizer; give --tokenizer {recorded_path}"
        )
    details = f"{audit.spaces_after_bos:,} spaces after BOS are not counted"
    if split.byte_paths:
        details = (
            "they are those of fineweb_val_bytes_*.bin; "
            f"the tokenizer's table would count {audit.scored_by_table:,} bytes"
        )
    print(
        f"validation {audit.documents:,} documents, {split.tokens:,} tokens in {options.data}\n"
        f"scored     {num_scored:,} tokens in sequences of {options.seq_len:,} tokens; the last "
        f"{split.tokens - 1 - num_scored:,} tokens do not fill a sequence and are not scored\n"
        f"counted    {audit.scored:,} bytes; {details}"
    )
    for mistake in audit.mistakes:
        print(f"found      {mistake}")
    print(describe_result(audit, split, bool(options.docs), searched))
    if audit.mistakes:
        return 1
    return 0 if options.docs else 3


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    remedy = "give the folder of a data set, its tokenizer and its documents"
    parser.require([options.tokenizer, options.data, *options.docs], remedy)
    num_listed, mistakes = compare_with_export(options.data)
    if num_listed is not None:
        print(f"shards     {num_listed:,} shards were compared with export.json")
    for mistake in mistakes:
        print(f"found      {mistake}")
    if mistakes:
        print(f"mistake: {len(mistakes)} found in the shards; the validation split is not audited")
        return 1
    return audit_split(options)


if __name__ == "__main__":
    dataset.run_tool(main)
