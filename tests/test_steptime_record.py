"""The record StepTime: its operators in Triton's interpreter and for GPUs; how it differs from the root's script."""

import ast
import builtins
import difflib
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import train_gpt as root
from conftest import ROOT, SMALL_MODEL, Corpus, clean_environment, run_trainer
from steptime import RECORD, SCRIPT, load_record

needs_triton = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="there is no triton for this machine",
)
# Lines of the record that are not the root's, outside the section OPERATORS: (in place of, these).
DIFFERENCES = [
    (r"Contents: .*", r"Contents: .* OPERATORS, MODEL, OPTIMIZERS,\n.*"),
    ("", r'\toperators: word\("auto\|0\|qkv\|mlp"\) = "auto"'),
    (
        r"\t\tq, k, v = .*\n\t\tq = rotate\(.*\n\t\treturn self\.proj\(attend\(.*",
        r"\t\tweights = .*\n\t\tq, k, v = qkv_heads\(x, weights, .*\n\t\treturn self\.proj\(attend\(q, k, v\).*",
    ),
    (
        r"\t\treturn x \+ self\.mlp\.proj\(F\.relu\(self\.mlp\.fc\(.*\)\)\.square\(\), self\.mlp_scale\)",
        r"\t\treturn x \+ relu2_mlp\(rms_norm\(x\), used\(self\.mlp\.fc\), used\(self\.mlp\.proj, self\.mlp_scale\)\)",
    ),
    ("", r"\t\tuse_operators\(cfg, rt, log\)"),
]


# --- the operators -----------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.timeout(400)
def test_the_operators_in_tritons_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "tests/steptime_operators.py",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=clean_environment(TRITON_INTERPRET=1),
        text=True,
        timeout=380,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed(, \d+ warnings)? in", done.stdout, re.M), done.stdout
    assert "skipped" not in done.stdout, done.stdout


BF16, FP32, INT, REAL = "*bf16", "*fp32", "i32", "fp32"
HEADS_CONSTANTS = dict(H=8, KV=4, half=32, BLOCK=32, WIDTH=32)
# A kernel's arguments at the defaults' sizes: types, constants, options.
COMPILED = {
    "heads_kernel": (
        dict(
            packed=BF16, gain=FP32, rotary=FP32, q=BF16, k=BF16, v=BF16, rows=INT, T=INT, eps=REAL
        ),
        HEADS_CONSTANTS,
        {},
    ),
    "heads_grad_kernel": (
        dict(
            dq=BF16,
            dk=BF16,
            dv=BF16,
            packed=BF16,
            gain=FP32,
            rotary=FP32,
            grad=BF16,
            gain_grad=FP32,
            rows=INT,
            T=INT,
            eps=REAL,
        ),
        HEADS_CONSTANTS,
        {},
    ),
    "relu2_kernel": (
        dict(x=BF16, w=BF16, a=BF16, out=BF16, M=INT, N=INT, K=INT, w_n=INT),
        dict(GRAD=False, BM=128, BN=256, BK=64, w_k=1),
        dict(num_warps=8, num_stages=3),
    ),
    "relu2_kernel with GRAD": (
        dict(x=BF16, w=BF16, a=BF16, out=BF16, M=INT, N=INT, K=INT, w_k=INT),
        dict(GRAD=True, BM=128, BN=256, BK=64, w_n=1),
        dict(num_warps=8, num_stages=3),
    ),
}
# Of shared memory a block can have: an H100, an A100, an RTX 4090; the latter two have tiles half as wide.
SHARED_BYTES = {90: 232_448, 80: 166_912, 89: 101_376}


