"""Estimate what a training step of an edited train_gpt.py costs on a GPU, without a GPU.

    python3 tools/roofline.py mine.py [NAME=value ...] [--device h100] [--ranks 8]
    python3 tools/roofline.py mine.py XSA_LAST_N=9 --against train_gpt.py [NAME=value ...]

Put settings after the script to which they belong. torch's compiler says which kernels a GPU would
run, and how many bytes each kernel reads and writes; nothing is computed. The time of a kernel is
the larger of bytes / bandwidth and FLOPs / rate, plus 2 us. This estimates the work of one device,
without the host and without waiting for other ranks: tools/README.md compares estimates with
published step times. Validation and test-time training are left out. It takes about a minute for
nine layers, and three minutes if layers are repeated.
"""

# This module builds on kernels.py (records the kernels of a step) and figures.py (writes the plot).
# kernels.py and pandas are imported when they are used, so that --help needs no packages.

import argparse
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python3 -P does not add it
import cli
from figures import write_figure

# The first four rows are from data sheets, without sparsity: memory bandwidth in bytes/s, matrix
# products in bfloat16 FLOP/s, memory in GB, bandwidth between GPUs in bytes/s. The other rows are
# the reached shares: `streamed` of the memory bandwidth by element-wise kernels; `bfloat16` of the
# FLOP/s by cuBLAS at 512 channels (openai/parameter-golf PR 670), `float32` the same with TF32; the
# rest of the FLOP/s by attention with heads of 64 channels and sequences of 1,024 tokens;
# attention_speedup is the factor for other lengths. The shares of attention are from the
# FlashAttention-3 paper (229, 288, 265 TFLOP/s; backward with fa3 363); the backward shares of
# flash and cudnn are from published step times. The shares of a100 and rtx4090 are fitted to one
# published step each (684 and about 940 ms for the challenge's script on one GPU). The shares of
# b200 are those of an H100, which is a guess.
RATES = """
rate               h100     h200     b200     a100  rtx4090
memory          3.35e12  4.80e12  8.00e12  2.04e12  1.01e12
products        9.89e14  9.89e14  2.25e15  3.12e14  1.65e14
gigabytes            80      141      180       80       24
link             4.5e11   4.5e11   9.0e11   3.0e11   2.5e10
streamed           0.88     0.88     0.88     0.88     0.88
bfloat16           0.48     0.48     0.48     0.55     0.80
float32            0.24     0.24     0.24     0.28     0.40
flash_forward     0.232    0.232    0.232    0.330    0.550
flash_backward    0.192    0.192    0.192    0.330    0.550
cudnn_forward     0.291    0.291    0.291    0.330    0.550
cudnn_backward    0.281    0.281    0.281    0.330    0.550
fa3_forward       0.268    0.268    0.268    0.330    0.550
fa3_backward      0.367    0.367    0.367    0.330    0.550
"""
HEAD, *ROWS = (line.split() for line in RATES.strip().splitlines())
DEVICES = {  # {device: {rate: number}}
    device: {name: float(numbers[column]) for name, *numbers in ROWS}
    for column, device in enumerate(HEAD[1:])
}
# The rate of attention rises with the length T of the sequences, because a longer sequence has more
# work for each block of queries. It is taken to be proportional to T / (T + HALF_SPEED_LENGTH).
# HALF_SPEED_LENGTH was fitted to these step times, which are published logs of scripts with flash
# attention on H100s. So their agreement does not test the fit. The columns "constant" and "fit" are
# estimates with a constant rate and with this formula:
#
#   GPUs  T (tokens)  tokens of a step  published (ms)  constant (ms)  fit (ms)  fit / published
#      8       1,024           524,288            43.5           36.0      36.0             0.83
#      8       2,048           524,288            51.9           46.8      43.4             0.84
#      1       1,024           524,288         326-333            278       278             0.84
#      1       8,192           393,216             594            666       522             0.88
#      1      16,384           393,216             955          1,186       878             0.92
#      1      32,768           524,288           2,219          2,966     2,117             0.95
#
# Two published times do not agree with the formula, and it is not known why. The difference is
# larger with the formula than with a constant rate:
#
#      8       4,096           393,216            71.5           51.9      44.2             0.62
#      1       4,096           393,216             525            406       344             0.66
RATED_LENGTH = 1024  # tokens of a sequence, at which the rates of attention were measured
HALF_SPEED_LENGTH = 473  # tokens of a sequence at which attention has half of its highest rate
LAUNCH = 2e-6  # seconds to launch a kernel
RESERVED = 3e9  # bytes of device memory that CUDA, NCCL and gaps between tensors take
RUN = 600  # seconds of a run
COLUMNS = ["kernels", "GB", "TFLOP", "ms"]


