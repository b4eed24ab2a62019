"""Estimate what a training step of an edited train_gpt.py costs on a GPU, without a GPU.

    python3 tools/roofline.py mine.py [NAME=value ...] [--device h100] [--ranks 8]
    python3 tools/roofline.py mine.py XSA_LAST_N=9 --against train_gpt.py [NAME=value ...]

Each script has the settings that stand behind it. torch's compiler says which kernels a GPU would
run, and what each reads and writes; nothing is computed. A kernel takes the longer of its bytes /
bandwidth and its FLOPs / rate, plus 2 us. This is an estimate of one device's work, without the
host and without waiting for other ranks: tools/README.md compares it with published step times.
Validation and test-time training are left out. About two minutes for nine layers.
"""

import argparse
import os
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with python3 -P
import cli
import numpy as np
from kernels import record

H100 = {
    # The data sheet, without sparsity: bytes/s, FLOP/s in bfloat16, GB, bytes/s between GPUs
    "memory": 3.35e12, "products": 989e12, "gigabytes": 80, "link": 450e9,
    # What is reached, as shares: of memory by element-wise kernels; of products by cuBLAS at 512
    # channels (openai/parameter-golf PR 670), and with TF32
    "streamed": 0.88, "bfloat16": 0.48, "float32": 0.24,
    # Attention, heads of 64 channels and rows of 1,024: the FlashAttention-3 paper (229, 288, 265
    # TFLOP/s; backward 363 by fa3), backward of the others from published step times
    "flash_forward": 0.232, "flash_backward": 0.192, "cudnn_forward": 0.291,
    "cudnn_backward": 0.281, "fa3_forward": 0.268, "fa3_backward": 0.367,
}  # fmt: skip
ATTENTION = [name for name in H100 if name.endswith("ward")]
# Theirs need fewer bytes for a FLOP. The shares are fitted to one published step each (684 ms and
# about 940 ms for the challenge's script on one of them); b200 has an H100's, which is a guess.
A100 = H100 | {"bfloat16": 0.55, "float32": 0.28} | dict.fromkeys(ATTENTION, 0.33)
RTX4090 = H100 | {"bfloat16": 0.8, "float32": 0.4} | dict.fromkeys(ATTENTION, 0.55)
DEVICES = {
    "h100": H100,
    "h200": H100 | {"memory": 4.8e12, "gigabytes": 141},
    "b200": H100 | {"memory": 8e12, "products": 2250e12, "gigabytes": 180, "link": 900e9},
    "a100": A100 | {"memory": 2.04e12, "products": 312e12, "link": 300e9},
    "rtx4090": RTX4090 | {"memory": 1.01e12, "products": 165e12, "gigabytes": 24, "link": 25e9},
}
LAUNCH = 2e-6  # seconds that a kernel takes besides its work
RESERVED = 3e9  # bytes of a device for CUDA, NCCL and gaps between tensors
RUN = 600  # seconds
HEAD = "side", "part", "kernels", "GB", "TFLOP", "ms"


def seconds_of(kernel, rates, ranks):
    if kernel.kind == "all-reduce":
        return (ranks > 1) * (2 * (1 - 1 / ranks) * kernel.bytes / rates["link"] + LAUNCH)
    share = rates.get(f"{kernel.kind}_{kernel.side}", rates.get(kernel.kind, rates["float32"]))
    moved = kernel.bytes / (rates["memory"] * rates["streamed"])
    return max(moved, kernel.flops / (rates["products"] * share)) + LAUNCH


class Table:
    """A step on a device: rows are {(side, part): array of kernels, bytes, FLOPs, seconds}."""

    def __init__(self, cost, rates, ranks):
        self.cost, self.rates = cost, rates
        self.rows = defaultdict(lambda: np.zeros(4))
        self.products = 0.0  # seconds of matrix products
        for kernel in cost.kernels:
            seconds = seconds_of(kernel, rates, ranks)
            times = 1 if kernel.side == "step" else cost.micro_steps
            self.rows[kernel[:2]] += np.multiply(times, (1, kernel.bytes, kernel.flops, seconds))
            is_product = kernel.flops and kernel.kind in ("bfloat16", "float32")
            self.products += times * seconds if is_product else 0.0
        self.total = sum(self.rows.values())
        self.seconds = self.total[3]

    def lines(self):
        rows = [[*key, *cells(values)] for key, values in self.rows.items()]
        return cli.table(HEAD, [*rows, ["sum", "", *cells(self.total)]])

    def words(self):
        cost, rates = self.cost, self.rates
        room = rates["gigabytes"] * 1e9 - RESERVED - cost.held
        fits = [n for n in cost.allowed if cost.peak * cost.micro_steps / n <= room]
        lines = [
            f"a step: {1e3 * self.seconds:.1f} ms, {self.products / self.seconds:.0%} of it matrix "
            f"products; {cost.tokens / self.seconds / 1e6:.2f} million tokens per second",
            f"its FLOPs alone, at the device's peak: {1e3 * self.total[2] / rates['products']:.1f} "
            "ms, which no kernels can beat",
            f"memory: {cost.held / 1e6:,.0f} MB of weights, gradients and optimizers, and "
            f"{cost.peak / 1e6:,.0f} MB in a micro-step; "
            + (f"fits from GRAD_ACCUM_STEPS={fits[0]} on" if fits else "no GRAD_ACCUM_STEPS fits"),
        ]
        for name in sorted(cost.unknown):
            lines.append(f"{name}: its FLOPs are not known, only its bytes are counted")
        return lines


