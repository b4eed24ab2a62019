"""tests/bench/laptop.py and laptop_results.py: the runs that they make, and what they conclude."""

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev

import check
import laptop
import laptop_results
import numpy as np
import pytest
from ablate import (
    Difference,
    Settings,
    Variant,
    find_differences,
    read_setting_names,
    read_variants,
    readable_name,
)
from cli import ToolError
from laptop_results import PARTS, VARIANTS, signed
from running import ROOT, Call, clean_environment
from runs import Result, Run, parse_value
from samples import BITS, detectable_difference, t_test
from scipy import stats

CODE, PROSE = "data/datasets/quickstart_sp1024", "data/datasets/docstrings_sp1024"
BLOCKS: dict[str, list[Settings]] = {
    "noise": [(("ITERATIONS", str(steps)),) for steps in (10, 20, 40)],
    "recipes": [(("DATA_PATH", path),) for path in (CODE, PROSE)],
    "reasons": [(("DATA_PATH", path),) for path in (CODE, PROSE)],
    "shorter": [(("ITERATIONS", "10"),)],
    "settings": [()],
    "export": [()],
}
SEEDS = {"noise": 8, "recipes": 5, "reasons": 3, "shorter": 3, "settings": 5, "export": 3}
OWN = {"MATRIX_LR": 0.01, "WARMDOWN_ITERS": 400.0, "MLP_MULT": 2.0}  # of the base
BEST = {"MATRIX_LR": 0.02, "WARMDOWN_ITERS": 400.0, "MLP_MULT": 6.0}
PUBLISHED = {name: each.effect for name, each in laptop_results.read_published().items()}


def distance(name: str, value: float) -> float:
    return abs(np.log1p(value) - np.log1p(BEST[name]))


def true_effect(part: str, variant: Variant, block: Settings) -> float:
    """Return how much higher the score of a variant is than that of the base: for recipes 20 times
    the published effect on code, and its opposite on prose. In the part shorter, it is inversely
    proportional to the number of steps."""
    if part in ("recipes", "reasons", "shorter", "export") and variant.settings:
        effect = 20 * (PUBLISHED[variant.name] or 0.01)
        if part == "shorter":
            effect *= 20 / float(block[0][1])  # the longer the run, the smaller the effect
        return -effect if block and block[0][1] == PROSE else effect
    pairs = variant.settings if part == "settings" else ()
    return sum(distance(name, float(value)) - distance(name, OWN[name]) for name, value in pairs)


def seed_score(seed: int, steps: int) -> float:
    return 3 - steps / 100 + 0.01 * (seed * 7 % 5)


def chance(variant: Variant, seed: int) -> float:
    return 0.0001 * np.sin(seed * sum(variant.name.encode())) if variant.settings else 0.0


def write_log(folder: Path, part: str, variant: Variant, block: Settings, seed: int) -> None:
    config: dict[str, object] = {"iterations": 20, "data_path": CODE, "seed": seed}
    config |= {name.lower(): value for name, value in OWN.items()}
    config |= {name.lower(): parse_value(value) for name, value in block + variant.settings}
    readable = readable_name(variant, block)
    name = f"laptop-{part}-{readable}-{readable.encode().hex()[-8:]}-seed{seed}"
    step = int(str(config["iterations"]))
    before = seed_score(seed, step)
    score = before + true_effect(part, variant, block) + chance(variant, seed)
    events = [
        {"event": "run", "run_id": name},
        {"event": "config", "run_id": name, **config},
        {"event": "made_of", "script": "aa", "tokenizer": str(config["data_path"])},
        {"event": "validation", "step": step, "val_loss": before, "val_bpb": before},
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
            for variant in read_variants(VARIANTS / f"{part}.txt"):
                for seed in range(1, 1 + SEEDS[part]):
                    write_log(folder, part, variant, block, seed)
    return folder


def rows_of(report: str, first_cell: str) -> Iterator[list[str]]:
    """Yield the rows of the Markdown tables that begin with this cell."""
    for line in report.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] == first_cell:
            yield cells


def number(text: str) -> float:
    return float(text.split()[0])


def report_on(logs: Path, out: Path) -> str:
    return "\n\n".join(laptop_results.describe(logs, "laptop", out, experiments=10))