def attention_speedup(length):
    """Return the rate of attention in sequences of `length` tokens, divided by the rate at
    RATED_LENGTH."""
    rated = RATED_LENGTH / (RATED_LENGTH + HALF_SPEED_LENGTH)
    return length / (length + HALF_SPEED_LENGTH) / rated


def estimate_seconds(kernel, rates, ranks):
    """Return how long a kernel takes on a device with these rates."""
    if kernel.kind == "all-reduce":
        if ranks == 1:
            return 0.0
        return 2 * (1 - 1 / ranks) * kernel.bytes / rates["link"] + LAUNCH
    share = rates.get(f"{kernel.kind}_{kernel.side}", rates.get(kernel.kind, rates["float32"]))
    if kernel.length:
        share *= attention_speedup(kernel.length)
    moved = kernel.bytes / (rates["memory"] * rates["streamed"])
    return max(moved, kernel.flops / (rates["products"] * share)) + LAUNCH


def slowest_rank(step, rates, ranks):
    """Return the kernels of the rank that takes the longest: all ranks wait for it."""

    def total_seconds(kernels):
        return sum(estimate_seconds(kernel, rates, ranks) for kernel in kernels)

    return max(step.by_rank or [step.kernels], key=total_seconds)


def make_table(step, rates, ranks):
    """Return a table with the kernels, bytes, FLOPs and time of each part of a step."""
    import pandas  # slow to import

    table = pandas.DataFrame(step.kernels)
    table["kernels"] = 1
    table["GB"] = table.bytes / 1e9
    table["TFLOP"] = table.flops / 1e12
    table["ms"] = [1e3 * estimate_seconds(kernel, rates, ranks) for kernel in step.kernels]
    is_product = (table.flops > 0) & (table.part != "attention")
    table["products"] = table.ms.where(is_product, 0.0)
    return table.groupby(["side", "part"], sort=False)[[*COLUMNS, "products"]].sum()


def format_table(table, sign=""):
    """Return the table as text, with its sum. `sign` is "+" for a table of differences."""
    table = table[COLUMNS].copy()
    table.loc[("sum", ""), :] = table.sum()
    integer = f"{{:{sign}.0f}}".format
    decimal = f"{{:{sign}.2f}}".format
    return table.to_string(formatters={"kernels": integer}, float_format=decimal, sparsify=False)


def summary_lines(step, table, rates):
    """Return lines on the time and the memory of a step."""
    total = table.sum()
    room = rates["gigabytes"] * 1e9 - RESERVED - step.held
    fits = "it fits with no GRAD_ACCUM_STEPS"
    if room > 0:
        least = max(1.0, step.peak * step.micro_steps / room)
        halvings = math.ceil(math.log2(least))  # a power of 2 divides the step
        fits = f"it fits with GRAD_ACCUM_STEPS >= {2**halvings}"
    return [
        f"a step: {total.ms:.1f} ms, {total.products / total.ms:.0%} of it matrix products; "
        f"{step.tokens / total.ms / 1e3:.2f} million tokens per second",
        "the FLOPs of the step alone would take "
        f"{1e15 * total.TFLOP / rates['products']:.1f} ms at the device's peak rate; "
        "no kernels can be faster than that",
        f"memory: {step.held / 1e6:,.0f} MB of weights, gradients and optimizers, and "
        f"{step.peak / 1e6:,.0f} MB more during a micro-step; {fits}",
    ]


class Run:
    """The steps of a script at the begin of a run and, if they change, later in the run."""

    def __init__(self, script, steps, rates, ranks):
        self.name = " ".join(script)
        self.steps = [replace(step, kernels=slowest_rank(step, rates, ranks)) for step in steps]
        self.tables = [make_table(step, rates, ranks) for step in self.steps]
        ends = [*(step.begins for step in steps[1:]), 1.0]
        self.count = 0.0  # steps in RUN seconds
        for step, table, end in zip(steps, self.tables, ends, strict=True):
            self.count += 1e3 * RUN * (end - step.begins) / table.ms.sum()
        self.memory = max(step.held + step.peak for step in steps)


