"""Say what the runs of laptop.py show, in Markdown tables and plots.

    python3 tests/bench/laptop_results.py logs            reads logs/laptop-*.jsonl
    python3 tests/bench/laptop_results.py logs --out .    writes laptop-*.png to another folder
    python3 tests/bench/laptop_results.py logs --name laptop20    reads logs/laptop20-*.jsonl

The score is in bits per byte of the validation text, measured on the stored, quantized model; lower
is better. Differences, intervals and the word "measurable" are those of tools/ablate.py. A part
without finished runs is left out. This program trains nothing. It takes less than a minute.
"""

# Builds on tools/: ablate.py (compares variants), samples.py (tests), runs.py (reads logs),
# report.py and figures.py (plots).

import csv
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import cli
from ablate import (
    Difference,
    RunsByVariant,
    Settings,
    Variant,
    find_differences,
    read_variants,
    readable_name,
    refusals,
)
from cli import ToolError
from figures import write_figure
from report import Effect, plot_effects
from runs import Run, read_logs
from samples import BITS, detectable_difference, find_split_faults, result_value, t_test

PARTS = "noise", "recipes", "reasons", "shorter", "settings", "export"
VARIANTS = Path(__file__).with_name("laptop")
BLOCKS = {  # what option --for-each varies
    "noise": "ITERATIONS",
    "recipes": "DATA_PATH",
    "reasons": "DATA_PATH",
    "shorter": "ITERATIONS",
}
SEED_COUNTS = 3, 5, 10
COLOUR = "#1b6ca8"
Blocks = dict[Settings, RunsByVariant]


def read_part(folder: Path, name: str, part: str) -> Blocks:
    """Return the finished runs of a part whose logs are named <name>-<part>-*. The name of a log
    says which variant it is of. Raises ToolError if a seed of a variant is there twice, or if its
    runs cannot be compared."""
    variants = read_variants(VARIANTS / f"{part}.txt")
    blocks: Blocks = {}
    logs = read_logs(sorted(folder.glob(f"{name}-{part}-*.jsonl")))
    if logs.problems:
        raise ToolError(f"{logs.problems[0]}; move it away, or run laptop.py again")
    for run in logs.runs:
        if run.status != "finished" or not run.result:
            continue
        varied = BLOCKS.get(part)
        block = ((varied, str(run.config[varied.lower()])),) if varied else ()
        names = {readable_name(variant, block): variant for variant in variants}
        match = re.fullmatch(
            rf"{re.escape(name)}-{part}-(.*)-[0-9a-f]{{8}}-seed\d+\.jsonl", run.name
        )
        if not match or match[1] not in names:
            words = f"its name is that of no variant in laptop/{part}.txt; move it away"
            raise ToolError(f"{run.path}: {words}")
        runs = blocks.setdefault(block, {variant: [] for variant in variants})
        group = runs[names[match[1]]]
        if run.seed in [other.seed for other in group]:
            words = "is there twice, from two experiments; move one of them away"
            raise ToolError(f"{run.path}: seed {run.seed} of this variant {words}")
        group.append(run)
    for runs in blocks.values():
        base, *others = runs
        for variant in others:
            if runs[base] and runs[variant] and (why := refusals(runs[base], runs[variant])):
                raise ToolError(f"{folder}: {variant.label}: {'; '.join(why)}")
    return dict(sorted(blocks.items(), key=lambda item: block_order(item[0])))


def block_order(block: Settings) -> tuple[int, bool]:
    """Sort numbers of steps by their size, and the quickstart's text before the other one."""
    value = block[0][1] if block else ""
    return (int(value) if value.isdigit() else 0), text_label(block) != "code"


def text_label(block: Settings) -> str:
    """Return a word for the text on which the runs of a block were trained."""
    return "prose" if block and Path(block[0][1]).name.startswith("docstrings") else "code"


def score(run: Run) -> float:
    value = result_value(run, BITS)
    assert value is not None  # only finished runs are kept
    return value


