"""Measure at laptop size what published changes do to the score.

    python3 tests/bench/laptop.py                 all parts; about 7.5 hours on two cores
    python3 tests/bench/laptop.py noise           only one part
    python3 tests/bench/laptop.py recipes --seeds 2 --steps 20    a short trial

The parts are calls of tools/ablate.py with the variants in tests/bench/laptop/:

    noise      how much a score varies with the seed, and with edits that change almost nothing
    recipes    changes by recipes, most of them with a published effect, on two texts
    reasons    tests of likely reasons for what the part recipes shows
    shorter    some recipes in runs of half as many steps
    settings   MATRIX_LR, WARMDOWN_ITERS and MLP_MULT, five values each
    export     how weights are stored; the model is wider, because in the other parts the matrices
               of the blocks are too small to be quantized

The model is that of data/quickstart.py. The first text is the quickstart's, the source code of
Python's standard library. The second one is prose: the docstrings of the standard library and of
torch, numpy and huggingface_hub. Two runs at a time are made (--jobs), each with one thread.

Runs write to logs/ in the current folder, and reports are written to logs/laptop-<part>/, or, with
another number of steps, to logs/laptop<steps>-<part>/. After an interruption, the same command
continues with the runs that are missing. At the end, laptop_results.py prints what the runs show.
"""

# Builds on data/quickstart.py and data/tokenize_docs.py (make the texts), on tools/ablate.py (makes
# the runs) and on laptop_results.py beside it. It starts tools/recipe.py as a process.

import ast
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
STEPS = 500
PACKAGES = "torch", "numpy", "huggingface_hub"
MIN_DOCSTRING = 200  # characters; shorter ones are signatures more than prose


def find_docstrings(folder: Path) -> Iterator[str]:
    """Yield a text for each Python file below a folder: its docstrings of at least MIN_DOCSTRING
    characters. Files without such docstrings are left out."""
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
    """Make the data set of docstrings, and return its folder. A data set that was made of the same
    versions of Python and of the packages is kept. Raises ToolError if a data set of this name
    exists that was not made here."""
    folder = quickstart.DATASETS / f"docstrings_sp{quickstart.VOCAB_SIZE}"
    stamp_path = quickstart.DATASETS / "docstrings.json"
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    stamp = json.dumps({"python": sys.version, **versions}) + "\n"
    with dataset.locked(quickstart.DATASETS, wait=True):
        is_known = stamp_path.is_file()
        if is_known and stamp_path.read_text("utf-8") == stamp:
            return folder
        if folder.exists() and not is_known:
            raise cli.ToolError(f"{folder}: was not made by laptop.py; rename it")
        folders = [Path(sysconfig.get_path("stdlib"))]
        folders += [Path(importlib.import_module(name).__file__ or "").parent for name in PACKAGES]
        names = {}
        for place in folders:
            for number, text in enumerate(find_docstrings(place)):
                names.setdefault(text, f"{place.name}/{number}")
        val, train = quickstart.split_documents(names)
        documents = quickstart.DATASETS / "docstrings.jsonl"
        lines = [json.dumps({"text": text}).encode() + b"\n" for text in [*val, *train]]
        dataset.write_atomic(stamp_path, b"being made\n")
        shutil.rmtree(folder, ignore_errors=True)
        tokenizer = dataset.DATA / "tokenizers" / f"docstrings_{quickstart.VOCAB_SIZE}_bpe.model"
        tokenizer.unlink(missing_ok=True)
        dataset.write_atomic(documents, *lines)
        arguments = [str(documents), "--name", "docstrings", "--num-val-docs", str(len(val))]
        arguments += ["--vocab-size", str(quickstart.VOCAB_SIZE), "--shard-tokens", "1000000"]
        tokenize_docs.make_data_set(tokenize_docs.parse_arguments(arguments))
        dataset.write_atomic(stamp_path, stamp.encode())
    return folder


class Part(NamedTuple):
    """The runs of a part."""

    seeds: int  # how many
    for_each: list[str]  # options of ablate.py
    settings: list[str]  # of all runs


