"""Proves that settings keep their published names and defaults, and that wrong ones end in one complete error."""

import functools
import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, SETTINGS, SMALL_MODEL, byte_data, run_trainer, train_gpt, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(60)

CONTROLS = "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,skip_weights"
PUBLISHED = dict(  # RUN_ID is missing: it is random
    DATA_PATH="./data/datasets/fineweb10B_sp1024",
    TOKENIZER_PATH="./data/tokenizers/fineweb_1024_bpe.model",
    SEED=1337,
    VAL_BATCH_SIZE=524288,
    VAL_LOSS_EVERY=1000,
    TRAIN_LOG_EVERY=200,
    VAL_TOKENS=0,
    ITERATIONS=20000,
    WARMDOWN_ITERS=1200,
    WARMUP_STEPS=20,
    TRAIN_BATCH_TOKENS=524288,
    TRAIN_SEQ_LEN=1024,
    MAX_WALLCLOCK_SECONDS=600.0,
    VOCAB_SIZE=1024,
    NUM_LAYERS=9,
    MODEL_DIM=512,
    NUM_HEADS=8,
    NUM_KV_HEADS=4,
    MLP_MULT=2,
    TIE_EMBEDDINGS=True,
    ROPE_BASE=10000.0,
    LOGIT_SOFTCAP=30.0,
    QK_GAIN_INIT=1.5,
    EMBED_LR=0.6,
    HEAD_LR=0.008,
    TIED_EMBED_LR=0.05,
    TIED_EMBED_INIT_STD=0.005,
    MATRIX_LR=0.04,
    SCALAR_LR=0.04,
    MUON_MOMENTUM=0.95,
    MUON_BACKEND_STEPS=5,
    MUON_MOMENTUM_WARMUP_START=0.85,
    MUON_MOMENTUM_WARMUP_STEPS=500,
    BETA1=0.9,
    BETA2=0.95,
    ADAM_EPS=1e-8,
    GRAD_CLIP_NORM=0.0,
    CONTROL_TENSOR_NAME_PATTERNS=CONTROLS,
    INT8_KEEP_FLOAT_FP32_NAME_PATTERNS=CONTROLS,
    TRAIN_PREFETCH=True,
    TRAIN_PREFETCH_QUEUE=2,
    TRAIN_COPY_STREAM=True,
    VAL_PREFETCH=True,
    VAL_PREFETCH_QUEUE=2,
    VAL_COPY_STREAM=True,
    VAL_BYTECOUNT_DEVICE="cpu",
    GPU_PREFETCH=2,
    VAL_RESIDENT=False,
    VAL_PROGRESS_LOG_EVERY=0,
    DEVICE="auto",
    TORCH_COMPILE="auto",
    GRAD_ACCUM_STEPS=0,
    ATTENTION_BACKEND="auto",
    DATA_STALL_SECONDS=60.0,
)
OPTIONAL = re.compile(r"TRAINING_TIMING_\w+|TRACE_STEPS|DATA_VERIFY|CHECKPOINT_\w+|RESUME")

