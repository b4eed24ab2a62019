"""Say what the runs of laptop.py show, in Markdown tables and plots.

    python3 tests/bench/laptop_results.py logs            reads logs/laptop-*.jsonl
    python3 tests/bench/laptop_results.py logs --out .    writes laptop-*.png to another folder

Differences, intervals and the word "measurable" are those of tools/ablate.py. Parts of which no
runs are there are left out. This program trains nothing, and takes about two minutes, most of them
for the simulation of false positives.
"""

# Builds on tools/: ablate.py (compares variants), samples.py (tests), runs.py (reads logs) and
# figures.py (plots).

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from runs import Result, Run, read_logs
from samples import BITS, detectable_difference, result_value

PARTS = "noise", "levers", "settings", "export"
VARIANTS = Path(__file__).with_name("laptop")
BLOCKS = {"noise": "ITERATIONS", "levers": "DATA_PATH"}  # option --for-each
SEED_COUNTS = 3, 5, 10
COLOURS = "#1b6ca8", "#c4501b"
Blocks = dict[Settings, RunsByVariant]


def read_part(folder: Path, part: str) -> Blocks:
    """Return the finished runs of a part. The name of a log says which variant it is of. Raises
    ToolError if a seed of a variant is there twice, or if its runs cannot be compared."""
    variants = read_variants(VARIANTS / f"{part}.txt")
    blocks: Blocks = {}
    for run in read_logs(sorted(folder.glob(f"laptop-{part}-*.jsonl"))).runs:
        if run.status != "finished" or not run.result:
            continue
        name = BLOCKS.get(part)
        block = ((name, str(run.config[name.lower()])),) if name else ()
        names = {readable_name(variant, block): variant for variant in variants}
        match = re.fullmatch(rf"laptop-{part}-(.*)-[0-9a-f]{{8}}-seed\d+\.jsonl", run.name)
        if not match or match[1] not in names:
            raise ToolError(f"{run.path}: its name is none of the part {part}; move it away")
        runs = blocks.setdefault(block, {variant: [] for variant in variants})
        group = runs[names[match[1]]]
        if run.seed in [other.seed for other in group]:
            words = "is there twice, from two experiments; move one of them away"
            raise ToolError(f"{run.path}: seed {run.seed} of this variant {words}")
        group.append(run)
    for runs in blocks.values():
        base = next(iter(runs))
        for variant, group in runs.items():
            if group and (reasons := refusals(runs[base], group)):
                raise ToolError(f"{folder}: {variant.label}: {'; '.join(reasons)}")
    return dict(sorted(blocks.items(), key=lambda item: block_order(item[0])))


def block_order(block: Settings) -> tuple[int, bool]:
    """Sort numbers of steps by their size, and the quickstart's text before the other one."""
    value = block[0][1] if block else "0"
    return (int(value), False) if value.isdigit() else (0, "quickstart" not in value)


def score(run: Run) -> float:
    value = result_value(run, BITS)
    assert value is not None  # only finished runs are kept
    return value


