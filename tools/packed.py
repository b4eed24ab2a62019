"""Scripts as texts: their packed form, what two of them differ in.

A packed script unpacks and runs itself; comments and docstrings are left out of it. Nothing is run
here.
"""

import ast
import base64
import hashlib
import lzma
import sys
import warnings
import zlib
from functools import cache
from itertools import zip_longest
from os.path import commonprefix

MAX_SOURCE = 1_000_000  # bytes of a script that is parsed; those of the field have a sixth
MAX_UNPACKED = 16_000_000  # bytes taken out of a packed script
# The packed form runs its source under its own name, so that __file__ is the file submitted: its
# text is what the log begins with, its size is the code size. linecache hands the readable lines to
# whatever asks for them: inspect.getsource, torch.compile, Triton, tracebacks.
PACKED = """\
# Packed; sha256 of the source in it: {sha256}
import base64, linecache, lzma, sys, zlib
_data = b"{literal}"
if zlib.crc32(_data) != {crc}:
    sys.exit("a changed packed script: edit the readable one, then package.py --pack")
_source = lzma.decompress(base64.b85decode(_data))
_lines = [_line + "\\n" for _line in _source.decode().split("\\n")]
linecache.cache[__file__] = len(_source), None, _lines, __file__
exec(compile(_source, __file__, "exec"))
"""
# pb=0: for text, half a per cent smaller than the preset.
FILTERS = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]
RAW = [{"id": lzma.FILTER_LZMA2}]  # as some records are packed


def pack(source: bytes) -> bytes:
    """The submitted form of a script. Raises ValueError, in words, for what cannot be packed."""
    if unpacked(source):
        raise ValueError("it is packed already: name the readable script")
    return packed_form(stripped(source))


def packed_form(source: bytes) -> bytes:
    literal = base64.b85encode(lzma.compress(source, lzma.FORMAT_ALONE, filters=FILTERS))
    values = {"sha256": hashlib.sha256(source).hexdigest(), "crc": zlib.crc32(literal)}
    return PACKED.format(literal=literal.decode(), **values).encode()


def stripped(source: bytes) -> bytes:
    """A script as Python writes its syntax tree: without comments, docstrings and empty lines.

    Raises ValueError, in words, for what Python cannot read or write.
    """
    tree = parsed(source)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    lines = [line for line in ast.unparse(tree).splitlines(keepends=True) if line.strip()]
    result = "".join([*lines, "\n"]).encode()
    if ast.dump(parsed(result)) != ast.dump(tree):
        raise ValueError("Python does not write it as it was read: submit it as it is")
    return result


def parsed(source: bytes) -> ast.Module:
    """Raises ValueError, in words."""
    if len(source) > MAX_SOURCE:
        raise ValueError(f"it is longer than {MAX_SOURCE:,} bytes, and not parsed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except SyntaxError as error:
        where = f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)
        python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
        raise ValueError(f"{python} does not compile it: {where}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"it cannot be parsed: {type(error).__name__}") from error


def unpacked(text: bytes) -> bytes | None:
    """The script inside a packed one of ours or of the challenge's records: lzma in base 85. None:
    it is not packed, or damaged."""
    try:
        nodes = list(ast.walk(parsed(text)))
    except ValueError:
        return None
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    literal = max((v for v in values if isinstance(v, (str, bytes))), key=len, default="")
    for form in ({"memlimit": 256 << 20}, {"format": lzma.FORMAT_RAW, "filters": RAW}):
        try:
            data = base64.b85decode(literal)
            source = lzma.LZMADecompressor(**form).decompress(data, MAX_UNPACKED)
            source.decode("utf-8")
        except (lzma.LZMAError, ValueError, EOFError, MemoryError):
            continue
        if b"import" in source:
            return source
    return None


@cache
def plain_form(text: bytes) -> bytes:
    """What decides what a script does: unpacked, without comments; as it is if it is no Python."""
    text = unpacked(text) or text
    try:
        return stripped(text)
    except (ValueError, RecursionError):
        return text


def difference(first: bytes, second: bytes) -> str:
    """In which line two scripts differ, packed or not; nothing but comments: empty."""
    texts = (first, second) if first == second else (plain_form(first), plain_form(second))
    both = ([line.rstrip() for line in text.strip().split(b"\n")] for text in texts)
    for number, pair in enumerate(zip_longest(*both, fillvalue=b"(no such line)"), 1):
        if pair[0] != pair[1]:
            here, there = (line.decode("utf-8", "replace").strip() for line in pair)
            start = max(0, len(commonprefix([here, there])) - 30)  # long lines: where they differ
            words = repr(here[start : start + 80]), repr(there[start : start + 80])
            return f"line {number} without comments is {words[0]}, not {words[1]}"
    return ""
