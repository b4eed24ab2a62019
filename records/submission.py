"""submission.json, read without trust, with the names that people write for its keys."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from findings import Finding
from reader import stated_by_seed

SCHEMA_PATH = Path(__file__).resolve().parent / "submission.schema.json"
PLACEHOLDER = re.compile(r"(?i)\s*(todo\b.*|tbd|x{2,}|\?+|<.*>|your[ _-].{0,40}|placeholder)\s*")
NUMBER = re.compile(r"\s*[+-]?\d{1,18}(\.\d{1,18})?\s*")


@dataclass(frozen=True)
class Submission:
    """The values under their right names, and what is wrong with the file."""

    values: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def by_seed(self) -> dict[int, dict[str, Any]]:
        """The results of each seed."""
        return stated_by_seed(self.values)

    @property
    def seeds(self) -> list[int]:
        """The seeds that it says were run."""
        given = self.values.get("seeds")
        if isinstance(given, list):
            return [seed for seed in given if type(seed) is int]
        if type(given) is int:
            return [given]
        return list(self.by_seed)


def schema() -> dict[str, Any]:
    return json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))


def read_submission(data: bytes, name: str) -> Submission:
    """Raises nothing: what is no JSON object is a finding without values. Floats are Decimals."""
    try:
        given = json.loads(
            data.decode("utf-8-sig"), parse_float=Decimal, parse_int=whole, parse_constant=str
        )
        if not isinstance(given, dict):
            raise ValueError(f"it holds a {type(given).__name__}, not an object")
    except (ValueError, ArithmeticError, RecursionError) as error:
        message = f"{name}: it is no JSON object: {str(error)[:200]}"
        if isinstance(error, json.JSONDecodeError):
            before = error.doc[: error.pos].rstrip()
            message += ": remove the comma before it" if before.endswith(",") else ""
        return Submission(findings=(Finding("R201", message),))
    rules = schema()
    properties = rules["properties"]
    values, renamed = right_names(given, properties)
    findings = []
    if renamed:
        findings.append(Finding("R205", f"{name}: by its usual name: {', '.join(renamed)}"))
    missing = [key for key in rules.pop("required") if values.get(key) in (None, "")]
    if missing:
        findings.append(Finding("R202", f"{name}: it does not say {', '.join(missing)}"))
    wrong = wrong_keys(values, rules)
    for key in [key for key in wrong if key not in missing][:20]:
        message = f"{name}: {key} is {shown(values[key])}: write {properties[key]['x-write']}"
        findings.append(Finding("R203", message))
    for key in ("name", "author", "github_id"):
        if PLACEHOLDER.fullmatch(str(values.get(key, ""))[:200]):
            message = f"{name}: {key} is a placeholder: {shown(values[key])}"
            findings.append(Finding("R204", message))
    return Submission(with_numbers(values, properties), tuple(findings))


def whole(text: str) -> int | float:
    """An absurd number, which no float could hold, is infinite."""
    return int(text) if len(text) < 20 else float("inf")


def right_names(
    given: Mapping[str, Any], properties: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The values, None left out, and `theirs -> ours` of each key that had another name."""
    values = {key: value for key, value in given.items() if value is not None}
    renamed = []
    for key, rule in properties.items():
        names = (key, *rule["x-synonyms"])
        written = next((name for name in values if name.lower().replace("-", "_") in names), None)
        if key not in values and written is not None:
            values[key] = values[written]
            renamed.append(f"{written} -> {key}")
    return values, renamed


def wrong_keys(values: Mapping[str, Any], rules: Mapping[str, Any]) -> list[str]:
    import jsonschema

    checker = jsonschema.Draft202012Validator(rules)
    return list(dict.fromkeys(str(e.absolute_path[0]) for e in checker.iter_errors(values)))


def with_numbers(values: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers in quotes are numbers all the same, or an invented one would escape the check."""
    numbers = dict(values)
    for key, rule in properties.items():
        value = numbers.get(key)
        text = value if rule["type"] in ("number", "integer") and isinstance(value, str) else ""
        if NUMBER.fullmatch(text):
            numbers[key] = Decimal(text.strip())
    return numbers


def shown(value: object) -> str:
    """A value as it stands in the JSON, shortened."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = str(type(value).__name__)
    if isinstance(value, Decimal):
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def decimals(value: object) -> int:
    """As written in the JSON; 0 for a whole number."""
    return max(0, -value.as_tuple().exponent) if isinstance(value, Decimal) else 0


def is_number(value: object) -> bool:
    if value is None or isinstance(value, (bool, str, list, dict)):
        return False
    try:
        return math.isfinite(value)
    except (OverflowError, TypeError, InvalidOperation):
        return False
