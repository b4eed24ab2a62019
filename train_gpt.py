"""Train a small GPT for the parameter-golf challenge: the best bits per byte that fit in 16,000,000 bytes.

    torchrun --standalone --nproc_per_node=8 train_gpt.py      eight GPUs (1, 2 or 4: the same order of tokens)
    python train_gpt.py                                        one process, on a GPU or on the CPU
    python train_gpt.py --help | --print-config                the settings (environment variables) | their values

One pipeline (section DATA) feeds training and validation; overlap off is a setting of the same code.

Contents: CONFIG, RUNTIME, INSTRUMENTS, DATA, MODEL, OPTIMIZERS, EVALUATION, ARTIFACT, TRAINING, MAIN.
"""
from __future__ import annotations
import bisect, collections, contextlib, copy, dataclasses, datetime, io, itertools, json, math, os, platform, queue
import re, resource, subprocess, sys, threading, time, uuid, zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np, sentencepiece, torch
import torch.distributed as dist, torch.nn.functional as F
from torch import Tensor, nn

# === CONFIG =======================
CONTROLS = "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,skip_weights"
def env(default: Any, meaning: str, low: float = -math.inf, below: float = math.inf, choices: tuple = ()) -> Any:
  """A setting: its default, "unit: meaning", and low <= value < below, or its choices."""
  return dataclasses.field(default=default, metadata=dict(meaning=meaning, low=low, below=below, choices=choices))