def score_differences(blocks: Blocks) -> dict[tuple[Settings, Variant], Difference]:
    """Return the differences of the scores from those of the base, corrected together. A variant
    without two seeds that the base also has is missing."""
    found = find_differences(blocks, BITS)
    return {(each.block, each.variant): each for each in found if each.metric == "loss"}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def signed(value: float) -> str:
    """Return a difference of scores with four decimals, or with as many as show two digits."""
    exponent = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:+.{max(4, 1 - exponent)}f}"


def unsigned(value: float) -> str:
    return signed(value)[1:]


def with_interval(difference: Difference | None) -> str:
    if difference is None:
        return ""
    test = difference.test
    return f"{signed(test.difference)} ({signed(test.low)} to {signed(test.high)})"


# === How much scores vary by chance ===


def noise_table(blocks: Blocks) -> str:
    """Return a table of the spreads, with a row for each number of steps."""
    differences = score_differences(blocks)
    others = [*next(iter(blocks.values()))][1:]
    rows = []
    for block, runs in blocks.items():
        base = [score(run) for run in next(iter(runs.values()))]
        if len(base) < 2:
            continue
        cells = [block[0][1], str(len(base)), f"{fmean(base):.4f}", unsigned(stdev(base))]
        for variant in others:
            found = differences.get((block, variant))
            cells += [unsigned(found.spread) if found else "", with_interval(found)]
        rows.append(cells)
    head = ["steps", "seeds", "mean score of the base", "its standard deviation between seeds"]
    for variant in others:
        words = f"`{variant.label}` minus base, same seed"
        head += [f"{words}: standard deviation", f"{words}: mean (95 % interval)"]
    return table(head, rows)


def detectable_unpaired(spread: float, seeds: int, comparisons: int) -> float:
    """Return what detectable_difference returns, for Welch's test of two samples that are not
    paired; spread: the standard deviation in each. It is found by simulation, to about 1 %."""
    import numpy as np  # slow to import
    from scipy import optimize, stats

    random = np.random.default_rng(1)
    first, second = random.normal(size=(2, 50_000, seeds))

    def missing(shift: float) -> float:
        tests = stats.ttest_ind(first, second + shift, axis=1, equal_var=False)
        return float((tests.pvalue < 0.05 / comparisons).mean()) - 0.8

    return spread * float(optimize.brentq(missing, 0, 1000, xtol=1e-3))


def seeds_table(spreads: Mapping[str, tuple[float, bool]], comparisons: int) -> str:
    """Return a table: which difference is found with how many seeds. spreads: {what: (standard
    deviation, paired by seed?)}"""
    rows = []
    for what, (spread, by_seed) in spreads.items():
        cells = [what, unsigned(spread)]
        function: Callable[[float, int, int], float]
        function = detectable_difference if by_seed else detectable_unpaired
        for count in (1, comparisons):
            cells += [unsigned(function(spread, seeds, count)) for seeds in SEED_COUNTS]
        rows.append(cells)
    head = ["comparison", "standard deviation"]
    for count in (1, comparisons):
        head += [f"{seeds} seeds, {count} comparison{'s' * (count > 1)}" for seeds in SEED_COUNTS]
    return table(head, rows)


DISTRIBUTIONS: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {  # of a score between seeds
    "normally": lambda random, shape: random.normal(size=shape),
    "with many outliers (t with 3 degrees of freedom)": lambda random, shape: random.standard_t(
        3, shape
    ),
    "evenly within limits": lambda random, shape: random.uniform(-1, 1, shape),
}


def false_positives(
    draw: Callable[[Any, tuple[int, ...]], Any], seeds: int, comparisons: int, experiments: int
) -> float:
    """Return the share of simulated experiments in which ablate.py calls a difference measurable
    although all variants are equal: their scores, the base's too, are drawn from one
    distribution. Holm's method calls a difference measurable if the smallest p is below
    0.05 / comparisons."""
    import numpy as np  # slow to import
    from scipy import stats

    random = np.random.default_rng(1)
    found = 0
    for start in range(0, experiments, 1000):
        count = min(1000, experiments - start)
        scores = draw(random, (count, 1 + comparisons, seeds))
        p = stats.ttest_rel(scores[:, 1:], scores[:, :1], axis=2).pvalue
        found += int((p.min(axis=1) < 0.05 / comparisons).sum())
    return found / experiments


