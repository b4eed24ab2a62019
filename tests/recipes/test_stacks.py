"""Each stack of records/stacks as a whole: it applies, keeps what a run promises, and packs."""

import json
from pathlib import Path

import package
import pytest
import recipe
import verify
from running import ROOT

pytestmark = pytest.mark.timeout(300)
NAMES = sorted(path.stem for path in (ROOT / "records" / "stacks").glob("*.json"))
TINY = {  # what fits verify.py's tiny model
    "baseline_plus": {"EVAL_STRIDE": 8},
    "sp8192": {"LOOP_START": 1, "LOOP_END": 1, "EVAL_STRIDE": 8, "ROPE_DIMS": 8, "GPTQ_BATCHES": 2},
}
TINY["sp8192_ttt"] = TINY["sp8192"] | {"PARALLEL_START": 2, "TTT_CHUNK_TOKENS": 64}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_verify_finds_no_fault_in_a_stack(name: str, tmp_path: Path) -> None:
    """Ranks, resume, priming and score; all its settings are defaults of the script."""
    script = tmp_path / "frontier.py"
    assert recipe.main(["apply", "--stack", name, "--to", str(script)]) == 0
    found = verify.check(script, TINY[name], quick=True, score_differs=True)
    assert [row for row in found if row[1] == "FAULT"] == []
    assert {"resume", "ranks", "replicas", "sum"} <= {row[0] for row in found}


@pytest.mark.parametrize("name", NAMES)
def test_a_stack_packs_into_a_small_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe.main(["apply", "--stack", name, "--to", "frontier.py"]) == 0
    text = Path("frontier.py").read_text(encoding="utf-8")
    values = json.loads((ROOT / "records" / "stacks" / f"{name}.json").read_text())["settings"]
    assert all(value in text for value in values.values())
    assert package.main(["--pack", "frontier.py"]) == 0
    assert 20_000 < Path("frontier_packed.py").stat().st_size < 45_000