def find_parts(code: str, prose: str, steps: int) -> dict[str, Part]:
    """Return all parts by their names. code, prose: the folders of the two data sets."""
    lengths = ",".join(map(str, (steps // 2, steps, 2 * steps)))
    on_code, length = f"DATA_PATH={code}", f"ITERATIONS={steps}"
    # A step with 288 channels takes four times as long as one with 128.
    wide = [f"ITERATIONS={steps // 4}", f"WARMDOWN_ITERS={steps // 5}", "MODEL_DIM=288"]
    return {
        "noise": Part(8, ["--for-each", f"ITERATIONS={lengths}"], [on_code]),
        "recipes": Part(5, ["--for-each", f"{on_code};{prose}"], [length]),
        "reasons": Part(3, ["--for-each", f"{on_code};{prose}"], [length]),
        "shorter": Part(3, ["--for-each", f"ITERATIONS={steps // 2}"], [on_code]),
        "settings": Part(3, [], [on_code, length]),
        "export": Part(3, [], [on_code, *wide]),
    }


def make_script(part: str) -> Path:
    """Write the trainer with all recipes that a part measures, and return its path."""
    recipes = EXPORT_RECIPES if part == "export" else RECIPES
    script = Path("logs", "laptop-export.py" if part == "export" else "laptop.py")
    script.parent.mkdir(exist_ok=True)
    script.unlink(missing_ok=True)  # of an earlier call; recipe.py overwrites nothing
    apply = [sys.executable, str(ROOT / "tools" / "recipe.py"), "apply", *recipes]
    if subprocess.run([*apply, "--to", str(script)], stdout=subprocess.DEVNULL).returncode:
        raise cli.ToolError("recipe.py cannot apply the recipes (see above)")
    return script


def main() -> int:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    text = "number of seeds (default: noise 8, recipes 5, all others 3)"
    add("--seeds", type=int, metavar="N", help=text)
    text = "training steps (default: 500); noise is also run with half and with twice as many, "
    text += "shorter uses half, and export a quarter"
    add("--steps", type=int, default=STEPS, metavar="N", help=text)
    add("--jobs", type=int, default=2, metavar="N", help="number of runs at a time (default: 2)")
    text = "beginning of the folders of the reports; its last part begins each RUN_ID"
    add("--out", type=Path, metavar="FOLDER", help=f"{text} (default: logs/laptop)")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error(f"--steps {options.steps} must be at least 4, because export uses a quarter")
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds {options.seeds} must be at least 1")
    if unknown := sorted({*options.parts} - {*PARTS}):
        parser.error(f"{unknown[0]}: no such part; the parts are {', '.join(PARTS)}")
    is_usual = options.steps == STEPS
    out = options.out or Path("logs", "laptop" if is_usual else f"laptop{options.steps}")
    code = quickstart.prepare_data_set(Path(sysconfig.get_path("stdlib"))).folder
    parts = find_parts(os.path.relpath(code), os.path.relpath(make_prose()), options.steps)
    # The name of a log contains a checksum of the command and of the environment. So that two
    # machines give the same names, the paths are relative and the number of threads is fixed.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    os.environ["OMP_NUM_THREADS"] = "1"
    train = ["python3", os.path.relpath(ROOT / "data" / "quickstart.py")]
    worst = 0
    for name in options.parts or PARTS:
        part = parts[name]
        words = [*part.for_each, "--jobs", str(options.jobs), "--out", f"{out}-{name}"]
        words += ["--variants", str(VARIANTS / f"{name}.txt")]
        words += ["--seeds", str(options.seeds or part.seeds)]
        # The validations during training are left out: only the final score is compared.
        command = [*train, "--script", str(make_script(name)), "VAL_LOSS_EVERY=0", *part.settings]
        worst = max(worst, ablate.main([*words, "--", *command]))
    results = ["logs", "--name", out.name, "--out", "logs"]
    return laptop_results.main(results) or worst


if __name__ == "__main__":
    dataset.run_tool(main, "run the same command again")
