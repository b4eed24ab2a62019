"""Tests of the artifact.

It has the challenge's layout and decodes within its error bound. Files of the challenge's own
script load. A size over the limit gives a warning, and nothing in a file is ever executed.
"""

import errno
import io
import os
import pickle
import re
import zlib
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults.live import Live
from running import SMALL_MODEL, Command, byte_data, make_config
from running import train_gpt as tg
from torch import Tensor

FORMAT = "int8_clean_per_row_v1"
PARTS = ["__quant_format__", "quantized", "scales", "dtypes", "passthrough", "qmeta"]
PARTS += ["passthrough_orig_dtypes"]
LARGEST_SMALL = 65_536  # elements of the largest tensor that is not quantized
# MLP matrices and the embeddings are larger than that, all other tensors are smaller.
SHAPE = {"NUM_LAYERS": 2, "MODEL_DIM": 192, "NUM_HEADS": 4, "NUM_KV_HEADS": 2}
SHAPE |= {"VOCAB_SIZE": 600, "TRAIN_SEQ_LEN": 8, "TIE_EMBEDDINGS": 0}
CONTROL_NAMES = ("attn_scale", "mlp_scale", "resid_mix", "q_gain", "skip_weights")


def random_state() -> dict[str, Tensor]:
    """Return a state whose first matrix rows are zero, tiny, large, and as large as possible."""
    torch.manual_seed(3)
    model = tg.GPT(make_config(**SHAPE), torch.float32)
    state = {name: t + 0.1 * torch.randn_like(t) for name, t in model.state_dict().items()}
    state["blocks.1.mlp.fc.weight"][:4] *= torch.tensor([[0.0], [1e-30], [1e3], [1e7]])
    return state


def read_artifact(data: bytes) -> dict[str, Any]:
    """Return the dictionary that an artifact holds."""
    return torch.load(io.BytesIO(zlib.decompress(data)), weights_only=True)


def compress_content(content: object) -> bytes:
    """Return an artifact that holds this object."""
    torch.save(content, buffer := io.BytesIO())
    return zlib.compress(buffer.getvalue(), 1)


def test_the_outlier_of_a_long_row_is_clipped() -> None:
    t = torch.ones(2, 1_000_000) * torch.tensor([[1.0], [2.0]])
    t[0, 5] = 1000.0  # one of a million lies beyond the quantile 0.9999984
    q, scale = tg.quantize(t)
    assert scale.tolist() == pytest.approx([1 / 127, 2 / 127], rel=1e-3)
    assert q.min() == q.max() == 127


