"""Settings keep their published names and defaults; --help and --print-config show them all.

Whatever is wrong with them is one error, which names each variable, its value and the remedy; it
ends the script with 2 before a device, a process group or a log is touched. A misspelt name is an
error, another trainer's name a warning, and all other names are no concern of ours.
"""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    SETTINGS,
    SMALL_MODEL,
    byte_data,
    clean_environment,
    config_of,
    run_trainer,
    train_gpt,
    write_split,
)
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(120)

CONTROLS = (
    "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,"
    "skip_weights"
)
PUBLISHED = {  # RUN_ID is missing: it is random
    "DATA_PATH": "./data/datasets/fineweb10B_sp1024",
    "TOKENIZER_PATH": "./data/tokenizers/fineweb_1024_bpe.model",
    "SEED": 1337,
    "VAL_BATCH_SIZE": 524288,
    "VAL_LOSS_EVERY": 1000,
    "TRAIN_LOG_EVERY": 200,
    "VAL_TOKENS": 0,
    "ITERATIONS": 20000,
    "WARMDOWN_ITERS": 1200,
    "WARMUP_STEPS": 20,
    "TRAIN_BATCH_TOKENS": 524288,
    "TRAIN_SEQ_LEN": 1024,
    "MAX_WALLCLOCK_SECONDS": 600.0,
    "VOCAB_SIZE": 1024,
    "NUM_LAYERS": 9,
    "MODEL_DIM": 512,
    "NUM_HEADS": 8,
    "NUM_KV_HEADS": 4,
    "MLP_MULT": 2,
    "TIE_EMBEDDINGS": True,
    "ROPE_BASE": 10000.0,
    "LOGIT_SOFTCAP": 30.0,
    "QK_GAIN_INIT": 1.5,
    "EMBED_LR": 0.6,
    "HEAD_LR": 0.008,
    "TIED_EMBED_LR": 0.05,
    "TIED_EMBED_INIT_STD": 0.005,
    "MATRIX_LR": 0.04,
    "SCALAR_LR": 0.04,
    "MUON_MOMENTUM": 0.95,
    "MUON_BACKEND_STEPS": 5,
    "MUON_MOMENTUM_WARMUP_START": 0.85,
    "MUON_MOMENTUM_WARMUP_STEPS": 500,
    "BETA1": 0.9,
    "BETA2": 0.95,
    "ADAM_EPS": 1e-8,
    "GRAD_CLIP_NORM": 0.0,
    "CONTROL_TENSOR_NAME_PATTERNS": CONTROLS,
    "INT8_KEEP_FLOAT_FP32_NAME_PATTERNS": CONTROLS,
    "TRAIN_PREFETCH": True,
    "TRAIN_PREFETCH_QUEUE": 2,
    "TRAIN_COPY_STREAM": True,
    "VAL_PREFETCH": True,
    "VAL_PREFETCH_QUEUE": 2,
    "VAL_COPY_STREAM": True,
    "VAL_BYTECOUNT_DEVICE": "cpu",
    "GPU_PREFETCH": 2,
    "TRAINING_TIMING_BREAKDOWN": False,
    "TRAINING_TIMING_EVERY": 200,
    "VAL_PROGRESS_LOG_EVERY": 0,
    "TRACE_STEPS": 0,
    "DEVICE": "auto",
    "TORCH_COMPILE": "auto",
    "GRAD_ACCUM_STEPS": 0,
    "ATTENTION_BACKEND": "auto",
    "DATA_STALL_SECONDS": 60.0,
    "CHECKPOINT_EVERY": 0,
    "CHECKPOINT_KEEP": 3,
    "RESUME": "",
}
WELL_KNOWN = """
N_PREFIX N_JOBS N_GPUS N_PROCS
PATH HOME USER LOGNAME SHELL PWD OLDPWD LANG LC_ALL LC_CTYPE TERM TMPDIR TEMP EDITOR PAGER HOSTNAME
DISPLAY SHLVL COLUMNS LINES TZ DEBUG VERBOSE PORT HOST CI NAME http_proxy no_proxy HTTPS_PROXY
CUDA_PATH CUDA_HOME CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
CUDA_VERSION CUBLAS_WORKSPACE_CONFIG CUDNN_PATH NVIDIA_VISIBLE_DEVICES NVIDIA_TF32_OVERRIDE
NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_DISABLE NCCL_TIMEOUT GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME
OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS KMP_AFFINITY TORCH_COMPILE_DEBUG TORCH_LOGS
TORCH_HOME TORCH_CUDA_ARCH_LIST TORCH_EXTENSIONS_DIR TORCH_DISTRIBUTED_DEBUG TRITON_CACHE_DIR
TORCHINDUCTOR_CACHE_DIR TORCHDYNAMO_DISABLE TORCHELASTIC_RUN_ID TORCHELASTIC_MAX_RESTARTS
TORCHELASTIC_ERROR_FILE PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF
RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE
MASTER_ADDR MASTER_PORT NODE_RANK NNODES WANDB_RUN_ID WANDB_API_KEY WANDB_PROJECT WANDB_MODE
WANDB_DIR WANDB_NAME MLFLOW_RUN_ID MLFLOW_TRACKING_URI HF_HOME HF_TOKEN HF_HUB_CACHE HF_HUB_OFFLINE
HF_DATASETS_CACHE TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM SLURM_JOB_ID SLURM_PROCID SLURM_LOCALID
SLURM_NTASKS SLURM_NNODES SLURM_JOB_NAME XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_DATA_DIRS
XDG_SESSION_ID PYTHONPATH PYTHONHASHSEED PYTHONUNBUFFERED VIRTUAL_ENV CONDA_PREFIX PIP_CACHE_DIR
LD_LIBRARY_PATH LD_PRELOAD CC CXX MAX_JOBS MODEL_DIR MODEL_NAME MODEL_PATH DATA_DIR DATA_ROOT
DATASET DATASETS_PATH OUTPUT_DIR CACHE_DIR LOG_DIR LOG_LEVEL NUM_GPUS NUM_WORKERS NUM_THREADS
GPU_COUNT GPU_ID JOB_ID RUN_NAME RUN_DIR EXPERIMENT_NAME SSH_TTY SSH_AUTH_SOCK AWS_REGION
KUBERNETES_PORT RUNPOD_POD_ID JUPYTER_PATH GITHUB_RUN_ID GITHUB_ACTIONS MATCHED_FINEWEB_REPO_ID
"""


