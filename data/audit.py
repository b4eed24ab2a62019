"""Prove bits per byte: are the bytes counted for a validation split the bytes of its documents?

    python3 data/audit.py --tokenizer data/tokenizers/fineweb_1024_bpe.model \\
        --data data/datasets/fineweb10B_sp1024 --docs data/docs_selected.jsonl
    # without the documents: looks for mistakes, and proves nothing
    python3 data/audit.py --tokenizer M --data DIR
    # audit another script's table
    python3 data/audit.py --tokenizer M --data DIR --table luts.npz

Trainers count with a table:

    bytes(previous -> target) = base[target] + (space[target] and not boundary[previous])

The tool decodes the split with the tokenizer's own library, document by document. Each text must be
as long in UTF-8 as the table says, except for a space directly after BOS, which the rule does not
count. Another tokenizer of the same size gives other text and other bytes: a comparison with the
documents shows this, or tokenizer.sha256 beside the shards does. If the tokenizer's normaliser
changes text, the changed documents are compared, and the last line says so. A table is an .npz or
.json file with base_bytes, has_leading_space and is_boundary, one entry per id.

Exit code: 0 proved, 1 a mistake found, 2 wrong usage, 3 no mistake found and nothing proved.
"""

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from producer import Parser, one_line, open_file, read_file, recorded_tokenizer, run_tool
from tokenize_docs import (
    BYTE_TOKENIZER,
    PROGRESS_SECONDS,
    SHARD_HEADER_WORDS,
    SHARD_MAGIC,
    SHARD_VERSION,
    SPACE,
    DataError,
    Source,
    Tokenizer,
    positive,
    sha256,
)

# isort: split
import numpy as np  # after tokenize_docs, which says in one line what is to be installed

CHUNK_TOKENS = 1 << 20  # tokens read, counted and decoded at once
ROWS = 1 << 16  # the ids a shard can hold; those a tokenizer lacks are unused
TEXT, BYTE, CONTROL, UNKNOWN, UNUSED = range(5)  # what an id stands for

# Validation splits: tokens predicted, bytes (worked out from logs,
# whose digits leave one byte open).
PUBLISHED = {
    "sp1024": (62_021_632, 151_080_362),
    "sp8192": (40_540_160, 151_078_221),
    "sp4096": (45_508_608, 151_074_052),
    "sp4096, another export": (45_514_752, 151_074_923),
    "NaiveBaseline export": (63_779_840, 155_769_746),
    "CaseOps with a byte sidecar": (47_851_520, 151_074_498),
    "sp1024, 400 bytes lost": (62_021_632, 151_079_962),
    "sp1024, length 16384": (62_013_440, 151_061_140),
    "sp1024, length 32768": (61_997_056, 151_024_098),
}

MISTAKES = {  # first those of a table, then those of the tokenizer or the split
    "leading_space_twice": (
        "the space that begins a piece is in its base and added again by its flag"
    ),
    "leading_space_missing": "the space that begins a piece is not counted",
    "other_entry": "not the piece's bytes",
    "inner_space_mark": (
        f"a {SPACE} behind the first character of a piece counts 3 bytes; its text is one space"
    ),
    "boundary_ignored": (
        "the space of the first piece behind BOS is counted; the rule leaves it out"
    ),
    "byte_piece_as_text": (
        "a byte piece counts as the 6 characters of its name, <0x..>; it is 1 byte"
    ),
    "byte_piece_as_replacement": (
        "a byte piece counts as U+FFFD, 3 bytes, decoded alone; it is 1 byte"
    ),
    "unused_ids_counted": "unused ids have bytes",
    "control_ids_counted": "control or unknown ids have bytes",
    "no_lone_space": (
        f"no piece is {SPACE} alone: a lone space becomes 3 byte pieces and counts 3 bytes"
    ),
    "missing_bos": "a document does not begin with BOS",
    "dropped_tail": "the end of the split is missing",
    "truncated_shard": "a shard is not as long as its header says, so nothing was audited",
    "other_tokenizer": "the shards were made with another tokenizer, says the file beside them",
    "ids_outside_vocabulary": "another tokenizer made this split; the audit ended there",
    "lost_text": "unknown or unused ids stand for text that is lost and count nothing",
    "broken_characters": (
        "the decoded text has another number of bytes: byte pieces that form no character"
    ),
    "other_text": (
        "the text is not that of the original document: was the split made from other --docs?"
    ),
    "published_bytes_differ": "as many tokens as a published split, but other bytes",
}
NAMES = list(MISTAKES)


