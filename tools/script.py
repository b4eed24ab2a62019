"""Static facts of a script: what it names, imports, reaches and trains on. Nothing of it is run."""

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import PurePosixPath

from packed import is_only_packed, is_ours, literals, packed_form, unpack

MAX_SCRIPT = 2_000_000  # bytes that are parsed
MAX_TEXT = 300  # characters of a text that may name files
# With these names, whatever they are renamed to, a script fetches or runs what is not in its text.
REACHING = re.compile(
    r"socket|http|urllib|requests|httpx|aiohttp|ftplib|smtplib|ctypes|cffi|marshal|runpy|gdown|wget|"
    r"cpp_extension|hub|hf_hub_download|snapshot_download|load_dataset|urlopen|urlretrieve|"
    r"get_kernel|load_state_dict_from_url|exec|eval|__import__|import_module|__builtins__"
)
COMMAND = re.compile(r"curl|wget|pip3?|(curl|wget|git clone|pip3? install) .*", re.DOTALL)
# What is trained on by its name, and validation data by its name or its files.
DATA = r"_?(file|shard|data|pattern|path|glob|loader|stream|token)\w*"
TRAINED_ON = re.compile(rf"train\w*{DATA}|data_train|calib\w*", re.IGNORECASE)
VALIDATION_NAME = re.compile(rf"val(id(ation)?)?{DATA}", re.IGNORECASE)
VALIDATION = re.compile(r"fineweb_val_|(^|[/_])val(idation)?([_*/]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Script:
    """What is known of a script's text."""

    text: bytes  # readable: of a packed script the one inside
    packed: bool = False
    ours: bool = False  # packed as package.py does it
    stray: bool = False  # other code stands around the packed script
    error: str | None = None  # why it was not parsed
    modules: frozenset[str] = frozenset()  # imported
    # what of REACHING and COMMAND: its line
    reaching: Mapping[str, int] = field(default_factory=dict)
    validation: Mapping[str, int] = field(default_factory=dict)  # trained on: its line
    paths: frozenset[str] = frozenset()  # last parts of its texts: names of files, and patterns

    def needs(self, name: str) -> bool:
        """Does it import this file, or name it in a text?"""
        path = PurePosixPath(name)
        stems = {".".join(path.with_suffix("").parts), path.stem, path.parts[0]}
        if path.suffix in (".py", ".so") and stems & self.modules:
            return True
        patterns = [one for one in self.paths if "*" in one and len(re.sub(r"\W", "", one)) > 1]
        return path.name in self.paths or any(fnmatch(path.name, one) for one in patterns)


@lru_cache(maxsize=16)
def look(text: bytes, depth: int = 3) -> Script:
    """The facts of a script, and of the one packed inside it. Raises nothing, whatever the text."""
    try:
        if len(text) > MAX_SCRIPT:
            raise ValueError(f"{len(text):,} bytes, more than {MAX_SCRIPT:,} are not read")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
        inside = unpack(literals(tree)) if depth else None
        if inside is not None:
            found = look(inside, depth - 1)
            stray = found.stray or not is_only_packed(text, tree, inside)
            return replace(found, packed=True, ours=is_ours(text), stray=stray)
        return facts_of_tree(tree, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Script(text, error=fault(error))


def fault(error: Exception) -> str:
    """Why a text was not parsed, in words."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)
    return str(error)[:200] if type(error) is ValueError else f"{type(error).__name__}: {error}"


def facts_of_tree(tree: ast.Module, text: bytes) -> Script:
    modules: set[str] = set()
    reaching: dict[str, int] = {}
    paths: set[str] = set()
    for node in ast.walk(tree):
        found = imported(node)
        modules |= {part.lstrip(".") for name in found for part in (name, name.split(".")[0])}
        words = [word for name in [*found, called(node)] for word in name.split(".")]
        for word in filter(REACHING.fullmatch, words):
            reaching.setdefault(word, node.lineno)
        if isinstance(node, ast.BinOp) and is_text(node.left) and is_text(node.right):
            reaching.setdefault("a text made of pieces", node.lineno)
        if is_text(node):
            if not re.search(r"\s", node.value):
                paths.add(PurePosixPath(node.value[:MAX_TEXT]).name)
            if COMMAND.fullmatch(node.value):
                reaching.setdefault(" ".join(node.value.split()[:2]), node.lineno)
    return Script(
        text,
        modules=frozenset(modules),
        reaching=reaching,
        validation=validation_trained_on(tree),
        paths=frozenset(paths),
    )


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def imported(node: ast.AST) -> list[str]:
    """Modules and what is taken from them, by their own names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Call) and called(node.func) in ("import_module", "__import__"):
        return [a.value for a in node.args if isinstance(a, ast.Constant) and type(a.value) is str]
    return []


def called(node: ast.AST) -> str:
    """The last part of a dotted name; methods called `eval`, as a model's, are not Python's."""
    if isinstance(node, ast.Name):
        return node.id
    is_other = isinstance(node, ast.Attribute) and node.attr not in ("eval", "exec")
    return node.attr if is_other else ""


def validation_trained_on(tree: ast.Module) -> dict[str, int]:
    """Validation data by its files or its names, where what is trained on is set."""
    meant: dict[str, str] = {}  # names to which validation data is assigned
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names = [called(target) for target in targets] + [getattr(node, "arg", None) or ""]
        value = getattr(node, "value", None)
        if not isinstance(value, ast.AST):
            continue
        if (data := validation_in(value)) and names[0]:
            meant.setdefault(names[0], data)
        if any(map(TRAINED_ON.fullmatch, names)):
            for part in ast.walk(value):
                if data := validation_in(part) or meant.get(called(part)):
                    lines.setdefault(data[:80], part.lineno)
    return lines


def validation_in(node: ast.AST) -> str:
    """A text or a name of validation data; empty: it is none."""
    text = getattr(node, "value", None)
    if not isinstance(text, str):
        return called(node) if VALIDATION_NAME.fullmatch(called(node)) else ""
    shards = "*" in text and fnmatch("fineweb_val_000000.bin", PurePosixPath(text).name)
    return text if shards or VALIDATION.search(text[:MAX_TEXT]) else ""


# --- the packed form ---


def pack(source: bytes) -> bytes:
    """The submitted form of a script: it unpacks and runs itself, and nothing else differs.

    Raises ValueError, in words, for what cannot be packed.
    """
    try:
        compile(source, "train_gpt.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        message = f"it does not compile: {fault(error)}: name a script that runs"
        raise ValueError(message) from error
    if is_ours(source) or look(source).packed:
        raise ValueError("it is packed already: name the readable script")
    return packed_form(source)
