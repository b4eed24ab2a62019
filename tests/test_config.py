"""Tests of settings.

They keep their published names and defaults, and --help and --print-config show them. All faults
are listed in one message, each with name, value and remedy, before a device or a log is used.
"""

import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from faults.live import Live, write_edited_script
from running import ROOT, SETTINGS, SMALL_MODEL, Call, byte_data, make_config, run_script, train_gpt

CONTROL_TENSOR_NAMES = (
    "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,"
    "skip_weights"
)
PUBLISHED = (ROOT / "tests/published_settings.txt").read_text(
    "utf-8"
)  # without RUN_ID, which is random
# Environment variables of machines and other programs, some of which look like settings.
OTHERS = """
PATH HOME PORT SHLVL LINES DATASET MODEL_NAME MODEL_PATH DATA_DIR DATASETS_PATH NUM_GPUS N_JOBS
GPU_COUNT JOB_ID RUN_NAME CUDA_VISIBLE_DEVICES NCCL_TIMEOUT OMP_NUM_THREADS TORCH_COMPILE_DEBUG
TORCHELASTIC_RUN_ID LOCAL_WORLD_SIZE NODE_RANK WANDB_RUN_ID TOKENIZERS_PARALLELISM SLURM_PROCID
MAX_STEPS N_HEAD EVAL_INTERVAL CHECKPOINT EMA_DECAY ROPE_DIMS n_layer VLLM_ATTENTION_BACKEND
DATASET_PATH SM_DATA_PATH CUDA_PATH PREFETCH MUON_WD MAX_ITERS LAYERS LR HISTSIZE CONDA_SHLVL
"""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, call: Call, tmp_path: Path) -> Call:
    """Return a function that calls main() in a folder that must stay empty; no run may start."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr(train_gpt, "execute", lambda *_: pytest.fail("a run was started"))

    def run(*arguments: str, **environment: object) -> tuple[int, str, str]:
        env = {name: str(value) for name, value in environment.items()}
        result = call(partial(train_gpt.main, env=env), *arguments)
        assert os.listdir(".") == []
        assert not torch.distributed.is_initialized()
        assert not torch.cuda.is_initialized()
        return result

    return run


def listed_faults(err: str) -> list[str]:
    """Return the faults of an error message, which come after its first line."""
    return [line.strip() for line in err.splitlines()[1:]]


def small_environment(folder: Path, **more: object) -> dict[str, str]:
    """Return an environment of settings without a fault, with the settings `more` in addition."""
    values = {**SMALL_MODEL, **byte_data(folder), **more}
    return {name: str(value) for name, value in values.items()}


def find_faults(environment: dict[str, str], ranks: int = 1) -> list[str]:
    """Return the faults that the script finds in these settings on so many ranks."""
    environment = environment | {"WORLD_SIZE": str(ranks)}
    config, _, faults, _ = train_gpt.read_config([], environment)
    return faults + train_gpt.check_settings(config, environment)[0]


def test_names_and_defaults_are_the_published_ones() -> None:
    published = dict(pair.split("=") for pair in PUBLISHED.split())
    assert published.keys() | {"RUN_ID", "CONTROL_TENSOR_NAME_PATTERNS"} == SETTINGS
    config, given, faults, warnings = train_gpt.read_config([], {})
    assert not given and not faults and not warnings
    assert config.run_id == "", "a random name"
    assert config == make_config(**published)
    assert config.control_tensor_name_patterns == CONTROL_TENSOR_NAMES


def test_print_config_says_which_values_were_given(main: Call) -> None:
    """Values come from arguments or from the environment; arguments win."""
    words = "ITERATIONS=4", "--print-config", "SEED=7", "RUN_ID=a=b"
    code, out, err = main(*words, SEED=5, TIE_EMBEDDINGS=0, MATRIX_LR="1e-3", DEVICE="auto")
    shown = json.loads(out)
    assert (code, err) == (0, "")
    assert {name.upper() for name in shown} == SETTINGS
    assert {tuple(entry) for entry in shown.values()} == {("value", "source")}
    given = {name: entry["value"] for name, entry in shown.items() if entry["source"] == "given"}
    other = {"tie_embeddings": False, "matrix_lr": 0.001, "device": "auto"}
    assert given == {"iterations": 4, "seed": 7, "run_id": "a=b", **other}
    assert shown["beta1"] == {"value": 0.9, "source": "default"}
    assert main("--print-config", SEED="x")[0] == 2


def test_help_shows_every_setting_with_its_default(main: Call) -> None:
    code, out, err = main("--help")
    shown = re.findall(r"(?m)^    (\w+): .+? = (.*?)  # .{12,}", out)
    texts = {"True": "1", "False": "0"}
    texts["CONTROL_TENSOR_NAMES"] = train_gpt.CONTROL_TENSOR_NAMES
    defaults = {name.upper(): texts.get(text, text.strip('"')) for name, text in shown}
    assert (code, err) == (0, "") and defaults.keys() == SETTINGS
    assert make_config(**defaults) == train_gpt.Config()
    assert "python3 train_gpt.py ITERATIONS=100 SEED=7\n" in out


def test_a_line_added_to_config_is_a_setting(tmp_path: Path) -> None:
    [line] = re.findall(r"(?m)^    seed: .*= 1337 .*\n", inspect.getsource(train_gpt.Config))
    lines = line + "    my_rate: float = 2.5  # rate; of this test\n"
    script = write_edited_script(tmp_path / "edited.py", [(line, lines)])
    done = run_script(script, tmp_path, "--print-config", MY_RATE="3")
    assert json.loads(done.out)["my_rate"] == {"value": 3.0, "source": "given"}
    done = run_script(script, tmp_path, "MY_RATES=3")
    assert (
        done.code == 2 and "MY_RATES=3: there is no such setting; did you mean MY_RATE=" in done.err
    )


def test_a_windows_line_end_is_not_part_of_a_value() -> None:
    config = make_config(ITERATIONS="7\r", DATA_PATH="here\r")
    assert (config.iterations, config.data_path) == (7, "here")


SHAPES = [
    {"MODEL_DIM": 13, "NUM_HEADS": 5, "NUM_KV_HEADS": 3},
    {"MODEL_DIM": 1, "NUM_HEADS": 6, "NUM_KV_HEADS": 4},
    {"TRAIN_SEQ_LEN": 7, "TRAIN_BATCH_TOKENS": 1, "VAL_BATCH_SIZE": 1},
    {"TRAIN_SEQ_LEN": 9, "GRAD_ACCUM_STEPS": 5, "MODEL_DIM": 40, "NUM_HEADS": 3},
    {"TRAIN_SEQ_LEN": 5_000_000},
    {"TRAIN_SEQ_LEN": 1, "TRAIN_BATCH_TOKENS": 63, "GRAD_ACCUM_STEPS": 16, "VAL_BATCH_SIZE": 3},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_following_the_remedies_leads_to_settings_that_train(
    tmp_path: Path, shape: dict[str, int]
) -> None:
    """Each remedy is applied, until no fault is left."""
    for ranks in (1, 3, 8, 16):
        settings = small_environment(tmp_path, **shape)
        for _ in range(8):
            faults = find_faults(settings, ranks)
            for fault in faults:
                name, _, remedy = fault.partition("=")
                settings[name] = re.search(r"(?:set|try) \D*(\d+)", remedy)[1]
        assert faults == []
        config = make_config(**settings)
        model = train_gpt.GPT(config, torch.float32)
        x = torch.zeros(1, config.train_seq_len, dtype=torch.int64)
        assert model(x, x).isfinite()


def test_all_faults_are_in_one_error(main: Call, tmp_path: Path) -> None:
    """Faults of types, ranges, shapes, names, data and arguments do not hide each other."""
    wrong = {"ITERATIONS": "ten", "TIE_EMBEDDINGS": "maybe", "SEED": -1, "RUN_ID": "a/b"}
    wrong |= {"MODEL_DIM": 6, "NUM_KV_HEADS": 3, "TRAIN_BATCH_TOKENS": 1000}
    wrong |= {"VOCAB_SIZE": 259, "BETA2": 1.5}
    environment = small_environment(tmp_path / "data", **wrong)
    (tmp_path / "data" / "fineweb_train_000000.bin").write_bytes(b"damaged")
    (tmp_path / "data" / "fineweb_val_000000.bin").unlink()
    arguments = {"TRAIN_PREFTECH=1": "TRAIN_PREFETCH", "iterations=5": "ITERATIONS"}
    arguments |= {"--seed=1": "SEED", "VOCAB_SIZE": "VOCAB_SIZE", "xyz": "--help"}
    code, out, err = main(*arguments, **environment)
    faults = listed_faults(err)
    assert (code, out) == (2, "")
    for word, near in arguments.items():
        assert [near in fault for fault in faults if fault.startswith(f"{word}: ")] == [True]
    starts = [f"{name}={value} " for name, value in wrong.items()]
    starts += [str(tmp_path / "data" / "fineweb_train_000000.bin"), "DATA_PATH="]
    assert [s for s in starts if sum(fault.startswith(s) for fault in faults) != 1] == []
    assert len(faults) == len(starts) + len(arguments), err


def test_missing_packages_are_one_line_with_the_command_that_installs_them() -> None:
    """--help does not need them."""
    command = [sys.executable, "-I", "-S", ROOT / "train_gpt.py"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "torchrun --standalone" in done.stdout and "    train_prefetch: bool = " in done.stdout
    done = subprocess.run(command, capture_output=True, text=True)
    install = f"or run {sys.executable} -m pip install -r requirements.txt"
    remedy = rf"No module named '\w+'; activate the environment that README.md creates, {install}"
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"\S+train_gpt.py: {remedy}\n", done.stderr)


def test_the_remedy_for_missing_data_names_an_existing_script(main: Call) -> None:
    code, _, err = main(DATA_PTH="elsewhere")
    folder, tokenizer, near = listed_faults(err)
    remedy = "get data/datasets/fineweb10B_sp1024 with `python3 data/cached_challenge_fineweb.py "
    assert code == 2 and f" is not a folder; {remedy}" in folder
    [script] = re.findall(r"\w+\.py", folder)
    assert (ROOT / "data" / script).exists() and tokenizer.startswith("TOKENIZER_PATH=")
    assert (
        near
        == "DATA_PTH in the environment is not a setting and was ignored; did you mean DATA_PATH?"
    )
    code, out, err = main("--print-config", DATA_PTH="elsewhere")
    assert (code, err) == (0, f"WARNING: {near}\n") and json.loads(out)


def test_without_data_the_data_sets_that_are_here_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("data/datasets/quickstart_sp1024")
    byte_data(folder)
    for path in ("nowhere", "."):
        faults = find_faults({"DATA_PATH": path})
        hint = f"set DATA_PATH={folder}, or get data/datasets/fineweb10B_sp1024 with `python3 "
        assert any(hint in fault for fault in faults), faults


def test_the_tokenizer_that_the_data_set_names_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used only if TOKENIZER_PATH is not given, and if it exists."""
    monkeypatch.chdir(tmp_path)
    folder, file = Path("data/datasets/own"), Path("data/tokenizers/own.json")
    settings = {"DATA_PATH": str(folder)}

    def chosen(**more: str) -> str:
        return train_gpt.read_config([], settings | more)[0].tokenizer_path

    byte_data(folder)
    assert chosen() == train_gpt.Config.tokenizer_path
    digest = hashlib.sha256((folder / "byte.json").read_bytes()).hexdigest()
    (folder / "tokenizer.sha256").write_text(f"{digest}  ../../tokenizers/own.json\n")
    assert chosen() == train_gpt.Config.tokenizer_path
    file.parent.mkdir()
    (folder / "byte.json").rename(file)
    assert chosen() == str(file)
    assert chosen(TOKENIZER_PATH="other.model") == "other.model"
    sizes = {name: str(SMALL_MODEL[name]) for name in ("TRAIN_SEQ_LEN", "TRAIN_BATCH_TOKENS")}
    assert find_faults(settings | {"VOCAB_SIZE": "260"} | sizes) == []


