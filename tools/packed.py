"""Pack scripts, unpack them, and compare the texts of two scripts. No script is run here.

A packed script unpacks and runs itself. Comments and docstrings are left out of it. This module
builds on the standard library only.
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

# Size limits in bytes: of a script that is parsed (scripts of the challenge have a sixth of it),
# and of a script that is taken out of a packed one.
MAX_SOURCE = 1_000_000
MAX_UNPACKED = 16_000_000
# The packed script runs its source under its own file name, so that __file__ is the submitted file:
# the log begins with the text of this file, and its size is the code size. linecache provides the
# readable lines for inspect.getsource, torch.compile, Triton and tracebacks.
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
# pb=0 makes text half a percent smaller than the preset does.
FILTERS = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]
RAW = [{"id": lzma.FILTER_LZMA2}]  # the format of some records


def pack(source: bytes) -> bytes:
    """Return the packed form of a script, which is submitted. Raises ValueError with the reason
    if the script cannot be packed."""
    if unpack_script(source):
        raise ValueError("it is packed already; give the readable script")
    return packed_form(strip_comments(source))


def packed_form(source: bytes) -> bytes:
    """Return a script that contains `source` compressed, and runs it."""
    literal = base64.b85encode(lzma.compress(source, lzma.FORMAT_ALONE, filters=FILTERS))
    values = {"sha256": hashlib.sha256(source).hexdigest(), "crc": zlib.crc32(literal)}
    return PACKED.format(literal=literal.decode(), **values).encode()


def strip_comments(source: bytes) -> bytes:
    """Return a script as Python writes its syntax tree: without comments, docstrings and empty
    lines. Raises ValueError with the reason if Python cannot read or write the script."""
    tree = parse_script(source)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    lines = [line for line in ast.unparse(tree).splitlines(keepends=True) if line.strip()]
    result = "".join([*lines, "\n"]).encode()
    if ast.dump(parse_script(result)) != ast.dump(tree):
        raise ValueError(
            "Python writes another script than it has read; submit the script unpacked"
        )
    return result


def parse_script(source: bytes) -> ast.Module:
    """Return the syntax tree of a script. Raises ValueError with the reason if there is none."""
    if len(source) > MAX_SOURCE:
        raise ValueError(
            f"it is longer than {MAX_SOURCE:,} bytes, which is the most that is parsed"
        )
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


def unpack_script(text: bytes) -> bytes | None:
    """Return the script inside a packed script of ours or of the challenge's records (lzma in base
    85); None if the script is not packed, or damaged."""
    try:
        nodes = list(ast.walk(parse_script(text)))
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
def comparable_form(text: bytes) -> bytes:
    """Return a script unpacked and without comments, so that scripts that do the same are equal; if
    it is not Python, return it unchanged."""
    text = unpack_script(text) or text
    try:
        return strip_comments(text)
    except (ValueError, RecursionError):
        return text


def describe_difference(first: bytes, second: bytes) -> str:
    """Return in words in which line two scripts differ, packed or not; empty if they differ only in
    comments."""
    if first == second:
        return ""
    texts = comparable_form(first), comparable_form(second)
    lines = ([line.rstrip() for line in text.strip().split(b"\n")] for text in texts)
    for number, pair in enumerate(zip_longest(*lines, fillvalue=b"(no such line)"), 1):
        if pair[0] != pair[1]:
            left, right = (line.decode("utf-8", "replace").strip() for line in pair)
            # Of long lines, only the part where they differ is shown.
            start = max(0, len(commonprefix([left, right])) - 30)
            words = repr(left[start : start + 80]), repr(right[start : start + 80])
            return f"line {number} without comments is {words[0]}, not {words[1]}"
    return ""