def cells(values, sign=""):
    count, size, flops, seconds = values
    ms, tera, giga = 1e3 * seconds, flops / 1e12, size / 1e9
    return f"{count:{sign}.0f}", f"{giga:{sign}.2f}", f"{tera:{sign}.2f}", f"{ms:{sign}.2f}"


def steps_in_run(tables):
    """Steps in 600 s of a run whose steps become as in the next table at some share of it."""
    edges = [*(table.cost.begins for table in tables), 1.0]
    return sum(RUN * (b - a) / t.seconds for a, b, t in zip(edges, edges[1:], tables, strict=False))


def difference(ours, theirs):
    """Lines on what one Table has more than another."""
    none = np.zeros(4)
    keys = [*ours.rows, *(key for key in theirs.rows if key not in ours.rows)]
    found = {key: ours.rows.get(key, none) - theirs.rows.get(key, none) for key in keys}
    found["sum", ""] = ours.total - theirs.total
    rows = [[*key, *cells(values, "+")] for key, values in found.items() if any(abs(values) > 1e-9)]
    return cli.table(HEAD, rows) if rows else ["no difference"]


def compare(name, ours, theirs):
    """Prints what `ours` costs more than `theirs`, both a script's tables."""
    for index in range(max(len(ours), len(theirs))):
        one, other = ours[min(index, len(ours) - 1)], theirs[min(index, len(theirs) - 1)]
        print(f"\nmore than {name}" + when(one if index < len(ours) else other))
        print("\n".join(difference(one, other)))
        more, share = one.seconds - other.seconds, one.seconds / other.seconds - 1
        memory = one.cost.peak + one.cost.held - other.cost.peak - other.cost.held
        print(f"a step: {1e3 * more:+.2f} ms ({share:+.1%}), memory {memory / 1e6:+,.0f} MB")
    steps = steps_in_run(ours) - steps_in_run(theirs)
    print(f"in {RUN} s: {abs(steps):,.0f} steps {'more' if steps > 0 else 'fewer'}")


def when(table):
    return f", from {table.cost.begins:.0%} of the run on" if table.cost.begins else ""


def draw(tables, path):
    """Bars of ms by part, for each script's first steps."""
    from matplotlib.figure import Figure  # optional, and slow to import

    keys = list(dict.fromkeys(key for table in tables.values() for key in table.rows))
    figure = Figure(figsize=(9, 0.3 * len(keys) + 1.5), dpi=150, layout="constrained")
    axes, height = figure.subplots(), 0.8 / len(tables)
    for number, (name, table) in enumerate(tables.items()):
        places = np.arange(len(keys)) + (number - (len(tables) - 1) / 2) * height
        ms = [1e3 * table.rows[key][3] for key in keys]
        label = f"{name}: {1e3 * table.seconds:.1f} ms a step"
        bars = axes.barh(places, ms, height, label=label, color=("#0072b2", "#e69f00")[number])
        axes.bar_label(bars, fmt=" %.2f", size=7)
    axes.set_yticks(range(len(keys)), [f"{side}: {part}" for side, part in keys], size=8)
    axes.set(xlabel="milliseconds of a step, estimated from bytes and FLOPs")
    axes.set_ylim(len(keys) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def rate(text):
    """NAME=number of --rate"""
    name, _, value = text.partition("=")
    try:
        if name in H100:
            return name, float(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text}: write NAME=number with one of {', '.join(H100)}")


def parse(arguments):
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    words = ("FILE", "NAME=value")
    add("script", nargs="+", metavar="FILE", help="an edited train_gpt.py, then its settings")
    add("--against", nargs="+", metavar=words, help="a script to compare with, and its settings")
    add("--device", choices=DEVICES, default="h100", help="default: %(default)s")
    add("--ranks", type=cli.number(int, 1, 4096), default=8, help="GPUs; default: %(default)s")
    add("--rate", type=rate, nargs="+", default=[], metavar="NAME=number", help="one you measured")
    add("--picture", type=Path, metavar="FILE", help="draw a picture: .svg or .png")
    options = parser.parse_args(arguments)
    if options.picture and options.picture.suffix not in (".svg", ".png"):
        parser.error(f"--picture {options.picture}: must end in .svg or .png")
    for script, *settings in filter(None, (options.script, options.against)):
        wrong = [word for word in settings if "=" not in word]
        if wrong or not Path(script).is_file():
            parser.error(f"{(wrong or [script])[0]}: write one file, then NAME=value")
    return options


def estimate(options):
    rates = DEVICES[options.device] | dict(options.rate)
    scripts = [words for words in (options.script, options.against) if words]
    jobs = [(words, last) for words in scripts for last in (False, True)]
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = [pool.submit(record, w[0], w[1:], options.ranks, last) for w, last in jobs]
        costs = [future.result() for future in futures]
    tables = []
    for words, found in zip(scripts, (costs[:2], costs[2:]), strict=False):
        tables.append([Table(cost, rates, options.ranks) for cost in found if cost])
        for table in tables[-1] if words is options.script else []:
            print(
                f"{' '.join(words)} on {options.ranks} x {options.device}{when(table)}: estimated"
            )
            print("\n".join((*table.lines(), *table.words(), "")))
    print(f"{steps_in_run(tables[0]):,.0f} steps in {RUN} s, without the host and other ranks")
    names = [" ".join(words) for words in scripts]
    if options.against:
        compare(names[1], *tables)
    if options.picture:
        draw(dict(zip(names, (first for first, *_ in tables), strict=True)), options.picture)
        print(f"picture: {options.picture}")


def main(arguments=None):
    options = parse(arguments)
    return cli.run(lambda: estimate(options))


if __name__ == "__main__":
    sys.exit(main())