def test_every_variant_has_a_source_and_settings_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open(VARIANTS / "published.csv", newline="") as file:
        assert all(row["source"] and row["kind"] for row in csv.DictReader(file))
    names = {part: read_variants(VARIANTS / f"{part}.txt")[1:] for part in PARTS}
    known_parts = "recipes", "reasons", "export"
    assert PUBLISHED.keys() == {v.name for part in known_parts for v in names[part]}
    assert sum(PUBLISHED[variant.name] is not None for variant in names["recipes"]) >= 14
    for part in ("recipes", "export"):
        known = read_setting_names(laptop.make_script(part))
        others = () if part == "export" else set(PARTS) - {"recipes", "export"}
        for variant in [v for each in (part, *others) for v in names[each]]:
            assert {name for name, _ in variant.settings} <= known, variant


@pytest.mark.filterwarnings("ignore:Precision loss:RuntimeWarning")  # equal artifacts
def test_the_report_finds_the_effects(logs: Path, tmp_path: Path) -> None:
    report = report_on(logs, tmp_path)
    assert report.startswith(
        "Finished runs: noise 72, recipes 190, reasons 36, shorter 12, settings 65, export 12"
    )
    # All parts but export have the base. Runs of several parts: on code 5 seeds after 20 steps and
    # 3 seeds after 10 steps, and on prose 3 seeds.
    words = "11. In 11 of them, all logged losses and the scores are equal to the last digit.\n"
    assert words in report
    little = read_variants(VARIANTS / "noise.txt")[2]
    for steps in (10, 20, 40):
        [row] = rows_of(report, str(steps))
        spread = stdev(seed_score(seed, steps) for seed in range(1, 9))
        assert row[1] == "8" and number(row[3]) == pytest.approx(spread, abs=6e-5)
        noise = [chance(little, seed) for seed in range(1, 9)]
        assert number(row[6]) == pytest.approx(stdev(noise), rel=0.05)
        assert number(row[7]) == pytest.approx(fmean(noise), rel=0.05)
    # Differences that are found, with 3, 5 and 10 seeds, for one and for 36 comparisons
    [paired], [unpaired] = (rows_of(report, name) for name in ("paired, `a little`", "not paired"))
    expected = [detectable_difference(stdev(noise), n, count) for count in (1, 36) for n in (3, 5)]
    found = [number(paired[column]) for column in (2, 3, 5, 6)]
    assert found == pytest.approx(expected, rel=0.05)
    assert all(number(u) > 10 * number(p) for u, p in zip(unpaired[2:], paired[2:], strict=True))
    assert len([*rows_of(report, "normally")][0]) == 3
    # Recipes
    [ema] = rows_of(report, "ema")
    assert ema[1:3] == ["averaging", "-0.0010"]
    assert number(ema[3]) == pytest.approx(-0.02, abs=2e-4) and ema[4] == "same sign"
    assert number(ema[5]) == pytest.approx(0.02, abs=2e-4) and ema[6] == "opposite sign"
    assert ema[8] == "-1"
    [gates, *_] = rows_of(report, "skip_gates")
    assert gates[2] == "-" and gates[4::2] == ["worse", "better", "+6"]
    [averaging] = rows_of(report, "averaging")
    assert averaging[:2] == ["averaging", "1"] and 0 < number(averaging[2]) < 0.0001
    assert averaging[3:] == [
        "1",
        "0",
        "0",
        "0",
        "1",
        "0",
    ]  # same sign on code, opposite sign on prose
    for text, expected in (("code", 1.0), ("prose", -1.0)):
        [found] = re.findall(rf"^- {text}: (\S+) \(95 % interval .*\), 15 variants$", report, re.M)
        # Some published effects are equal, so that chance decides their ranks here.
        assert number(found) == pytest.approx(expected, abs=0.02)
    # Settings and export
    for name, best in BEST.items():
        part = report.split(f"| {name} |")[1].split("\n\n")[0]
        for row in part.splitlines()[2:]:
            value, _, difference, count = (cell.strip() for cell in row.strip("|").split("|"))
            assert count == ("5 of 5" if float(value) == best else "0 of 5"), name
            if float(value) == OWN[name]:
                assert difference == "the base"
            else:
                effect = distance(name, float(value)) - distance(name, OWN[name])
                assert number(difference) == pytest.approx(effect, abs=2e-4)
    [int6] = rows_of(report, "int6")
    assert number(int6[3]) == pytest.approx(20 * 0.0084, abs=2e-4) and int6[4] == "1,004"
    for name in ("recipes", "settings"):
        assert (tmp_path / f"laptop-{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:Precision loss:RuntimeWarning")  # equal artifacts
