"""A submitted script looked at without running it:
does it compile, what does it import, is it packed?

It is parsed in a process of its own: nested deep enough, a text exhausts the parser's memory or
stack and takes its process along. That process has limits of memory and time, reads the text from
its standard input, imports nothing of the folder, and never executes what it compiled.
"""

import ast
import base64
import hashlib
import json
import lzma
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_SCRIPT, MAX_UNPACKED = 2_000_000, 8_000_000  # bytes parsed; bytes of a packed script
MEMORY, SECONDS = 2 << 30, 20  # of the parsing process
MAX_IMPORTS = 500
STUB = b'import base64,lzma\nexec(lzma.decompress(base64.b85decode("")))\n'


@dataclass
class Import:
    """A module named at import."""

    module: str
    line: int
    guarded: bool  # inside try or a function, so that the script may do without it


@dataclass
class Script:
    """What is known of a script's text."""

    bytes: int
    error: str | None = None  # why it does not compile
    unsure: str | None = None  # why it could not be told
    imports: list[Import] = field(default_factory=list)
    unpacked_bytes: int | None = None  # of the script inside a packed one
    unpacked_sha256: str | None = None


def look(text: bytes) -> Script:
    """Raises nothing, whatever the text."""
    script = Script(len(text))
    if len(text) > MAX_SCRIPT:
        script.unsure = f"{len(text):,} bytes: more than {MAX_SCRIPT:,} are not parsed"
        return script
    command = [sys.executable, "-I", "-S", "-B", "-W", "ignore", __file__]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, timeout=2 * SECONDS, check=False
        )
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        script.error = f"parsing it takes more than {SECONDS} s"
        return script
    except (OSError, ValueError) as error:
        script.unsure = f"the process that parses it failed: {error}"
        return script
    if found is None:
        script.error = "Python's parser breaks off on it: nested too deep, or too large"
        return script
    script.error, script.unpacked_bytes, script.unpacked_sha256 = (
        found.get(name) for name in ("error", "unpacked_bytes", "unpacked_sha256")
    )
    script.imports = [Import(*one) for one in found.get("imports", [])]
    return script


def packed_size(text: bytes) -> int:
    """Bytes of the script as it would be shipped packed:
    lzma, in base 85, behind a line that unpacks it.
    """
    # A dictionary of the text's own size: the result is the same, the preset's would be 64 MiB.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    filters[0]["dict_size"] = max(len(text), 4096)
    packed = len(lzma.compress(text, format=lzma.FORMAT_XZ, check=lzma.CHECK_NONE, filters=filters))
    return -(-packed // 4) * 5 + len(STUB)


# --- in the parsing process ---


def parse(text: bytes) -> dict[str, Any]:
    """The facts about a text, for `look`."""
    result: dict[str, Any] = {}
    try:
        tree = ast.parse(text, "train_gpt.py")
        # Some errors, such as a return outside a function, show only when code is made.
        # It is dropped, not run.
        compile(tree, "train_gpt.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        return {"error": f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)}
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    inner = unpack(tree)
    if inner is not None:
        result.update(unpacked_bytes=len(inner), unpacked_sha256=hashlib.sha256(inner).hexdigest())
        try:
            tree = ast.parse(inner, "train_gpt.py")
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            return {
                **result,
                "error": f"the script packed inside does not compile: {type(error).__name__}",
            }
    result["imports"] = list(imports(tree))[:MAX_IMPORTS]
    return result


def imports(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, guarded = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, guarded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node.lineno, guarded
        inside = guarded or isinstance(
            node, (ast.Try, ast.If, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        )
        todo += [(child, inside) for child in ast.iter_child_nodes(node)]


def unpack(tree: ast.AST) -> bytes | None:
    """The script inside one that carries it as a compressed literal and hands it to exec."""
    names = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, (ast.Name, ast.Attribute))
    }
    if "exec" not in names or not any(
        "decompress" in name.lower() or "decode" in name for name in names
    ):
        return None
    literals = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, (str, bytes))
        and len(node.value) > 1000
    ]
    for literal in sorted(literals, key=len, reverse=True)[:3]:
        data = literal if isinstance(literal, bytes) else literal.encode("utf-8", "replace")
        for text in filter(None, (inflate(plain) for plain in decoded(data))):
            return text
    return None


def decoded(data: bytes) -> Iterator[bytes]:
    for decode in (bytes, base64.b85decode, base64.b64decode, base64.a85decode):
        try:
            yield decode(data)
        except ValueError:
            continue


def inflate(data: bytes) -> bytes | None:
    """Decompressed, at most MAX_UNPACKED bytes; None: not compressed, or by something unknown."""

    def xz() -> bytes:
        return lzma.LZMADecompressor(memlimit=256 << 20).decompress(data, MAX_UNPACKED)

    def deflate() -> bytes:
        return zlib.decompressobj(wbits=47).decompress(data, MAX_UNPACKED)

    for one in (xz, deflate):
        try:
            return one()
        except (lzma.LZMAError, zlib.error, EOFError, MemoryError):
            continue
    return None


def main() -> int:
    import resource  # here, since only the parsing process is to be limited

    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, SECONDS)):
        try:
            resource.setrlimit(limit, (most, most))
        except (OSError, ValueError):
            # Not to be had on every system; the parent's deadline remains.
            continue
    print(json.dumps(parse(sys.stdin.buffer.read(MAX_SCRIPT + 1))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
