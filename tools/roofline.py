"""Estimate what a training step of an edited train_gpt.py costs on a GPU, without a GPU.

    python3 tools/roofline.py mine.py [NAME=value ...] [--device h100] [--ranks 8]
    python3 tools/roofline.py mine.py XSA_LAST_N=9 --against train_gpt.py [NAME=value ...]

Each script has the settings that stand behind it. torch's compiler says which kernels a GPU would
run, and what each reads and writes; nothing is computed. A kernel takes the longer of its bytes /
bandwidth and its FLOPs / rate, plus 2 us. This is an estimate of one device's work, without the
host and without waiting for other ranks: tools/README.md compares it with published step times.
Validation and test-time training are left out. About a minute for nine layers, three with loops.
"""

import argparse
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from io import StringIO
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with python3 -P
import cli
import pandas
from kernels import record

# By data sheets, without sparsity: bytes/s of memory, FLOP/s in bfloat16, GB, bytes/s between GPUs.
# Then what is reached, as shares: of memory by element-wise kernels; of products by cuBLAS at 512
# channels (openai/parameter-golf PR 670), and with TF32; of products by attention, with heads of 64
# channels and rows of 1,024, in the FlashAttention-3 paper (229, 288, 265 TFLOP/s; backward 363 by
# fa3; the others' backward is from published step times). The shares of a100 and rtx4090 are fitted
# to one published step each (684 and about 940 ms for the challenge's script on one); b200's are an
# H100's, which is a guess.
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
DEVICES = pandas.read_csv(StringIO(RATES), sep=r"\s+", index_col="rate")
LAUNCH = 2e-6  # seconds that a kernel takes besides its work
RESERVED = 3e9  # bytes of a device for CUDA, NCCL and gaps between tensors
RUN = 600  # seconds
COLUMNS = ["kernels", "GB", "TFLOP", "ms"]


def seconds_of(kernel, rates, ranks):
    if kernel.kind == "all-reduce":
        return (ranks > 1) * (2 * (1 - 1 / ranks) * kernel.bytes / rates["link"] + LAUNCH)
    share = rates.get(f"{kernel.kind}_{kernel.side}", rates.get(kernel.kind, rates["float32"]))
    moved = kernel.bytes / (rates["memory"] * rates["streamed"])
    return max(moved, kernel.flops / (rates["products"] * share)) + LAUNCH


def table_of(step, rates, ranks):
    """What each part of a step launches, moves, computes and takes."""
    table = pandas.DataFrame(step.kernels)
    table["kernels"] = 1
    table["GB"] = table.bytes / 1e9
    table["TFLOP"] = table.flops / 1e12
    table["ms"] = [1e3 * seconds_of(kernel, rates, ranks) for kernel in step.kernels]
    is_product = (table.flops > 0) & (table.part != "attention")
    table["products"] = table.ms.where(is_product, 0.0)
    return table.groupby(["side", "part"], sort=False)[[*COLUMNS, "products"]].sum()


def text_of(table, sign=""):
    table = table[COLUMNS].copy()
    table.loc[("sum", ""), :] = table.sum()
    whole, real = f"{{:{sign}.0f}}".format, f"{{:{sign}.2f}}".format
    return table.to_string(formatters={"kernels": whole}, float_format=real, sparsify=False)


def words(step, table, rates):
    """Lines on a step besides its table"""
    total = table.sum()
    room = rates["gigabytes"] * 1e9 - RESERVED - step.held
    fits = "no GRAD_ACCUM_STEPS fits"
    if room > 0:
        least = max(1.0, step.peak * step.micro_steps / room)
        halvings = math.ceil(math.log2(least))  # other numbers may not divide a step
        fits = f"fits from GRAD_ACCUM_STEPS={2**halvings} on"
    return [
        f"a step: {total.ms:.1f} ms, {total.products / total.ms:.0%} of it matrix products; "
        f"{step.tokens / total.ms / 1e3:.2f} million tokens per second",
        f"its FLOPs alone, at the device's peak: {1e15 * total.TFLOP / rates['products']:.1f} ms, "
        "which no kernels can beat",
        f"memory: {step.held / 1e6:,.0f} MB of weights, gradients and optimizers, and "
        f"{step.peak / 1e6:,.0f} MB in a micro-step; {fits}",
    ]