WELL_KNOWN = """PATH HOME USER LOGNAME SHELL PWD OLDPWD LANG LANGUAGE LC_ALL LC_CTYPE TERM TMPDIR TEMP TMP EDITOR VISUAL
PAGER HOSTNAME DISPLAY MAIL SHLVL COLUMNS LINES TZ DEBUG VERBOSE PORT HOST CI NAME
CUDA_PATH CUDA_HOME CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_VERSION
CUBLAS_WORKSPACE_CONFIG CUDNN_PATH NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NVIDIA_TF32_OVERRIDE
NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_ASYNC_ERROR_HANDLING NCCL_TIMEOUT NCCL_IB_HCA
GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME
OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS KMP_AFFINITY KMP_DUPLICATE_LIB_OK
TORCH_COMPILE_DEBUG TORCH_LOGS TORCH_HOME TORCH_CUDA_ARCH_LIST TORCH_EXTENSIONS_DIR TORCH_DISTRIBUTED_DEBUG
TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_SHOW_CPP_STACKTRACES TORCH_DEVICE_BACKEND_AUTOLOAD TORCHINDUCTOR_CACHE_DIR
TORCHINDUCTOR_MAX_AUTOTUNE TORCHDYNAMO_DISABLE TORCHDYNAMO_VERBOSE TORCHELASTIC_RUN_ID TORCHELASTIC_MAX_RESTARTS
TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE TRITON_CACHE_DIR
PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_NVML_BASED_CUDA_CHECK
RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE
MASTER_ADDR MASTER_PORT NODE_RANK NNODES
WANDB_RUN_ID WANDB_API_KEY WANDB_PROJECT WANDB_MODE WANDB_DIR WANDB_NAME MLFLOW_RUN_ID MLFLOW_TRACKING_URI
HF_HOME HF_TOKEN HF_HUB_CACHE HF_HUB_OFFLINE HF_HUB_ENABLE_HF_TRANSFER HF_DATASETS_CACHE HF_ENDPOINT
TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM HUGGING_FACE_HUB_TOKEN
SLURM_JOB_ID SLURM_PROCID SLURM_LOCALID SLURM_NTASKS SLURM_NNODES SLURM_NODEID SLURM_JOB_NAME SLURM_CPUS_PER_TASK
XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_DATA_DIRS XDG_RUNTIME_DIR XDG_SESSION_ID XDG_STATE_HOME
PYTHONPATH PYTHONHASHSEED PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONFAULTHANDLER VIRTUAL_ENV CONDA_PREFIX
CONDA_DEFAULT_ENV PIP_CACHE_DIR UV_CACHE_DIR LD_LIBRARY_PATH LD_PRELOAD DYLD_LIBRARY_PATH CC CXX MAX_JOBS
MODEL_DIR MODEL_NAME MODEL_PATH DATA_DIR DATA_ROOT DATASET DATASETS_PATH OUTPUT_DIR CACHE_DIR LOG_DIR LOG_LEVEL
BATCH_SIZE NUM_GPUS NUM_WORKERS NUM_THREADS GPU_COUNT GPU_ID JOB_ID RUN_NAME RUN_DIR EXPERIMENT_NAME
SSH_CONNECTION SSH_TTY SSH_AUTH_SOCK KUBERNETES_SERVICE_HOST KUBERNETES_PORT AWS_REGION AWS_PROFILE RUNPOD_POD_ID
JUPYTER_PATH PYTEST_CURRENT_TEST GITHUB_RUN_ID GITHUB_ACTIONS MATCHED_FINEWEB_REPO_ID""".split()


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def faults(self) -> list[str]:
        return [line.strip() for line in self.err.splitlines()[1:]]