class Table(NamedTuple):
    """A table that counts bytes: three arrays with one entry per id."""

    base: np.ndarray  # int64: bytes, without a leading space
    space: np.ndarray  # bool: begins with a space, counted unless the token before is a boundary
    boundary: np.ndarray  # bool

    def count(self, previous: np.ndarray, target: np.ndarray) -> np.ndarray:
        return self.base[target] + (self.space[target] & ~self.boundary[previous])


def kind_of(processor: Any, number: int) -> int:
    """What an id of a SentencePiece tokenizer stands for."""
    if processor.is_unused(number):
        return UNUSED
    if processor.is_control(number):
        return CONTROL
    if processor.is_unknown(number):
        return UNKNOWN
    return BYTE if processor.is_byte(number) else TEXT


def surface_of(piece: str, kind: int) -> bytes:
    """The bytes of the text of a piece."""
    if kind == TEXT:
        return piece.replace(SPACE, " ").encode("utf-8")
    return bytes.fromhex(piece[3:5]) if kind == BYTE else b""


class Vocabulary:
    """What ids stand for, and their text by the tokenizer's own library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.size, self.bos = tokenizer.vocab_size, tokenizer.bos_id
        self.processor = processor = tokenizer.processor
        if processor is None:
            offset = BYTE_TOKENIZER["offset"]
            pieces = ["<control>"] * offset + [f"<0x{value:02X}>" for value in range(256)]
            kinds = [CONTROL] * offset + [BYTE] * 256
        else:
            pieces = [processor.id_to_piece(i) for i in range(self.size)]
            kinds = [kind_of(processor, i) for i in range(self.size)]
            # Decoding may drop spaces from the start of a text;
            # behind these ids nothing is at the start.
            self.guard = processor.encode("a")
            self.guard_length = len(processor.decode(self.guard))
        unused = ROWS - self.size
        self.pieces = pieces + [""] * unused
        kinds = kinds + [UNUSED] * unused
        entries = list(zip(self.pieces, kinds, strict=True))
        self.surfaces = [surface_of(piece, kind) for piece, kind in entries]
        self.byte = np.array(
            [
                text[0] if kind == BYTE else -1
                for text, kind in zip(self.surfaces, kinds, strict=True)
            ]
        )
        self.kind = np.array(kinds)
        boundary = self.kind >= CONTROL
        space = np.array([kind == TEXT and piece.startswith(SPACE) for piece, kind in entries])
        self.truth = Table(np.array([*map(len, self.surfaces)]) - space, space, boundary)
        # Public scripts strip one mark of a piece and take all others for text;
        # the trainer's table is the truth.
        spelt = np.array([len(piece.encode("utf-8")) for piece in self.pieces]) - 3 * space
        self.rule = Table(np.where(self.kind == TEXT, spelt, self.truth.base), space, boundary)

    def texts(self, segments: list[np.ndarray]) -> list[str]:
        """Their text, with leading spaces;
        it gets shorter or longer where bytes form no character.
        """
        if self.processor is None:
            return [
                b"".join([self.surfaces[i] for i in ids.tolist()]).decode("utf-8", "ignore")
                for ids in segments
            ]
        texts = self.processor.decode([[*self.guard, *ids.tolist()] for ids in segments])
        return [text[self.guard_length :].replace(SPACE, " ") for text in texts]

    def mistakes(self, table: Table) -> np.ndarray:
        """The mistake in each id's entry, by its index in NAMES, -1 for none."""
        truth, kind, inner = self.truth, self.kind, self.rule.base - self.truth.base
        extra, same_flag = table.base - truth.base, table.space == truth.space
        right, once = same_flag & (extra == 0), truth.space & ((extra == 1) | (extra == 1 + inner))
        # Boundary flags matter to a space that follows, and nothing follows an unused id.
        boundary = np.where(table.space.any() & (kind != UNUSED), table.boundary, truth.boundary)
        unflagged = truth.space & ~table.space & ((extra == 0) | (extra == inner))
        cases = {
            "leading_space_missing": right & boundary & ~truth.boundary | unflagged,
            "leading_space_twice": once & table.space,
            "boundary_ignored": right & ~boundary & truth.boundary | once & ~table.space,
            "unused_ids_counted": (kind == UNUSED) & ~right,
            "control_ids_counted": truth.boundary & ~right,
            "byte_piece_as_text": (kind == BYTE) & (table.base == 6),
            "byte_piece_as_replacement": (kind == BYTE) & (table.base == 3),
            "inner_space_mark": same_flag & (inner > 0) & (extra == inner),
        }
        return np.select(
            [*cases.values()],
            [*map(NAMES.index, cases)],
            np.where(right, -1, NAMES.index("other_entry")),
        )