def compare(edited, base):
    """Print what one Run costs more than another: at the begin of the run and, if steps change, at
    its end."""
    moments = (0, -1) if len(edited.steps) + len(base.steps) > 2 else (0,)
    for moment in moments:
        print(f"\ncompared with {base.name}" + (", at the end of the run" if moment else ""))
        more = edited.tables[moment].sub(base.tables[moment], fill_value=0)
        print(format_table(more[more.abs().max(axis=1) > 1e-9], "+"))
    ms = 1e3 * RUN / edited.count - 1e3 * RUN / base.count
    share = base.count / edited.count - 1
    steps = f"{abs(edited.count - base.count):,.0f} steps {'fewer' if ms > 0 else 'more'}"
    memory = (edited.memory - base.memory) / 1e6
    print(f"{edited.name}: {ms:+.2f} ms ({share:+.1%}), {steps} in {RUN} s, {memory:+,.0f} MB")


def make_figure(runs):
    """Return a bar plot of the ms of each part of the first step, for each script."""
    import pandas
    from matplotlib.figure import Figure  # optional, and slow to import

    ms = pandas.concat({run.name: run.tables[0].ms for run in runs}, axis=1)[::-1]
    ms.index = ms.index.map(": ".join)
    figure = Figure(figsize=(9, 0.3 * len(ms) + 1.5), dpi=150, layout="constrained")
    ms.plot.barh(ax=figure.subplots(), width=0.8, xlabel="estimated time in a step (ms)")
    return figure


def parse_rate(text):
    """Return (name, number) of an option --rate NAME=number."""
    name, _, value = text.partition("=")
    names = list(DEVICES["h100"])
    if name not in names:
        raise argparse.ArgumentTypeError(f"{text}: the name must be one of {', '.join(names)}")
    return name, cli.number(float, 1e-9)(value)


def estimate(options):
    """Print the estimates for the script, and the comparison with another script if one is
    given."""
    from kernels import record  # imports torch

    rates = DEVICES[options.device] | dict(options.rate)
    scripts = [words for words in (options.script, options.against) if words]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(record, file, given, options.ranks) for file, *given in scripts]
        steps = [job.result() for job in jobs]
    runs = [
        Run(script, script_steps, rates, options.ranks)
        for script, script_steps in zip(scripts, steps, strict=True)
    ]
    edited = runs[0]
    for step, table in zip(edited.steps, edited.tables, strict=True):
        when = f", from {step.begins:.0%} of the run on" if step.begins else ""
        print(f"{edited.name} on {options.ranks} x {options.device}{when}, estimated")
        print("\n".join((format_table(table), *summary_lines(step, table, rates), "")))
    print(f"{edited.count:,.0f} steps in {RUN} s, if the host and other ranks cause no delay")
    if options.picture:
        drawn = write_figure(lambda: make_figure(runs), options.picture)
        print(f"plot: {options.picture}" if drawn else "plot: none, see the error above")
    if options.against:
        compare(*runs)
    return int(bool(options.picture) and not drawn)


def main(arguments=None):
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    words = ("FILE", "NAME=value")
    add(
        "script",
        nargs="+",
        metavar="FILE",
        help="an edited train_gpt.py, followed by settings NAME=value",
    )
    add(
        "--against",
        nargs="+",
        metavar=words,
        help="script to compare with, followed by its settings",
    )
    add("--device", choices=DEVICES, default="h100", help="GPU (default: %(default)s)")
    add(
        "--ranks",
        type=cli.number(int, 1, 4096),
        default=8,
        help="number of GPUs (default: %(default)s)",
    )
    add(
        "--rate",
        type=parse_rate,
        nargs="+",
        default=[],
        metavar="NAME=number",
        help="use a rate that you measured, such as bfloat16=0.6",
    )
    add(
        "--picture",
        type=cli.plot_path,
        metavar="FILE",
        help="write a bar plot of the parts of a step: .svg or .png",
    )
    options = parser.parse_args(arguments)
    for script, *settings in filter(None, (options.script, options.against)):
        if "=" in script:
            parser.error(f"{script}: give the script first, and its settings after it")
        if not Path(script).is_file():
            fault = "not a file" if Path(script).exists() else "no such file"
            parser.error(f"{script}: {fault}; give an edited copy of train_gpt.py")
        if wrong := [word for word in settings if "=" not in word]:
            parser.error(f"{wrong[0]}: give one file, followed by settings NAME=value")
    return cli.run(lambda: estimate(options))


if __name__ == "__main__":
    sys.exit(main())