@pytest.fixture
def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> Callable[..., Said]:
    """The script's main() in an empty folder, with these arguments and settings; a run that starts is a failure."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr(train_gpt, "execute", lambda *_: pytest.fail("a run was started"))

    def call(*arguments: str, **environ: object) -> Said:
        for name in SETTINGS | {"RANK", "LOCAL_RANK", "WORLD_SIZE"}:
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments])
        capsys.readouterr()
        code = train_gpt.main()
        for name in environ:
            monkeypatch.delenv(name)
        return Said(code, *capsys.readouterr())

    return call


def small(folder: Path, **more: object) -> dict[str, str]:
    """Settings without a fault, but for those in `more`."""
    return {k: str(v) for k, v in {**SMALL_MODEL, **byte_data(folder), **more}.items()}


def faults_of(environ: dict[str, str], world_size: int = 1) -> list[str]:
    config, faults = train_gpt.Config.from_environment(environ)
    return faults + config.problems(world_size)


def about(faults: list[str], name: str) -> list[str]:
    return [fault for fault in faults if fault.startswith(f"{name}=")]


# --- Names and defaults -----------------------------------------------------------------------------------------------


def test_names_and_defaults_are_the_published_ones(main: Callable[..., Said]) -> None:
    said = main("--print-config")
    values = {name.upper(): entry["value"] for name, entry in json.loads(said.out).items()}
    uuid.UUID(values.pop("RUN_ID"))
    values = {name: value for name, value in values.items() if not OPTIONAL.fullmatch(name)}
    assert values.keys() == PUBLISHED.keys()
    for name, value in PUBLISHED.items():
        assert values[name] == value and isinstance(values[name], bool) == isinstance(
            value, bool
        ), name


def test_print_config_says_where_each_value_is_from_and_touches_nothing(
    main: Callable[..., Said],
) -> None:
    said = main(
        "--print-config", SEED=5, TIE_EMBEDDINGS=0, MATRIX_LR="1e-3", RUN_ID="mine", DEVICE="auto"
    )
    assert said.code == 0 and said.err == "" and os.listdir(".") == []
    shown = json.loads(said.out)
    assert {name.upper() for name in shown} == SETTINGS
    assert all(set(entry) == {"value", "source"} for entry in shown.values())
    changed = {
        name: entry["value"] for name, entry in shown.items() if entry["source"] == "environment"
    }
    assert changed == {
        "seed": 5,
        "tie_embeddings": False,
        "matrix_lr": 0.001,
        "run_id": "mine",
        "device": "auto",
    }
    assert {entry["source"] for entry in shown.values()} == {"environment", "default"}


def test_every_run_without_a_name_gets_another_one() -> None:
    first, second = (train_gpt.Config.from_environment({})[0].run_id for _ in range(2))
    assert first != second and uuid.UUID(first).version == 4


def test_help_lists_every_setting_with_type_default_unit_and_meaning_in_groups(
    main: Callable[..., Said],
) -> None:
    said = main("--help")
    assert said.code == 0 and said.err == "" and os.listdir(".") == []
    heading, headings, listed = "", {}, {}
    for line in said.out.splitlines():
        if match := re.fullmatch(
            r"  ([A-Z0-9_]+)=(\S*)  \((int|float|bool|str), ([^)]+)\) (.+)", line
        ):
            name, default, kind, unit, meaning = match.groups()
            assert name not in listed and unit.strip() and len(meaning) >= 4, line
            listed[name], headings[name] = (default, kind), heading
        elif line:
            heading = line
    assert listed.keys() == SETTINGS
    for name, value in PUBLISHED.items():
        default, kind = listed[name]
        assert kind == type(value).__name__ or name == "GRAD_ACCUM_STEPS", name
        assert (default if kind == "str" else float(default)) == value, name
    together = [
        ("SEED", "DATA_PATH"),
        ("NUM_LAYERS", "MODEL_DIM"),
        ("BETA1", "MATRIX_LR"),
        ("ITERATIONS", "WARMUP_STEPS"),
        ("TRAIN_PREFETCH", "VAL_COPY_STREAM"),
        ("DEVICE", "TORCH_COMPILE"),
    ]
    assert all(headings[a] == headings[b] for a, b in together)
    assert len({headings[a] for a, _ in together}) == len(together)
    assert "MAX_WALLCLOCK_SECONDS=0" in said.out.replace(" MAX_WALLCLOCK_SECONDS=600", "")


# --- One error with everything in it ----------------------------------------------------------------------------------

# What is planted -> the variable that the fault is about. Each is the only fault of its configuration.
SINGLE = {
    "bool": (dict(TIE_EMBEDDINGS="true"), "TIE_EMBEDDINGS"),
    "int": (dict(ITERATIONS="ten"), "ITERATIONS"),
    "int_with_a_fraction": (dict(SEED="1.5"), "SEED"),
    "float": (dict(MATRIX_LR="fast"), "MATRIX_LR"),
    "not_a_number": (dict(MATRIX_LR="nan"), "MATRIX_LR"),
    "infinite": (dict(MAX_WALLCLOCK_SECONDS="inf"), "MAX_WALLCLOCK_SECONDS"),
    "empty_number": (dict(SEED=""), "SEED"),
    "empty_word": (dict(DEVICE=""), "DEVICE"),
    "negative": (dict(SEED=-1), "SEED"),
    "beyond_64_bits": (dict(SEED=2**64), "SEED"),
    "none": (dict(NUM_LAYERS=0), "NUM_LAYERS"),
    "beta": (dict(BETA1=1), "BETA1"),
    "momentum": (dict(MUON_MOMENTUM=1.5), "MUON_MOMENTUM"),
    "queue": (dict(TRAIN_PREFETCH_QUEUE=0), "TRAIN_PREFETCH_QUEUE"),
    "ring": (dict(GPU_PREFETCH=0), "GPU_PREFETCH"),
    "softcap": (dict(LOGIT_SOFTCAP=0), "LOGIT_SOFTCAP"),
    "stall": (dict(DATA_STALL_SECONDS=0), "DATA_STALL_SECONDS"),
    "device": (dict(DEVICE="gpu"), "DEVICE"),
    "compile": (dict(TORCH_COMPILE="yes"), "TORCH_COMPILE"),
    "bytecount_device": (dict(VAL_BYTECOUNT_DEVICE="tpu"), "VAL_BYTECOUNT_DEVICE"),
    "batch_of_no_rows": (dict(TRAIN_BATCH_TOKENS=100), "TRAIN_BATCH_TOKENS"),
    "batch_not_in_rows": (dict(TRAIN_BATCH_TOKENS=2040), "TRAIN_BATCH_TOKENS"),
    "batch_not_in_eighths": (dict(TRAIN_BATCH_TOKENS=2048 + 32), "TRAIN_BATCH_TOKENS"),
    "accumulation": (dict(GRAD_ACCUM_STEPS=7), "GRAD_ACCUM_STEPS"),
    "heads": (dict(MODEL_DIM=33), "MODEL_DIM"),
    "odd_head": (dict(MODEL_DIM=6), "MODEL_DIM"),
    "kv_heads": (dict(NUM_HEADS=4, NUM_KV_HEADS=3), "NUM_KV_HEADS"),
    "more_kv_heads": (dict(NUM_KV_HEADS=4), "NUM_KV_HEADS"),
    "val_batch": (dict(VAL_BATCH_SIZE=31), "VAL_BATCH_SIZE"),
    "tokenizer_size": (dict(VOCAB_SIZE=300), "VOCAB_SIZE"),
    "small_tokenizer_size": (dict(VOCAB_SIZE=100_00), "VOCAB_SIZE"),
}
# The same, without a value that would help: what to do is said in words.
WORDED = {
    "name_with_a_folder": (dict(RUN_ID="a/b"), "RUN_ID", "letters"),
    "name_upwards": (dict(RUN_ID=".."), "RUN_ID", "letters"),
    "name_with_a_space": (dict(RUN_ID="a b"), "RUN_ID", "letters"),
    "empty_name": (dict(RUN_ID=" "), "RUN_ID", ""),
    "no_validation_row": (dict(TRAIN_SEQ_LEN=64, VAL_TOKENS=64), "TRAIN_SEQ_LEN", "VAL_TOKENS"),
    "tokenizer_missing": (
        dict(TOKENIZER_PATH="/nowhere/of.model"),
        "TOKENIZER_PATH",
        "no such file",
    ),
    "tokenizer_damaged": (dict(TOKENIZER_PATH=__file__), "TOKENIZER_PATH", ".model"),
}


def remedies(fault: str) -> list[tuple[str, str]]:
    """(variable, value) of every value that a fault proposes, as `set 8, or OTHER=16` or `the default is 3` do."""
    variable, text = fault.split("=")[0], re.sub(r"^\w+=.*?: ", "", fault)
    found = [
        (name, value)
        for name, value in re.findall(r"\b(?:or|set) ([A-Z][A-Z0-9_]+)=([\w.]+)", text)
    ]
    listed = (
        r"\bset (?:one of |at least )?((?:[\w.-]+(?:, (?!as |or )| or (?![A-Z]))?)+)(?=, |: |$)"
    )
    for values in re.findall(listed, text):
        found += [
            (variable, value)
            for value in re.split(r", | or ", values)
            if value not in ("something", "less")
        ]
    return found + [
        (variable, value)
        for value in re.findall(r"(?:default is|, as|be at least) ([\w.-]+)", text)
    ]


@pytest.mark.parametrize("planted", SINGLE)
def test_a_wrong_value_is_named_and_its_remedy_is_valid(tmp_path: Path, planted: str) -> None:
    changes, variable = SINGLE[planted]
    environ = small(tmp_path, **changes)
    assert faults_of(small(tmp_path)) == []
    [fault] = faults_of(environ)
    assert fault.startswith(f"{variable}={changes[variable]}: ") and "\n" not in fault
    found = remedies(fault)
    assert variable in {name for name, _ in found} and "inf" not in {
        value.strip("-") for _, value in found
    }, fault
    for name, value in found:
        assert faults_of({**environ, name: value}) == [], (fault, name, value)


@pytest.mark.parametrize("planted", WORDED)
def test_a_wrong_value_without_a_better_one_says_what_to_do(tmp_path: Path, planted: str) -> None:
    changes, variable, words = WORDED[planted]
    [fault] = faults_of(small(tmp_path, **changes))
    assert (
        fault.startswith(f"{variable}={changes[variable]}: ")
        and words in fault
        and "\n" not in fault
    )
    assert "  " not in fault and len(fault.split(": ", 1)[1].split()) > 3, fault


SHAPE_NAMES = (
    "MODEL_DIM",
    "NUM_KV_HEADS",
    "TRAIN_BATCH_TOKENS",
    "GRAD_ACCUM_STEPS",
    "VAL_BATCH_SIZE",
)


@settings(deadline=None, max_examples=200)
@given(
    model=st.tuples(st.integers(1, 70), st.integers(1, 9), st.integers(1, 9)),
    seq_len=st.integers(1, 40),
    batches=st.tuples(st.integers(0, 40), st.sampled_from([0, 0, 1, 8]), st.integers(1, 5000)),
    accumulation=st.integers(0, 12),
    world_size=st.integers(1, 16),
)
def test_every_proposed_number_is_right_for_any_shape(
    model: tuple[int, int, int],
    seq_len: int,
    batches: tuple[int, int, int],
    accumulation: int,
    world_size: int,
) -> None:
    (dim, heads, kv), (eighths, more, val) = model, batches
    batch = max(1, 8 * seq_len * eighths + more)
    environ = {
        name: str(value)
        for name, value in dict(
            MODEL_DIM=dim,
            NUM_HEADS=heads,
            NUM_KV_HEADS=kv,
            TRAIN_SEQ_LEN=seq_len,
            TRAIN_BATCH_TOKENS=batch,
            VAL_BATCH_SIZE=val,
            GRAD_ACCUM_STEPS=accumulation,
            DATA_PATH="/nowhere",
            TOKENIZER_PATH="/nowhere",
        ).items()
    }
    faults = faults_of(environ, world_size)
    parts = world_size * (accumulation or max(1, 8 // world_size))
    assert bool(about(faults, "MODEL_DIM")) == (dim % heads != 0 or dim // heads % 2 != 0)
    assert bool(about(faults, "NUM_KV_HEADS")) == (heads % kv != 0)
    assert bool(about(faults, "TRAIN_BATCH_TOKENS")) == (batch % (8 * seq_len) != 0)
    assert bool(about(faults, "GRAD_ACCUM_STEPS")) == (
        batch % (8 * seq_len) == 0 and batch // seq_len % parts != 0
    )
    assert bool(about(faults, "VAL_BATCH_SIZE")) == (val < parts * seq_len)
    for variable in SHAPE_NAMES:
        for fault in about(faults, variable):
            if (
                variable != "GRAD_ACCUM_STEPS" or batch // seq_len % world_size == 0
            ):  # else no number of them helps
                assert variable in {name for name, _ in remedies(fault)}, fault
            for name, value in remedies(fault):
                if name in SHAPE_NAMES:
                    after = faults_of({**environ, name: value}, world_size)
                    assert not about(after, variable) and not about(after, name), (
                        fault,
                        name,
                        value,
                        after,
                    )


def test_values_of_every_wrong_kind_and_wrong_data_are_one_error(
    main: Callable[..., Said], tmp_path: Path
) -> None:
    environ = small(
        tmp_path / "data",
        ITERATIONS="ten",
        TIE_EMBEDDINGS="maybe",
        MATRIX_LR="inf",
        MODEL_DIM=6,
        TRAIN_BATCH_TOKENS=1000,
        NUM_KV_HEADS=3,
        VAL_BATCH_SIZE=1,
        VAL_BYTECOUNT_DEVICE="cuda",
        VOCAB_SIZE=259,
        TRAIN_PREFTECH=1,
    )
    write_shard(tmp_path / "data" / "fineweb_train_000001.bin", np.array([300]))
    (tmp_path / "data" / "fineweb_train_000002.bin").write_bytes(b"")
    (tmp_path / "data" / "fineweb_val_000000.bin").unlink()
    said = main("--bogus", **environ)
    assert said.code == 2 and said.out == "" and os.listdir(".") == []
    for name in (
        "ITERATIONS",
        "TIE_EMBEDDINGS",
        "MATRIX_LR",
        "TRAIN_BATCH_TOKENS",
        "MODEL_DIM",
        "NUM_KV_HEADS",
        "VAL_BATCH_SIZE",
        "VAL_BYTECOUNT_DEVICE",
        "TRAIN_PREFTECH",
        "DATA_PATH",
    ):
        [fault] = about(said.faults, name)
        assert fault.startswith(f"{name}={environ[name]}: ")
    assert (
        len(about(said.faults, "VOCAB_SIZE")) == 3
    )  # the tokenizer's size, and two shards with tokens beyond 258
    [damaged] = [fault for fault in said.faults if "fineweb_train_000002.bin" in fault]
    [argument] = [fault for fault in said.faults if fault.startswith("--bogus: ")]
    assert "0 bytes" in damaged and "--help" in argument
    assert len(said.faults) == 15, said.err


@pytest.mark.parametrize(
    ("out_of_range", "fault"),
    [
        (dict(SEED=-1), "SEED=-1: "),
        (dict(TORCH_COMPILE="yes"), "TORCH_COMPILE=yes: "),
        (dict(RUN_ID="a/b"), "RUN_ID=a/b: "),
        (dict(BETA2=1), "BETA2=1: "),
        (dict(NUM_LAYERS=0), "NUM_LAYERS=0: "),
    ],
    ids=str,
)
def test_a_value_out_of_its_range_hides_no_other_fault(
    main: Callable[..., Said], tmp_path: Path, out_of_range: dict, fault: str
) -> None:
    environ = small(
        tmp_path / "data",
        NUM_KV_HEADS=3,
        TRAIN_BATCH_TOKENS=1000,
        VAL_BATCH_SIZE=1,
        TOKENIZER_PATH="/nowhere/of.model",
        **out_of_range,
    )
    (tmp_path / "data" / "fineweb_train_000000.bin").write_bytes(b"damaged")
    said = main(**environ)
    assert said.code == 2
    for start in (
        fault,
        "NUM_KV_HEADS=3: ",
        "TRAIN_BATCH_TOKENS=1000: ",
        "VAL_BATCH_SIZE=1: ",
        "TOKENIZER_PATH=/nowhere/of.model: ",
        str(tmp_path / "data" / "fineweb_train_000000.bin"),
    ):
        assert any(line.startswith(start) for line in said.faults), (start, said.err)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRAIN_SEQ_LEN", 0),
        ("NUM_HEADS", 0),
        ("NUM_KV_HEADS", 0),
        ("MODEL_DIM", -4),
        ("VAL_BATCH_SIZE", 0),
        ("VOCAB_SIZE", 0),
        ("VOCAB_SIZE", 65_538),
        ("GRAD_ACCUM_STEPS", -1),
        ("VAL_TOKENS", -5),
        ("TRAIN_BATCH_TOKENS", 0),
    ],
)
def test_sizes_that_arithmetic_cannot_use_are_faults_not_crashes(
    main: Callable[..., Said], tmp_path: Path, name: str, value: int
) -> None:
    said = main(**small(tmp_path / "data", **{name: value}))
    assert said.code == 2 and about(said.faults, name)[0].startswith(f"{name}={value}: ")


def test_counting_bytes_on_a_device_that_is_not_used_is_a_fault(
    main: Callable[..., Said], tmp_path: Path
) -> None:
    environ = small(tmp_path / "data", VAL_BYTECOUNT_DEVICE="cuda", DEVICE="cpu")
    said = main(**environ)
    [fault] = said.faults
    assert fault.startswith("VAL_BYTECOUNT_DEVICE=cuda: ") and fault.endswith("set cpu")
    assert faults_of({**environ, "VAL_BYTECOUNT_DEVICE": "cpu"}) == []


def test_a_gpu_that_torch_cannot_use_never_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is there, torch sees no device: the fault has the driver, torch's CUDA and the way out."""

    def seems(path: object, really: Callable[[object], bool]) -> bool:
        return str(path).startswith(("/proc/driver/nvidia", "/dev/nvidia")) or really(path)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os.path, "exists", functools.partial(seems, really=os.path.exists))
    real_exists, real_text = Path.exists, Path.read_text
    monkeypatch.setattr(Path, "exists", lambda path: seems(path, real_exists))
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *a, **k: (
            "NVRM version: NVIDIA UNIX 570.86.15  Thu"
            if str(path).startswith("/proc/driver")
            else real_text(path, *a, **k)
        ),
    )
    for device, refused in (("auto", True), ("cuda", True), ("cpu", False)):
        config, _ = train_gpt.Config.from_environment({"DEVICE": device})
        faults = about(config.problems(1), "DEVICE")
        assert len(faults) == refused, device
        assert all(
            word in fault
            for fault in faults
            for word in ("570.86.15", torch.__version__, "DEVICE=cpu")
        )