def losses_of(blocks: Blocks) -> list[Difference]:
    """Return the differences of the scores, in bits per byte, corrected together."""
    found = find_differences(blocks, BITS)
    return [difference for difference in found if difference.metric == "loss"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def signed(value: float) -> str:
    return f"{value:+.4f}"


def with_interval(difference: Difference) -> str:
    test = difference.test
    return f"{signed(test.difference)} ({signed(test.low)} to {signed(test.high)})"


# === How much scores vary by chance ===


def noise_tables(blocks: Blocks) -> Iterator[str]:
    """Yield a table of the spreads for each number of steps."""
    losses = losses_of(blocks)
    rows = []
    for block, runs in blocks.items():
        base = [score(run) for run in next(iter(runs.values()))]
        cells = [block[0][1], str(len(base)), f"{fmean(base):.4f}", f"{stdev(base):.4f}"]
        own = [loss for loss in losses if loss.block == block]
        cells += [f"{loss.spread:.4f}, mean {signed(loss.test.difference)}" for loss in own]
        rows.append(cells)
    others = [variant.label for variant in [*next(iter(blocks.values()))][1:]]
    head = ["steps", "seeds", "mean score", "standard deviation between seeds"]
    head += [f"of the paired difference of `{name}`" for name in others]
    yield table(head, rows)


def seeds_tables(spreads: Mapping[str, tuple[float, bool]], comparisons: int) -> str:
    """Return a table: which difference is found with how many seeds. spreads: {what: (standard
    deviation, paired by seed?)}"""
    rows = []
    for what, (spread, by_seed) in spreads.items():
        cells = [what, f"{spread:.4f}"]
        for count in (1, comparisons):
            found = [detectable_difference(spread, n, count, by_seed) for n in SEED_COUNTS]
            cells += [f"{difference:.4f}" for difference in found]
        rows.append(cells)
    head = ["", "standard deviation"]
    for count in (1, comparisons):
        head += [f"{n} seeds, {count} comparison{'s' * (count > 1)}" for n in SEED_COUNTS]
    return table(head, rows)


def false_positives(
    shapes: Sequence[float] | None, seeds: int, comparisons: int, experiments: int
) -> float:
    """Return the share of simulated experiments in which ablate.py calls a difference between
    equal variants measurable. Differences with one seed are drawn from `shapes` with a random
    sign; without shapes they are normal. Their size does not matter, because t has no unit."""
    import numpy as np  # slow to import

    random = np.random.default_rng(1)
    variants = [Variant((), None, str(number)) for number in range(1 + comparisons)]
    found = 0
    for _ in range(experiments):
        runs: RunsByVariant = {}
        for variant in variants:
            if variant is variants[0]:
                drawn = np.zeros(seeds)
            elif shapes is None:
                drawn = random.normal(size=seeds)
            else:
                drawn = random.choice(shapes, seeds) * random.choice([-1, 1], seeds)
            runs[variant] = [
                Run("", seed=seed, result=Result("roundtrip", "score", value, value))
                for seed, value in enumerate((100 + drawn).tolist())
            ]
        found += any(difference.measurable for difference in find_differences({(): runs}, BITS))
    return found / experiments


def measured_shapes(blocks: Blocks) -> list[float]:
    """Return the differences by seed of all variants in all blocks, each divided by the standard
    deviation of its variant and less its mean."""
    shapes = []
    for runs in blocks.values():
        base, *others = runs.values()
        by_seed = {run.seed: score(run) for run in base}
        for group in others:
            found = [score(run) - by_seed[run.seed] for run in group if run.seed in by_seed]
            if len(found) > 2 and (spread := stdev(found)):
                shapes += [(value - fmean(found)) / spread for value in found]
    return shapes


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
            row["variant"]: Published(row["kind"], float(row["effect"]) if row["effect"] else None)
            for row in csv.DictReader(file)
        }


def verdict(loss: Difference, effect: float | None) -> str:
    if loss.equal:
        return "equal"
    if not loss.measurable:
        return "not measurable"
    if effect is None:
        return "better" if loss.test.difference < 0 else "worse"
    return "same sign" if loss.test.difference * effect > 0 else "opposite sign"


def cost_of(differences: Sequence[Difference], variant: Variant, metric: str) -> str:
    """Return the mean of a difference over all blocks; empty if it is not known."""
    values = [
        each.test.difference
        for each in differences
        if each.variant == variant and each.metric == metric
    ]
    return f"{fmean(values):+,.0f}" if values else ""


def levers_table(blocks: Blocks, published: Mapping[str, Published]) -> str:
    """Return the table of all recipes, the one with the lowest mean score first."""
    differences = find_differences(blocks, BITS)
    rows = []
    for variant, losses in by_variant(differences):
        known = published[variant.label]
        figure = "-" if known.effect is None else signed(known.effect)
        cells = [variant.label, known.kind, figure]
        for loss in losses:
            cells += [with_interval(loss), verdict(loss, known.effect)]
        cells += [cost_of(differences, variant, metric) for metric in ("step time", "artifact")]
        rows.append(cells)
    head = ["recipe", "kind", "published effect"]
    for block in blocks:
        head += [f"effect on {text_of(block)}", "verdict"]
    return table([*head, "step time (ms)", "artifact (bytes)"], rows)


def by_variant(differences: Sequence[Difference]) -> list[tuple[Variant, list[Difference]]]:
    """Return the differences of the scores by variant, the variant with the lowest mean first."""
    found: dict[Variant, list[Difference]] = {}
    for difference in differences:
        if difference.metric == "loss":
            found.setdefault(difference.variant, []).append(difference)
    return sorted(found.items(), key=lambda item: fmean(d.test.difference for d in item[1]))


def text_of(block: Settings) -> str:
    """Return a word for the text on which the runs of a block were trained."""
    return "prose" if block and "quickstart" not in block[0][1] else "code"


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return Spearman's rank correlation with its 95 % interval by the bootstrap."""
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


