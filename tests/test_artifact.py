"""Proves that the artifact has the published layout, decodes within its error bound, and cannot harm who loads it."""

import errno
import io
import os
import pickle
import resource
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import config_of, train_gpt
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.timeout(60)

FORMAT = "int8_clean_per_row_v1"
LARGEST_SMALL = 65_536  # elements of a tensor that is stored as it is
# A matrix and the embedding above that size, everything else below it.
SHAPE = dict(
    NUM_LAYERS=2, MODEL_DIM=192, NUM_HEADS=4, NUM_KV_HEADS=2, VOCAB_SIZE=600, TRAIN_SEQ_LEN=8
)
CONTROL_NAMES = ("attn_scale", "mlp_scale", "resid_mix", "q_gain", "skip_weights")


def random_state(**more: object) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = train_gpt.GPT(config_of(**{**SHAPE, **more}), torch.float32)
    return {name: t + 0.1 * torch.randn_like(t) for name, t in model.state_dict().items()}


def opened(data: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(zlib.decompress(data)), weights_only=True)


def artifact_of(content: object) -> bytes:
    torch.save(content, buffer := io.BytesIO())
    return zlib.compress(buffer.getvalue(), 1)


# --- Quantisation -----------------------------------------------------------------------------------------------------


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Rows of very different sizes, zeros among them; float16 scales reach values of about 8e6."""
    rows, cols = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    sizes = draw(
        st.lists(
            st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 7.5, 1e3, 8e6]), min_size=rows, max_size=rows
        )
    )
    values = draw(st.lists(st.floats(-1, 1, width=32), min_size=rows * cols, max_size=rows * cols))
    return torch.tensor(values).view(rows, cols) * torch.tensor(sizes)[:, None]


@settings(deadline=None, max_examples=200)
@given(t=matrices())
@example(t=torch.zeros(3, 4))
@example(t=torch.tensor([[1.0]]))
@example(t=torch.tensor([[8e6, -8e6], [1e-3, 0.0]]))
def test_a_matrix_comes_back_within_half_a_scale(t: Tensor) -> None:
    q, scale = train_gpt.quantize(t)
    assert q.dtype == torch.int8 and q.shape == t.shape and q.min() >= -127
    assert scale.dtype == torch.float16 and scale.shape == (len(t),)
    clip = torch.from_numpy(np.quantile(t.abs().numpy().astype(np.float64), 0.9999984, axis=1))[
        :, None
    ]
    exact = (clip / 127).clamp(min=1 / 127)
    assert torch.allclose(scale.double()[:, None], exact, rtol=2**-10, atol=0)
    back = train_gpt.dequantize(q, scale)
    assert back.dtype == torch.float32 and back.shape == t.shape
    rounding = 127 * (scale.double()[:, None] - exact).abs()
    inside = t.double().clamp(-clip, clip)
    assert ((back.double() - inside).abs() <= exact / 2 * (1 + 1e-5) + rounding).all()


@settings(deadline=None, max_examples=100)
@given(
    values=st.lists(
        st.floats(-1000, 1000, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30),
        min_size=1,
        max_size=40,
    )
)
@example(values=[0.0, 0.0])
def test_a_vector_comes_back_within_half_of_its_one_scale(values: list[float]) -> None:
    t = torch.tensor(values)
    q, scale = train_gpt.quantize(t)
    assert q.dtype == torch.int8 and q.shape == t.shape
    assert scale.dtype == torch.float32 and scale.shape == () and scale > 0
    clip = float(np.quantile(t.abs().numpy().astype(np.float64), 0.9999984))
    assert scale.item() == pytest.approx(clip / 127 if clip > 0 else 1.0, rel=1e-5, abs=1e-44)
    back = train_gpt.dequantize(q, scale)
    assert back.dtype == torch.float32 and back.shape == t.shape
    assert ((back - t.clamp(-clip, clip)).abs() <= scale / 2 * (1 + 1e-5) + 1e-6 * clip).all()


def test_every_row_has_its_own_scale_and_the_outliers_of_a_long_one_are_clipped() -> None:
    t = torch.ones(2, 1_000_000) * torch.tensor([[1.0], [2.0]])
    t[0, 5] = 1000.0  # one of a million lies beyond the quantile 0.9999984
    q, scale = train_gpt.quantize(t)
    assert scale.tolist() == pytest.approx([1 / 127, 2 / 127], rel=1e-3)
    back = train_gpt.dequantize(q, scale)
    assert back[0, 5].item() == pytest.approx(1.0, rel=1e-3)
    t[0, 5] = 1.0
    assert (back - t).abs().max() < 1e-3


# --- Layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [1, 0])
def test_file_has_exactly_the_published_parts(tied: int) -> None:
    state = random_state(TIE_EMBEDDINGS=tied)
    data, payload, raw = train_gpt.pack(state, config_of(**SHAPE))
    assert data[:2] == b"\x78\xda" and zlib.compress(zlib.decompress(data), 9) == data
    file = opened(data)
    assert set(file) == {
        "__quant_format__",
        "quantized",
        "scales",
        "dtypes",
        "passthrough",
        "qmeta",
        "passthrough_orig_dtypes",
    }
    large = {name for name, t in state.items() if t.numel() > LARGEST_SMALL}
    assert large == {
        "tok_emb.weight",
        *(f"blocks.{i}.mlp.{name}.weight" for i in (0, 1) for name in ("fc", "proj")),
        *([] if tied else ["lm_head.weight"]),
    }
    assert file["__quant_format__"] == FORMAT
    assert (
        set(file["quantized"])
        == set(file["scales"])
        == set(file["dtypes"])
        == set(file["qmeta"])
        == large
    )
    for name in large:
        assert (
            file["quantized"][name].dtype == torch.int8
            and file["quantized"][name].shape == state[name].shape
        )
        assert (
            file["scales"][name].dtype == torch.float16
            and file["scales"][name].shape == state[name].shape[:1]
        )
        assert file["dtypes"][name] == "float32" and file["qmeta"][name] == {
            "scheme": "per_row",
            "axis": 0,
        }
    assert set(file["passthrough"]) == set(state) - large
    for name, t in file["passthrough"].items():
        is_control = any(control in name for control in CONTROL_NAMES)
        assert t.dtype == (torch.float32 if is_control else torch.float16), name
        assert torch.equal(t, state[name].to(t.dtype)), name
    assert file["passthrough_orig_dtypes"] == {
        name: "float32" for name, t in file["passthrough"].items() if t.dtype == torch.float16
    }
    assert file["passthrough_orig_dtypes"]
    tensors = [t for part in ("quantized", "scales", "passthrough") for t in file[part].values()]
    assert payload == sum(t.numel() * t.element_size() for t in tensors) and raw == len(
        zlib.decompress(data)
    )


def test_the_size_limit_the_dtypes_and_the_kept_names_decide_how_a_tensor_is_stored() -> None:
    state = {
        "small": torch.randn(256, 256),
        "large": torch.randn(1, LARGEST_SMALL + 1),
        "line": torch.randn(70_000),
        "bf": torch.randn(300, 300).bfloat16(),
        "bf_small": torch.randn(4).bfloat16(),
        "kept.a": torch.randn(3).bfloat16(),
        "kept.large": torch.randn(300, 300),
        "count": torch.arange(5),
        "many": torch.arange(70_000),
        "turned": torch.randn(200, 400).t(),
    }
    file = opened(
        train_gpt.pack(state, config_of(INT8_KEEP_FLOAT_FP32_NAME_PATTERNS="kept,other"))[0]
    )
    assert {name: t.dtype for name, t in file["passthrough"].items()} == {
        "small": torch.float16,
        "bf_small": torch.float16,
        "kept.a": torch.float32,
        "count": torch.int64,
        "many": torch.int64,
    }
    assert file["passthrough_orig_dtypes"] == {"small": "float32", "bf_small": "bfloat16"}
    assert file["dtypes"] == {
        "large": "float32",
        "line": "float32",
        "bf": "bfloat16",
        "kept.large": "float32",
        "turned": "float32",
    }
    assert set(file["qmeta"]) == {"large", "bf", "kept.large", "turned"}
    assert file["scales"]["line"].shape == () and file["scales"]["line"].dtype == torch.float32
    back = train_gpt.unpack(artifact_of(file), state)
    assert torch.equal(back["count"], state["count"]) and torch.equal(back["many"], state["many"])
    assert (back["turned"] - state["turned"]).abs().max() < 0.03
    assert (back["line"] - state["line"]).abs().max() < 0.03


def test_a_packed_state_comes_back_with_its_names_shapes_and_values() -> None:
    state = random_state(TIE_EMBEDDINGS=0)
    back = train_gpt.unpack(train_gpt.pack(state, config_of(**SHAPE))[0], state)
    assert back.keys() == state.keys()
    for name, t in state.items():
        assert back[name].shape == t.shape and back[name].dtype == torch.float32
        if any(control in name for control in CONTROL_NAMES):
            assert torch.equal(back[name], t)
        else:
            bound = (
                t.abs().max().item() / 127
                if t.numel() > LARGEST_SMALL
                else 2**-11 * t.abs().max().item()
            )
            assert (back[name] - t).abs().max() <= max(bound, 1 / 127), name
    model = train_gpt.GPT(config_of(**SHAPE, TIE_EMBEDDINGS=0), torch.float32)
    model.load_state_dict(back)
    assert torch.equal(model.tok_emb.weight, back["tok_emb.weight"])


# --- A file in the challenge's own layout, written here ---------------------------------------------------------------


def challenge_file(
    state: dict[str, Tensor], *, dtype: str, complete: bool
) -> tuple[bytes, dict[str, np.ndarray]]:
    """(a file such as the challenge's own script writes, the values in it): rows in int8, small tensors as they are."""
    quantized, scales, dtypes, kept, originals, values = {}, {}, {}, {}, {}, {}
    for name, t in state.items():
        array = t.numpy()
        if array.size > LARGEST_SMALL:
            limit = (
                np.abs(array).max(axis=1, keepdims=True) / 2
            )  # another clip than ours: the scales say which
            scale = (limit / 127).astype(np.float16)
            q = np.clip(np.round(array / scale.astype(np.float32)), -127, 127).astype(np.int8)
            quantized[name], scales[name] = torch.from_numpy(q), torch.from_numpy(scale[:, 0])
            dtypes[name], values[name] = dtype, q.astype(np.float32) * scale.astype(np.float32)
        elif any(control in name for control in CONTROL_NAMES):
            kept[name], values[name] = t.clone(), array
        else:
            kept[name], originals[name], values[name] = (
                t.half(),
                dtype,
                array.astype(np.float16).astype(np.float32),
            )
    file = {
        "__quant_format__": FORMAT,
        "quantized": quantized,
        "scales": scales,
        "dtypes": dtypes,
        "passthrough": kept,
    }
    if complete:
        file |= {
            "qmeta": {name: {"scheme": "per_row", "axis": 0} for name in quantized},
            "passthrough_orig_dtypes": originals,
        }
    torch.save(file, buffer := io.BytesIO())
    return zlib.compress(buffer.getvalue(), level=9), values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_file_of_the_challenges_own_script_loads(dtype: str, complete: bool) -> None:
    state = random_state(TIE_EMBEDDINGS=0)
    data, values = challenge_file(state, dtype=dtype, complete=complete)
    back = train_gpt.unpack(data, state)
    assert back.keys() == values.keys()
    for name, value in values.items():
        # As bfloat16 it has 8 bits of precision, and may or may not be rounded to them here.
        assert np.allclose(
            back[name].float().numpy(), value, rtol=2**-8 if dtype == "bfloat16" else 0, atol=0
        ), name


# --- Hostile and damaged files ----------------------------------------------------------------------------------------

SMALL = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}