def noise_lines(parts: Mapping[str, Blocks], experiments: int) -> Iterator[str]:
    """Yield which difference is found with how many seeds, for the number of steps of the part
    recipes, and how often equal variants are called different."""
    blocks = parts["noise"]
    block = [*blocks][len(blocks) // 2]
    runs = blocks[block]
    differences = score_differences(blocks)
    base, *others = runs
    if len(runs[base]) < 2:
        return
    spreads = {"not paired": (stdev(map(score, runs[base])), False)}
    for variant in others:
        if (block, variant) in differences:
            spreads[f"paired, `{variant.label}`"] = differences[block, variant].spread, True
    recipes = [*score_differences(parts.get("recipes", {})).values()]
    if recipes:
        spreads["paired, median of the recipes"] = median(each.spread for each in recipes), True
        most = max(recipes, key=lambda each: each.spread)
        words = f"paired, `{most.variant.label}` on {text_label(most.block)}, which varies most"
        spreads[words] = most.spread, True
    comparisons = max(len(recipes), 2)
    words = "Differences of the score that are called measurable in 80 of 100 experiments, after"
    yield f"{words} {block[0][1]} steps (bits per byte):"
    yield seeds_table(spreads, comparisons)
    rows = []
    for name, draw in DISTRIBUTIONS.items():
        shares = [false_positives(draw, n, comparisons, experiments) for n in SEED_COUNTS[:2]]
        rows.append([name, *(f"{100 * share:.1f}" for share in shares)])
    what = f"at least one of {comparisons} differences measurable, although all variants equal"
    words = f"the base (from {experiments:,} simulated experiments each):"
    yield f"How many of 100 experiments call {what} {words}"
    yield table(["scores vary between seeds", *(f"{n} seeds" for n in SEED_COUNTS[:2])], rows)


# === What the recipes do ===


class Published(NamedTuple):
    """What is published about a variant. `effect` is in bits per byte; None if there is no figure
    for this change alone."""

    kind: str  # architecture, optimizer, averaging, evaluation, schedule, data or export
    effect: float | None


def read_published() -> dict[str, Published]:
    """Return {variant: what is published about it}. The file also names the sources."""
    with open(VARIANTS / "published.csv", encoding="utf-8", newline="") as file:
        return {
            row["variant"]: Published(
                row["kind"], float(row["effect_bpb"]) if row["effect_bpb"] else None
            )
            for row in csv.DictReader(file)
        }


def verdict(difference: Difference | None, effect: float | None) -> str:
    if difference is None:
        return ""
    if difference.equal:
        return "equal"
    if not difference.measurable:
        return "not measurable"
    if not effect:
        return "better" if difference.test.difference < 0 else "worse"
    return "same sign" if difference.test.difference * effect > 0 else "opposite sign"


def mean_cost(differences: Sequence[Difference], variant: Variant, metric: str) -> str:
    """Return the mean of a difference over all blocks; empty if it is not known."""
    values = [
        each.test.difference
        for each in differences
        if each.variant == variant and each.metric == metric
    ]
    return f"{fmean(values):+,.0f}" if values else ""


def recipes_table(blocks: Blocks, published: Mapping[str, Published]) -> str:
    """Return the table of all recipes, the one with the lowest mean score first."""
    differences = find_differences(blocks, BITS)
    scores = score_differences(blocks)
    rows = []
    for variant in sort_variants(scores):
        known = published[variant.label]
        figure = "-" if known.effect is None else signed(known.effect)
        cells = [variant.label, known.kind, figure]
        for block in blocks:
            found = scores.get((block, variant))
            cells += [with_interval(found), verdict(found, known.effect)]
        cells += [mean_cost(differences, variant, metric) for metric in ("step time", "artifact")]
        rows.append(cells)
    head = ["recipe", "kind", "published effect"]
    for block in blocks:
        head += [f"effect on {text_label(block)}", "verdict"]
    return table([*head, "step time (ms)", "artifact (bytes)"], rows)


VERDICTS = "same sign", "opposite sign", "not measurable"  # on a recipe with a published effect


def kinds_table(blocks: Blocks, published: Mapping[str, Published]) -> str:
    """Return a table with a row for each kind of change: how much its differences vary between
    seeds, and the number of each verdict. Recipes without a published effect are not among these
    numbers."""
    groups: dict[str, dict[tuple[Settings, Variant], Difference]] = {}
    for (block, variant), found in score_differences(blocks).items():
        groups.setdefault(published[variant.label].kind, {})[block, variant] = found
    rows = []
    for kind, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        verdicts = Counter(
            (block, verdict(found, published[variant.label].effect))
            for (block, variant), found in group.items()
            if published[variant.label].effect is not None
        )
        cells = [kind, str(len({variant for _, variant in group}))]
        cells += [unsigned(median(found.spread for found in group.values()))]
        rows.append(
            [*cells, *(str(verdicts[block, word]) for block in blocks for word in VERDICTS)]
        )
    head = [f"{text_label(block)}: {word}" for block in blocks for word in VERDICTS]
    spread = "median standard deviation of the difference between seeds"
    return table(["kind", "variants", spread, *head], rows)


def sort_variants(scores: Mapping[tuple[Settings, Variant], Difference]) -> list[Variant]:
    """Return the variants, the one with the lowest mean score first."""
    values: dict[Variant, list[float]] = {}
    for (_, variant), difference in scores.items():
        values.setdefault(variant, []).append(difference.test.difference)
    return sorted(values, key=lambda variant: fmean(values[variant]))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return Spearman's rank correlation with its 95 % interval. The interval comes from drawing
    the pairs again, with replacement (bootstrap); their own errors are not in it."""
    import numpy as np  # slow to import
    from scipy import stats

    def correlation(first: Any, second: Any) -> float:
        return stats.spearmanr(first, second).statistic

    first, second = map(np.array, zip(*pairs, strict=True))
    random = np.random.default_rng(1)
    drawn = [random.integers(0, len(pairs), len(pairs)) for _ in range(2000)]
    values = [correlation(first[i], second[i]) for i in drawn if len({*i.tolist()}) > 2]
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(correlation(first, second)), float(low), float(high)


def correlation_lines(blocks: Blocks, published: Mapping[str, Published]) -> Iterator[str]:
    """Yield a line for each text, and one for the mean of all texts."""
    scores = score_differences(blocks)
    groups = {text_label(block): [block] for block in blocks}
    groups |= {"the mean of both texts": [*blocks]} if len(blocks) > 1 else {}
    for name, group in groups.items():
        pairs = []
        for variant in sort_variants(scores):
            found = [scores[block, variant] for block in group if (block, variant) in scores]
            effect = published[variant.label].effect
            if effect is not None and len(found) == len(group):
                pairs.append((effect, fmean(each.test.difference for each in found)))
        if len(pairs) > 3:
            value, low, high = rank_correlation(pairs)
            words = f"{value:+.2f} (95 % interval {low:+.2f} to {high:+.2f})"
            yield f"- {name}: {words}, {len(pairs)} variants"


def list_effects(blocks: Blocks, published: Mapping[str, Published]) -> list[Effect]:
    """Return what the forest plot shows. The label of a recipe has its published effect in
    brackets."""
    effects = []
    for (block, variant), found in score_differences(blocks).items():
        known = published[variant.label].effect
        label = variant.label if known is None else f"{variant.label} ({known:+.4f} published)"
        effects.append(Effect(label, text_label(block), BITS, found.test, found.measurable))
    return effects


def shorter_table(shorter: Blocks, recipes: Blocks) -> str:
    """Return a table of the effects on code by the number of steps. shorter: the part of this name;
    recipes: the part with the effects after the usual number of steps."""
    on_code = {block: runs for block, runs in recipes.items() if text_label(block) == "code"}
    effects: dict[int, dict[Settings, str]] = {}  # {steps: {settings of the variant: effect}}
    for blocks in (shorter, on_code):
        for (block, variant), found in score_differences(blocks).items():
            steps = int(blocks[block][variant][0].config["iterations"])
            effects.setdefault(steps, {})[variant.settings] = with_interval(found)
    _, *variants = next(iter(shorter.values()))
    rows = [
        [variant.label, *(effects[steps].get(variant.settings, "") for steps in sorted(effects))]
        for variant in variants
    ]
    return table(["recipe", *(f"effect after {steps:,} steps" for steps in sorted(effects))], rows)


# === Three settings ===


def find_curves(blocks: Blocks) -> dict[str, dict[float, list[Run]]]:
    """Return {setting: {value: runs}}, with the base's own value among them. The runs of a setting
    have the same seeds: those with which all its values were run."""
    [runs] = blocks.values()
    base, *others = runs
    found: dict[str, dict[float, list[Run]]] = {}
    for variant in others:
        [(name, value)] = variant.settings
        if runs[variant] and runs[base]:
            own = float(runs[base][0].config[name.lower()])
            found.setdefault(name, {own: runs[base]})[float(value)] = runs[variant]
    curves = {}
    for name, values in found.items():
        common = set.intersection(*({run.seed for run in group} for group in values.values()))
        if len(common) > 1:
            curves[name] = {
                value: sorted(
                    (run for run in group if run.seed in common), key=lambda run: str(run.seed)
                )
                for value, group in sorted(values.items())
            }
    return curves


def curve_rows(values: Mapping[float, list[Run]], own: float) -> Iterator[list[str]]:
    """Yield for each value its mean score, the difference from the base's own value, and for how
    many seeds it is the best one."""
    by_seed = [*zip(*(map(score, runs) for runs in values.values()), strict=True)]
    best = [[*values][scores.index(min(scores))] for scores in by_seed]
    base = [score(run) for run in values[own]]
    for value, runs in values.items():
        scores = [score(run) for run in runs]
        words = "the base"
        if value != own:
            test = t_test(base, scores, by_seed=True)
            words = f"{signed(test.difference)} ({signed(test.low)} to {signed(test.high)})"
        cells = [f"{value:g}", f"{fmean(scores):.4f}", words]
        yield [*cells, f"{best.count(value)} of {len(best)}"]


def make_settings_figure(found: Mapping[str, Mapping[float, list[Run]]]) -> Any:
    """Draw for each setting the score at each of its values: the mean, and a line per seed."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(11, 3.8), layout="constrained", dpi=130)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (name, values) in zip(axes, found.items(), strict=True):
        columns = [[score(run) for run in runs] for runs in values.values()]
        for scores in zip(*columns, strict=True):
            axis.plot(range(len(scores)), scores, color="#bbbbbb", linewidth=0.8)
        axis.plot(range(len(columns)), [*map(fmean, columns)], "o-", color=COLOUR)
        axis.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        axis.set(xlabel=name, ylabel="score (bits per byte)")
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Score by setting: the mean, and a thin line for each seed", fontsize=11)
    return figure


# === How weights are stored ===


def export_table(blocks: Blocks) -> str:
    """Return a table: how much worse the stored model is than the trained weights, which the last
    validation measured, and how many bytes it has."""
    rows = []
    for variant, runs in next(iter(blocks.values())).items():
        pairs = [(run.validations[-1].val_bpb, score(run)) for run in runs if run.validations]
        if len(pairs) < 2:
            continue
        before, after = zip(*pairs, strict=True)
        test = t_test(before, after, by_seed=True)
        words = f"{signed(test.difference)} ({signed(test.low)} to {signed(test.high)})"
        sizes = [run.model_bytes for run in runs if run.model_bytes]
        size = f"{fmean(sizes):,.0f}" if sizes else ""
        rows.append([variant.label, f"{fmean(before):.4f}", f"{fmean(after):.4f}", words, size])
    head = ["variant", "score before export", "score", "difference (95 % interval)"]
    return table([*head, "artifact (bytes)"], rows)


# === All ===


def describe_repeats(runs: Sequence[Run]) -> Iterator[str]:
    """Yield in words how many runs of one configuration and seed were made more than once, whether
    they are equal (all their logged losses, and the score), and how much their scores differ.
    Nothing if there are none."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = repr((run.seed, sorted(run.conditions.items(), key=repr)))
        groups.setdefault(key, []).append(run)
    repeated = [group for group in groups.values() if len(group) > 1]
    if not repeated:
        return
    equal = 0
    largest = 0.0
    for group in repeated:
        losses = {
            repr(([(line.step, line.train_loss) for line in run.steps], run.result[:4]))
            for run in group
            if run.result
        }
        equal += len(losses) == 1
        scores = [*map(score, group)]
        largest = max(largest, max(scores) - min(scores))
    what = "all logged losses and the scores are equal to the last digit"
    if equal < len(repeated):
        what += f"; in the others, scores differ by at most {unsigned(largest)} bits per byte"
    words = "Combinations of configuration and seed of which several parts have a run"
    yield f"{words}: {len(repeated)}. In {equal} of them, {what}."


def describe(folder: Path, name: str, out: Path, experiments: int) -> Iterator[str]:
    """Yield the paragraphs of the report, and write the plots. Raises ToolError if there are no
    runs, or if a plot cannot be written."""
    parts = {part: blocks for part in PARTS if (blocks := read_part(folder, name, part))}
    if not parts:
        words = f"contains no finished runs {name}-*.jsonl; run laptop.py first"
        raise ToolError(f"{folder}: {words}")
    runs = {
        part: [run for each in blocks.values() for group in each.values() for run in group]
        for part, blocks in parts.items()
    }
    yield "Finished runs: " + ", ".join(f"{part} {len(found)}" for part, found in runs.items())
    faults = dict.fromkeys(fault for part in runs.values() for fault in find_split_faults(part))
    yield from (f"Note: {fault}" for fault in faults if "only a part" in fault)
    yield from describe_repeats([run for found in runs.values() for run in found])
    if "noise" in parts:
        yield "## Noise"
        yield noise_table(parts["noise"])
        yield from noise_lines(parts, experiments)
    if "recipes" in parts:
        yield from describe_recipes(parts["recipes"], out / f"{name}-recipes.png")
    if "reasons" in parts and score_differences(parts["reasons"]):
        yield "## Reasons"
        yield recipes_table(parts["reasons"], read_published())
    if "shorter" in parts and score_differences(parts["shorter"]):
        yield "## Shorter runs"
        yield shorter_table(parts["shorter"], parts.get("recipes", {}))
    if "settings" in parts:
        yield from describe_settings(parts["settings"], out / f"{name}-settings.png")
    if "export" in parts:
        yield "## Export"
        yield export_table(parts["export"])


def describe_recipes(blocks: Blocks, picture: Path) -> Iterator[str]:
    """Yield the paragraphs on the recipes, and write the plot; nothing if no variant has two seeds
    in common with the base. Raises ToolError if the plot cannot be written."""
    published = read_published()
    if not score_differences(blocks):
        return
    yield "## Recipes"
    yield recipes_table(blocks, published)
    yield kinds_table(blocks, published)
    if lines := [*correlation_lines(blocks, published)]:
        yield "Rank correlation of the published effects with the effects at laptop size:"
        yield "\n".join(lines)
    if not plot_effects(list_effects(blocks, published), picture):
        raise ToolError(f"{picture} was not written (see above)")


def describe_settings(blocks: Blocks, picture: Path) -> Iterator[str]:
    """Yield a table for each setting, and write the plot; nothing if no setting is complete. Raises
    ToolError if the plot cannot be written."""
    found = find_curves(blocks)
    if not found:
        return
    yield "## Settings"
    [runs] = blocks.values()
    config = next(iter(runs.values()))[0].config  # of the base
    for setting, values in found.items():
        head = [setting, "mean score", "minus the base (95 % interval)", "best for seeds"]
        yield table(head, [*curve_rows(values, float(config[setting.lower()]))])
    if not write_figure(lambda: make_settings_figure(found), picture):
        raise ToolError(f"{picture} was not written (see above)")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("logs", type=Path, metavar="FOLDER", help="folder with the logs")
    text = "beginning of the names of the logs (default: laptop)"
    add("--name", default="laptop", metavar="NAME", help=text)
    text = "folder for the plots (default: the folder with the logs)"
    add("--out", type=Path, metavar="FOLDER", help=text)
    text = "number of simulated experiments for each share of false positives (default: 20000)"
    add("--experiments", type=int, default=20_000, metavar="N", help=text)
    options = parser.parse_args(arguments)
    if options.experiments < 1:
        parser.error(f"--experiments {options.experiments} must be at least 1")
    out = options.out or options.logs
    for paragraph in describe(options.logs, options.name, out, options.experiments):
        print(f"{paragraph}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, refused=2))