# --- Missing data -----------------------------------------------------------------------------------------------------


def test_missing_data_comes_with_the_commands_that_make_and_fetch_it(
    main: Callable[..., Said],
) -> None:
    said = main()
    assert said.code == 2 and len(said.faults) == 3 and os.listdir(".") == []
    for fault, name in zip(sorted(said.faults), ("DATA_PATH", "DATA_PATH", "TOKENIZER_PATH")):
        assert fault.startswith(f"{name}={PUBLISHED[name]}: ")
        assert "`python3 data/quickstart.py --prepare-only`" in fault
        assert "`python3 data/cached_challenge_fineweb.py --variant sp1024`" in fault
    assert {split for split in ("train", "val") if f"fineweb_{split}_*.bin" in said.err} == {
        "train",
        "val",
    }


def test_data_in_a_parent_folder_comes_with_the_setting_that_finds_it(
    main: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = byte_data(tmp_path / "checkout/data/datasets/mine")
    (inside := tmp_path / "checkout/records/track/2026-01-01_Mine").mkdir(parents=True)
    monkeypatch.chdir(inside)
    environ = {
        **small(tmp_path / "elsewhere"),
        "DATA_PATH": "./data/datasets/mine",
        "TOKENIZER_PATH": "data/datasets/mine/byte.json",
    }
    said = main(**environ)
    found = dict(re.findall(r"set (DATA_PATH|TOKENIZER_PATH)=(\S+)", said.err))
    assert said.code == 2 and len(said.faults) == 3
    assert {name: Path(path).resolve() for name, path in found.items()} == {
        "DATA_PATH": Path(made["DATA_PATH"]).resolve(),
        "TOKENIZER_PATH": Path(made["TOKENIZER_PATH"]).resolve(),
    }
    assert faults_of({**environ, **found}) == []


# --- Names that are no settings ---------------------------------------------------------------------------------------


def test_a_misspelt_name_is_refused_with_the_nearest_one(
    main: Callable[..., Said], tmp_path: Path
) -> None:
    said = main(**small(tmp_path / "data", TRAIN_PREFTECH=1))
    assert said.code == 2 and len(said.faults) == 1
    assert said.faults[0].startswith("TRAIN_PREFTECH=1: ") and "TRAIN_PREFETCH?" in said.faults[0]


def test_a_slip_in_any_name_is_found() -> None:
    slips = {}
    for name in sorted(SETTINGS):
        for at in (1, len(name) // 2, len(name) - 2):
            slips[name[:at] + name[at + 1] + name[at] + name[at + 2 :]] = name
            slips[name[:at] + name[at + 1 :]] = name
            slips[name[:at] + "X" + name[at:]] = name
        if len(name) >= 14:
            slips[name[0] + name[2:-2] + name[-1]] = name
    slips = {slip: name for slip, name in slips.items() if slip not in SETTINGS | {"MODEL_DIR"}}
    faults, _ = train_gpt.foreign_names({slip: "1" for slip in slips})
    named = {
        fault.split("=")[0]: re.search(r"did you mean (\w+)", fault).group(1) for fault in faults
    }
    foreign = {slip for slip in slips if re.fullmatch(train_gpt.FOREIGN, slip)}
    assert len(slips) > 6 * len(SETTINGS) and len(foreign) < 20
    wrong = {
        slip: named.get(slip)
        for slip, name in slips.items()
        if slip not in foreign and named.get(slip) != name
    }
    for slip, other in wrong.items():  # only where another setting is as near
        assert other and plain_distance(slip, other) <= plain_distance(slip, slips[slip]), (
            slip,
            other,
        )
    assert len(wrong) < 20


def test_nearness_is_one_slip_or_two_from_twelve_letters_on() -> None:
    refused = {
        "SEEDS": True,
        "SEDE": True,
        "SEEDXY": False,
        "GPU_PREFETXX": True,
        "GPU_PREFEXX": False,
        "TRAIN_SEQ_LENXX": True,
        "TRAIN_SEQ_LENXXX": False,
        "ITERATIONXY": False,
        "TRAIN_SEQ_LEN": False,
    }
    for name, expected in refused.items():
        assert bool(train_gpt.foreign_names({name: "1"})[0]) == expected, name


def test_well_known_names_are_no_concern_of_ours() -> None:
    assert len(set(WELL_KNOWN)) >= 150 and not set(WELL_KNOWN) & SETTINGS
    for name in WELL_KNOWN:
        assert train_gpt.foreign_names({name: "1"}) == ([], []), name


FOREIGN_NAMES = (
    "EMA_ENABLED",
    "EMA_DECAY",
    "SWA_EVERY",
    "SWA_ENABLED",
    "TTT_LR",
    "TTT_EPOCHS",
    "MUON_WD",
    "ROPE_DIMS",
)


def test_settings_of_other_scripts_get_one_warning_line() -> None:
    for name in FOREIGN_NAMES:
        faults, warnings = train_gpt.foreign_names({name: "1", "PATH": "/bin", "SEED": "1"})
        assert (
            faults == [] and len(warnings) == 1 and name in warnings[0] and "\n" not in warnings[0]
        )
    faults, warnings = train_gpt.foreign_names(dict.fromkeys(FOREIGN_NAMES, "1"))
    assert (
        faults == [] and len(warnings) == 1 and all(name in warnings[0] for name in FOREIGN_NAMES)
    )
    assert train_gpt.foreign_names({"PATH": "/bin", "SEED": "1"}) == ([], [])


@functools.lru_cache(maxsize=None)
def plain_distance(a: str, b: str) -> int:
    """By its definition: the cheapest way to make b of a, from their ends; a swapped pair is not touched again."""
    if not a or not b:
        return len(a) + len(b)
    costs = [
        plain_distance(a[:-1], b) + 1,
        plain_distance(a, b[:-1]) + 1,
        plain_distance(a[:-1], b[:-1]) + (a[-1] != b[-1]),
    ]
    if len(a) > 1 and len(b) > 1 and a[-2:] == b[-1] + b[-2]:
        costs.append(plain_distance(a[:-2], b[:-2]) + 1)
    return min(costs)


@settings(deadline=None, max_examples=300)
@given(a=st.text("ABC_", max_size=7), b=st.text("ABC_", max_size=7))
def test_nearness_is_an_edit_distance_by_its_recursive_definition(a: str, b: str) -> None:
    assert all(
        train_gpt.similar(a, b, slips) == (plain_distance(a, b) <= slips) for slips in range(5)
    )
    assert train_gpt.similar(a, a, 0)


# --- The script as a process ------------------------------------------------------------------------------------------


def test_only_local_rank_0_speaks_and_nothing_is_left_behind(main: Callable[..., Said]) -> None:
    first = main(SEED=-1, LOCAL_RANK=0, RANK=8, WORLD_SIZE=16)
    second = main(SEED=-1, LOCAL_RANK=1, RANK=1, WORLD_SIZE=16)
    assert first.code == second.code == 2
    assert "SEED=-1" in first.err and second.err == second.out == first.out == ""
    assert (
        os.listdir(".") == []
        and not torch.cuda.is_initialized()
        and not torch.distributed.is_initialized()
    )


def test_a_bad_setting_ends_the_script_with_2_before_anything_is_written(tmp_path: Path) -> None:
    done = run_trainer(tmp_path / "run", SEED=-1)
    assert (
        done.code == 2 and done.out == "" and "SEED=-1" in done.err and "Traceback" not in done.err
    )
    assert os.listdir(tmp_path / "run") == []


def test_a_run_warns_once_about_other_scripts_settings_and_minds_no_well_known_name(
    tmp_path: Path,
) -> None:
    environ = small(
        tmp_path / "data",
        ITERATIONS=0,
        VAL_TOKENS=64,
        EMA_ENABLED=1,
        TTT_LR="0.1",
        MUON_WD="0.04",
        MODEL_DIR="/models",
        WANDB_RUN_ID="w",
        TORCHELASTIC_RUN_ID="t",
        DATA_ROOT="/data",
        JOB_ID=7,
    )
    done = run_trainer(tmp_path / "run", **environ)
    assert done.code == 0, done.err
    [warning] = [
        line for line in done.text.splitlines() if "EMA_ENABLED" in line or "TTT_LR" in line
    ]
    assert (
        all(name in warning for name in ("EMA_ENABLED", "TTT_LR", "MUON_WD"))
        and "MODEL_DIR" not in warning
    )
    assert done.out.count("EMA_ENABLED") == 1
    assert f"tokenizer_kind=byte tokenizer_path={environ['TOKENIZER_PATH']}" in done.text


IMPORT = """
import os, random, signal, sys, threading, warnings
import numpy, sentencepiece, torch
def state():
    return (dict(os.environ), os.listdir("."), threading.active_count(), torch.cuda.is_initialized(), sys.argv[:],
            torch.distributed.is_initialized(), torch.get_num_threads(), torch.get_default_dtype(), random.getstate(),
            torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), list(warnings.filters),
            torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.is_grad_enabled(),
            [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], signal.set_wakeup_fd(-1), os.getcwd())
before = state()
import train_gpt
after = state()
changed = [number for number, (a, b) in enumerate(zip(before, after)) if a != b]
assert not changed, changed
"""


def test_importing_the_module_does_nothing(tmp_path: Path) -> None:
    """Even with settings that are wrong: nothing is read from them."""
    kept = {
        name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ
    }
    env = {**kept, "SEED": "-1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.listdir(tmp_path) == []