@needs_triton
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_gpus(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code, without a GPU: no spilt register, all in shared memory, wide accesses, tensor cores."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = getattr(load_record(), name.split()[0])
    types, constants, options = COMPILED[name]
    if capability != 90 and "BN" in constants:
        constants = {**constants, "BN": 128}
    signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
    assert not signature.keys() - types.keys() - constants.keys()
    by_16 = [["tt.divisibility", 16]]
    attributes = {
        (i,): by_16 for i, arg in enumerate(kernel.arg_names) if arg in types and types[arg] != REAL
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    done = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(done.asm["cubin"]) > 1000
    ptx = done.asm["ptx"]
    assert ".local" not in ptx and done.metadata.shared <= SHARED_BYTES[capability]
    assert "st.global.v4.b32" in ptx
    if "relu2" in name:
        assert (
            "wgmma.mma_async" if capability == 90 else "mma.sync"
        ) in ptx and "cp.async.cg.shared" in ptx


def test_without_triton_all_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    record = load_record("steptime_without_triton")
    assert record.triton is None
    lines = []
    log = type("Log", (), {"line": lambda self, text: lines.append(text)})()
    cfg = record.Config(run_id="x", operators="qkv", num_layers=1)
    record.use_operators(cfg, record.Runtime(), log)
    assert lines == [
        "warning: operator qkv does not work here, it is eager: triton cannot be imported",
        "operators:none",
    ]
    assert record.OPERATORS == frozenset()


def loss_and_gradients(module: ModuleType) -> list[torch.Tensor]:
    cfg = module.Config(
        run_id="x", train_seq_len=40, model_dim=64, num_heads=4, num_kv_heads=2, num_layers=3
    )
    torch.manual_seed(3)
    model = module.GPT(cfg, torch.float32)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=random)
    model.cast()
    ids = torch.randint(0, cfg.vocab_size, (2, cfg.train_seq_len + 1), generator=random)
    loss = model(ids[:, :-1], ids[:, 1:])
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_the_eager_forms_are_the_roots_model() -> None:
    for a, b in zip(loss_and_gradients(load_record()), loss_and_gradients(root), strict=True):
        assert b.norm() > 0 and (a - b).norm() <= 1e-5 * b.norm()


# --- the script --------------------------------------------------------------------------------------------------


def test_the_script_differs_from_the_roots_by_the_operators_alone() -> None:
    text, of_root = SCRIPT.read_text("utf-8"), (ROOT / "train_gpt.py").read_text("utf-8")
    rest, sections = re.subn(r"# === OPERATORS ===\n.*?(?=# === MODEL ===\n)", "", text, flags=re.S)
    assert sections == 1
    ours, theirs = rest.splitlines(), of_root.splitlines()
    found = [
        ("\n".join(theirs[a:b]), "\n".join(ours[c:d]))
        for what, a, b, c, d in difflib.SequenceMatcher(
            None, theirs, ours, autojunk=False
        ).get_opcodes()
        if what != "equal"
    ]
    assert len(found) == len(DIFFERENCES), found
    for (old, new), (old_pattern, new_pattern) in zip(found, DIFFERENCES):
        assert re.fullmatch(old_pattern, old), old
        assert re.fullmatch(new_pattern, new), new


def names(text: str) -> tuple[set[str], set[str]]:
    """(names that a text defines anywhere, names that it reads)."""
    nodes = list(ast.walk(ast.parse(text)))
    loaded = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    stored = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    named = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ExceptHandler))}
    taken = {node.arg for node in nodes if isinstance(node, ast.arg)}
    imported = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    return stored | named | taken | imported, loaded


def test_the_section_stands_by_itself() -> None:
    """Outside it three names of it are used; it uses three of the rest of the script."""
    text = SCRIPT.read_text("utf-8")
    section = re.search(r"# === OPERATORS ===\n(.*?)# === MODEL ===\n", text, re.S)[1]
    defined, used = names(section)
    assert used - defined - set(dir(builtins)) == {
        "torch",
        "F",
        "os",
        "first_line",
        "rms_norm",
        "rotate",
    }
    top = {node.name for node in ast.parse(section).body if isinstance(node, ast.FunctionDef)}
    assert top & names(text.replace(section, ""))[1] == {"qkv_heads", "relu2_mlp", "use_operators"}