class Said(NamedTuple):
    """What a call of main() returned and printed."""

    code: int
    out: str
    err: str

    @property
    def faults(self) -> list[str]:
        """The list behind the error's first line."""
        return [line.strip() for line in self.err.splitlines()[1:]]


@pytest.fixture
def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> Callable[..., Said]:
    """main() in an empty folder, which must stay empty; a run that starts is a failure."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr(train_gpt, "execute", lambda *_: pytest.fail("a run was started"))

    def call(*arguments: str, **environment: object) -> Said:
        capsys.readouterr()
        code = train_gpt.main(
            list(arguments), {name: str(value) for name, value in environment.items()}
        )
        assert os.listdir(".") == []
        assert not torch.distributed.is_initialized()
        assert not torch.cuda.is_initialized()
        return Said(code, *capsys.readouterr())

    return call


def small(folder: Path, **more: object) -> dict[str, str]:
    """An environment of settings without a fault, but for those in `more`."""
    values = {**SMALL_MODEL, **byte_data(folder), **more}
    return {name: str(value) for name, value in values.items()}


def faults_of(environment: dict[str, str], ranks: int = 1) -> list[str]:
    config, faults = train_gpt.read_config(environment)
    return faults + train_gpt.find_faults(config, ranks, environment)


def about(faults: list[str], name: str) -> list[str]:
    return [fault for fault in faults if fault.startswith(f"{name}=")]


# Names, defaults, and how they are shown.


def test_names_and_defaults_are_the_published_ones() -> None:
    config, faults = train_gpt.read_config({})
    mine = config.as_text()
    assert faults == []
    assert {name: mine.get(name) for name in PUBLISHED} == {
        name: str(value) for name, value in PUBLISHED.items()
    }


def test_a_run_without_a_name_gets_one_of_its_own() -> None:
    first, second = (train_gpt.read_config({})[0].run_id for _ in range(2))
    assert first != second
    assert uuid.UUID(first).version == 4


def test_the_artifacts_names_follow_the_optimizers_unless_they_are_set() -> None:
    followed = config_of(CONTROL_TENSOR_NAME_PATTERNS="q_gain")
    kept = config_of(
        CONTROL_TENSOR_NAME_PATTERNS="q_gain", INT8_KEEP_FLOAT_FP32_NAME_PATTERNS="mix"
    )
    assert followed.int8_keep_float_fp32_name_patterns == "q_gain"
    assert kept.int8_keep_float_fp32_name_patterns == "mix"


def test_print_config_says_where_each_value_is_from(main: Callable[..., Said]) -> None:
    said = main(
        "--print-config", SEED=5, TIE_EMBEDDINGS=0, MATRIX_LR="1e-3", DEVICE="auto", BETA1=""
    )
    shown = json.loads(said.out)
    assert (said.code, said.err) == (0, "")
    assert {name.upper() for name in shown} == SETTINGS
    assert {tuple(entry) for entry in shown.values()} == {("value", "source")}
    changed = {n: entry["value"] for n, entry in shown.items() if entry["source"] == "environment"}
    assert changed == {"seed": 5, "tie_embeddings": False, "matrix_lr": 0.001, "device": "auto"}
    assert shown["beta1"] == {"value": 0.9, "source": "default"}


def read_help(text: str) -> dict[str, tuple[str, str, str]]:
    """{name: (default, kind, heading)} of what --help prints."""
    heading, listed = "", {}
    for line in text.splitlines():
        shown = re.fullmatch(r"    (\w+): (.+?) = (.*?)  # ([^;]+); (.{4,})", line)
        if shown:
            name = shown[1].upper()
            default = {"True": "1", "False": "0", "CONTROLS": train_gpt.CONTROLS}
            assert name not in listed
            listed[name] = default.get(shown[3], shown[3].strip('"')), shown[2], heading
        elif line.startswith("    # "):
            heading = line.strip(" #")
    return listed


def test_help_shows_every_setting_with_a_default_that_can_be_set(main: Callable[..., Said]) -> None:
    """With kind, unit and meaning, in groups; whatever it shows as a default is that default."""
    said = main("--help")
    listed = read_help(said.out)
    assert (said.code, said.err) == (0, "")
    assert listed.keys() == SETTINGS
    shown = {name: default for name, (default, _, _) in listed.items() if name != "RUN_ID"}
    config, faults = train_gpt.read_config(shown)
    assert faults == []
    assert {**config.as_text(), "RUN_ID": ""} == {**train_gpt.Config().as_text(), "RUN_ID": ""}
    together = (
        "SEED DATA_PATH",
        "NUM_LAYERS MODEL_DIM",
        "BETA1 MATRIX_LR",
        "ITERATIONS WARMUP_STEPS",
    )
    groups = [{listed[name][2] for name in names.split()} for names in together]
    assert [len(group) for group in groups] == [1] * len(groups)
    assert len(set().union(*groups)) == len(groups)
    assert "<=0: none: runs are repeatable" in said.out
    assert "in front of the command: ITERATIONS=100 python3 train_gpt.py\n" in said.out


def edited_copy(folder: Path) -> ModuleType:
    """The script with one more setting, a line in Config, and another seed."""
    [line] = re.findall(
        r"(?m)^    seed: Bound\[NonNegativeInt\] = 1337 .*\n", inspect.getsource(train_gpt.Config)
    )
    added = line.replace("1337", "7") + "    my_rate: float = 2000.5  # rate; of my idea\n"
    path = folder / "edited_train_gpt.py"
    path.write_text(Path(train_gpt.__file__).read_text("utf-8").replace(line, added), "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_in_config_is_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "edited_train_gpt", raising=False)
    edited = edited_copy(tmp_path)
    edited.main(["--help"], {})
    listed = read_help(capsys.readouterr().out)
    assert listed["MY_RATE"][::2] == ("2000.5", "data")
    assert listed["SEED"][0] == "7"
    config, faults = edited.read_config({"MY_RATE": "3", "MY_RATES": "3"})
    assert config.my_rate == 3.0
    assert len(faults) == 1 and "MY_RATE?" in faults[0]


def test_help_into_a_closed_pipe_ends_quietly() -> None:
    """As `python train_gpt.py --help | true`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, str(ROOT / "train_gpt.py"), "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