def correlation_lines(
    losses: Sequence[Difference], published: Mapping[str, Published]
) -> Iterator[str]:
    """Yield a line for each block, and one for the mean of all blocks."""
    blocks = [*dict.fromkeys(loss.block for loss in losses)]
    groups = {text_of(block): [loss for loss in losses if loss.block == block] for block in blocks}
    groups |= {"the mean of both texts": [*losses]} if len(blocks) > 1 else {}
    for name, group in groups.items():
        pairs = [
            (published[variant.label].effect, fmean(loss.test.difference for loss in own))
            for variant, own in by_variant(group)
            if published[variant.label].effect is not None
        ]
        if len(pairs) > 3:
            value, low, high = rank_correlation(pairs)
            words = f"{value:+.2f} (95 % interval {low:+.2f} to {high:+.2f})"
            yield f"- {name}: {words}, {len(pairs)} recipes"


def make_levers_figure(blocks: Blocks, published: Mapping[str, Published]) -> Any:
    """Draw a forest plot: a row for each recipe, and in it the effect on each text."""
    from matplotlib.figure import Figure  # slow to import

    rows = by_variant(find_differences(blocks, BITS))
    figure = Figure(figsize=(9, 1.4 + 0.36 * len(rows)), layout="constrained", dpi=130)
    axis = figure.subplots()
    texts = [*dict.fromkeys(map(text_of, blocks))]
    for y, (_, losses) in enumerate(rows):
        for loss in losses:
            number = texts.index(text_of(loss.block))
            fill = {"markerfacecolor": None if loss.measurable else "white"}
            half_width = loss.test.high - loss.test.difference
            style = {"color": COLOURS[number % 2], "marker": "os"[number % 2], "capsize": 2}
            place = y + 0.22 * (number - (len(texts) - 1) / 2)
            axis.errorbar(loss.test.difference, place, xerr=half_width, **style, **fill)
    axis.axvline(0, color="#444444", linewidth=0.8)
    names = [
        f"{variant.label} ({known.effect:+.4f})" if known.effect is not None else variant.label
        for variant, _ in rows
        for known in [published[variant.label]]
    ]
    axis.set_yticks(range(len(rows)), names, fontsize=9)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.grid(color="#dddddd", linewidth=0.6, axis="x")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("difference of the score from the base (bits per byte); left: better")
    for number, text in enumerate(texts):
        axis.plot([], [], "os"[number % 2], color=COLOURS[number % 2], label=f"{text}, measurable")
    axis.plot([], [], "o", color="#444444", markerfacecolor="white", label="not measurable")
    axis.legend(frameon=False, fontsize=9)
    title = "Effect at laptop size, with 95 % intervals; in brackets: the published effect"
    figure.suptitle(title, fontsize=11)
    return figure


# === Three settings ===


def curves(blocks: Blocks) -> dict[str, dict[float, list[Run]]]:
    """Return {setting: {value: runs}}, with the base's own value among them."""
    [runs] = blocks.values()
    base, *others = runs
    found: dict[str, dict[float, list[Run]]] = {}
    for variant in others:
        [(name, value)] = variant.settings
        if runs[variant] and runs[base]:
            own = float(runs[base][0].config[name.lower()])
            found.setdefault(name, {own: runs[base]})[float(value)] = runs[variant]
    return {name: dict(sorted(values.items())) for name, values in found.items()}


def curve_rows(values: Mapping[float, list[Run]]) -> Iterator[list[str]]:
    """Yield for each value its mean score, how much worse it is than the best value, and for how
    many seeds it is the best one."""
    means = {value: fmean(map(score, runs)) for value, runs in values.items()}
    best = min(means, key=lambda value: means[value])
    by_seed: dict[int | None, dict[float, float]] = {}
    for value, runs in values.items():
        for run in runs:
            by_seed.setdefault(run.seed, {})[value] = score(run)
    wins = [min(scores, key=lambda value: scores[value]) for scores in by_seed.values()]
    variants = {value: Variant((), None, f"{value:g}") for value in values}
    ordered = {variants[best]: values[best]}
    ordered |= {variants[value]: values[value] for value in values}
    losses = {loss.variant: loss for loss in losses_of({(): ordered})}
    for value in values:
        loss = losses.get(variants[value])
        words = with_interval(loss) if loss else "the best" if value == best else ""
        yield [f"{value:g}", f"{means[value]:.4f}", words, str(wins.count(value))]


