"""Each stack of records/stacks as a whole: it applies, and keeps what a run promises."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import recipe
import verify
from running import ROOT

pytestmark = pytest.mark.timeout(300)
NAMES = sorted(path.stem for path in (ROOT / "records" / "stacks").glob("*.json"))


@pytest.mark.slow
@pytest.mark.timeout(1500)  # test-time training is tried with every value of the last token
@pytest.mark.parametrize("name", NAMES)
def test_verify_finds_no_fault_in_a_stack(name: str, tmp_path: Path) -> None:
    """Ranks, resume, priming and score; all its settings are defaults of the script."""
    script = tmp_path / "frontier.py"
    assert recipe.main(["apply", "--stack", name, "--to", str(script)]) == 0
    tiny = dict(pair.split("=") for pair in recipe.stack(name)["verify"].split())
    found = list(verify.verdicts(script, tiny, quick=True, score_differs=True))
    assert [row for row in found if row[1] == "FAULT"] == []
    assert {"resume", "ranks", "replicas", "sum"} <= {row[0] for row in found}


@pytest.mark.parametrize("name", NAMES)
def test_a_stack_is_a_script_with_its_settings_as_defaults(name: str, script: Callable) -> None:
    module = script("--stack", name)
    config = module.Config()
    values = json.loads((ROOT / "records" / "stacks" / f"{name}.json").read_text())["settings"]
    read = {key: module.parse(module.SETTINGS[key], text) for key, text in values.items()}
    assert read.items() <= {k.upper(): v for k, v in vars(config).items()}.items()