# Wrong values.

# What is wrong -> what its line says besides the name and the value. Each is the only fault.
WRONG = {
    "TIE_EMBEDDINGS=true": "0 or 1",
    "ITERATIONS=ten": "set",
    "SEED=1.5": "set",
    "SEED=-1": "0",
    "SEED=18446744073709551616": "set",
    "MATRIX_LR=fast": "set",
    "MATRIX_LR=nan": "set",
    "MAX_WALLCLOCK_SECONDS=inf": "set",
    "NUM_LAYERS=0": "1",
    "TRAIN_PREFETCH_QUEUE=0": "1",
    "GPU_PREFETCH=0": "1",
    "VAL_BATCH_SIZE=0": "1",
    "GRAD_ACCUM_STEPS=-1": "0",
    "BETA1=1.0": "a number >= 0, < 1",
    "MUON_MOMENTUM=1.5": "a number >= 0, < 1",
    "LOGIT_SOFTCAP=0.0": "a number > 0",
    "DATA_STALL_SECONDS=0.0": "a number > 0",
    "DEVICE=gpu": "auto or cuda or cpu",
    "TORCH_COMPILE=yes": "auto or 0 or 1",
    "VAL_BYTECOUNT_DEVICE=cuda": "set cpu",
    "ATTENTION_BACKEND=fa9": "flash",
    "RUN_ID=a/b": "letters",
    "RUN_ID=..": "letters",
    "RUN_ID= ": "letters",
    "RESUME=auto": "RUN_ID",
    "TRAIN_BATCH_TOKENS=2080": "set a multiple of 256",
    "VAL_TOKENS=20": "a row has 32: set 0",
    "MATRIX_LR=-1": "set a number >= 0",
    "MATRIX_LR=0,04": "set a number >= 0",
    "DATA_PATH=/nowhere": "no such folder: run `python3 data/quickstart.py",
    "TOKENIZER_PATH=/nowhere/of.model": "data/quickstart.py",
    f"TOKENIZER_PATH={__file__}": "no SentencePiece model: run `python3 data/quickstart.py",
    "VOCAB_SIZE=259": "set 260",
}


