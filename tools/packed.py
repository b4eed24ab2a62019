"""The packed form of a script: one that unpacks and runs itself. Nothing is run here."""

import ast
import base64
import bz2
import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterator

MAX_UNPACKED = 16_000_000  # bytes taken out of a packed script
MIN_PACKED = 100  # characters of a literal that may be a packed script
# The packed form runs its source under its own name, so that __file__ is the file submitted: its
# text is what the log begins with, its size is the code size. linecache hands the readable lines to
# whatever asks for them: inspect.getsource, torch.compile, Triton, tracebacks.
PACKED = """\
# Packed; sha256 of the readable source: {sha256}
import base64, linecache, lzma, sys, zlib
_data = b"{literal}"
if zlib.crc32(_data) != {crc}:
    sys.exit("a changed packed script: edit the readable one, then package.py --pack")
_source = lzma.decompress(base64.b85decode(_data))
_lines = [_line + "\\n" for _line in _source.decode().split("\\n")]
linecache.cache[__file__] = len(_source), None, _lines, __file__
exec(compile(_source, __file__, "exec"))
"""
HEADER = PACKED.split("{", 1)[0].encode()
# pb=0: for text, half a per cent smaller than the preset.
FILTERS = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]
# All that a script may be made of that does nothing but unpack and run one literal.
DECODERS = {"base64", "lzma", "zlib", "bz2", "gzip", "brotli"}
CALLS = {"exec", "compile", "decompress", "decode", "b85decode", "b64decode", "a85decode"}
TEXTS = {"exec", "utf-8", "utf8", "id", "<string>", "train_gpt.py"}
BARE = (ast.Module, ast.Import, ast.ImportFrom, ast.alias, ast.Expr, ast.Assign, ast.Call)
BARE += (ast.Name, ast.Attribute, ast.Constant, ast.List, ast.Dict, ast.keyword, ast.expr_context)


def packed_form(source: bytes, literal: bytes = b"") -> bytes:
    """`source` as a script that unpacks and runs it; `literal`: with this payload."""
    data = b"" if literal else lzma.compress(source, lzma.FORMAT_ALONE, filters=FILTERS)
    literal = literal or base64.b85encode(data)
    sha256 = hashlib.sha256(source).hexdigest()
    crc = zlib.crc32(literal)
    return PACKED.format(sha256=sha256, literal=literal.decode(), crc=crc).encode()


def is_ours(text: bytes) -> bool:
    """Does it begin as the scripts that `packed_form` makes?"""
    return text.startswith(HEADER)


def literals(tree: ast.AST) -> list[bytes]:
    """The long texts in a script that may be another script."""
    return [
        node.value if isinstance(node.value, bytes) else node.value.encode("utf-8", "replace")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, (str, bytes))
        and len(node.value) >= MIN_PACKED
    ]


def is_only_packed(text: bytes, tree: ast.Module, source: bytes) -> bool:
    """Does a packed script hold nothing beside `source` but the code that unpacks and runs it?"""
    found = literals(tree)
    if len(found) != 1:
        return False
    if is_ours(text):
        return text == packed_form(source, found[0])
    nodes = list(ast.walk(tree))
    froms = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imports = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    names = [getattr(one, "attr", getattr(one, "id", "")) for one in functions]
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    short = {value for value in values if isinstance(value, str) and len(value) < MIN_PACKED}
    return (
        all(isinstance(node, BARE) for node in nodes)
        and froms | imports <= DECODERS
        and all(isinstance(node, ast.Name) for node in stored)
        and set(names) <= CALLS
        and short <= TEXTS
        and names.count("exec") == 1
    )


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
    """Decompressed UTF-8 text of at most MAX_UNPACKED bytes; None: the data is not such a text."""
    raw = [{"id": lzma.FILTER_LZMA2}]
    ways: list[Callable[[], bytes]] = [
        lambda: lzma.LZMADecompressor(memlimit=256 << 20).decompress(data, MAX_UNPACKED),
        lambda: lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=raw).decompress(data, MAX_UNPACKED),
        lambda: zlib.decompressobj(wbits=47).decompress(data, MAX_UNPACKED),  # zlib, gzip
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