def test_an_unusable_gpu_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a device exists and torch finds no GPU, the fault has the versions of torch and CUDA."""
    environment, exists = small_environment(tmp_path), Path.exists
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "nvidiactl" or exists(path))
    assert find_faults({**environment, "DEVICE": "cpu"}) == []
    for device in ("auto", "cuda"):
        [fault] = find_faults({**environment, "DEVICE": device})
        words = [
            f"DEVICE={device} is not possible: ",
            torch.__version__,
            str(torch.version.cuda),
            "set DEVICE=cpu",
        ]
        assert [word for word in words if word not in fault] == []


def test_a_misspelt_name_is_a_warning_that_names_the_setting() -> None:
    """The slips are a missing letter, an extra letter, two swapped letters, and lower case."""
    slips = {}
    for name in sorted(SETTINGS):
        for at in (1, len(name) // 2, len(name) - 2):
            slips[name[:at] + name[at + 1 :]] = name
            slips[name[:at] + "X" + name[at:]] = name
            slips[name[:at] + name[at + 1] + name[at] + name[at + 2 :]] = name
        slips[name.lower()] = name
    slips = {slip: name for slip, name in slips.items() if slip not in SETTINGS}
    config, given, faults, warnings = train_gpt.read_config([], dict.fromkeys(slips, "1"))
    assert config == train_gpt.Config() and not given and not faults
    expected = {
        f"{slip} in the environment is not a setting and was ignored; did you mean {slips[slip]}?"
        for slip in slips
    }
    assert expected - {*warnings} == set()


def test_names_of_other_programs_are_neither_errors_nor_warnings() -> None:
    _, _, faults, warnings = train_gpt.read_config([], dict.fromkeys(OTHERS.split(), "1"))
    assert faults == [] and warnings == []


def test_a_wrong_setting_of_one_rank_ends_all_with_its_line(tmp_path: Path) -> None:
    """No rank waits, and none leaves a file; a file would make the repaired command fail."""
    settings = small_environment(tmp_path / "data") | {"RUN_ID": "r", "NUM_KV_HEADS": 3}
    run = Live(tmp_path / "run", 2, other={"MODEL_DIM": 30, "SEED": "x"}, **settings)
    assert run.wait_for_exit() == [2, 2] and "Traceback" not in run.err and run.out == ""
    for start in ("NUM_KV_HEADS=3 ", "rank 1: SEED=x ", "rank 1: MODEL_DIM=30 "):
        assert run.err.count(f"\n  {start}") >= 1, run.err
    assert {path.name for path in run.folder.iterdir()} == {"out", "err"}


def test_a_run_that_is_shorter_than_its_warm_down_gets_a_warning() -> None:
    short = {"ITERATIONS": 40, "MAX_WALLCLOCK_SECONDS": 0}
    warning = (
        "ITERATIONS=40 is below WARMDOWN_ITERS=1200, so learning rates begin at 3.3 % of their "
        "values"
    )
    for settings, warnings in (
        (short, [warning]),
        (short | {"WARMDOWN_ITERS": 40}, []),
        (short | {"MAX_WALLCLOCK_SECONDS": 600}, []),
        (short | {"WARMDOWN_ITERS": 0}, []),
    ):
        given = {name: str(value) for name, value in settings.items()}
        assert train_gpt.read_config([], given)[3] == warnings


def test_files_beside_the_script_do_not_hide_packages(tmp_path: Path) -> None:
    shutil.copy(ROOT / "train_gpt.py", tmp_path)
    for name in ("torch", "numpy", "tokenize", "queue"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong one')\n")
    command = [sys.executable, "train_gpt.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Train a small GPT"), done.stderr


def test_a_missing_compiler_gives_one_line_and_leaves_no_log(tmp_path: Path) -> None:
    settings = small_environment(tmp_path) | {"TORCH_COMPILE": 1, "RUN_ID": "r", "PATH": "/nowhere"}
    settings |= {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    run = run_script(ROOT / "train_gpt.py", tmp_path, **settings)
    [line] = run.err.splitlines()
    assert run.code == 1 and line.startswith("train_gpt.py: rank 0: torch.compile fails: ")
    assert "; install gcc and g++, set TMPDIR to a folder whose programs may be executed" in line
    assert line.endswith(", or set TORCH_COMPILE=0")
    assert not (tmp_path / "logs").exists()


NOTEBOOK = """
import runpy
import sys