@dataclasses.dataclass(frozen=True)
class Config:
  """Every setting; its environment variable is its name in upper case, booleans are 0 or 1."""
  data_path: str = env("./data/datasets/fineweb10B_sp1024", "folder: of fineweb_train_*.bin and fineweb_val_*.bin")
  tokenizer_path: str = env("./data/tokenizers/fineweb_1024_bpe.model", "file: SentencePiece .model or byte .json")
  run_id: str = env("", "name: of logs/<RUN_ID>.txt and .jsonl")
  seed: int = env(1337, "number: of the initial weights", 0, 2**63)
  val_batch_size: int = env(524_288, "tokens: a validation batch, all ranks and micro-steps", 1)
  val_loss_every: int = env(1000, "steps: between validations, from step 0 on; 0: only at the end", 0)
  val_tokens: int = env(0, "tokens: validate on the first N only (never submit that); 0: all", 0)
  val_progress_log_every: int = env(0, "batches: between val_progress lines; 0: none", 0)
  train_log_every: int = env(200, "steps: between training lines (steps 1-10 always); 0: none", 0)
  iterations: int = env(20_000, "steps: length of the run", 0)
  warmdown_iters: int = env(1200, "steps: over the last of which the learning rate falls to 0", 0)
  warmup_steps: int = env(20, "steps: priming, rolled back; not a learning-rate warm-up", 0)
  train_batch_tokens: int = env(524_288, "tokens: an optimizer step, all ranks", 1)
  train_seq_len: int = env(1024, "tokens: a row", 1)
  max_wallclock_seconds: float = env(600.0, "seconds: cap on training; <=0: none (then runs repeat)")
  vocab_size: int = env(1024, "tokens: that of the tokenizer", 1, 65_537)
  num_layers: int = env(9, "blocks: the first half feeds skips to the second", 1)
  model_dim: int = env(512, "channels: width of the residual stream", 1)
  num_heads: int = env(8, "heads: of queries", 1)
  num_kv_heads: int = env(4, "heads: of keys and values", 1)
  mlp_mult: int = env(2, "times: MLP width over MODEL_DIM", 1)
  tie_embeddings: bool = env(True, "0/1: the output head is the token embedding")
  rope_base: float = env(10_000.0, "number: base of the rotary wavelengths", 1)
  logit_softcap: float = env(30.0, "number: logits = cap * tanh(logits / cap)", 1e-6)
  qk_gain_init: float = env(1.5, "number: initial gain of each query head")
  embed_lr: float = env(0.6, "rate: Adam, untied embedding", 0)
  head_lr: float = env(0.008, "rate: Adam, untied head", 0)
  tied_embed_lr: float = env(0.05, "rate: Adam, tied embedding", 0)
  tied_embed_init_std: float = env(0.005, "number: initial deviation of the tied embedding", 0)
  matrix_lr: float = env(0.04, "rate: Muon, matrices of the blocks", 0)
  scalar_lr: float = env(0.04, "rate: Adam, vectors and scalars", 0)
  muon_momentum: float = env(0.95, "number: Muon, after its warm-up", 0, 1)
  muon_backend_steps: int = env(5, "iterations: Newton-Schulz", 1)
  muon_momentum_warmup_start: float = env(0.85, "number: Muon, at step 0", 0, 1)
  muon_momentum_warmup_steps: int = env(500, "steps: linear ramp between the two", 0)
  beta1: float = env(0.9, "number: Adam", 0, 1)
  beta2: float = env(0.95, "number: Adam", 0, 1)
  adam_eps: float = env(1e-8, "number: Adam", 0)
  grad_clip_norm: float = env(0.0, "number: largest norm of the whole gradient; 0: off", 0)
  control_tensor_name_patterns: str = env(CONTROLS, "names: tensors of the blocks trained by Adam")
  int8_keep_float_fp32_name_patterns: str = env(CONTROLS, "names: small tensors stored in float32")
  train_prefetch: bool = env(True, "0/1: a thread reads the next batches")
  train_prefetch_queue: int = env(2, "batches: kept ready on the host", 1)
  train_copy_stream: bool = env(True, "0/1: uploads run on a CUDA stream of their own")
  val_prefetch: bool = env(True, "0/1: as TRAIN_PREFETCH, in validation")
  val_prefetch_queue: int = env(2, "batches: as TRAIN_PREFETCH_QUEUE, in validation", 1)
  val_copy_stream: bool = env(True, "0/1: as TRAIN_COPY_STREAM, in validation")
  gpu_prefetch: int = env(2, "batches: in flight on the device; 2: double buffering, 1: uploaded on demand", 1)
  val_bytecount_device: str = env("cpu", "device: that counts the bytes of val_bpb", choices=("cpu", "cuda"))
  data_stall_seconds: float = env(60.0, "seconds: a read that takes longer ends the run", 0.1)
  device: str = env("auto", "device: auto is cuda where there is one", choices=("auto", "cuda", "cpu"))
  torch_compile: str = env("auto", "mode: auto is on with CUDA, off on the CPU", choices=("auto", "0", "1"))
  grad_accum_steps: int = env(0, "micro-steps: a step; 0: max(1, 8 / ranks); more save memory", 0)
  @classmethod
  def from_environment(cls, environ: dict[str, str]) -> tuple[Config, list[str]]:
    """The settings in `environ`, and a fault for each value of another type."""
    values, faults = {"run_id": str(uuid.uuid4())}, []
    for f in dataclasses.fields(cls):
      if (text := environ.get(f.name.upper())) is not None:
        try: values[f.name] = parsed(text, f.type)
        except ValueError as e: faults.append(f"{f.name.upper()}={text}: {e}: default is {shown(f.default)}")
    return cls(**values), faults
  def accumulation(self, world_size: int) -> int: return self.grad_accum_steps or max(1, SPANS_A_STEP // world_size)
  def val_batch_rows(self, world_size: int) -> int:  # of one rank
    return self.val_batch_size // (world_size * self.accumulation(world_size)) // self.train_seq_len
  def fault(self, name: str, text: str) -> str: return f"{name.upper()}={shown(getattr(self, name))}: {text}"
  def problems(self, world_size: int) -> list[str]:
    """Every fault, with its variable, value and remedy. Reads data files, touches no device."""
    wrong, default = dict(self._range_faults()), Config(run_id="x")
    sound = dataclasses.replace(self, **{name: getattr(default, name) for name in wrong})
    return [*(self.fault(name, text) for name, text in wrong.items()), *sound._shape_faults(world_size),
            *tokenizer_faults(sound), *dataset_faults(sound)]
  def _range_faults(self) -> Iterator[tuple[str, str]]:
    for f in dataclasses.fields(self):
      value, m = getattr(self, f.name), f.metadata
      if value not in (m["choices"] or [value]): yield f.name, f"set one of {', '.join(m['choices'])}"
      elif not isinstance(value, str) and not m["low"] <= value < m["below"]:
        limit = f"at least {m['low']:g}" + (f" and below {m['below']:g}" if m["below"] < math.inf else "")
        yield f.name, f"must be {limit}: the default is {shown(f.default)}"
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", self.run_id):
      yield "run_id", "it names files: use letters, digits, '.', '_' and '-'"
  def _shape_faults(self, world_size: int) -> Iterator[str]:
    heads, T, parts = self.num_heads, self.train_seq_len, world_size * self.accumulation(world_size)
    rows, unit = self.train_batch_tokens // T, SPANS_A_STEP * T
    ranks = f"{world_size} ranks x {parts // world_size} micro-steps"
    if self.model_dim % (2 * heads):
      yield self.fault("model_dim", f"must divide by 2 x NUM_HEADS: set {nearest(self.model_dim, 2 * heads)}")
    if heads % self.num_kv_heads:
      yield self.fault("num_kv_heads", f"must divide NUM_HEADS={heads}: set {math.gcd(heads, self.num_kv_heads)}")
    if self.train_batch_tokens % unit:
      near = nearest(self.train_batch_tokens, unit)
      yield self.fault("train_batch_tokens", f"must divide by 8 x TRAIN_SEQ_LEN = {unit}: set {near}")
    elif rows % parts:
      fits, near = fitting_accumulation(rows, world_size, parts), math.lcm(unit, parts * T)
      yield self.fault("grad_accum_steps", f"the {rows} rows of a step do not divide by {ranks}: set "
                       + f"{fits}, or " * (fits > 0) + f"TRAIN_BATCH_TOKENS={near}")
    if self.val_batch_rows(world_size) < 1:
      yield self.fault("val_batch_size", f"no row for each of {ranks}: set at least {parts * T}")

GROUPS = {"data_path": "data", "val_batch_size": "validation and logs", "iterations": "length", "vocab_size": "model",
          "embed_lr": "optimizer", "control_tensor_name_patterns": "artifact", "train_prefetch": "overlap and input",
          "device": "device"}  # first field -> heading
FOREIGN = re.compile(r"(EMA|SWA|LAWA|TTT|QAT|LATE|XSA|BIGRAM|VE|MTP|LORA|EVAL|GPTQ|DTG|CHECKPOINT|TRAINING_TIMING)_\w+|"
                     r"MUON_WD|ADAM_WD|MUON_BETA2|ROPE_DIMS|LN_SCALE|GATED_ATTENTION|VALUE_RESIDUAL|TRACE_STEPS|"
                     r"DATA_VERIFY|RESUME|VAL_RESIDENT|ATTENTION_BACKEND")
NOT_OURS = {"MODEL_DIR"}  # common elsewhere, a letter from ours

def parsed(text: str, kind: str) -> Any:
  """`text` as a bool, int, float or str; ValueError says what it has to be."""
  with contextlib.suppress(ValueError):
    if kind == "bool" and text in ("0", "1"): return text == "1"
    if kind == "int": return int(text)
    if kind == "float" and math.isfinite(float(text)): return float(text)
  if kind == "str" and text.strip(): return text
  raise ValueError("set " + {"bool": "0 or 1", "int": "a whole number", "float": "a number", "str": "a value"}[kind])
def shown(value: Any) -> str:
  """A value as it is typed in the environment."""
  return f"{value:g}" if isinstance(value, float) else str(value * 1) or "random_uuid4"
def nearest(value: int, unit: int) -> int: return unit * max(1, round(value / unit))
def fitting_accumulation(rows: int, world_size: int, parts: int) -> int:
  """The least GRAD_ACCUM_STEPS that cuts a step's rows into `parts` or more equal ones, else the greatest, else 0."""
  fits = [g for g in range(1, rows // world_size + 1) if rows % (world_size * g) == 0]
  return next((g for g in fits if world_size * g >= parts), max(fits, default=0))
def edit_distance(a: str, b: str) -> int:
  """Damerau-Levenshtein distance: insert, delete, replace, swap two neighbours."""
  rows = [list(range(len(b) + 1))]
  for i in range(1, len(a) + 1):
    rows.append([i])
    for j in range(1, len(b) + 1):
      least = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (a[i - 1] != b[j - 1]))
      swapped = i > 1 and j > 1 and a[i - 2:i] == b[j - 2:j][::-1]
      rows[i].append(min(least, rows[i - 2][j - 2] + 1) if swapped else least)
  return rows[-1][-1]
def foreign_names(environ: dict[str, str]) -> tuple[list[str], list[str]]:
  """(faults: names that are nearly a setting, warnings: settings of the challenge's other scripts)."""
  ours, faults = {f.name.upper() for f in dataclasses.fields(Config)}, []
  names = sorted(set(environ) - ours - NOT_OURS)
  for name in itertools.filterfalse(FOREIGN.fullmatch, names):
    near = ((edit_distance(name, o), o) for o in ours if abs(len(o) - len(name)) <= 2)
    distance, best = min(near, default=(9, ""))
    if distance <= 1 + (len(name) >= 12):
      faults.append(f"{name}={environ[name]}: no such setting: did you mean {best}? Rename it, or unset it")
  others = ", ".join(filter(FOREIGN.fullmatch, names))
  return faults, [f"set, but this script has no such setting: {others}"] if others else []
def print_help() -> int:
  print(__doc__ + "\nThe learning rate of a capped run follows the clock: with MAX_WALLCLOCK_SECONDS=0 runs repeat.")
  for f in dataclasses.fields(Config):
    (unit, meaning), choices = f.metadata["meaning"].split(": ", 1), ", ".join(f.metadata["choices"])
    print((f"\n{GROUPS[f.name]}\n" if f.name in GROUPS else "") + f"  {f.name.upper()}={shown(f.default)}  "
          f"({f.type}, {unit}) {meaning}" + (f" ({choices})" if choices else ""))
  return 0

# === RUNTIME ======================
GROUP_TIMEOUT = datetime.timedelta(minutes=5)  # the longest a rank waits for another: compilation fits, a dead job ends
class RunError(Exception): """A foreseeable failure; its text is one line: what, where, which value, what to do."""
def first_line(error: BaseException) -> str: return (str(error).strip() or repr(error)).splitlines()[0][:160]
def torch_version() -> tuple[int, ...]: return tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
def runtime_faults(config: Config, environ: dict[str, str]) -> Iterator[str]:
  """Faults of torch and the devices; creates no context on one."""
  if torch_version() < (2, 6): yield f"torch {torch.__version__}: unsafe at loading files: pip install torch==2.13.0"
  cuda, driver = config.device != "cpu" and torch.cuda.is_available(), Path("/proc/driver/nvidia/version")
  if cuda and int(ranks := environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
    yield f"LOCAL_WORLD_SIZE={ranks}: {torch.cuda.device_count()} CUDA devices here: set --nproc_per_node to that"
  elif config.device != "cpu" and not cuda and (driver.exists() or os.path.exists("/dev/nvidia0")):
    version = re.search(r"\d+\.\d[\d.]*", driver.read_text() if driver.exists() else "")
    yield config.fault("device", f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use NVIDIA driver "
                       f"{version.group() if version else '?'} (CUDA_VISIBLE_DEVICES="
                       f"{environ.get('CUDA_VISIBLE_DEVICES', 'unset')}): fit torch to it, or set DEVICE=cpu")
  elif config.device == "cuda" and not cuda: yield "DEVICE=cuda: torch sees no CUDA device: set auto or cpu"
  if config.val_bytecount_device == "cuda" and not cuda: yield "VAL_BYTECOUNT_DEVICE=cuda: no CUDA in use: set cpu"

@dataclasses.dataclass(frozen=True)
class Runtime:
  """This process among the ranks: its device, the dtype of activations, the collectives (main thread only)."""
  rank: int = 0
  world_size: int = 1
  device: torch.device = torch.device("cpu")
  dtype: torch.dtype = torch.float32
  @classmethod
  def start(cls, config: Config, environ: dict[str, str]) -> Runtime:
    """Takes the device and joins the process group: NCCL with CUDA, gloo without, none for a single process."""
    device, dtype = torch.device("cpu"), torch.float32
    if cuda := config.device != "cpu" and torch.cuda.is_available():
      torch.cuda.set_device(device := torch.device("cuda", int(environ.get("LOCAL_RANK", 0))))
      if torch.cuda.get_device_capability(device) >= (8, 0): dtype = torch.bfloat16
      torch.set_float32_matmul_precision("high")  # TF32 where a product is in float32
      torch.backends.cuda.enable_cudnn_sdp(False)
    if "RANK" in environ and "WORLD_SIZE" in environ:
      backend, device_id = ("nccl", device) if cuda else ("gloo", None)
      dist.init_process_group(backend, timeout=GROUP_TIMEOUT, device_id=device_id)
    return cls(int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1)), device, dtype)
  @property
  def cuda(self) -> bool: return self.device.type == "cuda"
  def all_reduce(self, tensor: Tensor) -> Tensor:
    """Sums `tensor` over the ranks in place."""
    self._collective(dist.all_reduce, tensor)
    return tensor
  def broadcast(self, value: Any) -> Any:
    """Rank 0's `value` on every rank (a synchronisation point: only at the start and the end of a run)."""
    self._collective(dist.broadcast_object_list, box := [value], src=0, device=self.device)
    return box[0]
  def _collective(self, call: Callable[..., None], *args: Any, **options: Any) -> None:
    """One rank: the same code without the call. A failure means that another rank died or hung."""
    try:
      if dist.is_initialized(): call(*args, **options)
    except RuntimeError as error:
      raise RunError(f"rank {self.rank}: another rank died, or hung for {GROUP_TIMEOUT}: see that one's error: "
                     f"{first_line(error)}") from error
  def synchronize(self) -> None:
    """Synchronisation point: returns when the device has finished all that was launched."""
    if self.cuda: torch.cuda.synchronize(self.device)
  def close(self) -> None:
    if dist.is_initialized(): dist.destroy_process_group()

class RunLog:
  """Rank 0's console, logs/<RUN_ID>.txt (people, parsers) and .jsonl (tools), each opened once; an older log of that
  RUN_ID is kept under the time of its last line. On other ranks all three are /dev/null."""
  def __init__(self, run_id: str, enabled: bool):
    self.path = Path("logs", f"{run_id}.txt")
    names = [self.path, self.path.with_suffix(".jsonl")]
    try:
      if enabled:
        self.path.parent.mkdir(exist_ok=True)
        old = [name for name in names if name.exists()]
        last = datetime.datetime.fromtimestamp(max((name.stat().st_mtime for name in old), default=0))
        for name in old: name.rename(name.with_suffix(f".{last:%Y%m%d-%H%M%S-%f}{name.suffix}"))
      self.text, self.events = (open(name if enabled else os.devnull, "w", 1, encoding="utf-8") for name in names)
    except OSError as error:
      raise RunError(f"{self.path}: cannot open the log: {error.strerror}: run where you can write") from error
    self.stdout = sys.stdout if enabled else self.text
  def file(self, text: str) -> None: print(text, file=self.text)
  def say(self, event: str, template: str, **fields: Any) -> None:
    """One set of fields as text and as an event."""
    self.line(template.format(**fields))
    self.event(event, **fields)
  def console(self, text: str) -> None: print(text, file=self.stdout, flush=True)
  def line(self, text: str) -> None:
    self.file(text)
    self.console(text)
  def event(self, name: str, **fields: Any) -> None:
    print(json.dumps({"event": name, "time": round(time.time(), 3), **fields}), file=self.events)
  def close(self) -> None:
    self.text.close()
    self.events.close()

def write_atomic(path: Path, data: bytes) -> None:
  """Writes the whole file or none of it: a temporary beside it, fsync, rename."""
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  try:
    with open(temporary, "wb") as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except OSError as error:
    raise RunError(f"{path}: cannot write {len(data)} bytes: {error.strerror}: free the disk") from error
  finally: temporary.unlink(missing_ok=True)

# === INSTRUMENTS ==================
class Clock:
  """Training time in ms, without validation; true, as both edges wait for the device (synchronisation points)."""
  def __init__(self, runtime: Runtime): self.runtime, self.total_ms, self.since = runtime, 0.0, math.inf
  def now_ms(self) -> float: return self.total_ms + 1e3 * max(0.0, time.perf_counter() - self.since)
  def start(self) -> None:
    self.runtime.synchronize()
    self.since = time.perf_counter()
  def stop(self) -> None:
    self.runtime.synchronize()
    self.total_ms, self.since = self.now_ms(), math.inf

class Forecast:
  """Says on the console, after the first piece of work (the second where the first one compiles), how long `count`
  units of `ticks` pieces will take and, on too slow a CPU, what to run instead."""
  def __init__(self, runtime: Runtime, log: RunLog, compiles: bool, *, unit: str, count: int, ticks=1, cap_s=0.0):
    self.runtime, self.log, self.ticks_left, self.since = runtime, log, 1 + compiles, time.perf_counter()
    self.unit, self.count, self.ticks, self.cap_s = unit, count, ticks, cap_s if cap_s > 0 else math.inf
  def tick(self) -> None:
    self.ticks_left -= 1
    if self.ticks_left not in (0, 1): return
    self.runtime.synchronize()  # synchronisation point: at most twice a forecast
    unit_s, self.since = self.ticks * (time.perf_counter() - self.since), time.perf_counter()
    if self.ticks_left: return
    total_s = round(min(self.cap_s, self.count * unit_s))
    self.log.console(f"({self.unit}: about {unit_s:.3g} s each, {datetime.timedelta(seconds=total_s)} in all)")
    if total_s > 600 and not self.runtime.cuda:
      self.log.console(f"(long, on a CPU: `python3 {QUICKSTART}` trains a small model in two minutes)")

# === DATA =========================
SPANS_A_STEP = 8  # the challenge's order: a step is 8 spans of TRAIN_BATCH_TOKENS / 8 + 1 tokens for any world size
SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES, TOKEN_BYTES = 20240520, 1, 1024, 2
EDGE_TOKENS = 32_768  # at both ends of every shard, checked against the vocabulary at the start
QUICKSTART, DOWNLOAD = "data/quickstart.py", "data/cached_challenge_fineweb.py --variant sp1024"
def shard_tokens(path: Path) -> int:
  """The token count of a shard; RunError unless its magic, version, count and size are right."""
  try:
    with open(path, "rb") as file: header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
  except OSError as error:
    raise RunError(f"{path}: {error.strerror}: make it readable, or move it away") from error
  magic, version, count = np.frombuffer(header.ljust(12, b"\0")[:12], dtype="<i4").tolist()
  fault = f"{size} bytes, not {HEADER_BYTES + TOKEN_BYTES * count} for the {count} tokens its header promises"
  if len(header) == HEADER_BYTES and (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
    fault = f"magic {magic}, version {version}, not {SHARD_MAGIC}, {SHARD_VERSION}"
  elif count > 0 and size == HEADER_BYTES + TOKEN_BYTES * count: return count
  raise RunError(f"{path}: {fault}: not a whole token shard: delete it and fetch or make it again")

class Shards:
  """The tokens of one split: its files in name order, one stream that begins again after its end."""
  def __init__(self, folder: str, split: str):
    self.paths = sorted(Path(folder).glob(f"fineweb_{split}_*.bin"))
    self.ends = list(itertools.accumulate(map(shard_tokens, self.paths)))
    self.total = self.ends[-1] if self.ends else 0
  def pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Tokens [first, first + count) of the endless stream as (file index, byte offset, tokens)."""
    while count > 0:
      position = first % self.total
      index = bisect.bisect_right(self.ends, position)
      begin = self.ends[index - 1] if index else 0
      taken = min(count, self.ends[index] - position)
      yield index, HEADER_BYTES + TOKEN_BYTES * (position - begin), taken
      first, count = first + taken, count - taken

def dataset_faults(config: Config) -> Iterator[str]:
  """Faults of the shards: missing, damaged, of another vocabulary."""
  for split in ("train", "val"):
    paths, tokens = sorted(Path(config.data_path).glob(f"fineweb_{split}_*.bin")), 0
    if not paths: yield config.fault("data_path", f"no fineweb_{split}_*.bin: {where_else(config, 'data_path')}")
    for path in paths:
      try: tokens += shard_tokens(path)
      except RunError as error:
        yield str(error)
        continue
      mapped = np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)
      worst = max(int(mapped[:EDGE_TOKENS].max()), int(mapped[-EDGE_TOKENS:].max()))
      if worst >= config.vocab_size:
        yield config.fault("vocab_size", f"{path} holds token {worst}: set the VOCAB_SIZE of its tokenizer, or "
                                         "DATA_PATH to shards of this vocabulary")
    if split == "val" and 0 < tokens and cut_val_tokens(config, tokens) <= config.train_seq_len:
      yield config.fault("train_seq_len", f"{tokens} val tokens (VAL_TOKENS={config.val_tokens}) make no row: "
                                          "set less, or more VAL_TOKENS")
def where_else(config: Config, name: str) -> str:
  """A remedy for a missing path: the setting that finds it in a parent folder, or how to get data."""
  for found in (parent / getattr(config, name) for parent in Path.cwd().resolve().parents):
    if found.exists(): return f"it is further up: set {name.upper()}={found.resolve()}"
  return f"make some: `python3 {QUICKSTART} --prepare-only` prints their paths; or fetch it: `python3 {DOWNLOAD}`"
def cut_val_tokens(config: Config, total: int) -> int:
  """Tokens of the validation split in use: whole rows, and one more to predict."""
  return (min(total, config.val_tokens or total) - 1) // config.train_seq_len * config.train_seq_len + 1

@dataclasses.dataclass(frozen=True)
class BatchPlan:
  """Which rows make batch k of a rank: arithmetic without state, so order cannot depend on timing.
  A row is seq_len + 1 tokens; row j begins at token j * seq_len + j // span_rows: none with the last of a span."""
  seq_len: int
  span_rows: int   # rows of a span
  first_row: int   # of batch 0
  stride: int      # rows from one batch of this rank to its next
  batch_rows: int  # rows of a full batch
  end_row: int     # where the rank's share ends; training: never
  @classmethod
  def train(cls, config: Config, rank: int, world_size: int) -> BatchPlan:
    """Batch k is micro-step k % accumulation of step k // accumulation."""
    rows = config.train_batch_tokens // config.train_seq_len
    share = rows // (world_size * config.accumulation(world_size))
    return cls(config.train_seq_len, rows // SPANS_A_STEP, rank * share, world_size * share, share, sys.maxsize)
  @classmethod
  def val(cls, config: Config, tokens: int, rank: int, world_size: int) -> BatchPlan:
    """Rows floor(S * rank / W) to floor(S * (rank + 1) / W) of the S rows of `tokens` tokens."""
    rows = (tokens - 1) // config.train_seq_len
    first, end = rows * rank // world_size, rows * (rank + 1) // world_size
    share = min(config.val_batch_rows(world_size), max(1, end - first))
    return cls(config.train_seq_len, rows, first, share, share, end)
  def num_batches(self) -> int: return -((self.first_row - self.end_row) // self.stride)
  def rows(self, k: int) -> range:
    first = self.first_row + k * self.stride
    return range(first, min(first + self.batch_rows, self.end_row))
  def token(self, row: int) -> int: return row * self.seq_len + row // self.span_rows
  def tokens(self, rows: range) -> tuple[int, int]:
    """(first token, tokens) of a batch: one stretch of the stream."""
    return self.token(rows.start), self.token(rows.stop - 1) + self.seq_len + 1 - self.token(rows.start)
  def segments(self, rows: range) -> list[tuple[int, int, int]]:
    """The batch cut where spans end: (row within the batch, rows, token within the batch)."""
    ends = range((rows.start // self.span_rows + 1) * self.span_rows, rows.stop, self.span_rows)
    cuts = [rows.start, *ends, rows.stop]
    return [(a - rows.start, b - a, self.token(a) - self.token(rows.start)) for a, b in zip(cuts, cuts[1:])]
def data_crc(plan: BatchPlan, rows: range, tokens: np.ndarray) -> int:
  """Sum of crc32 over the rows, each started with its row number: the same for any ranks and accumulation."""
  first, T = plan.token(rows.start), plan.seq_len
  return sum(zlib.crc32(tokens[plan.token(row) - first:][:T + 1], row & 0xFFFFFFFF) for row in rows)
def widen(x: Any, y: Any, tokens: Any, segments: list[tuple[int, int, int]]) -> None:
  """uint16 tokens -> int64 x, y of shape (rows, T); numpy arrays in the reader thread, or tensors on the device."""
  T = x.shape[1]
  for row, rows, begin in segments:
    x[row:row + rows] = tokens[begin:begin + rows * T].reshape(rows, T)
    y[row:row + rows] = tokens[begin + 1:begin + 1 + rows * T].reshape(rows, T)

class Overlap(NamedTuple):
  """The overlap of one split in effect: the settings, less what the device or another setting rules out."""
  prefetch: bool     # off: the reader reads a batch when it is asked for
  queue: int         # host batches kept ready
  copy_stream: bool  # off: uploads queue on the compute stream
  device_slots: int  # batches in flight on the device; 0: none (CPU)
  words: str         # the same for the log, with reasons
  @classmethod
  def of(cls, config: Config, split: str, cuda: bool) -> Overlap:
    on, depth, stream = (getattr(config, split + n) for n in ("_prefetch", "_prefetch_queue", "_copy_stream"))
    slots = 0 if not cuda else config.gpu_prefetch if on else 1
    why = "(no_cuda)" if not cuda else "(prefetch_off)" if slots != config.gpu_prefetch else ""
    words = (f"prefetch:{on} copy_stream:{stream and cuda}{'(no_cuda)' if stream > cuda else ''} prefetch_queue:"
             f"{depth if on else '0(prefetch_off)'}")
    if split == "val":
      words = f"overlap:{on or stream and cuda} {words} bytecount_device:{config.val_bytecount_device}"
    return cls(on, depth if on else 1, stream and cuda, slots, f"{words} gpu_prefetch:{slots}{why}")

# x and y, (rows, T) int64, valid until the next call (with CUDA: the GPU_PREFETCH-th), and what `digest` said of them.
Batch = tuple[Tensor, Tensor, int]

class Slot:
  """A buffer of one batch: uint16 tokens and, where batches are handed out, int64 x and y, each its own tensor."""
  def __init__(self, plan: BatchPlan, device: torch.device, *, pinned: bool = False, widened: bool = True):
    size, rows = plan.batch_rows * plan.seq_len + plan.batch_rows // plan.span_rows + 2, plan.batch_rows * widened
    self.tokens = torch.empty(size, dtype=torch.uint16, device=device, pin_memory=pinned)
    self.x, self.y = (torch.zeros(rows, plan.seq_len, dtype=torch.int64, device=device) for _ in "xy")
  def batch(self) -> Batch:
    part = self.rows < len(self.x)  # the last batch of a validation
    return (self.x[:self.rows], self.y[:self.rows], self.digest) if part else (self.x, self.y, self.digest)

class HostHandOut:
  """The CPU's last stage: a host slot itself is handed out, free again at the next call."""
  ahead = 0
  def __init__(self):
    self.pending, self.wait_ms = collections.deque(), 0.0  # host slots in use, oldest first; input wait so far
  def ask(self): pass
  def close(self): pass
  def host_waited(self, ms: float) -> None: self.wait_ms += ms
  def submit(self, slot: Slot) -> None: self.pending.append(slot)
  def recycle(self, block: bool = False) -> list[Slot]:
    """Host slots no longer needed; block: at least one."""
    return [self.pending.popleft() for _ in range(len(self.pending))]
  def hand_out(self) -> Batch: return self.pending[-1].batch()

class DeviceRing(HostHandOut):
  """CUDA's last stage: a ring of device slots, written on the copy stream, read on the compute stream.
  `ready`: the slot's tokens have arrived; `free`: they have been read. Waiting on an event never recorded passes at
  once, on a re-recorded one waits for the old record: so `free` is recorded at construction, and copy j refused until
  `free` of copy j - depth was recorded. x and y are valid until the depth-th later call."""
  def __init__(self, plan: BatchPlan, overlap: Overlap, device: torch.device):
    super().__init__()
    self.depth, self.ahead, self.submitted, self.handed = overlap.device_slots, overlap.device_slots - 1, 0, 0
    self.compute = torch.cuda.current_stream(device)
    self.copy = torch.cuda.Stream(device) if overlap.copy_stream else self.compute
    self.slots = [Slot(plan, device) for _ in range(self.depth)]
    for slot in self.slots:
      slot.ready, slot.free = torch.cuda.Event(), torch.cuda.Event()
      slot.free.record(self.compute)
    self.idle = collections.deque()  # (asked, fed) events of recent batches
  def ask(self) -> None:
    """An event where the compute stream begins to wait; adds up those that have passed, waits for none."""
    while self.idle and self.idle[0][1].query():
      asked, fed = self.idle.popleft()
      self.wait_ms += asked.elapsed_time(fed)
    self.asked, self.fed = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    self.asked.record(self.compute)
  def submit(self, slot: Slot) -> None:
    """The one crossing from host to device: uploads a slot, two bytes a token. The host does not wait."""
    if self.submitted - self.handed >= self.depth:
      raise RuntimeError(f"copy {self.submitted} would overwrite a batch that was not handed out yet")
    target = self.slots[self.submitted % self.depth]
    with torch.cuda.stream(self.copy):
      self.copy.wait_event(target.free)
      target.tokens[:slot.size].copy_(slot.tokens[:slot.size], non_blocking=True)
      target.ready.record(self.copy)
      slot.copied.record(self.copy)
    target.rows, target.segments, target.digest = slot.rows, slot.segments, slot.digest
    self.pending.append(slot)
    self.submitted += 1
  def recycle(self, block: bool = False) -> list[Slot]:
    if block: self.pending[0].copied.synchronize()  # synchronisation point: every host slot waits
    done = []
    while self.pending and self.pending[0].copied.query(): done.append(self.pending.popleft())
    return done
  def hand_out(self) -> Batch:
    """The compute stream waits for the copy, widens it, and marks the slot free; the host waits for nothing."""
    slot = self.slots[self.handed % self.depth]
    self.compute.wait_event(slot.ready)
    self.fed.record(self.compute)
    self.idle.append((self.asked, self.fed))
    widen(slot.x, slot.y, slot.tokens, slot.segments)
    slot.free.record(self.compute)
    self.handed += 1
    return slot.batch()
  def host_waited(self, ms: float): pass  # the device may be busy meanwhile: events tell when it was idle
  def close(self) -> None:
    self.copy.synchronize()  # synchronisation point: no copy outlives the slots it reads and writes

class Pipeline:
  """The one path of tokens: shard files -> reader thread -> host slots -> device slots -> x, y; batches 0, 1, 2, ...
  The reader thread reads exactly this rank's bytes and calls digest(plan, rows, tokens); it does no CUDA work: only
  the main thread iterates, and so issues copies. A reader's error is raised as RunError, after the good batches."""
  def __init__(self, shards: Shards, plan: BatchPlan, overlap: Overlap, runtime: Runtime, *, name: str,
               digest: Callable[..., int], stall_seconds: float):
    self.shards, self.plan, self.overlap, self.digest, self.end = shards, plan, overlap, digest, plan.num_batches()
    self.who, self.stall_seconds = f"rank {runtime.rank}: the {name} reader", stall_seconds
    self.stage = DeviceRing(plan, overlap, runtime.device) if overlap.device_slots else HostHandOut()
    self.taken = self.handed = self.late_copies = self.bytes_read = 0
    self.host_waits_ms: list[float] = []    # of every batch
    self.free = queue.SimpleQueue()         # slots to the reader; None: it has to go
    self.ready = queue.Queue()              # slots from the reader; None: nothing more will come
    self.permits = threading.Semaphore(overlap.queue * overlap.prefetch)  # batches the reader may still read
    self.doing = (math.inf, "nothing yet")  # since when it has been in a read, and of what
    self.files, self.error, self.closed = {}, None, False
    for _ in range(overlap.queue + max(1, overlap.device_slots)):
      slot = Slot(plan, torch.device("cpu"), pinned=runtime.cuda, widened=not overlap.device_slots)
      slot.copied = torch.cuda.Event(blocking=True) if overlap.device_slots else None
      self.free.put(slot)
    self.thread = threading.Thread(target=self._read_all, name=f"{name}-reader", daemon=True)
    self.thread.start()
  def _read_all(self) -> None:
    try:
      for k in range(self.end):
        self.permits.acquire()
        if (slot := self.free.get()) is None or self.closed: break
        self._fill(slot, self.plan.rows(k))
        self.ready.put(slot)
        self._advise(k + 1 + self.overlap.queue)
    except BaseException as error: self.error = error  # all: a silent death would leave the consumer waiting
    finally:
      self.ready.put(None)
      for file in self.files.values(): file.close()
  def _fill(self, slot: Slot, rows: range) -> None:
    first, slot.size = self.plan.tokens(rows)
    slot.rows, slot.segments = len(rows), self.plan.segments(rows)
    tokens, begin = slot.tokens.numpy()[:slot.size], 0
    for index, offset, count in self.shards.pieces(first, slot.size):
      self._read(index, offset, memoryview(tokens[begin:begin + count]).cast("B"))
      begin += count
    slot.digest = self.digest(self.plan, rows, tokens)
    if not self.overlap.device_slots:  # on the CPU the reader widens, so that the main thread does not
      widen(slot.x.numpy(), slot.y.numpy(), tokens, slot.segments)
  def _read(self, index: int, offset: int, out: memoryview) -> None:
    """Exactly len(out) bytes; a file that has shrunk is an error (were it mapped: a crash)."""
    file, done = self._open(index, offset), 0
    file.seek(offset)
    while done < len(out):
      count = file.readinto(out[done:])
      if not count: raise EOFError(f"it ends at byte {offset + done}, {len(out) - done} short: it changed")
      done += count
    self.bytes_read, self.doing = self.bytes_read + done, (math.inf, self.doing[1])
  def _open(self, index: int, offset: int) -> io.FileIO:
    self.doing = (time.monotonic(), f"{self.shards.paths[index]} at byte {offset}")
    if index not in self.files:
      if len(self.files) >= 4: self.files.pop(next(iter(self.files))).close()
      self.files[index] = open(self.shards.paths[index], "rb", buffering=0)
    return self.files[index]
  def _advise(self, k: int) -> None:
    """Asks the kernel for the bytes of batch k, in the next shard too: its read will find them in memory."""
    if k >= self.end or not hasattr(os, "posix_fadvise"): return
    with contextlib.suppress(OSError):  # advice only: what cannot be read fails when it is due
      for index, offset, count in self.shards.pieces(*self.plan.tokens(self.plan.rows(k))):
        os.posix_fadvise(self._open(index, offset).fileno(), offset, 2 * count, os.POSIX_FADV_WILLNEED)
    self.doing = (math.inf, self.doing[1])
  def _take(self) -> Slot:
    """The next host batch; waits for it, never without a bound."""
    if not self.overlap.prefetch: self.permits.release()
    for slot in self.stage.recycle(): self.free.put(slot)
    while self.ready.empty() and self.stage.pending:  # the device is busy with what its copies wait for
      for slot in self.stage.recycle(block=True): self.free.put(slot)
    started = time.perf_counter()
    while True:
      try: slot = self.ready.get(timeout=0.2)
      except queue.Empty:
        if time.monotonic() - self.doing[0] < self.stall_seconds: continue
        raise RunError(f"{self.who} has waited for {self.doing[1]} for over DATA_STALL_SECONDS="
                       f"{shown(self.stall_seconds)}: storage hangs: move DATA_PATH to a local disk") from None
      if slot is not None: break
      self.ready.put(None)
      raise RunError(f"{self.who} failed on {self.doing[1]}: {self.error!r}") from self.error
    if self.overlap.prefetch: self.permits.release()
    self.taken += 1
    self.host_waits_ms.append(1e3 * (time.perf_counter() - started))
    self.stage.host_waited(self.host_waits_ms[-1])
    return slot
  def __iter__(self) -> Iterator[Batch]: return self
  def __next__(self) -> Batch:
    """The next batch; uploads of later ones are issued first, as far as they have been read."""
    if self.handed >= self.end: raise StopIteration
    self.stage.ask()
    if self.taken == self.handed:
      self.late_copies += self.handed > 0
      self.stage.submit(self._take())
    batch = self.stage.hand_out()
    self.handed += 1
    while self.taken < min(self.end, self.handed + self.stage.ahead) and self.ready.queue and self.ready.queue[0]:
      self.stage.submit(self._take())
    return batch
  def close(self) -> None:
    """Ends the reader from any state, within a second; one stuck in a read is left behind (a daemon)."""
    self.closed = True
    self.free.put(None)
    self.permits.release()
    self.thread.join(timeout=0.8)
    self.stage.close()

# === MODEL ========================
class Linear(nn.Linear):
  """A float32 weight, no bias, cast to the activation's dtype at use: from torch 2.12 on autocast would compute
  rms_norm, and with it the residual stream, in float32 (pytorch/pytorch PR 174824)."""
  def __init__(self, fan_in: int, fan_out: int, zero: bool = False):
    super().__init__(fan_in, fan_out, bias=False)
    if zero: nn.init.zeros_(self.weight)
  def forward(self, x: Tensor) -> Tensor: return F.linear(x, self.weight.to(x.dtype))
def rms_norm(x: Tensor) -> Tensor: return F.rms_norm(x, (x.size(-1),))
def rotate(x: Tensor, rotary: Tensor) -> Tensor:
  """Rotary positions (arXiv:2104.09864), halves of a head paired: x (B, heads, T, d), rotary (2, T, d / 2)."""
  (cos, sin), (left, right) = rotary.to(x.dtype), x.chunk(2, dim=-1)
  return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)

class Attention(nn.Module):
  """Causal attention: grouped queries, rms norm on queries and keys, a gain for each query head."""
  def __init__(self, config: Config):
    super().__init__()
    D, self.gqa = config.model_dim, config.num_heads != config.num_kv_heads
    self.head_dim = D // config.num_heads
    self.c_q, self.proj = Linear(D, D), Linear(D, D, zero=True)
    self.c_k, self.c_v = (Linear(D, config.num_kv_heads * self.head_dim) for _ in "kv")
    self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))
  def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
    q, k, v = (c(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for c in (self.c_q, self.c_k, self.c_v))
    q = rotate(rms_norm(q), rotary) * self.q_gain.to(q.dtype)[:, None, None]  # (B, heads, T, head_dim)
    y = F.scaled_dot_product_attention(q, rotate(rms_norm(k), rotary), v, is_causal=True, enable_gqa=self.gqa)
    return self.proj(y.transpose(1, 2).flatten(2))

class Block(nn.Module):
  """Attention and the MLP down(relu(up x)^2) (arXiv:2109.08668), scaled by channel; the embedding x0 is mixed in."""
  def __init__(self, config: Config):
    super().__init__()
    D, hidden, ones = config.model_dim, config.mlp_mult * config.model_dim, torch.ones(config.model_dim)
    self.attn = Attention(config)
    self.mlp = nn.ModuleDict({"fc": Linear(D, hidden), "proj": Linear(hidden, D, zero=True)})
    self.attn_scale, self.mlp_scale = nn.Parameter(ones.clone()), nn.Parameter(ones.clone())
    self.resid_mix = nn.Parameter(torch.stack((ones, 0 * ones)))
  def forward(self, x: Tensor, x0: Tensor, rotary: Tensor) -> Tensor:
    mix = self.resid_mix.to(x.dtype)
    x = mix[0] * x + mix[1] * x0
    x = x + self.attn_scale.to(x.dtype) * self.attn(rms_norm(x), rotary)
    return x + self.mlp_scale.to(x.dtype) * self.mlp.proj(F.relu(self.mlp.fc(rms_norm(x))).square())

class GPT(nn.Module):
  """The challenge's baseline: the first half of the blocks pushes its outputs, the second half adds them back."""
  def __init__(self, config: Config, dtype: torch.dtype):
    super().__init__()
    self.dtype, self.logit_softcap, self.num_encoder = dtype, config.logit_softcap, config.num_layers // 2
    self.tok_emb = nn.Embedding(config.vocab_size, config.model_dim)
    self.skip_weights = nn.Parameter(torch.ones(self.num_encoder, config.model_dim))
    self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
    self.lm_head = None if config.tie_embeddings else Linear(config.model_dim, config.vocab_size, zero=True)
    if config.tie_embeddings: nn.init.normal_(self.tok_emb.weight, std=config.tied_embed_init_std)
    channels = torch.arange(0, config.model_dim // config.num_heads, 2) / (config.model_dim // config.num_heads)
    angle = torch.outer(torch.arange(config.train_seq_len).float(), config.rope_base ** -channels)
    self.register_buffer("rotary", torch.stack((angle.cos(), angle.sin())), persistent=False)
  def forward(self, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy in nats, a float32 scalar, of predicting y from x, both (B, T)."""
    x, skips = rms_norm(self.tok_emb(x).to(self.dtype)), []  # (B, T, D)
    x0 = x
    for i, block in enumerate(self.blocks):
      if i >= self.num_encoder and skips:
        x = x + self.skip_weights[i - self.num_encoder].to(x.dtype) * skips.pop()
      x = block(x, x0, self.rotary)
      if i < self.num_encoder: skips.append(x)
    head = self.tok_emb.weight if self.lm_head is None else self.lm_head.weight
    logits = F.linear(rms_norm(x), head.to(x.dtype))
    logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

def compiled(model: GPT, log: RunLog) -> Callable[..., Tensor]:
  """`model` through torch.compile; eager, with one warning, where that cannot work."""
  calls = [torch.compile(model, dynamic=False, fullgraph=True), model]
  def call(x: Tensor, y: Tensor) -> Tensor:
    try: return calls[0](x, y)
    except (torch._dynamo.exc.TorchDynamoException, ImportError, OSError) as error:
      if calls.pop(0) is model: raise
      log.line(f"warning: torch.compile does not work here, training goes on without it: {first_line(error)}")
      return model(x, y)
  return call

# === OPTIMIZERS ===================
def newton_schulz(matrices: Tensor, iterations: int, dtype: torch.dtype) -> Tensor:
  """(n, rows, cols) -> about the nearest semi-orthogonal matrices, by Muon's quintic iteration in `dtype`; the batch
  is mathematically a loop over n (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""
  tall = matrices.size(-2) > matrices.size(-1)
  x = (matrices.mT if tall else matrices).to(dtype)
  x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
  for _ in range(iterations):
    gram = x @ x.mT
    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
  return x.mT if tall else x

class FlatParameters:
  """All parameters, and all gradients, as one float32 vector each; every Parameter and its .grad are views of them.
  One reduction a step instead of DDP's buckets; a bank of same-shaped matrices is a view too; `tail` more elements
  carry the control vector."""
  def __init__(self, groups: list[list[nn.Parameter]], tail: int):
    ends = list(itertools.accumulate(-(-sum(p.numel() for p in group) // 64) * 64 for group in groups))  # aligned
    self.values = torch.zeros(ends[-1], device=groups[0][0].device)
    self.reduced = torch.zeros(ends[-1] + tail, device=self.values.device)
    self.grads, self.tail = self.reduced[:ends[-1]], self.reduced[ends[-1]:]
    self.groups = []  # one-dimensional (values, gradients) of each group
    for group, start in zip(groups, [0, *ends]):
      end = start
      for p in group:
        here = slice(end, end := end + p.numel())
        self.values[here] = p.detach().flatten()
        p.data, p.grad = self.values[here].view(p.shape), self.grads[here].view(p.shape)
      self.groups.append((self.values[start:end], self.grads[start:end]))

class Optimizers:
  """Muon on the matrices of the blocks; Adam on embedding, head and everything small."""
  def __init__(self, model: GPT, config: Config, tail: int):
    self.config, self.muon_dtype = config, torch.bfloat16 if model.skip_weights.is_cuda else torch.float32
    banks, small = collections.defaultdict(list), [model.skip_weights] if model.num_encoder else []
    for name, p in model.blocks.named_parameters():
      small_one = p.ndim != 2 or named(name, config.control_tensor_name_patterns)
      (small if small_one else banks[p.shape]).append(p)
    adam = [([model.tok_emb.weight], config.tied_embed_lr if config.tie_embeddings else config.embed_lr),
            ([model.lm_head.weight] if model.lm_head else [], config.head_lr), (small, config.scalar_lr)]
    adam = [(group, lr) for group, lr in adam if group]
    self.flat = FlatParameters([*banks.values(), *(group for group, _ in adam)], tail)
    self.banks = [(values.view(-1, *shape), grads.view(-1, *shape))  # (n, rows, cols)
                  for shape, (values, grads) in zip(banks, self.flat.groups)]
    self.averages = [torch.zeros_like(values) for values, _ in self.banks]
    vectors = [(nn.Parameter(values), grads) for values, grads in self.flat.groups[len(banks):]]
    for vector, grads in vectors: vector.grad = grads
    groups = [{"params": [vector], "lr": lr, "base_lr": lr} for (vector, _), (_, lr) in zip(vectors, adam)]
    self.adam = torch.optim.Adam(groups, betas=(config.beta1, config.beta2), eps=config.adam_eps, fused=True)
  @torch.no_grad()
  def step(self, lr_scale: float, momentum: float) -> None:
    """One update from the reduced gradients; Muon's is scaled by sqrt(max(1, rows / cols))."""
    if self.config.grad_clip_norm > 0:
      self.flat.grads.mul_((self.config.grad_clip_norm / (self.flat.grads.norm() + 1e-6)).clamp(max=1.0))
    for (values, grads), average in zip(self.banks, self.averages):
      average.mul_(momentum).add_(grads)
      update = newton_schulz(grads.add(average, alpha=momentum), self.config.muon_backend_steps, self.muon_dtype)
      scale = max(1.0, values.size(-2) / values.size(-1)) ** 0.5
      values.add_(update, alpha=-self.config.matrix_lr * lr_scale * scale)
    for group in self.adam.param_groups: group["lr"] = group["base_lr"] * lr_scale
    self.adam.step()
  def snapshot(self) -> Any: return copy.deepcopy((self.flat.values, self.averages, self.adam.state_dict()))
  def restore(self, saved: Any) -> None:
    for mine, theirs in zip([self.flat.values, *self.averages], [saved[0], *saved[1]]): mine.copy_(theirs)
    self.adam.load_state_dict(copy.deepcopy(saved[2]))  # it would keep, and change, the saved tensors

def named(name: str, patterns: str) -> bool:
  """Whether one of the comma-separated patterns is part of `name`."""
  return any(pattern in name for pattern in patterns.split(",") if pattern)
def lr_multiplier(config: Config, step: int, elapsed_ms: float) -> float:
  """The learning rate's factor at a step (from 0): 1, then linearly down to 0 at the last step or the cap."""
  if config.warmdown_iters == 0: return 1.0
  if config.max_wallclock_seconds <= 0: return min(1.0, (config.iterations - step) / config.warmdown_iters)
  remaining_ms = max(0.0, 1e3 * config.max_wallclock_seconds - elapsed_ms)
  return min(1.0, remaining_ms * max(step, 1) / max(config.warmdown_iters * elapsed_ms, 1e-9))
def muon_momentum(config: Config, step: int) -> float:
  """Linear from MUON_MOMENTUM_WARMUP_START to MUON_MOMENTUM over the warm-up steps."""
  share = 1.0 if step >= config.muon_momentum_warmup_steps else step / config.muon_momentum_warmup_steps
  return (1 - share) * config.muon_momentum_warmup_start + share * config.muon_momentum

Agreed = collections.namedtuple("Agreed", "elapsed_ms train_loss data_crc wait_ms")  # wait_ms: of each rank
class Control:
  """The control vector, the tail of a step's gradient reduction: what the ranks agree on.
  Read two steps late its event has long passed, so nothing drains the device; as every rank waits for that event and
  never queries it, all decide alike at the same step. A crc travels in three parts of 11 bits: exact float32 sums."""
  def __init__(self, tail: Tensor, runtime: Runtime):
    self.tail, self.runtime = tail, runtime
    self.ring = [torch.zeros(2, len(tail), pin_memory=runtime.cuda) for _ in range(3)]  # (sent, received) of a step
    self.events = [torch.cuda.Event(blocking=True) if runtime.cuda else None for _ in range(3)]
  def agree(self, step: int, reduced: Tensor, loss: Tensor, *, elapsed_ms: float, wait_ms: float, data_crc: int):
    """Sums gradients and tail over the ranks. loss: a device scalar, this rank's share of the mean loss."""
    (sent, received), rank = self.ring[step % 3], self.runtime.rank
    parts, waits = [data_crc >> bits & 0x7FF for bits in (0, 11, 22)], [0.0] * self.runtime.world_size
    waits[rank] = wait_ms
    sent.copy_(torch.tensor([*parts, elapsed_ms * (rank == 0), 0.0, *waits]))
    self.tail.copy_(sent, non_blocking=True)
    self.tail[4] = loss
    self.runtime.all_reduce(reduced)
    received.copy_(self.tail, non_blocking=True)
    if self.runtime.cuda: self.events[step % 3].record()
  def read(self, step: int) -> Agreed:
    """Synchronisation point: waits for the reduction of `step`, two steps ago (for a logged line: just now)."""
    if self.runtime.cuda: self.events[step % 3].synchronize()
    low, mid, high, elapsed_ms, loss, *waits = self.ring[step % 3][1].tolist()
    return Agreed(elapsed_ms, loss, int(low) + (int(mid) << 11) + (int(high) << 22) & 0xFFFFFFFF, waits)

# === EVALUATION ===================
class ByteTable(NamedTuple):
  """What each token id adds to the bytes of a text."""
  base: Any           # int32: UTF-8 bytes without a leading space
  leading_space: Any  # bool: begins with one, counted unless the token before is a boundary
  boundary: Any       # bool: control, unknown and unused ids
  @classmethod
  def load(cls, path: str) -> ByteTable:
    """From a SentencePiece .model, or a .json {"kind": "byte", "offset": n}: ids below n are controls."""
    if path.endswith(".json"):
      offset = json.loads(Path(path).read_text(encoding="utf-8"))["offset"]
      boundary = np.arange(offset + 256) < offset
      return cls((~boundary).astype(np.int32), np.zeros_like(boundary), boundary)
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    base, space, boundary = (np.zeros(model.vocab_size(), dtype) for dtype in (np.int32, bool, bool))
    for i, piece in enumerate(map(model.id_to_piece, range(model.vocab_size()))):
      boundary[i] = model.is_control(i) or model.is_unknown(i) or model.is_unused(i)
      space[i] = piece.startswith("\u2581") and not boundary[i]
      text = piece.replace("\u2581", " ").encode()
      base[i] = 0 if boundary[i] else 1 if model.is_byte(i) else len(text) - space[i]
    return cls(base, space, boundary)
  def count(self, previous: Any, target: Any) -> Any:
    """Bytes of the ids `target`, each after its `previous`; numpy arrays or tensors."""
    return self.base[target].sum() + (self.leading_space[target] & ~self.boundary[previous]).sum()

def tokenizer_faults(config: Config) -> Iterator[str]:
  path = config.tokenizer_path
  try:
    if not Path(path).is_file():
      yield config.fault("tokenizer_path", f"no such file: {where_else(config, 'tokenizer_path')}")
    elif (size := len(ByteTable.load(path).base)) != config.vocab_size:
      yield config.fault("vocab_size", f"the tokenizer {path} has {size} tokens: set {size}")
  except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
    yield config.fault("tokenizer_path", f"no SentencePiece .model, no byte .json ({first_line(error)}): set one")

class Validation:
  """The validation split: nats from the model, bytes from the tokens alone, so counted only once."""
  def __init__(self, config: Config, runtime: Runtime, log: RunLog):
    self.config, self.runtime, self.log, self.shards = config, runtime, log, Shards(config.data_path, "val")
    self.tokens = cut_val_tokens(config, self.shards.total)
    self.plan = BatchPlan.val(config, self.tokens, runtime.rank, runtime.world_size)
    self.overlap, self.bytes = Overlap.of(config, "val", runtime.cuda), 0
    self.table = ByteTable.load(config.tokenizer_path)
    on_device = ByteTable(*(torch.from_numpy(part).to(runtime.device) for part in self.table))
    self.device_table = on_device if config.val_bytecount_device == "cuda" else None
  def host_bytes(self, plan: BatchPlan, rows: range, tokens: np.ndarray) -> int:
    """Runs in the reader thread, behind the first validation."""
    return 0 if self.bytes or self.device_table else int(self.table.count(tokens[:-1], tokens[1:]))
  @torch.no_grad()
  def evaluate(self, loss_of: Callable[..., Tensor], scope: str, compiles: bool) -> tuple[float, float, float]:
    """(nats a token, bits per byte, milliseconds); waits for the device only where it says so."""
    c, log, seen, batches, started = self.config, self.log, 0, self.plan.num_batches(), time.perf_counter()
    told = started
    sums = torch.zeros(2, dtype=torch.float64, device=self.runtime.device)  # nats, bytes
    forecast = Forecast(self.runtime, log, compiles, unit=f"{scope}: {batches} batches", count=batches)
    with contextlib.closing(Pipeline(self.shards, self.plan, self.overlap, self.runtime, name="val",
                                     digest=self.host_bytes, stall_seconds=c.data_stall_seconds)) as pipeline:
      for done, (x, y, digest) in enumerate(pipeline, 1):
        sums[0] += loss_of(x, y).double() * y.numel()
        sums[1] += self.device_table.count(x, y) if self.device_table and not self.bytes else digest
        seen += y.numel()
        forecast.tick()
        at = f"{scope} batch {done}/{batches}"
        if c.val_progress_log_every and done % c.val_progress_log_every == 0:  # a synchronisation point
          log.line(f"val_progress:{at} partial_mean_loss:{sums[0].item() / seen:.4f} tokens_seen:{seen}")
        if time.perf_counter() - told > 30: told = log.console(f"({at})") or time.perf_counter()
    nats, counted = self.runtime.all_reduce(sums).tolist()  # synchronisation point: the end of a validation
    self.bytes = self.bytes or int(counted)
    return nats / (self.tokens - 1), nats / math.log(2) / self.bytes, 1e3 * (time.perf_counter() - started)

# === ARTIFACT =====================
CAP_BYTES = 16_000_000  # of script and artifact together
SMALL_ELEMENTS, CLIP_QUANTILE, QUANT_FORMAT = 65_536, 0.9999984, "int8_clean_per_row_v1"
def quantize(t: Tensor) -> tuple[Tensor, Tensor]:
  """Float tensor -> (int8 of its shape, scale): float16 (rows,) for a matrix, a float32 scalar otherwise."""
  rows = t.float() if t.ndim == 2 else t.float().reshape(1, -1)
  clip = torch.quantile(rows.abs(), CLIP_QUANTILE, dim=1)
  scale = (clip / 127).clamp(min=1 / 127) if t.ndim == 2 else torch.where(clip > 0, clip / 127, 1.0)
  q = (rows.clamp(-clip[:, None], clip[:, None]) / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
  return q.view(t.shape), scale.half() if t.ndim == 2 else scale[0]
def dequantize(q: Tensor, scale: Tensor) -> Tensor:
  """The inverse of quantize() up to half a scale, in float32."""
  return q.float() * scale.float().view(-1, *[1] * (q.ndim - 1) if scale.ndim else [])
def pack(state: dict[str, Tensor], config: Config) -> tuple[bytes, int, int]:
  """(the artifact, bytes of its tensors, bytes of the torch file in it)."""
  file: dict[str, Any] = {"__quant_format__": QUANT_FORMAT, "quantized": {}, "scales": {}, "dtypes": {},
                          "passthrough": {}, "qmeta": {}, "passthrough_orig_dtypes": {}}
  for name, t in state.items():
    t, dtype, real = t.detach().cpu().contiguous(), str(t.dtype).removeprefix("torch."), t.is_floating_point()
    if real and t.numel() > SMALL_ELEMENTS:
      (file["quantized"][name], file["scales"][name]), file["dtypes"][name] = quantize(t), dtype
      file["qmeta"] |= {name: {"scheme": "per_row", "axis": 0}} if t.ndim == 2 else {}
    elif real and not named(name, config.int8_keep_float_fp32_name_patterns):
      file["passthrough"][name], file["passthrough_orig_dtypes"][name] = t.half(), dtype
    else: file["passthrough"][name] = t.float().clone() if real else t.clone()
  torch.save(file, buffer := io.BytesIO())
  payload = sum(t.nbytes for part in ("quantized", "scales", "passthrough") for t in file[part].values())
  return zlib.compress(buffer.getvalue(), 9), payload, len(buffer.getvalue())
def unpack(data: bytes, expected: dict[str, Tensor]) -> dict[str, Tensor]:
  """The state in an artifact, ours or the challenge's; RunError unless it fits `expected`, bounded in size."""
  limit = 8 * sum(t.numel() for t in expected.values()) + (1 << 20)
  try:
    raw = (stream := zlib.decompressobj()).decompress(data, limit)
    if not stream.eof: raise ValueError(f"it is cut short, or larger than {limit} bytes when decompressed")
    file = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)  # executes nothing
    if file["__quant_format__"] != QUANT_FORMAT: raise ValueError(f"its format is {file['__quant_format__']}")
    found = {name: t.shape for name, t in [*file["quantized"].items(), *file["passthrough"].items()]}
    wanted = {name: t.shape for name, t in expected.items()}
    if wrong := sorted(name for name in found.keys() | wanted if found.get(name) != wanted.get(name)):
      raise ValueError(f"missing, unknown or of another shape: {', '.join(wrong[:5])}")
    if any(file["scales"][name].shape not in ((), q.shape[:1]) for name, q in file["quantized"].items()):
      raise ValueError("its scales are not one a row")
    return {name: dequantize(q, file["scales"][name]) for name, q in file["quantized"].items()} | {
        name: t.to(expected[name].dtype) for name, t in file["passthrough"].items()}
  except Exception as error:  # whatever a damaged or hostile file raises, people get one line
    raise RunError(f"the artifact cannot be loaded: {type(error).__name__}: {first_line(error)}") from error

# === TRAINING =====================
class Run:
  """The model and all that trains it; the same weights on every rank, from SEED."""
  def __init__(self, config: Config, runtime: Runtime, log: RunLog):
    torch.manual_seed(config.seed)
    self.config, self.runtime, self.log, self.clock = config, runtime, log, Clock(runtime)
    self.accumulation = config.accumulation(runtime.world_size)
    self.step_tokens = config.train_batch_tokens + SPANS_A_STEP  # read by one step
    self.model = GPT(config, runtime.dtype).to(runtime.device)
    self.compiles = config.torch_compile == "1" or config.torch_compile == "auto" and runtime.cuda
    self.loss_of = compiled(self.model, log) if self.compiles else self.model
    self.optimizers = Optimizers(self.model, config, tail=5 + runtime.world_size)
    self.control = Control(self.optimizers.flat.tail, runtime)
    self.shards, self.overlap = Shards(config.data_path, "train"), Overlap.of(config, "train", runtime.cuda)
    self.plan = BatchPlan.train(config, runtime.rank, runtime.world_size)
    self.validation, self.partial = Validation(config, runtime, log), " partial_val:1" * (config.val_tokens > 0)
    self.logged = 0, 0.0, [0.0] * runtime.world_size  # step, clock and input waits of the last training line
  def batches(self) -> Pipeline:
    """The training stream from token 0."""
    return Pipeline(self.shards, self.plan, self.overlap, self.runtime, name="train", digest=data_crc,
                    stall_seconds=self.config.data_stall_seconds)

def train_step(run: Run, batches: Pipeline, step: int, elapsed_ms: float, crc: int, tick: Callable[[], None]) -> int:
  """Fetch, forward, backward, reduce, update. elapsed_ms: the agreed clock; crc: this rank's data_crc, returned."""
  run.optimizers.flat.reduced.zero_()
  loss_share = torch.zeros((), device=run.runtime.device)
  for _ in range(run.accumulation):
    x, y, digest = next(batches)
    loss = run.loss_of(x, y) / (run.accumulation * run.runtime.world_size)
    loss.backward()
    loss_share += loss.detach()
    crc = crc + digest & 0xFFFFFFFF
    tick()
  run.control.agree(step, run.optimizers.flat.reduced, loss_share, elapsed_ms=run.clock.now_ms(),
                    wait_ms=batches.stage.wait_ms, data_crc=crc)
  run.optimizers.step(lr_multiplier(run.config, step, elapsed_ms), muon_momentum(run.config, step))
  return crc
def warm_up(run: Run, tick: Callable[[], None]) -> None:
  """Priming steps: they compile, allocate and fill caches outside the clock; then their effect is rolled back."""
  saved, count = run.optimizers.snapshot(), run.config.warmup_steps
  with contextlib.closing(run.batches()) as batches:
    for step in range(count):
      train_step(run, batches, step, 0.0, 0, tick)
      if count <= 20 or step % 10 == 9 or step + 1 == count: run.log.line(f"warmup_step:{step + 1}/{count}")
  run.optimizers.restore(saved)
def validate(run: Run, step: int) -> float:
  """Validates with the clock stopped; returns the milliseconds it took."""
  run.clock.stop()
  val_loss, val_bpb, val_ms = run.validation.evaluate(run.loss_of, f"step_{step}", run.compiles)
  ms = run.clock.total_ms
  run.log.say("validation", "step:{step}/{iterations} val_loss:{val_loss:.4f} val_bpb:{val_bpb:.4f} "
              "train_time:{train_time_ms:.0f}ms step_avg:{step_avg_ms:.2f}ms" + run.partial +
              "\nval_stage_time_ms:{val_ms:.0f}ms step:{step}/{iterations}",
              step=step, iterations=run.config.iterations, val_loss=val_loss, val_bpb=val_bpb, train_time_ms=ms,
              step_avg_ms=ms / max(step, 1), val_ms=val_ms, val_tokens=run.validation.tokens - 1,
              val_bytes=run.validation.bytes)
  run.clock.start()
  return val_ms

def log_step(run: Run, step: int) -> None:
  """A training line, with rates since the last one. Synchronisation point: its time has to be true."""
  run.runtime.synchronize()
  c, ms, agreed = run.config, run.clock.now_ms(), run.control.read(step - 1)
  (last_step, last_ms, last_waits), cap_s = run.logged, c.max_wallclock_seconds
  since_ms = max(ms - last_ms, 1e-9)
  wait = 100 * max(now - then for now, then in zip(agreed.wait_ms, last_waits)) / since_ms
  run.log.say("step", "step:{step}/{iterations} train_loss:{train_loss:.4f} train_time:{train_time_ms:.0f}ms "
              "step_avg:{step_avg_ms:.2f}ms tok_s:{tok_s:.0f} input_wait:{input_wait_percent:.2f}% "
              "data_crc:{data_crc} eta:{eta_s:.0f}s", step=step, iterations=c.iterations,
              train_loss=agreed.train_loss, train_time_ms=ms, step_avg_ms=ms / step,
              tok_s=1e3 * (step - last_step) * c.train_batch_tokens / since_ms,
              input_wait_percent=wait, data_crc=f"{agreed.data_crc:08x}",
              eta_s=max(0, min((c.iterations - step) * ms / step, 1e3 * cap_s - ms if cap_s > 0 else math.inf) / 1e3))
  run.logged = step, ms, agreed.wait_ms

def train(run: Run) -> None:
  """Trains to the last step or the cap, validating."""
  c, log, clock, step, crc, val_ms = run.config, run.log, run.clock, 0, 0, 0.0
  forecast = Forecast(run.runtime, log, run.compiles, unit=f"{c.warmup_steps} + {c.iterations} steps",
                      count=c.warmup_steps + c.iterations, ticks=run.accumulation, cap_s=c.max_wallclock_seconds)
  warm_up(run, forecast.tick)
  with contextlib.closing(run.batches()) as batches:
    clock.start()
    while True:
      # Synchronisation point: the reduction of two steps ago, past unless the host runs far ahead.
      elapsed_ms = run.control.read(step - 2).elapsed_ms if step >= 2 else 0.0
      mean_ms = elapsed_ms / max(step - 1, 1)
      capped = 0 < 1e3 * c.max_wallclock_seconds <= elapsed_ms + 2 * mean_ms and step < c.iterations
      last = capped or step == c.iterations
      if last or c.val_loss_every and step % c.val_loss_every == 0: val_ms += validate(run, step)
      if last: break
      if step == run.shards.total // run.step_tokens:
        log.line(f"WARNING: step {step + 1} begins a second epoch: {len(run.shards.paths)} shards, all used up")
      forecast.since = time.perf_counter()
      crc = train_step(run, batches, step, elapsed_ms + mean_ms, crc, forecast.tick)
      step += 1
      if step <= 10 or c.train_log_every and step % c.train_log_every == 0: log_step(run, step)
    clock.stop()
    at = f"wallclock_cap train_time:{clock.total_ms:.0f}ms step:{step}/{c.iterations}"
    if capped: log.line(f"stopping_early: {at}")
    report(run, batches, step, val_ms)
def report(run: Run, batches: Pipeline, step: int, val_ms: float) -> None:
  """What the run has cost."""
  train_ms, wait_ms, seen = run.clock.total_ms, batches.stage.wait_ms, step * run.step_tokens
  peak = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)] * 2
  if run.runtime.cuda: peak = [torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20]
  run.log.say("input", "timing_train_loop_ms:{train_time_ms:.0f}ms timing_val_total_ms:{val_total_ms:.0f}ms\n"
              "input: waited {wait_ms:.1f} ms ({wait_percent:.2f}% of training), at most {host_wait_max_ms:.1f} ms a "
              "batch; {bytes_read} bytes read\ntokens_seen:{tokens_seen} epochs:{epochs:.3f}\n"
              "peak memory allocated: {peak_mib[0]} MiB reserved: {peak_mib[1]} MiB", step=step,
              train_time_ms=train_ms, val_total_ms=val_ms, wait_ms=wait_ms, peak_mib=peak,
              wait_percent=100 * wait_ms / (train_ms or 1), host_wait_max_ms=max(batches.host_waits_ms, default=0),
              bytes_read=batches.bytes_read, tokens_seen=seen, epochs=seen / run.shards.total)
def export_and_score(run: Run, code_bytes: int) -> None:
  """Rank 0 writes the artifact; every rank decodes its very bytes; their score is the run's."""
  log, data = run.log, None
  if run.runtime.rank == 0:
    state = {name: t.detach().cpu().clone() for name, t in run.model.state_dict().items()}
    torch.save(state, buffer := io.BytesIO())
    write_atomic(Path("final_model.pt"), buffer.getvalue())
    data, payload, raw = pack(state, run.config)
    write_atomic(Path("final_model.int8.ptz"), data)
    full, payload_ratio = len(buffer.getvalue()), sum(t.nbytes for t in state.values()) / max(payload, 1)
    log.say("artifact", "Serialized model: {model_bytes} bytes\nCode size: {code_bytes} bytes\n"
            "Total submission size: {raw_total_bytes} bytes\nSerialized model int8+zlib: {artifact_bytes} bytes "
            "(payload:{payload_bytes} raw_torch:{raw_torch_bytes} payload_ratio:{payload_ratio:.2f}x)\n"
            "Total submission size int8+zlib: {total_bytes} bytes", model_bytes=full, code_bytes=code_bytes,
            raw_total_bytes=full + code_bytes, artifact_bytes=len(data), payload_bytes=payload, raw_torch_bytes=raw,
            payload_ratio=payload_ratio, total_bytes=(total := len(data) + code_bytes))
    if total > CAP_BYTES: log.line(f"WARNING: {total} bytes, the challenge's cap is {CAP_BYTES}")
  run.model.load_state_dict(unpack(run.runtime.broadcast(data), run.model.state_dict()))
  val_loss, val_bpb, eval_ms = run.validation.evaluate(run.loss_of, "final_int8_zlib_roundtrip", compiles=False)
  log.say("score", "final_int8_zlib_roundtrip val_loss:{val_loss:.4f} val_bpb:{val_bpb:.4f} eval_time:{eval_ms:.0f}ms"
          "{partial}\nfinal_int8_zlib_roundtrip_exact val_loss:{val_loss:.8f} val_bpb:{val_bpb:.8f}{partial}",
          val_loss=val_loss, val_bpb=val_bpb, eval_ms=eval_ms, partial=run.partial)

# === MAIN =========================
def log_header(run: Run, source: str) -> None:
  """What describes the run, in the words existing parsers know."""
  c, log, runtime, sdp, validation, smi = run.config, run.log, run.runtime, torch.backends.cuda, run.validation, ""
  with contextlib.suppress(OSError, subprocess.SubprocessError):
    smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout
  rule, params = "=" * 100, sum(p.numel() for p in run.model.parameters())
  log.file(f"{source}\n{rule}\nRunning Python {sys.version}\nRunning PyTorch {torch.__version__}\n{smi}\n{rule}")
  def words(names: str) -> str: return " ".join(f"{name}:{getattr(c, name)}" for name in names.split())
  kind, lr = ("sentencepiece", "byte")[c.tokenizer_path.endswith(".json")], "tied_" * c.tie_embeddings + "embed_lr"
  log.line(
      f"val_bpb:enabled tokenizer_kind={kind} tokenizer_path={c.tokenizer_path}\n"
      f"train_loader:dataset:{Path(c.data_path).resolve().name} train_shards:{len(run.shards.paths)}\n"
      f"val_loader:shards pattern={c.data_path}/fineweb_val_*.bin tokens:{validation.tokens - 1}{run.partial}\n"
      f"model_params:{params}\nworld_size:{runtime.world_size} grad_accum_steps:{run.accumulation}\n"
      f"sdp_backends:cudnn={sdp.cudnn_sdp_enabled()} flash={sdp.flash_sdp_enabled()} "
      f"mem_efficient={sdp.mem_efficient_sdp_enabled()} math={sdp.math_sdp_enabled()}\n"
      f"attention_mode:gqa {words('num_heads num_kv_heads')}\n{words('tie_embeddings')} embed_lr:{getattr(c, lr)} "
      f"head_lr:{0.0 if c.tie_embeddings else c.head_lr} {words('matrix_lr scalar_lr')}\n"
      f"{words('train_batch_tokens train_seq_len iterations warmup_steps')} "
      f"max_wallclock_seconds:{c.max_wallclock_seconds:.3f}\nseed:{c.seed}\n"
      f"train_io:{run.overlap.words}\nval_io:{validation.overlap.words}")
  if runtime.cuda and runtime.dtype == torch.float32: log.line("no native bfloat16 on this GPU: float32")
  log.event("config", **dataclasses.asdict(c))
  name = torch.cuda.get_device_name() if runtime.cuda else platform.machine()
  log.event("hardware", device=name, cpus=os.cpu_count(), torch=torch.__version__, cuda=torch.version.cuda,
            python=platform.python_version(), platform=platform.platform(), world_size=runtime.world_size)
def out_of_memory(config: Config, runtime: Runtime) -> str:
  parts, (free, total) = runtime.world_size * config.accumulation(runtime.world_size), torch.cuda.mem_get_info()
  more = fitting_accumulation(config.train_batch_tokens // config.train_seq_len, runtime.world_size, 2 * parts)
  return (f"rank {runtime.rank}: CUDA out of memory at {config.train_batch_tokens // parts} tokens a micro-step, "
          f"{free >> 20} of {total >> 20} MiB free: set GRAD_ACCUM_STEPS={more}")
def execute(config: Config, warnings: list[str]) -> int:
  """The run, to its exit code. A foreseeable failure is one line, any other a traceback."""
  runtime, log, code, status, problem = Runtime(), None, 1, "failed", ""
  try:
    runtime = Runtime.start(config, dict(os.environ))
    config = dataclasses.replace(config, run_id=runtime.broadcast(config.run_id))
    log, source = RunLog(config.run_id, runtime.rank == 0), Path(__file__).read_text(encoding="utf-8")
    log.console(str(log.path))
    log.event("run", run_id=config.run_id, argv=sys.argv)
    log_header(run := Run(config, runtime, log), source)
    for warning in warnings: log.line(f"warning: {warning}")
    train(run)
    export_and_score(run, len(source.encode()))
    code, status = 0, "finished"
  except torch.OutOfMemoryError: problem = out_of_memory(config, runtime)
  except RunError as error: problem = str(error)
  except KeyboardInterrupt: code, status, problem = 130, "interrupted", "interrupted"
  finally:
    if problem: print(f"train_gpt.py: {problem}", file=sys.stderr, flush=True)
    if log:
      if problem: log.file(f"error: {problem}")
      log.event("end", status=status, exit_code=code, error=problem)
      log.console(f"{status}: see {log.path}")
      log.close()
    runtime.close()
  return code
def main() -> int:
  environ, arguments = dict(os.environ), sys.argv[1:]
  if arguments in (["--help"], ["-h"]): return print_help()
  config, faults = Config.from_environment(environ)
  misspelt, warnings = foreign_names(environ)
  faults += misspelt + [f"{argument}: no such argument: settings are environment variables, see --help"
                        for argument in arguments if argument != "--print-config"]
  if arguments and not faults:
    print(json.dumps({name: {"value": value, "source": ("default", "environment")[name.upper() in environ]}
                      for name, value in dataclasses.asdict(config).items()}, indent=1))
    return 0
  faults += [*runtime_faults(config, environ), *config.problems(int(environ.get("WORLD_SIZE", 1)))]
  if torch_version() < (2, 11): warnings.append(f"torch {torch.__version__} is older than 2.11, the oldest tested")
  if not faults: return execute(config, warnings)
  if int(environ.get("LOCAL_RANK", 0)) == 0:
    print("train_gpt.py: nothing was started, settings are wrong:", *faults, sep="\n  ", file=sys.stderr)
  return 2
# Python's own exit aborts now and then, in gloo's threads (torch 2.13: "terminate called ...").
if __name__ == "__main__": os._exit((main(), sys.stdout.flush())[0])