def test_a_line_end_of_windows_is_no_part_of_a_value() -> None:
    config, faults = train_gpt.read_config({"ITERATIONS": "7\r", "DATA_PATH": "here\r"})
    assert (config.iterations, config.data_path, faults) == (7, "here", [])


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_value_is_one_line_with_the_remedy(tmp_path: Path, wrong: str) -> None:
    name, value = wrong.split("=")
    [fault] = faults_of(small(tmp_path, **{name: value}))
    assert fault.startswith(f"{wrong}: ") and "\n" not in fault
    assert WRONG[wrong] in fault.removeprefix(wrong)


def test_a_split_shorter_than_a_row_asks_for_shorter_rows(tmp_path: Path) -> None:
    environment = small(tmp_path)
    write_split(Path(environment["DATA_PATH"]), "val", np.arange(4, 36), [])
    assert faults_of(environment) == ["TRAIN_SEQ_LEN=32: validation has 32 tokens: set less"]


SHAPES = st.fixed_dictionaries(
    {
        "MODEL_DIM": st.integers(1, 40),
        "NUM_HEADS": st.integers(1, 6),
        "NUM_KV_HEADS": st.integers(1, 6),
        "TRAIN_SEQ_LEN": st.integers(1, 9),
        "TRAIN_BATCH_TOKENS": st.integers(1, 64) | st.integers(1, 8).map(lambda n: 8 * 9 * 7 * n),
        "GRAD_ACCUM_STEPS": st.sampled_from([0, 1, 2, 4, 5, 8, 16]),
        "VAL_BATCH_SIZE": st.integers(1, 200),
    }
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return small(tmp_path_factory.mktemp("shapes"))


@settings(deadline=None, max_examples=60)
@given(shape=SHAPES, ranks=st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_what_is_proposed_helps_and_what_has_no_fault_can_be_trained(
    environment: dict[str, str], shape: dict[str, int], ranks: int
) -> None:
    """Following the lines ends with none left; then the ranks' batches are a step's rows."""
    mine = {**environment, **{name: str(value) for name, value in shape.items()}}
    for _ in range(8):
        faults = faults_of(mine, ranks)
        for fault in faults:
            name, number = re.fullmatch(r"(\w+)=.*set (?:\D*)(\d+)", fault).groups()
            mine[name] = number
        if not faults:
            break
    assert faults == []
    config = config_of(**mine)
    plans = [
        train_gpt.BatchPlan.train(
            config, train_gpt.Runtime(config, {"RANK": rank, "WORLD_SIZE": ranks})
        )
        for rank in range(ranks)
    ]
    micro_steps = range(config.micro_steps(ranks))
    rows = [row for k in micro_steps for plan in plans for row in plan.rows(k)]
    assert rows == list(range(config.train_batch_tokens // config.train_seq_len))
    assert 8 * plans[0].span_rows * config.train_seq_len == config.train_batch_tokens
    for plan in plans:  # each batch is part of a span, or some whole ones
        first, count = plan.tokens(plan.rows(0))[:2]
        assert first + count == plan.first_token(plan.rows(0)[-1]) + config.train_seq_len + 1
    model = train_gpt.GPT(config, torch.float32)
    x = torch.zeros(1, config.train_seq_len, dtype=torch.int64)
    assert model(x, x).isfinite()


def test_all_that_is_wrong_is_in_one_error(main: Callable[..., Said], tmp_path: Path) -> None:
    """Kinds, ranges, shapes, names, data, arguments; none of them hides another."""
    wrong = {"ITERATIONS": "ten", "TIE_EMBEDDINGS": "maybe", "SEED": -1, "RUN_ID": "a/b"}
    wrong |= {"MODEL_DIM": 6, "NUM_KV_HEADS": 3, "TRAIN_BATCH_TOKENS": 1000, "VAL_BATCH_SIZE": 1}
    wrong |= {"VOCAB_SIZE": 259, "BETA2": 1.5, "TRAIN_PREFTECH": 1, "iterations": 5}
    environment = small(tmp_path / "data", **wrong)
    (tmp_path / "data" / "fineweb_train_000000.bin").write_bytes(b"damaged")
    (tmp_path / "data" / "fineweb_val_000000.bin").unlink()
    said = main("--bogus", **environment)
    assert (said.code, said.out) == (2, "")
    starts = [f"{name}={value}: " for name, value in wrong.items()]
    starts += [str(tmp_path / "data" / "fineweb_train_000000.bin"), "DATA_PATH=", "--bogus: "]
    assert [s for s in starts if sum(fault.startswith(s) for fault in said.faults) != 1] == []
    assert len(said.faults) == len(starts), said.err


def test_missing_packages_are_one_line_with_the_command_that_brings_them() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "train_gpt.py", "--help"],
        capture_output=True,
        text=True,
    )
    remedy = "is missing: python3 -m pip install -r requirements.txt"
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"train_gpt.py: \w+ {remedy}\n", done.stderr)


def test_missing_data_comes_with_the_commands_that_fetch_it(
    main: Callable[..., Said], tmp_path: Path
) -> None:
    said = main()
    assert said.code == 2 and len(said.faults) == 2  # a folder is one, for both splits
    for fault in said.faults:
        name = fault.split("=")[0]
        assert fault.startswith(f"{name}={PUBLISHED[name]}: ")
        commands = re.findall(r"data/\w+\.py", fault.split(": ", 1)[1])
        assert commands and all((ROOT / command).exists() for command in commands)
    assert f"fineweb10B_sp1024: no such folder in {Path.cwd()}: cd {ROOT}: run" in said.err
    said = main(DATA_PATH=tmp_path)
    assert all(f"no fineweb_{split}_*.bin" in said.err for split in ("train", "val"))
    byte_data(tmp_path / "set")
    for wrong in (__file__, tmp_path):
        said = main(DATA_PATH=wrong)
        assert said.err.count(f"DATA_PATH={wrong}: set the folder that holds the shards: run") == 1


@pytest.mark.parametrize("sign", ["/proc/driver/nvidia", "/dev/nvidiactl"])
def test_a_gpu_that_torch_cannot_use_never_means_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    """A driver or a device is there, torch finds no GPU: the fault has torch's versions."""
    environment, exists = small(tmp_path), Path.exists

    def seems(path: Path) -> bool:
        return str(path) == sign or "nvidia" not in str(path) and exists(path)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "exists", seems)
    assert faults_of({**environment, "DEVICE": "cpu"}) == []
    for device in ("auto", "cuda"):
        [fault] = faults_of({**environment, "DEVICE": device})
        words = [f"DEVICE={device}: ", torch.__version__, str(torch.version.cuda), "set DEVICE=cpu"]
        assert [word for word in words if word not in fault] == []