def test_the_script_fits_its_walls() -> None:
    text = SCRIPT.read_text("utf-8")
    section = text.split("# === OPERATORS ===\n")[1].split("# === MODEL ===\n")[0]
    assert max(map(len, section.splitlines())) <= 120
    assert len(text.encode()) <= 100_000 and len(text.splitlines()) <= 1_750
    assert "/work" not in text


# --- runs --------------------------------------------------------------------------------------------------------


def test_a_run_on_the_cpu_is_eager_and_the_roots_to_the_bit(tmp_path: Path, corpus: Corpus) -> None:
    settings = {**SMALL_MODEL, **corpus.env, "ITERATIONS": 4}
    for of, script in (("root", ROOT / "train_gpt.py"), ("record", SCRIPT)):
        done = run_trainer(tmp_path / of, script=script, **settings)
        assert done.code == 0, done.err
        losses = done.values("train_loss"), done.values("val_loss"), done.values("data_crc")
        if of == "root":
            wanted = losses
    assert losses == wanted and len(losses[0]) == 4
    assert "\noperators:none\n" in done.text and "warning" not in done.text


@needs_triton
def test_a_run_with_operators_has_the_same_losses(tmp_path: Path, corpus: Corpus) -> None:
    settings = {
        **SMALL_MODEL,
        **corpus.env,
        "ITERATIONS": 3,
        "TRAIN_BATCH_TOKENS": 512,
        "VAL_TOKENS": 129,
        "VAL_BATCH_SIZE": 128,
        "NUM_LAYERS": 1,
        "TRAIN_SEQ_LEN": 16,
    }
    plain = run_trainer(tmp_path / "plain", script=SCRIPT, **settings, OPERATORS=0)
    fast = run_trainer(tmp_path / "fast", script=SCRIPT, **settings, TRITON_INTERPRET=1)
    assert plain.code == fast.code == 0, plain.err + fast.err
    assert "\noperators:none\n" in plain.text and "\noperators:mlp+qkv\n" in fast.text
    for word in ("train_loss", "val_loss"):
        a, b = (
            torch.tensor([float(value) for value in done.values(word)]) for done in (plain, fast)
        )
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4)


def test_an_operator_that_is_asked_for_on_the_cpu_is_a_warning(
    tmp_path: Path, corpus: Corpus
) -> None:
    done = run_trainer(
        tmp_path,
        script=SCRIPT,
        **{**SMALL_MODEL, **corpus.env, "ITERATIONS": 1, "OPERATORS": "mlp"},
    )
    assert done.code == 0, done.err
    warnings = [line for line in done.text.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and warnings[0].startswith(
        "warning: operator mlp does not work here, it is eager: "
    )


def test_an_operator_that_does_not_exist_is_a_fault(tmp_path: Path) -> None:
    done = run_trainer(tmp_path, script=SCRIPT, OPERATORS="all")
    assert (
        done.code == 2 and "OPERATORS=all: set auto or 0 or qkv or mlp; default is auto" in done.err
    )


# --- the folder --------------------------------------------------------------------------------------------------


def test_the_folder_is_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "records/track_non_record_16mb" / RECORD.name
    shutil.copytree(RECORD, folder, ignore=shutil.ignore_patterns("__pycache__", "logs"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "records/check.py"), str(folder), "--json"],
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_has_the_numbers_of_the_log_and_claims_no_speed() -> None:
    readme, submission = (
        (RECORD / "README.md").read_text("utf-8"),
        json.loads((RECORD / "submission.json").read_text()),
    )
    log = (RECORD / "train_seed1337.log").read_text("utf-8")
    assert f"{submission['val_loss']:.8f}" in readme and f"{submission['val_bpb']:.8f}" in readme
    assert f"{submission['bytes_total']:,}" in readme and f"{submission['bytes_code']:,}" in readme
    assert "\noperators:none\n" in log
    assert "not yet measured on a GPU" in readme
    table = readme.split("## Measured\n", 1)[1].split("\n## ", 1)[0]
    assert not re.search(r"\d ms\b", table)
    for path in re.findall(r"\b(tests/[\w./]+\.py)\b", readme):
        assert path == "tests/bench/steps.py" or (ROOT / path).exists(), path