def test_the_report_has_the_effects_by_the_number_of_steps(logs: Path, tmp_path: Path) -> None:
    report = report_on(logs, tmp_path)
    [layer_scale] = rows_of(report, "layer_scale")
    assert layer_scale[2] == "+0.0026" and layer_scale[4] == "same sign"
    assert number(layer_scale[3]) == pytest.approx(20 * 0.0026, abs=2e-4)
    shorter = report.split("## Shorter runs")[1].split("##")[0]
    assert "| recipe | effect after 10 steps | effect after 20 steps |\n" in shorter
    [smear_gate] = rows_of(shorter, "smear_gate")
    assert [number(cell) for cell in smear_gate[1:]] == pytest.approx([-0.08, -0.04], abs=3e-4)
    assert not [*rows_of(shorter, "ema")], "it is not in laptop/shorter.txt"


@pytest.mark.filterwarnings("ignore:Precision loss:RuntimeWarning")
def test_runs_that_are_missing_leave_gaps_and_nothing_else(logs: Path, tmp_path: Path) -> None:
    for path in logs.iterdir():
        if not (
            re.search(r"recipes-ema-docs|noise-.*seed[2-8]\.|noise-.*-40-", path.name)
            or re.search(r"recipes-smear.*seed[2-5]\.", path.name)
            or re.search(r"settings-(MATRIX|WARM)|settings-MLP_MULT-6-.*seed5", path.name)
        ):
            shutil.copy(path, tmp_path)
    report = report_on(tmp_path, tmp_path)
    recipes = report.split("## Reasons")[0]
    assert "Finished runs: noise 6," in report and "Differences of the score" not in report
    [ema] = rows_of(recipes, "ema")
    assert number(ema[3]) == pytest.approx(-0.02, abs=2e-4) and ema[5:7] == ["", ""]
    assert len(ema) == 9 and not [*rows_of(recipes, "smear_gate")], "one seed shows no difference"
    [six] = rows_of(report.split("| MLP_MULT |")[1], "6")
    assert six[3] == "4 of 4" and "| MATRIX_LR |" not in report
    assert "- prose" in report


def test_repeated_runs_that_differ_are_counted(logs: Path, tmp_path: Path) -> None:
    """As on machines whose processors round differently."""
    for path in [*logs.glob("*-recipes-base-quick*"), *logs.glob("*-noise-base-20-*")]:
        shutil.copy(path, tmp_path)
    [path] = tmp_path.glob("*-noise-*seed3.jsonl")
    value = seed_score(3, 20)
    path.write_text(
        path.read_text().replace(f'"score", "val_loss": {value}', '"score", "val_loss": 2')
    )
    [path] = tmp_path.glob("*-noise-*seed4.jsonl")
    value = seed_score(4, 20)
    path.write_text(path.read_text().replace(f'"val_bpb": {value}', f'"val_bpb": {value + 3e-6}'))
    report = report_on(tmp_path, tmp_path)
    assert "have a run: 5. In 3 of them, all logged losses and the scores are equal" in report
    assert "; in the others, scores differ by at most 0.0000030 bits per byte." in report


def test_runs_that_do_not_belong_together_are_refused(logs: Path, tmp_path: Path) -> None:
    def read() -> laptop_results.Blocks:
        return laptop_results.read_part(tmp_path, "laptop", "recipes")

    with pytest.raises(ToolError, match=r"contains no finished runs laptop-\*"):
        report_on(tmp_path, tmp_path)
    for name in ("base", "ema"):
        for path in logs.glob(f"laptop-recipes-{name}-quick*-seed[12].jsonl"):
            shutil.copy(path, tmp_path)
    [ema] = tmp_path.glob("*ema*seed1.jsonl")
    text = ema.read_text()
    ema.write_text(text.replace('"finished"', '"failed"'))
    [runs] = read().values()
    assert sum(map(len, runs.values())) == 3, "an unfinished run does not count"
    ema.write_text(text.replace('"script": "aa"', '"script": "bb"'))
    with pytest.raises(ToolError, match="ema: the runs of one variant differ in code"):
        read()
    again = tmp_path / re.sub("-[0-9a-f]{8}-", "-00000000-", ema.name)
    for path in (ema, again):
        path.write_text(text)
    with pytest.raises(ToolError, match="seed 1 of this variant is there twice"):
        read()
    again.rename(tmp_path / "laptop-recipes-other-00000000-seed1.jsonl")
    with pytest.raises(ToolError, match="its name is that of no variant"):
        read()