# Names that are no settings.


def test_a_misspelt_name_is_an_error_that_names_the_nearest_setting() -> None:
    """A letter too few or too many, two swapped in a name of eight or more, lower case."""
    slips = {}
    for name in sorted(SETTINGS):
        for at in (1, len(name) // 2, len(name) - 2):
            slips[name[:at] + name[at + 1 :]] = name
            slips[name[:at] + "X" + name[at:]] = name
            if len(name) >= 8:
                slips[name[:at] + name[at + 1] + name[at] + name[at + 2 :]] = name
        slips[name.lower()] = name
    slips = {slip: name for slip, name in slips.items() if slip not in SETTINGS}
    _, faults = train_gpt.read_config(dict.fromkeys(slips, "1"))
    named = {fault.split("=")[0]: re.search(r"(\w+)\?$", fault)[1] for fault in faults}
    assert {slip: named.get(slip) for slip, name in slips.items() if named.get(slip) != name} == {}


def test_well_known_names_are_no_concern_of_ours() -> None:
    names = set(WELL_KNOWN.split())
    assert len(names) >= 140 and not names & SETTINGS
    _, faults = train_gpt.read_config(dict.fromkeys(names, "1"))
    assert faults == []


SHORTENED = {
    "MAX_WALLCLOCK": "MAX_WALLCLOCK_SECONDS",
    "GRAD_CLIP": "GRAD_CLIP_NORM",
    "SEQ_LEN": "TRAIN_SEQ_LEN",
    "BATCH_TOKENS": "TRAIN_BATCH_TOKENS",
    "COPY_STREAM": "TRAIN_COPY_STREAM",
}
ELSEWHERE = [
    "LEARNING_RATE",
    "BATCH_SIZE",
    "MAX_STEPS",
    "LR",
    "D_MODEL",
    "N_LAYER",
    "N_HEAD",
    "N_EMBD",
    "BLOCK_SIZE",
    "MAX_ITERS",
    "ITERS",
    "LAYERS",
    "DROPOUT",
    "DTYPE",
    "COMPILE",
    "WARMUP_ITERS",
    "EVAL_INTERVAL",
    "WEIGHT_DECAY",
    "PREFETCH",
    "CHECKPOINT",
    "EMA_DECAY",
    "SWA_EVERY",
    "TTT_LR",
    "TTT_EPOCHS",
    "MUON_WD",
    "ROPE_DIMS",
    "QAT_START",
    "n_layer",
]


def test_other_trainers_names_and_parts_of_ours_are_errors() -> None:
    """Else a run would go on with the defaults, for ten minutes on eight GPUs."""
    names = dict.fromkeys([*SHORTENED, *ELSEWHERE], "1")
    _, faults = train_gpt.read_config({**names, "PATH": "/bin", "SEED": "1"})
    lines = {fault.split("=")[0]: fault for fault in faults}
    assert lines.keys() == names.keys()
    for name, setting in SHORTENED.items():
        assert lines[name].endswith(f"did you mean {setting}?")
    for name in ELSEWHERE:
        assert "no setting here" in lines[name] and "did you mean" not in lines[name]


def test_a_fault_names_the_setting_that_was_given(tmp_path: Path) -> None:
    environment = {**byte_data(tmp_path), "VOCAB_SIZE": "260", "DEVICE": "cpu"}
    cases = {
        "NUM_HEADS=7": ["NUM_HEADS=7: MODEL_DIM=512 is no multiple of 14", "NUM_HEADS=7: NUM_KV"],
        "MODEL_DIM=500": ["MODEL_DIM=500: 2 x NUM_HEADS must divide it: set a multiple of 16"],
        "NUM_KV_HEADS=3": ["NUM_KV_HEADS=3: set a divisor of NUM_HEADS=8"],
        "TRAIN_BATCH_TOKENS=1000": ["TRAIN_BATCH_TOKENS=1000: a step is 8 spans of whole rows"],
    }
    for setting, expected in cases.items():
        faults = faults_of({**environment, **dict([setting.split("=")])})
        assert len(faults) == len(expected)
        for fault, start in zip(faults, expected, strict=True):
            assert fault.startswith(start)


def test_three_ranks_hear_of_all_that_must_change_at_once(tmp_path: Path) -> None:
    environment = small(tmp_path, TRAIN_BATCH_TOKENS=2048, GRAD_ACCUM_STEPS=0)
    faults = faults_of(environment, ranks=3)
    assert [fault.rsplit(": ", 1)[1] for fault in faults] == ["set 8", "set a multiple of 768"]
    remedy = {"GRAD_ACCUM_STEPS": "8", "TRAIN_BATCH_TOKENS": "768"}
    assert faults_of(environment | remedy, ranks=3) == []
    [fault] = faults_of(environment | {"GRAD_ACCUM_STEPS": "3"})
    assert fault.endswith("x 1 ranks must divide 8 or be a multiple of 8: set 8")


LAUNCHED = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "x", "MASTER_PORT": 1}


