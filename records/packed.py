"""The packed form of a script: one that unpacks and runs itself. Nothing is run here."""

import ast
import base64
import bz2
import hashlib
import lzma
import re
import zlib
from collections.abc import Callable, Iterator

MAX_UNPACKED = 16_000_000  # bytes taken out of a packed script
MIN_PACKED = 100  # characters of a literal that may be a packed script
# The packed form runs its source under its own name, so that __file__ is the file submitted: its
# text is what the log begins with, its size is the code size. linecache hands the readable lines to
# whatever asks for them: inspect.getsource, torch.compile, Triton, tracebacks.
PACKED = """\
# Packed; sha256 of the readable source: {sha256}
import base64, linecache, lzma
_source = lzma.decompress(base64.b85decode("{literal}"))
_lines = [_line + "\\n" for _line in _source.decode().split("\\n")]
linecache.cache[__file__] = len(_source), None, _lines, __file__
exec(compile(_source, __file__, "exec"))
"""
HEADER = re.compile(rb"# Packed; sha256 of the readable source: ([0-9a-f]{64})\n")
# pb=0: for text, half a per cent smaller than the preset.
FILTERS = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]


def packed_form(source: bytes) -> bytes:
    """`source` as a script that unpacks and runs it."""
    data = lzma.compress(source, format=lzma.FORMAT_ALONE, filters=FILTERS)
    literal = base64.b85encode(data).decode()
    return PACKED.format(sha256=hashlib.sha256(source).hexdigest(), literal=literal).encode()


def promised_sha256(text: bytes) -> str | None:
    """The hash in the first line of a script that `packed_form` has made."""
    header = HEADER.match(text)
    return header[1].decode() if header else None


def literals(tree: ast.AST) -> list[bytes]:
    """The long texts in a script that may be another script."""
    return [
        node.value if isinstance(node.value, bytes) else node.value.encode("utf-8", "replace")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, (str, bytes))
        and len(node.value) >= MIN_PACKED
    ]


def unpack(texts: list[bytes]) -> bytes | None:
    """The script that one of the longest literals carries, compressed; None: no script."""
    for literal in sorted(texts, key=len, reverse=True)[:3]:
        for data in decoded(literal):
            text = inflated(data)
            if text and b"import" in text:
                return text
    return None


def decoded(literal: bytes) -> Iterator[bytes]:
    for decode in (bytes, base64.b85decode, base64.b64decode, base64.a85decode):
        try:
            yield decode(literal)
        except ValueError:
            continue


def inflated(data: bytes) -> bytes | None:
    """Decompressed UTF-8 text of at most MAX_UNPACKED bytes; None: the data is no such text."""
    raw = [{"id": lzma.FILTER_LZMA2}]
    ways: list[Callable[[], bytes]] = [
        lambda: lzma.LZMADecompressor(memlimit=256 << 20).decompress(data, MAX_UNPACKED),
        lambda: lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=raw).decompress(data, MAX_UNPACKED),
        lambda: zlib.decompressobj(wbits=47).decompress(data, MAX_UNPACKED),  # zlib, gzip
        lambda: zlib.decompressobj(wbits=-15).decompress(data, MAX_UNPACKED),  # raw
        lambda: bz2.BZ2Decompressor().decompress(data, MAX_UNPACKED),
    ]
    for way in ways:
        try:
            text = way()
            text.decode("utf-8")
        except (lzma.LZMAError, zlib.error, OSError, ValueError, EOFError, MemoryError):
            continue
        return text
    return None