def read_table(path: Path, size: int) -> Table:
    """Another script's table. Raises DataError unless it has an entry for each of `size` ids."""
    try:
        content = (
            dict(np.load(io.BytesIO(read_file(path)), allow_pickle=False))
            if path.suffix == ".npz"
            else json.loads(read_file(path))
        )
        # Public scripts call the same columns base_bytes_lut and is_boundary_token_lut.
        column = {
            str(name).removesuffix("_lut").removesuffix("_token"): np.asarray(content[name])
            for name in content
        }
        columns = [column[name] for name in ("base_bytes", "has_leading_space", "is_boundary")]
        if any(
            part.dtype.kind not in "biu" or part.ndim != 1 or not size <= len(part) <= ROWS
            for part in columns
        ):
            raise ValueError(
                "its columns must be whole numbers or flags, "
                f"one for each of the tokenizer's {size} ids"
            )
    except Exception as error:  # whatever a damaged file raises, people get one line
        raise DataError(
            f"{path}: not a table ({one_line(error)}); write one with numpy.savez("
            f"{path.stem!r}, base_bytes=..., has_leading_space=..., is_boundary=...)"
        ) from None
    base, space, boundary = (np.pad(part, (0, ROWS - len(part))) for part in columns)
    return Table(base.astype(np.int64), space.astype(bool), boundary.astype(bool))


class Split:
    """The tokens of the validation shards, by their position in all of them.

    Raises DataError without good shards.
    """

    def __init__(self, folder: Path) -> None:
        self.paths, self.ends, self.truncated = sorted(folder.glob("fineweb_val_*.bin")), [0], ""
        for path in self.paths:
            with open_file(path) as handle:
                header = np.frombuffer(handle.read(12).ljust(12, b"\0"), "<i4").tolist()
            if header[:2] != [SHARD_MAGIC, SHARD_VERSION] or len(header) < 3:
                raise DataError(
                    f"{path}: not a shard (its first words are {header}); fetch or write it again"
                )
            self.ends.append(self.ends[-1] + header[2])
            size, expected = path.stat().st_size, 4 * SHARD_HEADER_WORDS + 2 * header[2]
            if size != expected:
                self.truncated = f"{path.name} has {size:,} bytes instead of {expected:,}"
        if not self.ends[-1]:
            raise DataError(
                f"{folder}: no tokens in fineweb_val_*.bin there; "
                "give the data set's folder with --data"
            )

    def read(self, start: int, end: int) -> np.ndarray:
        parts = [
            np.fromfile(
                path,
                "<u2",
                max(0, min(end, last) - max(start, first)),
                offset=4 * SHARD_HEADER_WORDS + 2 * max(0, start - first),
            )
            for path, (first, last) in zip(self.paths, pairwise(self.ends), strict=True)
        ]
        return np.concatenate(parts).astype(np.int64)


