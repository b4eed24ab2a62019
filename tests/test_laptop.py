"""tests/bench/laptop.py and laptop_results.py: the runs that they make, and what they conclude."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import stdev

import laptop_results
import numpy as np
import pytest
from ablate import Settings, Variant, read_variants, readable_name
from cli import ToolError
from running import ROOT, clean_environment
from runs import parse_value
from samples import detectable_difference
from scipy import stats

CODE, PROSE = "data/datasets/quickstart_sp1024", "data/datasets/docstrings_sp1024"
BLOCKS: dict[str, list[Settings]] = {
    "noise": [(("ITERATIONS", str(steps)),) for steps in (10, 20, 40)],
    "levers": [(("DATA_PATH", path),) for path in (CODE, PROSE)],
    "settings": [()],
    "export": [()],
}
SEEDS = {"noise": 8, "levers": 5, "settings": 5, "export": 3}
OWN = {"MATRIX_LR": 0.01, "WARMDOWN_ITERS": 400.0, "MLP_MULT": 2.0}  # of the base
BEST = {"MATRIX_LR": 0.02, "WARMDOWN_ITERS": 400.0, "MLP_MULT": 6.0}
PUBLISHED = {name: each.effect for name, each in laptop_results.read_published().items()}


def true_effect(part: str, variant: Variant, block: Settings) -> float:
    """Return how much higher the score of a variant is than that of the base."""
    if part in ("levers", "export") and variant.settings:
        published = PUBLISHED[variant.name] or 0.01
        return -published * 20 if block and block[0][1] == PROSE else published * 20
    effect = 0.0
    for name, value in variant.settings if part == "settings" else ():
        effect += abs(np.log1p(float(value)) - np.log1p(BEST[name]))
        effect -= abs(np.log1p(OWN[name]) - np.log1p(BEST[name]))
    return effect


def seed_score(seed: int, steps: int) -> float:
    return 3 - steps / 100 + 0.01 * (seed * 7 % 5)


def write_log(folder: Path, part: str, variant: Variant, block: Settings, seed: int) -> None:
    settings = dict(block + variant.settings)
    config: dict[str, object] = {"iterations": 20, "data_path": CODE, "seed": seed}
    config |= {name.lower(): value for name, value in OWN.items()}
    config |= {name.lower(): parse_value(value) for name, value in settings.items()}
    digits = readable_name(variant, block).encode().hex()[-8:]
    name = f"laptop-{part}-{readable_name(variant, block)}-{digits}-seed{seed}"
    score = seed_score(seed, config["iterations"]) + true_effect(part, variant, block)
    if variant.settings:
        score += 0.0001 * np.sin(seed * sum(variant.name.encode()))
    events = [
        {"event": "run", "run_id": name},
        {"event": "config", "run_id": name, **config},
        {"event": "made_of", "script": "aa", "tokenizer": str(config["data_path"])},
        {"event": "validation", "step": config["iterations"], "val_loss": score, "val_bpb": score},
        {"event": "artifact", "artifact_bytes": 1000 + len(variant.name), "code_bytes": 10},
        {"event": "score", "val_loss": score, "val_bpb": score, "eval_time_ms": len(name)},
        {"event": "end", "status": "finished", "exit_code": 0, "error": ""},
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with logs as laptop.py makes them, whose effects are those of true_effect."""
    folder = tmp_path_factory.mktemp("logs")
    for part, blocks in BLOCKS.items():
        for block in blocks:
            for variant in read_variants(laptop_results.VARIANTS / f"{part}.txt"):
                for seed in range(1, 1 + SEEDS[part]):
                    write_log(folder, part, variant, block, seed)
    return folder


def rows_of(report: str, first_cell: str) -> Iterator[list[str]]:
    """Yield the rows of the Markdown tables that begin with this cell."""
    for line in report.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] == first_cell:
            yield cells


def test_every_variant_has_a_source() -> None:
    names = [
        {variant.name for variant in read_variants(laptop_results.VARIANTS / f"{part}.txt")[1:]}
        for part in ("levers", "export")
    ]
    assert set.union(*names) == PUBLISHED.keys()
    assert sum(PUBLISHED[name] is not None for name in names[0]) >= 14