class Cell:
    write = staticmethod(sys.__stdout__.write)
    flush = staticmethod(sys.__stdout__.flush)

sys.stdout, sys.ps1 = Cell(), "In [1]: "
sys.argv = ["train_gpt.py", "ITERATIONS=1"]
try:
    runpy.run_path(SCRIPT, run_name="__main__")
except SystemExit as end:
    print("the notebook goes on:", end.code)
"""


def test_a_notebook_goes_on_after_a_run(tmp_path: Path) -> None:
    """A notebook's stream cannot be configured, and os._exit would end the notebook."""
    cell = NOTEBOOK.replace("SCRIPT", repr(str(ROOT / "train_gpt.py")))
    (tmp_path / "cell.py").write_text(cell)
    run = run_script(
        tmp_path / "cell.py", tmp_path, **small_environment(tmp_path) | {"RUN_ID": "r"}
    )
    assert run.out.endswith("finished: see logs/r.txt\nthe notebook goes on: 0\n"), run.err


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_that_would_each_train_alone_are_refused(
    main: Call, tmp_path: Path, name: str
) -> None:
    """srun and mpirun start them; torchrun sets RANK, and one task is one process."""
    settings = small_environment(tmp_path / "data")
    code, _, err = main(**settings, **{name: "8"})
    assert code == 2 and f"8 processes were started without torchrun ({name}=8)" in err
    assert "start one torchrun per machine" in err
    assert train_gpt.find_wrong_launch({name: "1"}) == []
    launched = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    assert train_gpt.find_wrong_launch({name: "8", **launched}) == []
    assert train_gpt.find_wrong_launch({"SLURM_NTASKS": "8"}) == []  # inside of salloc


@pytest.mark.parametrize("given", [{"RANK": "0"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x"}])
def test_incomplete_variables_of_a_launcher_are_one_line(
    main: Call, tmp_path: Path, given: dict[str, str]
) -> None:
    """A shell or a batch system may have set RANK."""
    code, _, err = main(**small_environment(tmp_path / "data"), **given)
    [fault] = listed_faults(err)
    assert code == 2 and fault.startswith(f"RANK={given['RANK']} WORLD_SIZE=")
    assert "all three must be whole numbers, and RANK must be less than WORLD_SIZE" in fault
    assert fault.endswith("start the script with torchrun, which sets them, or `unset RANK`")