@pytest.mark.parametrize(
    ("values", "effect", "expected"),
    [
        ([0.0, 0.0, 0.0], -0.1, "equal"),
        ([0.10, 0.11, 0.12], -0.1, "opposite sign"),
        ([0.10, 0.11, 0.12], 0.1, "same sign"),
        ([0.10, 0.11, 0.12], None, "worse"),
        ([-0.10, -0.11, -0.12], None, "better"),
        ([-0.10, 0.11, 0.12], 0.1, "not measurable"),
    ],
)
def test_verdicts(values: list[float], effect: float | None, expected: str) -> None:
    test = t_test([0.0] * 3, values, by_seed=True)
    measurable = test.p_two_sided < 0.05
    difference = Difference((), Variant(()), "loss", "", 3, test, measurable)
    assert laptop_results.verdict(difference, effect) == expected


def test_the_rank_correlation_has_the_interval_of_its_pairs() -> None:
    """Of 40 pairs with a correlation of 0.5: a standard error of about 0.13."""
    random = np.random.default_rng(0)
    first = random.normal(size=40)
    second = 0.5 * first + np.sqrt(0.75) * random.normal(size=40)
    value, low, high = laptop_results.rank_correlation([*zip(first, second, strict=True)])
    assert value == pytest.approx(stats.spearmanr(first, second).statistic)
    assert low < value < high and 0.3 < high - low < 0.7


@pytest.mark.parametrize("by_seed", [True, False])
def test_a_detectable_difference_is_found_in_80_of_100_experiments(by_seed: bool) -> None:
    random = np.random.default_rng(0)
    function = detectable_difference if by_seed else laptop_results.detectable_unpaired
    for seeds, comparisons in ((3, 1), (5, 1), (20, 1), (5, 18), (10, 36)):
        shift = function(2.0, seeds, comparisons)
        first = random.normal(0, 0 if by_seed else 2.0, (20_000, seeds))
        second = random.normal(shift, 2.0, (20_000, seeds))
        if by_seed:
            p = stats.ttest_rel(second, first, axis=1).pvalue
        else:
            p = stats.ttest_ind(second, first, axis=1, equal_var=False).pvalue
        found = (p < 0.05 / comparisons).mean()
        assert found == pytest.approx(0.8, abs=0.015), (seeds, comparisons)


@pytest.mark.parametrize("name", laptop_results.DISTRIBUTIONS)
def test_the_simulation_calls_measurable_what_ablate_does(name: str) -> None:
    draw = laptop_results.DISTRIBUTIONS[name]
    experiments, comparisons, seeds = 200, 6, 5
    random = np.random.default_rng(1)
    found = 0
    for _ in range(experiments):
        runs = {
            Variant((), None, str(number)): [
                Run("", seed=seed, result=Result("roundtrip", "score", value, value))
                for seed, value in enumerate(100 + draw(random, (seeds,)))
            ]
            for number in range(1 + comparisons)
        }
        found += any(each.measurable for each in find_differences({(): runs}, BITS))
    share = laptop_results.false_positives(draw, seeds, comparisons, experiments)
    assert share == found / experiments and found > 0


def test_equal_variants_are_rarely_called_different() -> None:
    """With one comparison, p < 0.05 in 5 of 100 experiments; Holm's method keeps it at that."""
    draw = laptop_results.DISTRIBUTIONS["normally"]
    for comparisons in (1, 36):
        share = laptop_results.false_positives(draw, 5, comparisons, 10_000)
        assert share == pytest.approx(0.05, abs=0.01)  # the standard error is 0.002


def test_a_data_set_of_docstrings_is_made_again_for_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laptop.quickstart, "DATASETS", tmp_path)
    monkeypatch.setattr(laptop.quickstart, "MIN_CHARACTERS", 1000)
    monkeypatch.setattr(laptop.quickstart, "VAL_BYTES", 4000)
    monkeypatch.setattr(laptop.dataset, "DATA", tmp_path)
    monkeypatch.setattr(laptop, "PACKAGES", ("huggingface_hub",))
    monkeypatch.setattr(laptop.sysconfig, "get_path", lambda _: os.path.dirname(json.__file__))
    made: list[list[str]] = []

    def make_data_set(words: list[str]) -> None:
        made.append(words)
        (tmp_path / "docstrings_sp1024").mkdir()

    monkeypatch.setattr(laptop.tokenize_docs, "parse_arguments", lambda words: words)
    monkeypatch.setattr(laptop.tokenize_docs, "make_data_set", make_data_set)
    for _ in range(2):
        assert laptop.make_prose() == tmp_path / "docstrings_sp1024"
    assert len(made) == 1, "it is kept"
    lines = Path(made[0][0]).read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert any("Deserialize" in text for text in texts) and len(texts) > 20
    stamp = tmp_path / "docstrings.json"
    stamp.write_text("being made\n")  # as after an interruption
    laptop.make_prose()
    assert len(made) == 2 and "huggingface_hub" in stamp.read_text()
    stamp.unlink()
    with pytest.raises(ToolError, match=r"was not made by laptop\.py"):
        laptop.make_prose()