@pytest.mark.filterwarnings("ignore:Precision loss:RuntimeWarning")  # equal artifacts
def test_the_report_finds_the_effects(logs: Path, tmp_path: Path) -> None:
    report = "\n\n".join(laptop_results.describe(logs, tmp_path, experiments=20))
    assert report.startswith("Finished runs: noise 72, levers 190, settings 65, export 12")
    # The base of all parts is the same configuration.
    assert "5 runs were made two or more times, in different parts; 5 of them have" in report
    for steps in (10, 20, 40):
        [row] = rows_of(report, str(steps))
        spread = stdev(seed_score(seed, steps) for seed in range(1, 9))
        assert row[1] == "8" and row[3] == f"{spread:.4f}"
    # With twenty times the published effects on code, and the opposite on prose:
    [ema] = rows_of(report, "ema")
    assert ema[1:3] == ["averaging", "-0.0010"]
    assert float(ema[3].split()[0]) == pytest.approx(-0.02, abs=0.002) and ema[4] == "same sign"
    assert float(ema[5].split()[0]) == pytest.approx(0.02, abs=0.002) and ema[6] == "opposite sign"
    assert ema[8] == "-1"
    [gates] = rows_of(report, "skip_gates")
    assert gates[2] == "-" and gates[4::2] == ["worse", "better", "+6"]
    assert "- code: +1.00 (95 % interval +0.99 to +1.00), 15 recipes" in report
    assert "- prose: -1.00 (95 % interval -1.00 to -0.99)" in report
    [int6] = rows_of(report, "int6")
    assert int6[1:3] == ["export", "+0.0083"] and int6[4] == "same sign" and len(int6) == 7
    for name, best in BEST.items():
        part = report.split(f"| {name} |")[1]
        [row] = rows_of(part.split("\n\n")[0], f"{best:g}")
        assert row[2:] == ["the best", "5"], name
    for name in ("levers", "settings"):
        assert (tmp_path / f"laptop-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_do_not_belong_together_are_refused(logs: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="contains no finished runs"):
        laptop_results.read_part(tmp_path, "noise") or next(
            laptop_results.describe(tmp_path, tmp_path, 1)
        )
    base, ema = (
        next(path for path in logs.glob(f"laptop-levers-{name}-quick*-seed1.jsonl"))
        for name in ("base", "ema")
    )
    for path in (base, ema):
        shutil.copy(path, tmp_path)
    text = ema.read_text()
    (tmp_path / ema.name).write_text(text.replace('"finished"', '"failed"'))
    [runs] = laptop_results.read_part(tmp_path, "levers").values()
    assert sum(map(len, runs.values())) == 1, "an unfinished run does not count"
    again = tmp_path / re.sub("-[0-9a-f]{8}-", "-00000000-", ema.name)
    for path in (tmp_path / ema.name, again):
        path.write_text(text)
    with pytest.raises(ToolError, match="seed 1 of this variant is there twice"):
        laptop_results.read_part(tmp_path, "levers")
    again.rename(tmp_path / "laptop-levers-other-00000000-seed1.jsonl")
    with pytest.raises(ToolError, match="its name is none of the part levers"):
        laptop_results.read_part(tmp_path, "levers")


@pytest.mark.parametrize("by_seed", [True, False])
def test_a_detectable_difference_is_found_in_80_of_100_experiments(by_seed: bool) -> None:
    random = np.random.default_rng(0)
    for seeds, comparisons in ((3, 1), (5, 1), (5, 18), (10, 36)):
        shift = detectable_difference(2.0, seeds, comparisons, by_seed)
        first = random.normal(0, 0 if by_seed else 2.0, (20_000, seeds))
        second = random.normal(shift, 2.0, (20_000, seeds))
        test = stats.ttest_rel if by_seed else stats.ttest_ind
        found = test(second, first, axis=1).pvalue < 0.05 / comparisons
        assert found.mean() == pytest.approx(0.8, abs=0.012), (seeds, comparisons)


def test_equal_variants_are_rarely_called_different() -> None:
    """With one comparison, p < 0.05 in 5 of 100 experiments; Holm's method keeps it at that."""
    shares = [laptop_results.false_positives(None, 5, count, 400) for count in (1, 6)]
    for share in shares:
        assert 0.01 < share < 0.09  # 400 experiments: 0.05 +- 0.011


@pytest.mark.slow
def test_laptop_runs_and_continues(tmp_path: Path) -> None:
    """In a copy of the repository with two recipes, on the real texts, with the real trainer."""
    for name in ("train_gpt.py", "data/*.py", "tools/*.py", "records/recipes/*.diff"):
        for path in ROOT.glob(name):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    shutil.copytree(ROOT / "tests" / "bench", tmp_path / "tests" / "bench")
    variants = tmp_path / "tests" / "bench" / "laptop" / "levers.txt"
    variants.write_text("base:\nleaky_relu2: LEAKY_SLOPE=0.5\n")
    command = [sys.executable, "tests/bench/laptop.py", "levers", "--seeds", "2", "--steps", "4"]
    environment = clean_environment(VAL_TOKENS="2048")
    for kept in (False, True):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("8 of 8 runs are finished" in done.stdout) == kept
        assert "Finished runs: levers 8" in done.stdout
        [row] = rows_of(done.stdout, "leaky_relu2")
        assert row[1:3] == ["architecture", "-0.0021"] and len(row) == 9
    names = {path.name for path in (tmp_path / "logs").glob("*.jsonl")}
    assert {re.sub("-[0-9a-f]{8}", "", name) for name in names} == {
        f"laptop-levers-{variant}-{text}_sp1024-seed{seed}.jsonl"
        for variant in ("base", "leaky_relu2")
        for text in ("quickstart", "docstrings")
        for seed in (1337, 1338)
    }
    text = next((tmp_path / "logs").glob("*leaky*docstrings*.jsonl")).read_text()
    assert '"leaky_slope": 0.5' in text and '"vocab_size": 1024' in text