class Originals:
    """The documents as written.

    `rest`: what the current one must go on with, None when it has gone wrong.
    """

    def __init__(self, files: list[str], vocabulary: Vocabulary) -> None:
        self.sums = dict.fromkeys(
            ("documents", "bytes", "changed_documents", "normalised_bytes"), 0
        )
        self.texts, self.rest = self.normalised(Source(tuple(files), 0), vocabulary.processor), ""

    def normalised(self, source: Source, processor: Any) -> Iterator[str]:
        """The documents as the tokenizer's normaliser leaves them,
        from which its pieces are cut.
        """
        for block in source.blocks():
            for index in range(len(block.documents)):
                text = block.parse(index)[0]
                normal = processor.normalize(text).replace(SPACE, " ") if processor else text
                values = (1, len(text.encode()), normal != text, len(normal.encode()))
                for name, value in zip(self.sums, values, strict=True):
                    self.sums[name] += value
                yield normal

    def feed(self, text: str, begins: bool, is_last: bool) -> Iterator[tuple[str, int]]:
        """A document begins or goes on with this text:
        (what is wrong, behind how many bytes of it).
        """
        if begins:
            ended_early, self.rest = bool(self.rest), next(self.texts, None)
            if ended_early or self.rest is None:
                yield "other_text", -int(ended_early)  # the token before is where it ended
        # Its last character may have been cut.
        if is_last and self.rest and not self.rest.startswith(text):
            text = text.rstrip("\ufffd")
        whole = text
        while text and self.rest is not None:
            if self.rest.startswith(text):
                self.rest = self.rest[len(text) :]
                break
            common = len(os.path.commonprefix([text, self.rest]))
            # Where the document is over and the text goes on,
            # the next document may follow without BOS.
            following = next(self.texts, None) if common == len(self.rest) else None
            text = text[common:]
            after = text.lstrip()
            self.rest, fault = None, "other_text"
            if (
                following is not None
                and after
                and after.startswith(following.lstrip()[: min(64, len(after))])
            ):
                self.rest, text, fault = following.lstrip(), after, "missing_bos"
            elif following is not None:
                self.texts = chain([following], self.texts)
            yield fault, len(whole[: len(whole) - len(text)].encode("utf-8"))
        if is_last and self.rest:
            yield "dropped_tail", len(whole.encode("utf-8"))


