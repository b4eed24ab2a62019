"""Static facts of a script: what it imports, downloads, names and takes as settings.

Nothing of it is run. The time taken grows linearly with the length of the text.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from packed import literals, packed_form, promised_sha256, unpack

MAX_SCRIPT = 2_000_000  # bytes that are parsed
MAX_FSTRING = 10_000  # bytes of one f-string: Python 3.11 needs quadratic time for a long one
MAX_DEPTH = 3  # packed inside packed
MAX_NODES = 200  # of a command that are looked at
MAX_NAME = 300  # characters of a text that may name a file
UNKNOWN = object()  # a default that is no plain value

STRINGS = re.compile(
    rb"#[^\n]*|(?P<prefix>\b[a-zA-Z]{1,2})?(?:"
    rb'"""(?:[^"\\]+|\\.|"(?!""))*(?:""")?|'
    rb"'''(?:[^'\\]+|\\.|'(?!''))*(?:''')?|"
    rb'"(?:[^"\\\n]+|\\.)*"?|'
    rb"'(?:[^'\\\n]+|\\.)*'?)",
    re.DOTALL,
)
DOWNLOADS = re.compile(
    r"hf_hub_download|snapshot_download|load_dataset|urlopen|urlretrieve|get_kernel|"
    r"hub\.load|load_state_dict_from_url|(?:requests|httpx)\.get|(?:gdown|wget)\.download"
)
COMMAND = re.compile(r"subprocess|popen|os\.system", re.IGNORECASE)
DOWNLOADING_COMMAND = re.compile(r"\b(curl|wget|git\W{1,4}clone|pip3?\W{1,4}install)\b")
# Modules with which a script reaches a network, or runs machine code of its own.
REACHING = re.compile(
    r"(socket|http|urllib|requests|httpx|aiohttp|ftplib|smtplib|ctypes|cffi"
    r"|torch\.utils\.cpp_extension|torch\.hub)(\.|$)"
)
TRAINING_FILES = re.compile(r"train\w*(file|shard|data|pattern|path|glob)\w*|data_train", re.I)
VALIDATION = re.compile(r"fineweb_val_|(^|[/_])val(idation)?[_*/]", re.IGNORECASE)


class Import(NamedTuple):
    """Where a module is imported first, and whether the script may do without it."""

    line: int
    optional: bool


@dataclass(frozen=True)
class Script:
    """What is known of a script's text."""

    text: bytes  # readable: of a packed script the one inside
    packed: bool = False
    opaque: bool = False  # packed in a way that this module does not unpack
    error: str | None = None  # why it was not parsed
    imports: Mapping[str, Import] = field(default_factory=dict)  # by module
    downloads: Mapping[str, int] = field(default_factory=dict)  # the call or command: its line
    reaching: Mapping[str, int] = field(default_factory=dict)  # module of REACHING: its line
    validation: Mapping[str, int] = field(default_factory=dict)  # trained on: its line
    named: frozenset[str] = frozenset()  # last parts of the paths in its texts
    runs_files: bool = False  # it calls exec or runpy

    @cached_property
    def imported(self) -> dict[str, Import]:
        """By module, and by the package that a module lies in."""
        names: dict[str, Import] = {}
        for module, place in self.imports.items():
            module = module.lstrip(".")
            names.setdefault(module, place)
            names.setdefault(module.split(".")[0], place)
        return names


# --- reading ---


@lru_cache(maxsize=16)
def look(text: bytes, depth: int = MAX_DEPTH) -> Script:
    """The facts of a script, and of the one packed inside it. Raises nothing, whatever the text."""
    try:
        tree = parse(text)
        texts = literals(tree)
        inside = unpack(texts) if depth else None
        if inside is not None:
            return replace(look(inside, depth - 1), packed=True)
        opaque = max(map(len, texts), default=0) > len(text) / 2
        return replace(facts_of_tree(tree, text), opaque=opaque)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return facts_of_text(text, fault(error))


def parse(text: bytes) -> ast.Module:
    """Raises SyntaxError, ValueError, RecursionError or MemoryError for what is not parsed."""
    if len(text) > MAX_SCRIPT:
        raise ValueError(f"{len(text):,} bytes, more than {MAX_SCRIPT:,} are not read")
    for string in STRINGS.finditer(text):
        formatted = b"f" in (string["prefix"] or b"").lower()
        if formatted and len(string[0]) > MAX_FSTRING:
            number = text.count(b"\n", 0, string.start()) + 1
            raise ValueError(f"line {number}: an f-string of {len(string[0]):,} bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def fault(error: Exception) -> str:
    """Why a text was not parsed, in words."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)
    if type(error) is ValueError:
        return str(error)[:200]
    return f"{type(error).__name__}: {error}"[:200]


def facts_of_tree(tree: ast.Module, text: bytes) -> Script:
    imports: dict[str, Import] = {}
    downloads: dict[str, int] = {}
    reaching: dict[str, int] = {}
    for node, optional in nodes(tree):
        for module, whole in modules(node):
            imports.setdefault(module, Import(node.lineno, optional))
            if reached := REACHING.match(whole):
                reaching.setdefault(reached[1], node.lineno)
        if isinstance(node, ast.Call) and (call := download(node)):
            downloads.setdefault(call, node.lineno)
    return Script(
        text,
        imports=imports,
        downloads=downloads,
        reaching=reaching,
        validation=validation_trained_on(tree),
        named=frozenset(last_parts(constants(tree))),
        runs_files=runs_files(text),
    )


def facts_of_text(text: bytes, error: str) -> Script:
    """Of a text that is not parsed, perhaps since it is of a newer Python: what lines show."""
    lines = re.findall(rb"(?m)(?:^|[;:])[ \t]{0,40}(?:from|import)[ \t]{1,40}([\w.]{1,99})", text)
    imports = {name.decode(): Import(0, True) for name in lines}
    strings = re.findall(rb"[\"']([^\"'\n]{1,%d})(?=[\"'])" % MAX_NAME, text)
    return Script(
        text,
        error=error,
        imports=imports,
        reaching={reached[1]: 0 for name in imports if (reached := REACHING.match(name))},
        named=frozenset(last_parts(name.decode("utf-8", "replace") for name in strings)),
        runs_files=runs_files(text),
    )


def runs_files(text: bytes) -> bool:
    return re.search(rb"\bexec[ \t]{0,9}\(|\brunpy\b", text) is not None


# --- what a tree holds ---


def nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Each node, with whether the script may do without what it does."""
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    perhaps = (ast.Try, ast.If, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    while todo:
        node, optional = todo.pop()
        yield node, optional
        inside = optional or isinstance(node, perhaps)
        # Reversed: the nodes come in the order of the lines.
        todo += [(child, inside) for child in reversed(list(ast.iter_child_nodes(node)))]


def modules(node: ast.AST) -> list[tuple[str, str]]:
    """The modules that a statement or a call imports; each also with the name taken from it."""
    if isinstance(node, ast.Import):
        return [(alias.name, alias.name) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return [(module, f"{module}.{alias.name}") for alias in node.names]
    if isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
        names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        return [(name, name) for name in names if isinstance(name, str)]
    return []


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name with attributes; of another expression the attributes alone."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        names.append(node.id)
    return ".".join(reversed(names))


def download(call: ast.Call) -> str | None:
    """What a call downloads with; None: it does not look like a download."""
    name = dotted(call.func)[-80:]
    match = DOWNLOADS.search(name)
    if COMMAND.search(name):
        near = islice(ast.walk(call), MAX_NODES)
        texts = [text.value for text in near if isinstance(text, ast.Constant)]
        match = DOWNLOADING_COMMAND.search(" ".join(str(text)[:MAX_NAME] for text in texts))
    return re.sub(r"\W+", " ", match[0]) if match else None


def constants(tree: ast.AST) -> Iterator[str]:
    """The short texts in a script."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and len(text) <= MAX_NAME:
            yield text


def last_parts(texts: Iterator[str]) -> Iterator[str]:
    """The files that texts may name; a command or a comment names several."""
    for text in texts:
        yield PurePosixPath(text).name
        for word in text.split():
            yield PurePosixPath(word).name


def validation_trained_on(tree: ast.Module) -> dict[str, int]:
    """Texts that name the validation split where the files to train on are set."""
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            names = [dotted(target) for target in node.targets]
        elif isinstance(node, ast.AnnAssign):
            names = [dotted(node.target)]
        elif isinstance(node, ast.keyword):
            names = [node.arg or ""]
        else:
            continue
        if node.value and any(TRAINING_FILES.fullmatch(name.split(".")[-1]) for name in names):
            for part in islice(ast.walk(node.value), MAX_NODES):
                text = part.value if isinstance(part, ast.Constant) else None
                if isinstance(text, str) and VALIDATION.search(text[:MAX_NAME]):
                    lines.setdefault(text[:80], part.lineno)
    return lines


# --- settings ---


class Default(NamedTuple):
    """What a script takes where its environment does not name a setting."""

    value: Any  # UNKNOWN: no plain value
    kind: type | None = None  # what the script makes of the text: int, float or nothing


def settings(text: bytes) -> dict[str, Default]:
    """The settings that a script takes from its environment, by lower-case name: their defaults.

    Those of its class Config, and each os.environ.get("NAME", default).
    """
    try:
        tree = parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        names = re.findall(rb"environ(?:\.get\(|\[)[ \t]{0,9}[\"'](\w{1,99})", text)
        return {name.decode().lower(): Default(UNKNOWN) for name in names}
    texts = string_constants(tree)
    kinds: dict[int, type] = {}  # of calls, by what they are an argument of
    defaults: dict[str, Default] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "Config":
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    defaults[line.target.id] = Default(plain_value(line.value, texts))
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("int", "float") and node.args:
            kinds[id(node.args[0])] = int if node.func.id == "int" else float
        if dotted(node.func).endswith(("environ.get", "getenv")) and node.args:
            name, kind = node.args[0], kinds.get(id(node))
            if isinstance(name, ast.Constant):
                default = node.args[1] if len(node.args) > 1 else None
                value = plain_value(default, texts)
                defaults.setdefault(str(name.value).lower(), Default(value, kind))
    return defaults


def string_constants(tree: ast.Module) -> dict[str, str]:
    """NAME = "text" at the top, and what `NAME +=` adds to it."""
    parts: dict[str, list[str]] = {}
    for node in tree.body:
        value = getattr(node, "value", None)
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            continue
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts[node.targets[0].id] = [value.value]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            parts.setdefault(node.target.id, []).append(value.value)
    return {name: "".join(texts) for name, texts in parts.items()}


def plain_value(node: ast.AST | None, texts: Mapping[str, str]) -> Any:
    if isinstance(node, ast.Name) and node.id in texts:
        return texts[node.id]
    if node is None:
        return UNKNOWN
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN


# --- the packed form ---


def pack(source: bytes) -> bytes:
    """The submitted form of a script: it unpacks and runs itself, and nothing else differs.

    Raises ValueError, in words, for what cannot be packed.
    """
    try:
        source.decode("utf-8")
        compile(source, "train_gpt.py", "exec", dont_inherit=True)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start} is not UTF-8: name a script, saved as UTF-8"
        ) from error
    except (SyntaxError, ValueError) as error:
        if b"\n" + 100 * b"=" + b"\n" in source:
            raise ValueError("a log of a run: name the script that ran") from error
        raise ValueError(f"it does not compile: {fault(error)}: mend that first") from error
    if promised_sha256(source) or look(source).packed:
        raise ValueError("it is packed already: name the readable script")
    return packed_form(source)