def small_file(**changes: object) -> dict[str, Any]:
    return {
        "__quant_format__": FORMAT,
        "quantized": {"a": torch.ones(2, 3, dtype=torch.int8)},
        "scales": {"a": torch.ones(2, dtype=torch.float16)},
        "dtypes": {"a": "float32"},
        "passthrough": {"b": torch.ones(4)},
        **changes,
    }


def refusal(data: bytes, expected: dict[str, Tensor] = SMALL) -> str:
    with pytest.raises(train_gpt.RunError) as caught:
        train_gpt.unpack(data, expected)
    said = str(caught.value)
    assert "artifact" in said and len(said.splitlines()) == 1
    return said


class Command:
    """Pickled, it runs a command where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple]:
        return os.mkdir, (str(self.path),)


def test_the_small_file_is_fine_before_it_is_damaged() -> None:
    assert torch.equal(train_gpt.unpack(artifact_of(small_file()), SMALL)["a"], torch.ones(2, 3))


@pytest.mark.parametrize("wrap", ["torch_file", "plain_pickle", "within_a_part"])
def test_a_file_that_would_run_a_command_is_refused_and_runs_nothing(
    tmp_path: Path, wrap: str
) -> None:
    command = Command(tmp_path / "ran")
    if wrap == "plain_pickle":
        refusal(zlib.compress(pickle.dumps(command, protocol=2)))
    else:
        refusal(artifact_of(command if wrap == "torch_file" else small_file(qmeta={"a": command})))
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(command))
    assert (tmp_path / "ran").exists(), "the command would have left this"


def test_a_file_that_decompresses_to_200_mb_is_refused_in_bounded_memory() -> None:
    packer, megabyte = zlib.compressobj(1), bytes(1 << 20)
    data = b"".join(packer.compress(megabyte) for _ in range(200)) + packer.flush()
    tracemalloc.start()
    try:
        said = refusal(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data) < 2 << 20 and peak < 16 << 20, said


HUGE = (
    1 << 25
)  # elements: a tensor that repeats one value takes a few bytes in the file, and here 128 MiB in float32
PRETENDED = {
    "quantized": ("a", torch.zeros(1, 1, dtype=torch.int8).expand(2, HUGE // 2)),
    "passthrough": ("b", torch.zeros(1).half().expand(HUGE)),
    "scales": ("a", torch.zeros(1).half().expand(HUGE)),
}


@pytest.mark.parametrize("part", PRETENDED)
def test_a_tensor_that_pretends_to_be_huge_is_refused_before_it_takes_memory(part: str) -> None:
    name, tensor = PRETENDED[part]
    data = artifact_of(small_file(**{part: {name: tensor}}))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        refusal(data)
    largest = max((event.self_cpu_memory_usage for event in profile.events()), default=0)
    assert len(data) < 10_000 and largest < 1 << 20, f"{largest >> 20} MiB were taken"


def test_scales_of_more_rows_than_the_matrix_are_refused() -> None:
    """They would spread one row over several."""
    row = {"a": torch.zeros(1, 3)}
    file = small_file(quantized={"a": torch.ones(1, 3, dtype=torch.int8)}, passthrough={})
    assert train_gpt.unpack(artifact_of({**file, "scales": {"a": torch.ones(1).half()}}), row)[
        "a"
    ].shape == (1, 3)
    for rows in (2, 1000):
        refusal(artifact_of({**file, "scales": {"a": torch.ones(rows).half()}}), row)


WRONG = {
    "another_format": (small_file(__quant_format__="int6_v2"), "int6_v2"),
    "no_format": ({}, "__quant_format__"),
    "not_a_dictionary": ([1, 2], ""),
    "a_number": (7, ""),
    "parts_of_another_type": (small_file(quantized=[torch.ones(2)]), ""),
    "values_of_another_type": (small_file(passthrough={"b": "words"}), ""),
    "no_scales": (small_file(scales={}), "a"),
    "no_quantized_part": ({k: v for k, v in small_file().items() if k != "quantized"}, "quantized"),
    "missing_name": (small_file(passthrough={}), "b"),
    "unknown_name": (
        small_file(passthrough={"b": torch.ones(4), "extra.weight": torch.ones(1)}),
        "extra.weight",
    ),
    "wrong_shape": (small_file(passthrough={"b": torch.ones(5)}), "b"),
    "turned_matrix": (
        small_file(
            quantized={"a": torch.ones(3, 2, dtype=torch.int8)},
            scales={"a": torch.ones(3, dtype=torch.float16)},
        ),
        "a",
    ),
    "as_many_elements_otherwise": (small_file(passthrough={"b": torch.ones(2, 2)}), "b"),
    "scales_of_too_many_rows": (small_file(scales={"a": torch.ones(3, dtype=torch.float16)}), ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_does_not_fit_is_refused_in_one_line(name: str) -> None:
    content, word = WRONG[name]
    assert word in refusal(artifact_of(content))


@settings(deadline=None, max_examples=80)
@given(keep=st.integers(0, 10_000), zipped=st.booleans(), old_layout=st.booleans())
@example(keep=0, zipped=True, old_layout=False)
@example(keep=-1, zipped=True, old_layout=False)
@example(keep=0, zipped=False, old_layout=False)
def test_a_truncated_file_is_refused_in_one_line(keep: int, zipped: bool, old_layout: bool) -> None:
    torch.save(small_file(), buffer := io.BytesIO(), _use_new_zipfile_serialization=not old_layout)
    raw = buffer.getvalue()
    data = (
        zlib.compress(raw)[: keep % len(zlib.compress(raw))]
        if zipped
        else zlib.compress(raw[: keep % len(raw)])
    )
    refusal(data)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(deadline=None, max_examples=80)
@given(place=st.integers(0, 10_000), value=st.integers(0, 255), old_layout=st.booleans())
def test_a_changed_byte_is_refused_in_one_line_or_harmless(
    place: int, value: int, old_layout: bool
) -> None:
    torch.save(small_file(), buffer := io.BytesIO(), _use_new_zipfile_serialization=not old_layout)
    raw = bytearray(buffer.getvalue())
    raw[place % len(raw)] = value
    try:
        back = train_gpt.unpack(zlib.compress(bytes(raw)), SMALL)
    except train_gpt.RunError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert {name: t.shape for name, t in back.items()} == {"a": (2, 3), "b": (4,)}


def test_noise_is_refused_in_one_line() -> None:
    for data in (b"", b"not zlib at all", zlib.compress(b"not a torch file"), zlib.compress(b"")):
        refusal(data)


# --- Atomic files -----------------------------------------------------------------------------------------------------


def test_a_whole_file_replaces_the_old_one_after_it_has_reached_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, happened, replace, fsync = tmp_path / "model.ptz", [], os.replace, os.fsync

    def watched_fsync(number: int) -> None:
        assert os.fstat(number).st_size == 5000
        happened.append("fsync")
        fsync(number)

    def watched_replace(source: Path, target: Path) -> None:
        assert Path(source).parent == tmp_path and Path(source).read_bytes() == b"n" * 5000
        assert path.read_bytes() == b"old"
        happened.append("replace")
        replace(source, target)

    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    train_gpt.write_atomic(path, b"n" * 5000)
    assert happened[:2] == ["fsync", "replace"] and path.read_bytes() == b"n" * 5000
    assert os.listdir(tmp_path) == ["model.ptz"]


def failed_write(path: Path) -> str:
    with pytest.raises(train_gpt.RunError) as caught:
        train_gpt.write_atomic(path, b"n" * 50_000)
    said = str(caught.value)
    assert str(path) in said and "50000 bytes" in said and "\n" not in said
    return said


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "model.ptz"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, call, full)
    assert "No space left" in failed_write(path)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["model.ptz"]


def test_a_write_that_breaks_off_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "model.ptz"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        assert "File too large" in failed_write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["model.ptz"]


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in failed_write(tmp_path / "gone" / "model.ptz")
    assert os.listdir(tmp_path) == []