class Audit:
    """Counts the split by the audited table and by what its text has.

    `findings`: what differs, by name.
    """

    def __init__(
        self, split: Split, vocabulary: Vocabulary, table: Table, originals: Originals | None
    ) -> None:
        self.split, self.vocabulary = split, vocabulary
        self.table, self.originals = table, originals
        self.findings: dict[str, dict[str, Any]] = {}
        self.sums = dict.fromkeys(
            ("counted_bytes", "true_bytes", "tail_bytes", "documents", "spaces_behind_bos"), 0
        )
        self.entries = vocabulary.mistakes(table)
        for entry in np.unique(self.entries[self.entries >= 0]):
            ids = np.flatnonzero(self.entries == entry)
            values = " for ".join(
                str([int(column[ids[0]]) for column in part]) for part in (table, vocabulary.truth)
            )
            self.find(
                NAMES[entry],
                detail=f"{len(ids):,} ids such as {ids[0]} {vocabulary.pieces[ids[0]]!r}: {values}",
            )
        if vocabulary.processor and SPACE not in vocabulary.pieces:
            self.find("no_lone_space")

    def find(
        self,
        name: str,
        position: int = -1,
        *,
        tokens: int = 0,
        extra_bytes: int = 0,
        detail: str = "",
    ) -> None:
        """Notes a mistake and the tokens that show it, with the first place for each name."""
        finding = self.findings.setdefault(
            name,
            {
                "name": name,
                "meaning": MISTAKES[name],
                "tokens": 0,
                "extra_bytes": 0,
                "first": None,
                "detail": detail,
            },
        )
        finding["tokens"] += tokens
        finding["extra_bytes"] += extra_bytes
        if finding["first"] is None and position >= 0:
            document = begin = 0  # position 0 begins a document, with or without BOS
            for start in range(1, position + 1, CHUNK_TOKENS):
                tokens = self.split.read(start, min(start + CHUNK_TOKENS, position + 1))
                edges = np.flatnonzero(tokens == self.vocabulary.bos)
                document += len(edges)
                begin = start + int(edges[-1]) if len(edges) else begin
            token = int(self.split.read(position, position + 1)[0])
            finding["first"] = {
                "document": document,
                "token": position - begin,
                "position": position,
                "id": token,
                "piece": self.vocabulary.pieces[token],
            }

    def run(self, predicted: int) -> None:
        """Audits the whole split, of which `predicted` tokens behind the first are scored."""
        if self.split.truncated:
            self.find("truncated_shard", detail=self.split.truncated)
            return
        vocabulary, total, began = self.vocabulary, self.split.ends[-1], time.monotonic()
        start, before, told = 0, vocabulary.bos, began
        while start < total:
            tokens = self.split.read(start, min(start + CHUNK_TOKENS + 3, total))
            if (outside := tokens >= vocabulary.size).any():
                self.find("ids_outside_vocabulary", start + int(outside.argmax()), tokens=1)
                return
            size = min(CHUNK_TOKENS, len(tokens))
            # No character is cut.
            while size < len(tokens) and 0x80 <= vocabulary.byte[tokens[size]] < 0xC0:
                size += 1
            self.scan(start, tokens[:size], np.append(before, tokens[: size - 1]), predicted)
            start, before = start + size, tokens[size - 1]
            if time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                print(
                    f"audited {start:,} of {total:,} tokens ({100 * start // total} %), "
                    f"{(told - began) * (total - start) / start:.0f} s to go",
                    file=sys.stderr,
                    flush=True,
                )

    def scan(self, start: int, tokens: np.ndarray, previous: np.ndarray, predicted: int) -> None:
        """Audits tokens that are whole characters:
        the table first, then their decoded text and the originals.
        """
        vocabulary, truth = self.vocabulary, self.vocabulary.truth
        counted, true = self.table.count(previous, tokens), truth.count(previous, tokens)
        if vocabulary.processor:
            byte = vocabulary.byte[tokens]
            true[:-2] -= 2 * ((byte[:-2] == 0xE2) & (byte[1:-1] == 0x96) & (byte[2:] == 0x81))
        # Position 0 is never predicted.
        scored = slice(int(start == 0), max(0, predicted + 1 - start))
        self.scan_table(start, tokens, previous, counted - true, scored)
        behind_bos = truth.space[tokens] & truth.boundary[previous]
        begins = tokens == vocabulary.bos
        is_lost = vocabulary.kind[tokens] >= UNKNOWN
        if is_lost.any():
            self.find("lost_text", start + int(is_lost.argmax()), tokens=int(is_lost.sum()))
        if start == 0 and not begins[0]:
            self.find("missing_bos", 0, tokens=1)
            begins[0] = True
        parts = (counted[scored], true[scored], true[scored.stop :], begins, behind_bos)
        for name, part in zip(self.sums, parts, strict=True):
            self.sums[name] += int(part.sum())
        self.scan_texts(start, tokens, true + behind_bos, begins, is_lost)

    def scan_table(
        self,
        start: int,
        tokens: np.ndarray,
        previous: np.ndarray,
        extra_bytes: np.ndarray,
        scored: slice,
    ) -> None:
        """Notes the mistakes of the audited table, where it counts more or less than the truth."""
        where = scored.start + np.flatnonzero(extra_bytes[scored.start :])
        # If its own entry is right, that of the token before is wrong, or the vocabulary.
        entry, before = self.entries[tokens[where]], self.entries[previous[where]]
        entry = np.select([entry >= 0, before >= 0], [entry, before], NAMES.index("no_lone_space"))
        for mistake in np.unique(entry):
            chosen = where[entry == mistake]
            self.find(
                NAMES[mistake],
                start + int(chosen[0]),
                tokens=len(chosen),
                extra_bytes=int(extra_bytes[chosen[chosen < scored.stop]].sum()),
            )

    def scan_texts(
        self,
        start: int,
        tokens: np.ndarray,
        lengths: np.ndarray,
        begins: np.ndarray,
        is_lost: np.ndarray,
    ) -> None:
        """Compares the decoded text of each document with its tokens' bytes and the originals."""
        vocabulary = self.vocabulary
        ends = np.append(0, np.cumsum(lengths))
        edges = np.union1d(0, np.flatnonzero(begins))
        texts = vocabulary.texts(np.split(tokens, edges[1:]))
        bounds = pairwise([*edges.tolist(), len(tokens)])
        for text, (first, stop) in zip(texts, bounds, strict=True):
            is_last, ids = start + stop == self.split.ends[-1], tokens[first:stop]
            faults = [*self.originals.feed(text, begins[first], is_last)] if self.originals else []
            data = text.encode("utf-8")
            # Unknown ids decode to a mark of some length, and are noted already.
            if len(data) != ends[stop] - ends[first] and not is_lost[first:stop].any():
                raw = b"".join([vocabulary.surfaces[i] for i in ids.tolist()])
                offset = len(os.path.commonprefix([raw, data]))
                is_tail = is_last and len(raw) - offset < 4
                faults += [("dropped_tail" if is_tail else "broken_characters", offset)]
            for name, offset in faults:
                at = int(np.searchsorted(ends[1:], ends[first] + offset, side="right"))
                self.find(name, start + min(at, stop - 1), tokens=1)


