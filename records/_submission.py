"""submission.json, read without trust, with the names that people write for its keys."""

import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from _reader import missing

try:
    import jsonschema
except ImportError:
    raise SystemExit(f"error: {missing('jsonschema', '-r tests/requirements.txt')}") from None

SCHEMA_PATH = Path(__file__).resolve().parent / "submission.schema.json"
PLACEHOLDER = re.compile(r"(?i)\s*(todo\b.*|tbd|x{2,}|\?+|<.*>|your[ _-].{0,40}|placeholder)\s*")


@dataclass
class Submission:
    """The values under their right names, and (level, words) of what is wrong."""

    values: dict[str, Any] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)


def schema() -> dict[str, Any]:
    return json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))


def read_submission(data: bytes) -> Submission:
    """Raises nothing: what is no JSON object is a fault without values. Floats are Decimals."""
    result = Submission()
    try:
        given = json.loads(data.decode("utf-8-sig"), parse_float=Decimal, parse_constant=str)
        if not isinstance(given, dict):
            raise ValueError(f"it holds a {type(given).__name__}, not an object")
    except (ValueError, ArithmeticError, RecursionError) as error:
        result.faults.append(("refused", f"it is no JSON object: {str(error)[:200]}"))
        return result
    rules = schema()
    result.values, renamed = right_names(given, rules["properties"])
    if renamed:
        result.faults.append(("note", "by its usual name: " + ", ".join(renamed)))
    missing = [key for key in rules.pop("required") if result.values.get(key) in (None, "")]
    if missing:
        result.faults.append(("warned", f"it does not say {', '.join(missing)}"))
    checker = jsonschema.Draft202012Validator(rules)
    for error in list(checker.iter_errors(result.values))[:20]:
        key = str(error.absolute_path[0])
        if key not in missing:
            result.faults.append(("warned", f"{key}: {error.message[:200]}"))
    for key in ("name", "author", "github_id"):
        if PLACEHOLDER.fullmatch(str(result.values.get(key, ""))[:200]):
            result.faults.append(("warned", f"{key} is a placeholder: {result.values[key]}"))
    return result


def right_names(
    given: dict[str, Any], properties: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The values, None left out, and `theirs -> ours` of each key that had another name."""
    values = {key: value for key, value in given.items() if value is not None}
    renamed = []
    for key, rule in properties.items():
        names = (key, *rule["x-synonyms"])
        found = next((one for one in values if one.lower().replace("-", "_") in names), None)
        if key not in values and found is not None:
            values[key] = values[found]
            renamed.append(f"{found} -> {key}")
    return values, renamed


def decimals(value: object) -> int:
    """As written in the JSON; 0 for a whole number."""
    return max(0, -value.as_tuple().exponent) if isinstance(value, Decimal) else 0


def results_by_seed(values: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """seed_results, from the ways in which people write it (or seeds, as an object)."""
    given = values.get("seed_results", values.get("seeds"))
    found: dict[int, dict[str, Any]] = {}
    if isinstance(given, dict):
        for key, value in given.items():
            number = re.search(r"\d{1,12}", key)
            if number:
                found[int(number[0])] = value if isinstance(value, dict) else {"val_bpb": value}
    elif isinstance(given, list):
        for value in given:
            if isinstance(value, dict) and isinstance(value.get("seed"), int):
                found[value["seed"]] = value
    return found


def seeds_named(values: dict[str, Any]) -> list[int]:
    """The seeds that submission.json says were run."""
    given = values.get("seeds")
    if isinstance(given, list):
        return [seed for seed in given if type(seed) is int]
    if type(given) is int:
        return [given]
    return list(results_by_seed(values))