@pytest.mark.parametrize(
    "wrong",
    [{"WORLD_SIZE": 8}, {"RANK": 1}, {"LOCAL_RANK": 0}, {**LAUNCHED, "WORLD_SIZE": "x"}]
    + [{**LAUNCHED, "RANK": 3}, {**LAUNCHED, "RANK": -1}, {**LAUNCHED, "LOCAL_RANK": ""}],
)
@pytest.mark.row("left-over variables of a launcher (..)", "refused before the start")
def test_a_launchers_variables_come_together_or_not_at_all(wrong: dict) -> None:
    """WORLD_SIZE=8 alone would train on an eighth of the data, in silence."""
    assert train_gpt.launcher_faults({}) == []
    assert train_gpt.launcher_faults({name: str(value) for name, value in LAUNCHED.items()}) == []
    [fault] = train_gpt.launcher_faults({name: str(value) for name, value in wrong.items()})
    assert "start with torchrun, or `unset " in fault


@pytest.mark.parametrize("word", ["ITERATIONS=100", "--batch_size=32", "config/x.py"])
def test_an_argument_is_answered_with_how_to_set(main: Callable[..., Said], word: str) -> None:
    said = main(word)
    how = f"{word}: settings go in front: ITERATIONS=100 python3 train_gpt.py"
    assert said.code == 2 and how in said.faults