def audit(options: argparse.Namespace) -> dict[str, Any]:
    """The result as one object. Raises DataError if the data cannot be audited."""
    vocabulary, length = Vocabulary(Tokenizer(options.tokenizer)), options.seq_len
    table = read_table(options.table, vocabulary.size) if options.table else vocabulary.truth
    split = Split(options.data)
    originals = Originals(options.docs, vocabulary) if options.docs else None
    predicted = (split.ends[-1] - 1) // length * length
    if predicted < 1:
        raise DataError(
            f"{options.data}: {split.ends[-1]} tokens are no sequence of {length}; "
            "give a lower --seq-len"
        )
    run = Audit(split, vocabulary, table, originals)
    wanted, name = recorded_tokenizer(options.data)
    found = sha256(read_file(options.tokenizer))
    if wanted and found != wanted:
        own = os.path.normpath(options.data / name)
        remedy = f"give --tokenizer {own}" if os.path.isfile(own) else f"{own} is missing"
        detail = f"it has sha256 {wanted:.12}, {options.tokenizer} has {found:.12}: {remedy}"
        run.find("other_tokenizer", detail=detail)
    run.run(predicted)
    published = {name: size for name, (tokens, size) in PUBLISHED.items() if tokens == predicted}
    matches = [name for name, size in published.items() if abs(run.sums["true_bytes"] - size) <= 1]
    if published and not matches:
        run.find(
            "published_bytes_differ",
            detail=" or ".join(f"{name} has {published[name]:,}" for name in published),
        )
    return {
        "verdict": "mistake" if run.findings else "proved" if originals else "not proved",
        "tokenizer": str(options.tokenizer),
        "recorded": bool(wanted),
        "ids": vocabulary.size,
        "data": str(options.data),
        "shards": len(split.paths),
        "tokens": split.ends[-1],
        "seq_len": length,
        "predicted_tokens": predicted,
        "tail_tokens": split.ends[-1] - 1 - predicted,
        "table": str(options.table or "the trainer's table"),
        **run.sums,
        "published": "".join(matches),
        "originals": originals.sums if originals else None,
        "findings": [*run.findings.values()],
    }


