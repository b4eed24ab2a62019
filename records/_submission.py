"""submission.json, read without trust:
held against submission.schema.json, with the synonyms that people write.

The schema is JSON Schema (draft 2020-12); `faults` knows the keywords that it uses,
and refuses any other, so that a schema that says more than is checked cannot go unnoticed.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _reader import read_bytes, reason

SCHEMA_PATH = Path(__file__).resolve().parent / "submission.schema.json"
MAX_SUBMISSION = 1_000_000  # bytes
PLACEHOLDER = re.compile(
    r"\s*(?:todo\b.*|tbd\b.*|fixme\b.*|x{2,}|\?+|n/?a|none|null|<.*>|your[ _-].{0,40}|placeholder|"
    r"example|name|author)\s*",
    re.IGNORECASE | re.DOTALL,
)
TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "integer": lambda value: (
        isinstance(value, int)
        and not isinstance(value, bool)
        or isinstance(value, float)
        and value.is_integer()
    ),
    "null": lambda value: value is None,
}
KNOWN = {
    "$schema",
    "title",
    "description",
    "x-level",
    "x-synonyms",
    "type",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "required",
    "properties",
    "items",
    "additionalProperties",
}


class Decimal(float):
    """A number of a JSON text that remembers how many decimals it was written with."""

    decimals: int

    def __new__(cls, text: str) -> "Decimal":
        number = super().__new__(cls, text)
        mantissa, _, exponent = text.lower().partition("e")
        number.decimals = min(30, max(0, len(mantissa.partition(".")[2]) - int(exponent[:6] or 0)))
        return number


def decimals(value: float) -> int:
    """As written; 0 for a whole number."""
    return getattr(value, "decimals", 0)


@dataclass
class Submission:
    """The keys of submission.json under their right names,
    and (level, words) of what is wrong with it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)


def schema() -> dict[str, Any]:
    return json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))


def read_submission(path: str | Path) -> Submission:
    """Raises nothing: a file that is no JSON object is a fault without values."""
    result = Submission()
    repeated: list[str] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: set[str] = set()
        for name, _ in found:
            if name in seen:
                repeated.append(name)
            seen.add(name)
        return dict(found)

    try:
        text = read_bytes(path, MAX_SUBMISSION).decode("utf-8-sig")
        values = json.loads(
            text,
            parse_float=Decimal,
            parse_int=_whole,
            parse_constant=_no_constant,
            object_pairs_hook=pairs,
        )
    except RecursionError:
        result.faults.append(("refused", "submission.json is nested too deep"))
    except (OSError, ValueError, MemoryError) as error:
        result.faults.append(("refused", f"submission.json is no JSON: {reason(error)}"))
    else:
        result.faults += [
            ("warned", f"submission.json has {name} more than once: the last one counts")
            for name in repeated[:5]
        ]
        if isinstance(values, dict):
            judge(values, result)
        else:
            result.faults.append(
                ("refused", f"submission.json holds {_kind(values)}, not an object")
            )
    return result


def judge(values: dict[str, Any], result: Submission) -> None:
    """Fills `result` from a parsed submission.json."""
    rules = schema()
    result.values = dict(values)
    for key, rule in rules["properties"].items():
        if values.get(key) is not None:
            continue
        found = next(
            (
                name
                for name in values
                if name.lower().replace("-", "_") in (key, *rule["x-synonyms"])
                and values[name] is not None
                and name != key
            ),
            None,
        )
        if found is None:
            continue
        level = "warned" if key in rules["required"] else "note"
        result.faults.append((level, f"submission.json: {found} is to be called {key}"))
        result.values[key] = (
            [values[found]] if key == "seeds" and TYPES["integer"](values[found]) else values[found]
        )
    for key, words in faults(result.values, rules):
        level = rules["properties"].get(key, {}).get("x-level", "refused")
        result.faults.append((level, f"submission.json: {words}"))
    for key in ("name", "author", "github_id"):
        value = result.values.get(key)
        if isinstance(value, str) and PLACEHOLDER.fullmatch(value[:200]):
            result.faults.append(
                ("refused", f"submission.json: {key} is a placeholder: {value[:40]}")
            )


def faults(
    value: Any, rule: dict[str, Any], name: str = "", key: str = ""
) -> Iterator[tuple[str, str]]:
    """(top-level key, words) of each way in which a value is not as the schema says."""
    unknown = set(rule) - KNOWN
    if unknown:
        raise ValueError(
            f"submission.schema.json uses {', '.join(sorted(unknown))}, which is not checked"
        )
    if "type" in rule and not _is(value, rule["type"]):
        wanted = rule["type"] if isinstance(rule["type"], str) else " or ".join(rule["type"])
        yield key, f"{name or 'it'} is {_kind(value)}, not {_article(wanted)}"
        return
    yield from ((key, words) for words in _plain_faults(value, rule, name))
    if isinstance(value, dict):
        for inner in rule.get("required", []):
            if inner not in value:
                yield key or inner, f"{name + '.' if name else ''}{inner} is missing"
        others = rule.get("additionalProperties", {})
        for inner, one in list(value.items())[:1000]:
            below = rule.get("properties", {}).get(inner, others)
            if isinstance(below, dict):
                yield from faults(
                    one, below, f"{name}.{inner[:40]}" if name else inner[:40], key or inner
                )
    elif isinstance(value, list) and "items" in rule:
        for number, one in enumerate(value[:1000]):
            yield from faults(one, rule["items"], f"{name}[{number}]", key)


def _plain_faults(value: Any, rule: dict[str, Any], name: str) -> Iterator[str]:
    if "enum" in rule and value not in rule["enum"]:
        yield f"{name} is {_shown(value)}, none of {', '.join(rule['enum'])}"
    if isinstance(value, str):
        if len(value) < rule.get("minLength", 0):
            yield f"{name} is empty"
        elif len(value) > rule.get("maxLength", len(value)):
            yield f"{name} has {len(value):,} characters, at most {rule['maxLength']} are taken"
        elif "pattern" in rule and not re.search(rule["pattern"], value[:1000]):
            yield f"{name} is {_shown(value)}, not {rule['description'].rstrip('.')}"
    elif TYPES["number"](value):
        if not value > rule.get("exclusiveMinimum", -float("inf")):
            yield (
                f"{name} is {_shown(value)}: a placeholder? "
                f"It must be above {rule['exclusiveMinimum']}"
            )
        elif not rule.get("minimum", value) <= value <= rule.get("maximum", value):
            yield f"{name} is {_shown(value)}, out of its range"


def _is(value: Any, types: str | list[str]) -> bool:
    return any(TYPES[one](value) for one in ([types] if isinstance(types, str) else types))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"the string {_shown(value)}"
    kinds = ("boolean", "integer", "number", "object", "array")
    return _article(next((kind for kind in kinds if TYPES[kind](value)), "value"))


def _article(word: str) -> str:
    return f"a{'n' * (word[0] in 'aio')} {word}"


def _shown(value: Any) -> str:
    return json.dumps(value)[:60] if isinstance(value, (str, int, float)) else _kind(value)


def _whole(text: str) -> int | float:
    # Python refuses, or takes very long for, whole numbers of thousands of digits.
    return int(text) if len(text) < 20 else Decimal(text)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")