@pytest.fixture(scope="module")
def record() -> Path:
    [folder] = ROOT.glob("records/track_non_record_16mb/*_LaptopLevers")
    return folder


@pytest.fixture(scope="module")
def record_logs(record: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the unpacked logs of the record."""
    folder = tmp_path_factory.mktemp("record")
    with tarfile.open(record / "logs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "logs"


@pytest.mark.filterwarnings("ignore:Precision loss:RuntimeWarning")
def test_the_record_says_what_its_logs_say(
    record: Path, record_logs: Path, tmp_path: Path, call: Call
) -> None:
    """Its logs were written by its two scripts, and the tables in its README are theirs. The last
    table of the noise is left out, because it does not depend on the logs."""
    code, out, _ = call(check.main, record)
    warned = re.findall(r"^  (?:refused|warned) +(.*)", out, re.MULTILINE)
    assert code == 0 and [line[:10] for line in warned] == ["it counted"], "not all of FineWeb"
    lines = (record / "README.md").read_text().splitlines()
    report = laptop_results.describe(record_logs, "laptop", tmp_path, experiments=1)
    tables = [line for text in report for line in text.splitlines() if line.startswith("| ")]
    simulated = *laptop_results.DISTRIBUTIONS, "scores vary between seeds"
    measured = [line for line in tables if not line.startswith(tuple(f"| {s}" for s in simulated))]
    assert len(measured) > 60 and [line for line in measured if line not in lines] == []
    for part in PARTS:
        blocks = laptop_results.read_part(record_logs, "laptop", part)
        runs = [run for block in blocks.values() for each in block.values() for run in each]
        [row] = [line for line in lines if line.startswith(f"| `{part}` |")]
        assert row.endswith(f"| {len(runs)} |")
        script = record_logs / "laptop-export.py" if part == "export" else record / "train_gpt.py"
        checksum = hashlib.sha256(script.read_bytes()).hexdigest()
        assert {run.conditions["code"] for run in runs} == {checksum[:12]}


@pytest.mark.filterwarnings("ignore:Precision loss:RuntimeWarning")
def test_the_table_of_recipes_has_the_effects_of_the_record(record_logs: Path) -> None:
    column = (ROOT / "records" / "recipes" / "README.md").read_text()
    for part in ("recipes", "reasons"):
        blocks = laptop_results.read_part(record_logs, "laptop", part)
        scores = laptop_results.score_differences(blocks)
        code, prose = blocks
        for variant in [*blocks[code]][1:]:
            if variant.label in ("partial_rope + smear_gate", "ema 0.9"):
                continue  # they have no row
            found = [scores[block, variant] for block in (code, prose)]
            cells = [signed(each.test.difference) + "*" * each.measurable for each in found]
            assert " / ".join(cells) in column, variant.label


@pytest.mark.slow
def test_laptop_runs_and_continues(tmp_path: Path) -> None:
    """In a copy of the repository with one recipe, on the real texts, with the real trainer."""
    for name in ("train_gpt.py", "data/*.py", "tools/*.py", "records/recipes/*.diff"):
        for path in ROOT.glob(name):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    shutil.copytree(ROOT / "tests" / "bench", tmp_path / "tests" / "bench")
    variants = tmp_path / "tests" / "bench" / "laptop" / "recipes.txt"
    variants.write_text("base:\nleaky_relu2: LEAKY_SLOPE=0.5\n")
    command = [sys.executable, "tests/bench/laptop.py", "recipes", "--seeds", "2", "--steps", "4"]
    environment = clean_environment(VAL_TOKENS="2048")
    for kept in (False, True):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("8 of 8 runs are finished" in done.stdout) == kept
        assert "Finished runs: recipes 8" in done.stdout
        assert "Note: all runs scored only a part of the validation split" in done.stdout
        [row] = rows_of(done.stdout, "leaky_relu2")
        assert row[1:3] == ["architecture", "-0.0021"] and len(row) == 9
    names = {path.name for path in (tmp_path / "logs").glob("*.jsonl")}
    assert {re.sub("-[0-9a-f]{8}", "", name) for name in names} == {
        f"laptop4-recipes-{variant}-{text}_sp1024-seed{seed}.jsonl"
        for variant in ("base", "leaky_relu2")
        for text in ("quickstart", "docstrings")
        for seed in (1337, 1338)
    }
    text = next((tmp_path / "logs").glob("*leaky*docstrings*.jsonl")).read_text()
    assert '"leaky_slope": 0.5' in text and '"vocab_size": 1024' in text