class Run:
    """A script's steps, as they are at first and, where they change, later."""

    def __init__(self, script, steps, rates, ranks):
        self.name = " ".join(script)
        self.steps = steps
        self.tables = [table_of(step, rates, ranks) for step in steps]
        ends = [*(step.begins for step in steps[1:]), 1.0]
        self.count = 0.0  # steps in RUN
        for step, table, end in zip(steps, self.tables, ends, strict=True):
            self.count += 1e3 * RUN * (end - step.begins) / table.ms.sum()
        self.memory = max(step.held + step.peak for step in steps)


def compare(ours, theirs):
    """Prints what one Run costs more than another: its first steps, and its last if some differ."""
    moments = (0, -1) if len(ours.steps) + len(theirs.steps) > 2 else (0,)
    for moment in moments:
        print(f"\nmore than {theirs.name}" + (", at the end of the run" if moment else ""))
        more = ours.tables[moment].sub(theirs.tables[moment], fill_value=0)
        print(text_of(more[more.abs().max(axis=1) > 1e-9], "+"))
    ms = 1e3 * RUN / ours.count - 1e3 * RUN / theirs.count
    share = theirs.count / ours.count - 1
    steps = f"{abs(ours.count - theirs.count):,.0f} steps {'fewer' if ms > 0 else 'more'}"
    memory = (ours.memory - theirs.memory) / 1e6
    print(f"{ours.name}: {ms:+.2f} ms ({share:+.1%}), {steps} in {RUN} s, {memory:+,.0f} MB")


def draw(runs, path):
    """Bars of ms by part, for each script's first steps."""
    from matplotlib.figure import Figure  # optional, and slow to import

    ms = pandas.concat({run.name: run.tables[0].ms for run in runs}, axis=1)[::-1]
    ms.index = ms.index.map(": ".join)
    figure = Figure(figsize=(9, 0.3 * len(ms) + 1.5), dpi=150, layout="constrained")
    ms.plot.barh(ax=figure.subplots(), width=0.8, xlabel="milliseconds of a step, estimated")
    figure.savefig(path)


def rate(text):
    """NAME=number of --rate"""
    name, _, value = text.partition("=")
    if name not in DEVICES.index:
        raise argparse.ArgumentTypeError(f"{text}: name one of {', '.join(DEVICES.index)}")
    return name, cli.number(float, 1e-9)(value)


def estimate(options):
    rates = dict(DEVICES[options.device]) | dict(options.rate)
    scripts = [words for words in (options.script, options.against) if words]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(record, file, given, options.ranks) for file, *given in scripts]
        steps = [job.result() for job in jobs]
    runs = [Run(*both, rates, options.ranks) for both in zip(scripts, steps, strict=True)]
    ours = runs[0]
    for step, table in zip(ours.steps, ours.tables, strict=True):
        when = f", from {step.begins:.0%} of the run on" if step.begins else ""
        print(f"{ours.name} on {options.ranks} x {options.device}{when}: estimated")
        print("\n".join((text_of(table), *words(step, table, rates), "")))
    print(f"{ours.count:,.0f} steps in {RUN} s, without the host and other ranks")
    if options.picture:
        draw(runs, options.picture)
        print(f"picture: {options.picture}")
    if options.against:
        compare(*runs)


def main(arguments=None):
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    words = ("FILE", "NAME=value")
    add("script", nargs="+", metavar="FILE", help="an edited train_gpt.py, then its settings")
    add("--against", nargs="+", metavar=words, help="a script to compare with, and its settings")
    add("--device", choices=DEVICES, default="h100", help="default: %(default)s")
    add("--ranks", type=cli.number(int, 1, 4096), default=8, help="GPUs; default: %(default)s")
    add("--rate", type=rate, nargs="+", default=[], metavar="NAME=number", help="one you measured")
    add("--picture", type=cli.picture, metavar="FILE", help="draw a picture: .svg or .png")
    options = parser.parse_args(arguments)
    for script, *settings in filter(None, (options.script, options.against)):
        wrong = [word for word in settings if "=" not in word]
        if wrong or not Path(script).is_file():
            parser.error(f"{(wrong or [script])[0]}: write one file, then NAME=value")
    return cli.run(lambda: estimate(options))


if __name__ == "__main__":
    sys.exit(main())
