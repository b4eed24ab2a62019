"""Measure at laptop size what published changes do to the score.

    python3 tests/bench/laptop.py                 all parts; perhaps seven hours on two cores
    python3 tests/bench/laptop.py noise           only one part: noise, levers, settings or export
    python3 tests/bench/laptop.py levers --seeds 2 --steps 20    a short trial

The parts are calls of tools/ablate.py with the variants in tests/bench/laptop/:

    noise      how much a score varies with the seed, and with edits that change almost nothing
    levers     recipes with a published effect, on two texts
    settings   MATRIX_LR, WARMDOWN_ITERS and MLP_MULT, five values each
    export     how weights are stored, with a wider model, because the matrices of the others are
               so small that they are not quantized

The model is that of data/quickstart.py. The first text is the quickstart's, the source code of
Python's standard library. The second one is prose: the docstrings of the standard library and of
torch, numpy and huggingface_hub. Two runs at a time are made (--jobs), each with one thread.

Runs write to logs/ in the current folder, and reports are written to logs/laptop-<part>/. After an
interruption, the same command continues with the runs that are missing. At the end,
laptop_results.py prints what the runs show.
"""

# Builds on data/quickstart.py and data/tokenize_docs.py (make the texts), on tools/ablate.py (makes
# the runs) and on laptop_results.py beside it. It starts tools/recipe.py as a process.

import ast
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python3 -P does not add it
import laptop_results
from laptop_results import PARTS, VARIANTS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data"))
import ablate
import dataset
import quickstart
import tokenize_docs
from dataset import ROOT, cli

RECIPES = [
    "leaky_relu2", "xsa", "ema", "sliding_window", "smear_gate", "bigram_hash",
    "muon_weight_decay", "polar_express", "parallel_residuals", "partial_rope", "layer_scale",
    "two_lanes", "skip_gates", "attn_gate", "loop", "warmdown_share", "muon_row_norm", "documents",
]  # fmt: skip
EXPORT_RECIPES = ["int6", "lzma"]
PACKAGES = "torch", "numpy", "huggingface_hub"
MIN_DOCSTRING = 200  # characters; shorter ones are signatures more than prose


def find_docstrings(folder: Path) -> Iterator[str]:
    """Yield for each Python file below a folder the docstrings that are long enough, as a text."""
    for path in sorted(folder.rglob("*.py")):
        if {"site-packages", "test", "tests", "idle_test"} & set(path.relative_to(folder).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a file for another version of Python
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        texts = [text for node in nodes if (text := ast.get_docstring(node))]
        if long := [text for text in texts if len(text) >= MIN_DOCSTRING]:
            yield "\n\n".join(long)


def make_prose() -> Path:
    """Make the data set of docstrings unless it exists, and return its folder."""
    folder = quickstart.DATASETS / f"docstrings_sp{quickstart.VOCAB_SIZE}"
    if (dataset.read_export(folder) or {}).get("complete"):
        return folder
    packages = Path(sysconfig.get_path("purelib"))
    folders = [Path(sysconfig.get_path("stdlib")), *(packages / name for name in PACKAGES)]
    names = {}
    for place in folders:
        for number, text in enumerate(find_docstrings(place)):
            names.setdefault(text, f"{place.name}/{number}")
    val, train = quickstart.split_documents(names)
    documents = quickstart.DATASETS / "docstrings.jsonl"
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in [*val, *train]]
    dataset.write_atomic(documents, *lines)
    arguments = [str(documents), "--name", "docstrings", "--num-val-docs", str(len(val))]
    arguments += ["--vocab-size", str(quickstart.VOCAB_SIZE), "--shard-tokens", "1000000"]
    tokenize_docs.make_data_set(tokenize_docs.parse_arguments(arguments))
    return folder


def find_parts(code: str, prose: str, steps: int) -> dict[str, tuple[int, list[str], list[str]]]:
    """Return {part: (seeds, options of ablate.py, settings of all its runs)}."""
    lengths = ",".join(map(str, (steps // 2, steps, 2 * steps)))
    fixed = [f"ITERATIONS={steps}"]
    return {
        "noise": (8, ["--for-each", f"ITERATIONS={lengths}"], [f"DATA_PATH={code}"]),
        "levers": (5, ["--for-each", f"DATA_PATH={code},{prose}"], fixed),
        "settings": (5, [], [f"DATA_PATH={code}", *fixed]),
        "export": (3, [], [f"DATA_PATH={code}", f"ITERATIONS={steps // 2}", "MODEL_DIM=288"]),
    }


def make_script(part: str) -> Path:
    """Write the trainer with all recipes that a part measures, and return its path."""
    recipes = EXPORT_RECIPES if part == "export" else RECIPES
    script = Path("logs", "laptop-export.py" if part == "export" else "laptop.py")
    script.parent.mkdir(exist_ok=True)
    script.unlink(missing_ok=True)  # of an earlier call; recipe.py overwrites nothing
    apply = [sys.executable, str(ROOT / "tools" / "recipe.py"), "apply", *recipes]
    subprocess.run([*apply, "--to", str(script)], check=True, stdout=subprocess.DEVNULL)
    return script


def main() -> int:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    add("--seeds", type=int, help="number of seeds (default: 8, 5, 5 and 3)")
    text = "training steps (default: 500); noise has half and twice as many, too, export has half"
    add("--steps", type=int, default=500, help=text)
    add("--jobs", type=int, default=2, help="number of runs at a time (default: 2)")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(
            f"--steps {options.steps} must be at least 2, because noise also has half of it"
        )
    if unknown := sorted({*options.parts} - {*PARTS}):
        parser.error(f"{unknown[0]}: no such part; the parts are {', '.join(PARTS)}")
    code = quickstart.prepare_data_set(Path(sysconfig.get_path("stdlib"))).folder
    parts = find_parts(os.path.relpath(code), os.path.relpath(make_prose()), options.steps)
    # The names of the logs depend on the command and on the environment, so neither contains what
    # differs between machines: no absolute path, and no number of threads that depends on their
    # cores. The validations during training are left out: only the final score is compared.
    train = ["python3", os.path.relpath(ROOT / "data" / "quickstart.py")]
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    os.environ["OMP_NUM_THREADS"] = "1"
    worst = 0
    for part in options.parts or PARTS:
        seeds, more, settings = parts[part]
        words = [*more, "--jobs", str(options.jobs), "--variants", str(VARIANTS / f"{part}.txt")]
        words += ["--out", f"logs/laptop-{part}", "--seeds", str(options.seeds or seeds)]
        run = [*train, "--script", str(make_script(part)), "VAL_LOSS_EVERY=0", *settings]
        worst = max(worst, ablate.main([*words, "--", *run]))
    return worst or laptop_results.main(["logs", "--out", "logs"])


if __name__ == "__main__":
    dataset.run_tool(main, "run the same command again")