def test_print_config_shows_the_faults_too(main: Callable[..., Said]) -> None:
    said = main("--print-config", SEED="x", LEARNING_RATE="3e-4")
    assert said.code == 2 and json.loads(said.out)["seed"]["source"] == "environment"
    assert "SEED=x" in said.err and "LEARNING_RATE=3e-4" in said.err


@pytest.mark.timeout(60)  # else it would be waited for
@pytest.mark.parametrize("name", ["TOKENIZER_PATH", "RESUME", ".producing", "deep .producing"])
@pytest.mark.row("a pipe, a device or nonsense as ..", "refused at once, in one line")
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    environment = small(tmp_path / "data")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if name.endswith(".producing"):
        producing = Path(environment["DATA_PATH"]) / ".producing"
        pipe.rename(producing)
        if name.startswith("deep"):
            producing.unlink()
            producing.write_text("[" * 100_000)
        faults = faults_of(environment)
        assert len(faults) == 1 and f"{producing}: no JSON of a producer" in faults[0]
        return
    for path in (pipe, "/dev/zero"):
        environment[name] = str(path)
        if name == "TOKENIZER_PATH":
            [fault] = faults_of(environment)
        else:
            with pytest.raises(train_gpt.RunError) as error:
                train_gpt.find_checkpoint(train_gpt.read_config(environment)[0])
            fault = str(error.value)
        assert fault.startswith(f"{name}={path}: ") and "no regular file" in fault


