"""A script's text, looked at without running it: its packed form, and what it needs besides."""

import ast
import base64
import bz2
import hashlib
import lzma
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_SCRIPT, MAX_UNPACKED = 4_000_000, 16_000_000  # bytes: parsed, and taken out of a packed one
MIN_PACKED = 100  # characters of a literal that may be a packed script
UNKNOWN = object()  # a default that is no plain value
MAX_DEPTH = 3  # packed inside packed
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
FETCHES = re.compile(
    r"hf_hub_download|snapshot_download|load_dataset|urlopen|urlretrieve|get_kernel|"
    r"(?:requests|httpx)\.get|(?:gdown|wget)\.download"
)
COMMAND = re.compile(r"subprocess|popen|os\.system", re.IGNORECASE)
FETCHING_COMMAND = re.compile(r"\b(curl|wget|git\W{1,4}clone|pip3?\W{1,4}install)\b")


@dataclass
class Script:
    """What is known of a script's text."""

    text: bytes  # readable: of a packed script that inside
    packed: bool = False
    opaque: bool = False  # packed by something that this does not unpack
    error: str | None = None  # why it does not parse
    imports: dict[str, tuple[int, bool]] = field(default_factory=dict)  # module: (line, optional)
    fetches: dict[str, int] = field(default_factory=dict)  # by what it downloads: line


def pack(source: bytes) -> bytes:
    """The submitted form of a script: it unpacks and runs itself, and nothing else differs.

    Raises ValueError, in words, for what cannot be packed.
    """
    try:
        source.decode("utf-8")
        compile(source, "train_gpt.py", "exec", dont_inherit=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8: save it as UTF-8") from error
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"it does not compile: {fault(error)}: mend that first") from error
    if promised_sha256(source) or look(source).packed:
        raise ValueError("it is packed already: name the readable script")
    return packed_form(source)


def packed_form(source: bytes) -> bytes:
    """`source` as `pack` writes it, whatever it is."""
    data = lzma.compress(source, format=lzma.FORMAT_ALONE, filters=FILTERS)
    literal = base64.b85encode(data).decode()
    return PACKED.format(sha256=hashlib.sha256(source).hexdigest(), literal=literal).encode()


def promised_sha256(text: bytes) -> str | None:
    """The hash in the header line of a script that `pack` has made."""
    found = HEADER.match(text)
    return found[1].decode() if found else None


def look(text: bytes, depth: int = MAX_DEPTH) -> Script:
    """Parses a script, and the one packed inside. Raises nothing, whatever the text."""
    script = Script(text)
    if len(text) > MAX_SCRIPT:
        script.error = f"{len(text):,} bytes, more than {MAX_SCRIPT:,} are not read"
        return script
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
        inner = unpack(tree) if depth else None
        script.opaque = inner is None and max(map(len, literals(tree)), default=0) > len(text) / 2
        if inner is not None:
            script = look(inner, depth - 1)
            script.packed = True
            return script
        script.imports = imports(tree)
        script.fetches = fetches(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        script.error = fault(error)
        # Of a newer Python, perhaps: what it imports is seen, not whether it could do without.
        named = re.findall(rb"(?m)(?:^|[;:])[ \t]*(?:from|import)[ \t]+([\w.]+)", text)
        script.imports = {name.decode(): (0, True) for name in named}
    return script


def fault(error: Exception) -> str:
    """Why a text is no script, in words."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)
    return f"{type(error).__name__}: {error}"[:200]


def settings(text: bytes) -> dict[str, Any]:
    """The settings that a script takes from its environment, by lower-case name: their defaults.

    Those of its class Config, and each os.environ.get("NAME", default); UNKNOWN: no plain value.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        names = re.findall(rb"environ(?:\.get\(|\[)\s*[\"'](\w+)", text)
        return {name.decode().lower(): UNKNOWN for name in names}
    constants = string_constants(tree)
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "Config":
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    found[line.target.id] = plain_value(line.value, constants)
        if isinstance(node, ast.Call) and re.search(
            r"(environ\.get|getenv)$", ast.unparse(node.func)
        ):
            names = [one.value for one in node.args[:1] if isinstance(one, ast.Constant)]
            for name in names:
                default = node.args[1] if len(node.args) > 1 else None
                found.setdefault(str(name).lower(), plain_value(default, constants))
    return found


def string_constants(tree: ast.Module) -> dict[str, str]:
    """NAME = "text" at the top, and what `NAME +=` adds to it."""
    found: dict[str, str] = {}
    for node in tree.body:
        value = getattr(node, "value", None)
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            continue
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = value.value
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = found.get(node.target.id, "") + value.value
    return found


def plain_value(node: ast.AST | None, constants: dict[str, str]) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if node is None:
        return UNKNOWN
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN


def imports(tree: ast.AST) -> dict[str, tuple[int, bool]]:
    """Modules by name: (line, whether the script may do without), from the first place of each."""
    found: dict[str, tuple[int, bool]] = {}
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, optional = todo.pop(0)
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        for name in names:
            found.setdefault(name, (node.lineno, optional))
        inside = optional or isinstance(
            node, (ast.Try, ast.If, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        )
        todo += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found


def fetches(tree: ast.AST) -> dict[str, int]:
    """Calls and commands that download something: their lines."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)[-80:]
        words = FETCHES.search(called)
        if COMMAND.search(called):
            words = FETCHING_COMMAND.search(ast.unparse(node))
        if words:
            found.setdefault(re.sub(r"\W+", " ", words[0]), node.lineno)
    return found


def unpack(tree: ast.AST) -> bytes | None:
    """The script that a packed one carries as a compressed literal."""
    for literal in sorted(literals(tree), key=len, reverse=True)[:3]:
        for data in decoded(literal):
            text = inflated(data)
            if text and b"import" in text:
                return text
    return None


def literals(tree: ast.AST) -> list[bytes]:
    """The long texts in a script that may be another one."""
    return [
        node.value if isinstance(node.value, bytes) else node.value.encode("utf-8", "replace")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, (str, bytes))
        and len(node.value) >= MIN_PACKED
    ]


def decoded(literal: bytes) -> Iterator[bytes]:
    for decode in (bytes, base64.b85decode, base64.b64decode, base64.a85decode):
        try:
            yield decode(literal)
        except ValueError:
            continue


def inflated(data: bytes) -> bytes | None:
    """Decompressed UTF-8 text of at most MAX_UNPACKED bytes; None: it is none."""
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