def challenge_file(
    state: dict[str, Tensor], *, dtype: str = "float32", complete: bool = True
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Compute with numpy what the challenge's script writes.

    Return (the dictionary in the file, the values that it stands for by name).
    """
    quantized, scales, dtypes, kept, originals, values = {}, {}, {}, {}, {}, {}
    for name, t in state.items():
        array = t.numpy()
        if array.size > LARGEST_SMALL:
            limit = np.quantile(np.abs(array), np.float32(0.9999984), axis=1, keepdims=True)
            exact = np.maximum(limit.astype(np.float32) / np.float32(127), np.float32(1 / 127))
            q = np.clip(np.round(np.clip(array, -limit, limit) / exact), -127, 127).astype(np.int8)
            scale = exact.astype(np.float16)
            quantized[name], scales[name] = torch.from_numpy(q), torch.from_numpy(scale[:, 0])
            dtypes[name], values[name] = dtype, q.astype(np.float32) * scale.astype(np.float32)
        elif any(control in name for control in CONTROL_NAMES):
            kept[name], values[name] = t.clone(), array
        else:
            kept[name], originals[name] = t.half(), dtype
            values[name] = array.astype(np.float16).astype(np.float32)
    parts = [FORMAT, quantized, scales, dtypes, kept]
    parts += [{name: {"scheme": "per_row", "axis": 0} for name in quantized}, originals]
    return dict(zip(PARTS, parts if complete else parts[:5], strict=False)), values


def test_an_artifact_is_what_the_challenges_script_would_write() -> None:
    """Parts, names and dtypes have the same order, and the numbers are equal up to rounding."""
    state = random_state()
    data, payload, raw = tg.pack(state, make_config(**SHAPE))
    assert zlib.compress(zlib.decompress(data), 9) == data
    file, (expected, _) = read_artifact(data), challenge_file(state)
    assert list(file) == list(expected) == PARTS
    assert len(file["quantized"]) == 6 and len(file["passthrough"]) == 17
    for part in PARTS:
        if part in ("quantized", "scales", "passthrough"):
            assert list(file[part]) == list(expected[part])
            for name, t in expected[part].items():
                ours = file[part][name]
                assert ours.dtype == t.dtype and ours.shape == t.shape, name
                assert (ours.double() - t.double()).abs().max() <= (part == "quantized"), name
                assert (ours != t).float().mean() < 0.001, name
        else:
            assert file[part] == expected[part]
    tensors = [t for part in ("quantized", "scales", "passthrough") for t in file[part].values()]
    assert payload == sum(t.nbytes for t in tensors) and raw == len(zlib.decompress(data))


def test_size_dtype_and_name_decide_how_a_tensor_is_stored() -> None:
    """Each tensor is decoded in the dtype that it had."""
    state = {
        "small": torch.rand(256, 256),
        "large": torch.rand(1, LARGEST_SMALL + 1),
        "line": torch.rand(70_000),
        "bf": torch.rand(300, 300).bfloat16(),
        "bf_small": torch.rand(4).bfloat16(),
        "kept.a": torch.rand(3).bfloat16(),
        "kept.large": torch.rand(300, 300),
        "count": torch.arange(70_000),
        "turned": torch.rand(200, 400).t(),
    }
    config = make_config(INT8_KEEP_FLOAT_FP32_NAME_PATTERNS="kept,other")
    data = tg.pack(state, config)[0]
    file = read_artifact(data)
    half, single = torch.float16, torch.float32
    kept = {"small": half, "bf_small": half, "kept.a": single, "count": torch.int64}
    assert {name: t.dtype for name, t in file["passthrough"].items()} == kept
    assert file["passthrough_orig_dtypes"] == {"small": "float32", "bf_small": "bfloat16"}
    others = ("large", "line", "kept.large", "turned")
    assert file["dtypes"] == dict.fromkeys(others, "float32") | {"bf": "bfloat16"}
    assert set(file["qmeta"]) == {"large", "bf", "kept.large", "turned"}
    assert file["scales"]["line"].shape == () and file["scales"]["line"].dtype == single
    for name, t in tg.unpack(data, state).items():
        assert t.dtype == state[name].dtype and t.shape == state[name].shape
        assert (t.double() - state[name].double()).abs().max() < 0.04, name
        if kept.get(name, half) != half:
            assert torch.equal(t, state[name]), name


def test_a_tensor_that_is_not_stored_takes_no_bytes_and_makes_a_score_that_uses_it_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head that only training uses is left out by one line of `storage`."""
    state = random_state()
    config = make_config(**SHAPE)
    complete, stored = tg.pack(state, config), tg.storage
    name = "lm_head.weight" if "lm_head.weight" in state else "blocks.0.mlp.fc.weight"
    monkeypatch.setattr(
        tg, "storage", lambda n, t, c: "not stored" if n == name else stored(n, t, c)
    )
    data, tensor_bytes, _ = tg.pack(state, config)
    assert len(data) < len(complete[0]) and tensor_bytes < complete[1]
    back = tg.unpack(data, state)
    assert list(back) == list(state) and back[name].isnan().all()
    for other, t in tg.unpack(complete[0], state).items():
        assert other == name or torch.equal(back[other], t)


def test_a_new_way_to_store_a_tensor_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, one bit for each number. The script restores the tensor and counts its bytes."""

    def quantize_to_signs(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits = np.packbits(t.numpy() > 0, axis=-1)
        return torch.from_numpy(bits), t.abs().mean(dim=-1)

    def restore(bits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        signs = np.unpackbits(bits.numpy(), axis=-1).astype(np.float32) * 2 - 1
        return torch.from_numpy(signs) * scale[:, None]

    state = {"a": torch.rand(300, 400) - 0.5, "b": torch.rand(300, 400) - 0.5}
    monkeypatch.setitem(tg.QUANTIZERS, "signs", (quantize_to_signs, restore))
    monkeypatch.setattr(tg, "storage", lambda name, t, config: {"a": "signs", "b": "int8"}[name])
    data, tensor_bytes, _ = tg.pack(state, make_config(**SHAPE))
    assert tensor_bytes == (300 * 400 // 8 + 4 * 300) + (300 * 400 + 2 * 300)
    back = tg.unpack(data, state)
    assert torch.equal(back["a"].sign(), state["a"].sign())
    assert torch.allclose(
        back["a"].abs(), state["a"].abs().mean(dim=1, keepdim=True).expand(-1, 400)
    )
    assert (back["b"] - state["b"]).abs().max() < 0.005


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_file_of_the_challenges_own_script_loads(dtype: str, complete: bool) -> None:
    """The decoded tensors are a complete state of the model."""
    state = random_state()
    file, values = challenge_file(state, dtype=dtype, complete=complete)
    back = tg.unpack(compress_content(file), state)
    assert back.keys() == values.keys()
    for name, value in values.items():
        # bfloat16 has 8 bits of precision; the decoded value may or may not be rounded to them.
        rtol = 2**-8 if dtype == "bfloat16" else 0
        assert np.allclose(back[name].float().numpy(), value, rtol=rtol, atol=0), name
    tg.GPT(make_config(**SHAPE), torch.float32).load_state_dict(back)


def test_a_command_in_an_artifact_is_not_executed(tmp_path: Path) -> None:
    command = Command(tmp_path / "ran")
    for content in (command, {"passthrough": {}, "quantized": {}, "qmeta": command}):
        with pytest.raises(pickle.UnpicklingError):
            tg.unpack(compress_content(content), {})
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(command))
    assert (tmp_path / "ran").exists(), "an unsafe load executes the command"


@pytest.mark.parametrize("fails", ["", "fsync", "replace"])
def test_a_file_is_replaced_after_the_new_one_is_on_the_disk_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path, happened = tmp_path / "model.ptz", []
    path.write_bytes(b"old")

    def watch(name: str, size_of: Any, real: Any, first: Any, *more: Path) -> None:
        assert path.read_bytes() == b"old" and size_of(first).st_size == 5000
        happened.append(name)
        if name == fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(first, *more)

    for name, size_of in (("fsync", os.fstat), ("replace", os.stat)):
        monkeypatch.setattr(os, name, partial(watch, name, size_of, getattr(os, name)))
    with pytest.raises(OSError, match="No space left") if fails else nullcontext():
        tg.write_atomic(path, b"n" * 5000, "temporary")
    assert happened == (["fsync"] if fails == "fsync" else ["fsync", "replace"])
    assert path.read_bytes() == (b"old" if fails else b"n" * 5000)
    assert os.listdir(tmp_path) == ["model.ptz"]


def test_a_bank_of_matrices_has_a_scale_for_each_row() -> None:
    """The scales equal those of single matrices, also above the size limit of torch.quantile."""
    bank = torch.randn(3, 300, 40, generator=torch.Generator().manual_seed(1)) * 3
    q, scale = tg.quantize(bank)
    assert q.shape == bank.shape and scale.shape == (3, 300) and scale.dtype == torch.float16
    for number in range(3):
        alone = tg.quantize(bank[number])
        assert torch.equal(q[number], alone[0]) and torch.equal(scale[number], alone[1])
    assert (tg.dequantize(q, scale) - bank).abs().max() <= 0.51 * scale.max()
    large = torch.ones(2, 2900, 2900)
    torch.testing.assert_close(tg.dequantize(*tg.quantize(large)), large, rtol=1e-3, atol=0)


def test_the_log_has_the_sizes_of_the_files_and_warns_over_the_limit(tmp_path: Path) -> None:
    settings = {**SMALL_MODEL, **byte_data(tmp_path), "ITERATIONS": 2, "RUN_ID": "r"}
    edit = {"if total > 16_000_000:": "if total > 50_000:"}
    run = Live(tmp_path, 0, edit, **settings).finish()
    code, model = run.script.stat().st_size, run.folder / "final_model.pt"
    artifact = (run.folder / "final_model.int8.ptz").stat().st_size
    lines = run.out.splitlines()
    for line in (
        f"Serialized model: {model.stat().st_size} bytes",
        f"Code size: {code} bytes",
        f"Total submission size: {code + model.stat().st_size} bytes",
        f"Total submission size int8+zlib: {code + artifact} bytes",
        f"WARNING: artifact and script have {code + artifact} bytes; the size limit is 16,000,000",
    ):
        assert line in lines
    words = r"payload:\d+ raw_torch:\d+ payload_ratio:\d+\.\d\dx"
    sizes = rf"^Serialized model int8\+zlib: {artifact} bytes \({words}\)$"
    assert re.search(sizes, run.out, re.MULTILINE)