def make_settings_figure(found: Mapping[str, Mapping[float, list[Run]]]) -> Any:
    """Draw for each setting the score at each of its values: the mean, and a line per seed."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(11, 3.8), layout="constrained", dpi=130)
    for axis, (name, values) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        by_seed: dict[int | None, list[tuple[float, float]]] = {}
        for place, runs in enumerate(values.values()):
            for run in runs:
                by_seed.setdefault(run.seed, []).append((place, score(run)))
        for points in by_seed.values():
            axis.plot(*zip(*points, strict=True), color="#bbbbbb", linewidth=0.8)
        means = [fmean(map(score, runs)) for runs in values.values()]
        axis.plot(range(len(means)), means, "o-", color=COLOURS[0])
        axis.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        axis.set(xlabel=name, ylabel="score (bits per byte)")
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Score by setting: the mean, and a thin line for each seed", fontsize=11)
    return figure


# === All ===


def describe_repeats(runs: Sequence[Run]) -> str:
    """Return in words how many runs of one configuration and seed were made more than once, and
    whether they are equal: all their logged losses, and the score."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = repr((run.seed, sorted(run.conditions.items(), key=repr)))
        groups.setdefault(key, []).append(run)
    repeated = [group for group in groups.values() if len(group) > 1]
    equal = 0
    for group in repeated:
        losses = {
            repr(([(line.step, line.train_loss) for line in run.steps], run.result[:4]))
            for run in group
            if run.result
        }
        equal += len(losses) == 1
    return (
        f"{len(repeated)} runs were made two or more times, in different parts; {equal} of them "
        "have the same losses and the same score to the last digit each time."
    )


def describe(folder: Path, out: Path, experiments: int) -> Iterator[str]:
    """Yield the parts of the report, and write the plots. Raises ToolError if there are no runs."""
    parts = {part: blocks for part in PARTS if (blocks := read_part(folder, part))}
    if not parts:
        raise ToolError(f"{folder}: contains no finished runs of laptop.py; run laptop.py first")
    runs = {
        part: [run for each in blocks.values() for group in each.values() for run in group]
        for part, blocks in parts.items()
    }
    yield "Finished runs: " + ", ".join(f"{part} {len(found)}" for part, found in runs.items())
    yield describe_repeats([run for found in runs.values() for run in found])
    losses = {part: losses_of(blocks) for part, blocks in parts.items()}
    published = read_published()
    if "noise" in parts:
        yield "## Noise"
        yield from noise_tables(parts["noise"])
        yield from noise_lines(parts["noise"], losses, experiments)
    if losses.get("levers"):
        yield "## Recipes"
        yield levers_table(parts["levers"], published)
        yield "Rank correlation of the published effects with the effects here:"
        yield "\n".join(correlation_lines(losses["levers"], published))
        path = out / "laptop-levers.png"
        write_figure(lambda: make_levers_figure(parts["levers"], published), path)
    if "settings" in parts and (found := curves(parts["settings"])):
        yield "## Settings"
        for name, values in found.items():
            head = [name, "mean score", "above the best value", "seeds for which it is the best"]
            yield table(head, [*curve_rows(values)])
        write_figure(lambda: make_settings_figure(found), out / "laptop-settings.png")
    if losses.get("export"):
        yield "## Export"
        yield levers_table(parts["export"], published)


def noise_lines(
    blocks: Blocks, losses: Mapping[str, Sequence[Difference]], experiments: int
) -> Iterator[str]:
    """Yield which difference is found with how many seeds, and the simulation, for the number of
    steps of the other parts: the middle one."""
    block = [*blocks][len(blocks) // 2]
    runs = blocks[block]
    own = [loss for loss in losses["noise"] if loss.block == block]
    if not own:
        return
    spread = stdev(map(score, next(iter(runs.values()))))
    spreads = {"not paired": (spread, False)}
    spreads |= {f"paired, `{loss.variant.label}`": (loss.spread, True) for loss in own}
    levers = [loss.spread for loss in losses.get("levers", []) if loss.spread]
    if levers:
        spreads["paired, the median recipe"] = median(levers), True
    comparisons = max(len(losses.get("levers", [])), 2)
    words = f"smallest difference found in 80 of 100 experiments, after {block[0][1]} steps"
    yield f"{words} (bits per byte):"
    yield seeds_tables(spreads, comparisons)
    shapes = measured_shapes(blocks)
    for seeds in (3, 5):
        kinds = {"normal": None, f"as the {len(shapes)} measured ones here": shapes}
        for kind, values in kinds.items():
            share = false_positives(values, seeds, comparisons, experiments)
            yield (
                f"- {seeds} seeds, differences distributed {kind}: {100 * share:.1f} of 100 "
                f"simulated experiments with {comparisons} equal variants call at least one of "
                f"them different"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("logs", type=Path, metavar="FOLDER", help="folder with the logs")
    text = "folder for the plots (default: the folder with the logs)"
    add("--out", type=Path, metavar="FOLDER", help=text)
    text = "simulated experiments for each share of false positives (default: 1000)"
    add("--experiments", type=int, default=1000, metavar="N", help=text)
    options = parser.parse_args(arguments)
    out = options.out or options.logs
    print("\n\n".join(describe(options.logs, out, options.experiments)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, refused=2))