def report(r: dict[str, Any]) -> Iterator[str]:
    """The result for people; the verdict is the last line."""
    record = (
        "compared with tokenizer.sha256" if r["recorded"] else "no tokenizer.sha256 to compare with"
    )
    yield (
        f"tokenizer   {{tokenizer}}: {{ids:,}} ids; {record}\n"
        "split       {data}: {shards} shards, {documents:,} documents, {tokens:,} tokens\n"
        "predicted   {predicted_tokens:,} tokens in sequences of {seq_len:,}\n"
        "tail        {tail_tokens:,} tokens, {tail_bytes:,} bytes after them, "
        "which are not predicted and not counted\n"
        "counted     {counted_bytes:,} bytes by {table}; their text has {true_bytes:,}; "
        "the {spaces_behind_bos:,} spaces directly after BOS are in neither number"
    ).format(**r)
    if r["originals"]:
        yield (
            "originals   {documents:,} documents, {bytes:,} bytes; "
            "compared with the {normalised_bytes:,} bytes "
            "that the tokenizer's normaliser makes of them ({changed_documents:,} changed)"
        ).format(**r["originals"])
    else:
        yield "originals   not compared (--docs)"
    yield f"published   {r['published'] or 'none of the known splits has these numbers'}"
    for f in r["findings"]:
        first = "; first at document {document}, token {token}, position {position}: {id} {piece!r}"
        yield (
            f"{f['name']}: {f['meaning']}"
            f"{f['tokens'] and '; {tokens:,} tokens, {extra_bytes:+,} bytes'.format(**f) or ''}"
            f"{first.format(**f['first']) if f['first'] else ''}"
            f"{f['detail'] and '; ' + f['detail']}"
        )
    names = ", ".join(f["name"] for f in r["findings"])
    counted, true = r["counted_bytes"], max(1, r["true_bytes"])
    factor = ""
    if counted not in (0, true):
        factor = f"; the true val_bpb is {counted / true:.4f} times the counted one"
    if names:
        yield f"mistake: {names}{factor}"
    elif r["originals"]:
        changed, before, after = (
            r["originals"][name] for name in ("changed_documents", "bytes", "normalised_bytes")
        )
        note = (
            f", after the tokenizer's normaliser changed {changed:,} of them: {before:,} bytes as "
            f"written are {after:,}; bits per byte are those of the changed text"
        )
        yield (
            f"proved: the text of all {r['documents']:,} documents has the bytes that are counted"
            f"{note if changed else ''}"
        )
    else:
        yield (
            "not proved: no mistake was found, but another tokenizer of this size would show none; "
            "give the documents with --docs"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    model, folder = "a SentencePiece .model or a byte .json", "folder of fineweb_val_*.bin"
    add("--tokenizer", type=Path, required=True, metavar="M", help=model)
    add("--data", type=Path, required=True, metavar="DIR", help=folder)
    add("--docs", nargs="+", metavar="FILE", help="the documents that the split was made from")
    add("--table", type=Path, metavar="FILE", help="audit this table, not the trainer's")
    add("--seq-len", type=positive, default=1024, metavar="T", help="TRAIN_SEQ_LEN (default: 1024)")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        result = audit(options)
    except (DataError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(json.dumps(result, indent=2) if options.json else "\n".join(report(result)))
    return {"proved": 0, "mistake": 1, "not proved": 3}[result["verdict"]]


if __name__ == "__main__":
    run_tool(main)