def test_another_text_of_the_script_is_another_run(tmp_path: Path) -> None:
    """Machines compare it, and the beginning of each shard, whose sizes are all alike."""
    config = config_of(**small(tmp_path))
    facts = train_gpt.data_facts(config)
    text = Path(train_gpt.__file__).read_bytes()
    assert facts["train_gpt.py"] == f"crc {zlib.crc32(text):08x}"
    write_split(tmp_path, "train", np.arange(9000) % 250, [])
    other = train_gpt.data_facts(config)
    assert {name for name in facts if facts[name] != other[name]} == {"fineweb_train_000000.bin"}


def test_empty_patterns_mean_none() -> None:
    config = config_of(CONTROL_TENSOR_NAME_PATTERNS="")
    assert config.control_tensor_name_patterns == config.int8_keep_float_fp32_name_patterns == ""
    assert config_of().int8_keep_float_fp32_name_patterns == train_gpt.CONTROLS


# The script as a process.


def test_one_rank_of_a_machine_speaks_and_the_others_let_it_finish(
    main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher ends all ranks at the first exit."""
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    node = {"WORLD_SIZE": 16, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    first = main(SEED=-1, LOCAL_RANK=0, RANK=8, **node)
    assert first.code == 2 and "SEED=-1" in first.err and sum(waited) < 1
    second = main(SEED=-1, LOCAL_RANK=1, RANK=9, **node)
    assert second == (2, "", "") and sum(waited) >= 10


@pytest.mark.slow
def test_torchrun_shows_the_whole_list_once_and_reports_it(tmp_path: Path) -> None:
    done = run_trainer(tmp_path, ranks=2, SEED=-1, NUM_KV_HEADS=3, TRAIN_PREFTECH=1)
    said, report = done.err.split("FAILED", 1)
    assert done.code != 0 and done.out == "" and os.listdir(tmp_path) == []
    for start in ("SEED=-1: ", "NUM_KV_HEADS=3: ", "TRAIN_PREFTECH=1: ", "TOKENIZER_PATH="):
        assert said.count(start) == 1, done.err
        assert report.count(start) == 1, done.err


def test_the_list_is_in_the_error_file(
    main: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    said = main(SEED=-1, BETA1=2)
    written = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert [fault for fault in said.faults if fault not in written] == [] != said.faults


IMPORT = """
import os, random, signal, sys, threading, warnings
import numpy, sentencepiece, torch
from torch.distributed.elastic.multiprocessing import errors
import torch.nn.attention, torch.profiler
def state():
    cuda, matmul = torch.cuda.is_initialized(), torch.get_float32_matmul_precision()
    torch_state = cuda, matmul, torch.distributed.is_initialized(), torch.get_num_threads()
    torch_state += torch.is_grad_enabled(), torch.get_rng_state().tolist()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    randomness = random.getstate(), numpy.random.get_state()[1].tolist()
    process = dict(os.environ), os.getcwd(), sys.argv[:], threading.active_count(), handlers
    return torch_state, randomness, process, list(warnings.filters), os.listdir(".")
before = state()
import train_gpt
assert before == state()
"""


def test_importing_the_module_does_nothing(tmp_path: Path) -> None:
    """Even with settings that are wrong: nothing is read from them."""
    env = clean_environment(SEED=-1, PYTHONPATH=ROOT, PYTHONDONTWRITEBYTECODE=1)
    command = [sys.executable, "-c", IMPORT]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.listdir(tmp_path) == []
