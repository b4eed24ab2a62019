"""A parameter-golf record: LeakyReLU^2, legal test-time training, Parallel Muon, overlapped input.

  torchrun --standalone --nproc_per_node=8 train_gpt.py   eight GPUs (1, 2 or 4: the same order of tokens)
  python train_gpt.py                                     one process, GPU or CPU
  python train_gpt.py --help | --print-config             the settings, their values

What is not the recipe's own is the repository's train_gpt.py. README.md: commands, numbers.
"""
from __future__ import annotations
import bisect, contextlib, copy, datetime, faulthandler, functools, io, itertools, json, lzma, math, os, queue, re
import resource, subprocess, sys, threading, time, uuid, zlib
from collections import defaultdict, deque, namedtuple
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter as now

import numpy as np, sentencepiece, torch
import torch.distributed as dist, torch.nn.functional as F
from torch import nn
try: from flash_attn_interface import flash_attn_func  # FlashAttention-3
except (ImportError, OSError): flash_attn_func = None

# === CONFIG ===
CONTROLS = ("attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,skip_weights,smear,"
	"dtg_gate,ve_layer_scales,ve_shared.scale,attn_gate,vr_lambda")
# Kinds of settings: in words, and from text to value (of another text it raises).
def within(low, below=math.inf):
	def parse(text):
		if low <= (value := type(low)(text)) < below: return value
		raise ValueError
	return f"{low:g} <= {type(low).__name__} < {below:g}", parse
def word(pattern, meaning=""): return meaning or pattern.replace("|", " or "), lambda t: re.fullmatch(pattern, t)[0]
natural, count, vocab, share = within(0, 2**63), within(1, 2**63), within(1, 65_537), within(0.0, 1.0)
number, rate, positive = within(-1e300), within(0.0), within(1e-6)
name, text = word(r"[\w.-]*\w[\w.-]*", "letters, digits, '.', '_', '-'"), word(r"(?s).*\S.*", "a value")
where, mode, counter = word("auto|cuda|cpu"), word("auto|0|1"), word("cpu|cuda")
switch = "0 or 1", {"0": False, "1": True}.__getitem__
layers = word(r"\d+(,\d+)*", "layers, as 9,10")

@dataclass(frozen=True)
class Config:
	"""Every setting (its variable: the name in upper case), grouped as in README.md, which has units and meanings."""
	data_path: text = "./data/datasets/fineweb10B_sp1024"
	tokenizer_path: text = "./data/tokenizers/fineweb_1024_bpe.model"
	run_id: name = "random_uuid4"; seed: natural = 1337
	val_batch_size: count = 524_288; val_loss_every: natural = 4000; val_tokens: natural = 0
	val_progress_log_every: natural = 0; train_log_every: natural = 500
	iterations: natural = 20_000; warmdown_iters: natural = 3500; warmup_steps: natural = 20
	train_batch_tokens: count = 786_432; train_seq_len: count = 2048; eval_seq_len: natural = 2048
	max_wallclock_seconds: number = 600.0
	vocab_size: vocab = 1024; num_layers: count = 11; model_dim: count = 512; num_heads: count = 8; num_kv_heads: count = 4
	mlp_mult: positive = 3.0; mlp_fused_form: switch = True; tie_embeddings: switch = True
	rope_base: positive = 10_000.0; rope_dims: natural = 16; logit_softcap: positive = 30.0; qk_gain_init: number = 1.5
	xsa_last_n: natural = 4; ln_scale: switch = True; bigram_vocab_size: natural = 2048; bigram_dim: count = 128
	ve_enabled: switch = True; ve_dim: count = 128; ve_layers: layers = "9,10"
	gated_attention: switch = False; value_residual: switch = False; dtg_enabled: switch = False
	embed_lr: rate = 0.6; head_lr: rate = 0.008; tied_embed_lr: rate = 0.035; tied_embed_init_std: rate = 0.005
	matrix_lr: rate = 0.025; muon_momentum: share = 0.99; muon_backend_steps: count = 5; muon_wd: rate = 0.04
	muon_momentum_warmup_start: share = 0.92; muon_momentum_warmup_steps: natural = 1500
	scalar_lr: rate = 0.025; adam_wd: rate = 0.04; beta1: share = 0.9; beta2: share = 0.95; adam_eps: rate = 1e-8
	grad_clip_norm: rate = 0.3; ema_enabled: switch = True; ema_decay: share = 0.997
	swa_enabled: switch = False; swa_every: count = 50
	lawa_enabled: switch = False; lawa_k: count = 10; lawa_freq: count = 100
	qat_enabled: switch = False; late_qat: switch = False; late_qat_threshold: rate = 0.15
	control_tensor_name_patterns: text = CONTROLS
	eval_stride: natural = 64; ttt_enabled: switch = False; ttt_lr: rate = 0.002; ttt_epochs: natural = 3
	ttt_momentum: share = 0.9; ttt_grad_clip: rate = 1.0; ttt_chunk_tokens: count = 32_768
	ttt_batch_seqs: count = 32; ttt_freeze_blocks: natural = 2
	train_prefetch: switch = True; train_prefetch_queue: count = 2; train_copy_stream: switch = True
	val_prefetch: switch = True; val_prefetch_queue: count = 2; val_copy_stream: switch = True
	gpu_prefetch: count = 2; val_bytecount_device: counter = "cpu"
	data_stall_seconds: positive = 60.0
	device: where = "auto"; torch_compile: mode = "auto"; grad_accum_steps: natural = 0
	training_timing_breakdown = trace_steps = 0  # not here
	@classmethod
	def from_environment(cls, environ):
		"""(the settings, a fault for each value not of its kind: there the default stays)."""
		values, faults = {"run_id": str(uuid.uuid4())}, []
		for name in filter(environ.__contains__, SETTINGS):
			meaning, parse = globals()[SETTINGS[name].type]
			try: values[name.lower()] = parse(environ[name])
			except (LookupError, TypeError, ValueError): faults.append(
				f"{name}={environ[name]}: set {meaning}; the default is {shown(SETTINGS[name].default)}")
		return cls(**values), faults
	def accumulation(self, world_size): return self.grad_accum_steps or max(1, SPANS_A_STEP // world_size)
	def evaluated(self): return replace(self, train_seq_len=self.eval_seq_len or self.train_seq_len)
	def problems(self, world_size):
		"""Every fault, with value and remedy."""
		faults = (runtime_faults(self), self._shape_faults(world_size), self._recipe_faults(world_size),
			tokenizer_faults(self), dataset_faults(self.evaluated()))
		return [f"{name.upper()}={shown(getattr(self, name))}: {text}" if name else text
			for name, text in itertools.chain(*faults)]
	def _recipe_faults(self, world_size):
		T, stride, head, last = self.train_seq_len, self.eval_stride, self.model_dim // self.num_heads, self.num_layers - 1
		if self.rope_dims % 2 or self.rope_dims > head: yield "rope_dims", f"set an even number up to {head}"
		if self.bigram_vocab_size == 1: yield "bigram_vocab_size", "set 0 or 2"
		if self.ve_enabled and last < max(map(int, self.ve_layers.split(","))):
			yield "ve_layers", f"the last layer is {last}: set {last}, or VE_ENABLED=0"
		if self.val_batch_size < world_size * self.accumulation(world_size) * self.evaluated().train_seq_len:
			yield "eval_seq_len", "no row for each rank: raise VAL_BATCH_SIZE"
		if self.ttt_enabled and T % (stride or T + 1): yield "eval_stride", f"TTT: set a divisor of TRAIN_SEQ_LEN={T}"
		if self.ttt_enabled and self.ttt_chunk_tokens % T: yield "ttt_chunk_tokens", f"set a multiple of TRAIN_SEQ_LEN={T}"
	def _shape_faults(self, world_size):
		"""(a setting or "", what is wrong, what to do)."""
		heads, T, steps = self.num_heads, self.train_seq_len, self.accumulation(world_size)
		rows, unit, parts = self.train_batch_tokens // T, SPANS_A_STEP * T, world_size * steps
		for name, of, words in ("model_dim", 2 * heads, "2 x NUM_HEADS"), ("train_batch_tokens", unit, "8 x TRAIN_SEQ_LEN"):
			if (value := getattr(self, name)) % of:
				yield name, f"must divide by {words}: set {of * max(1, round(value / of))}"
		if heads % self.num_kv_heads:
			yield "num_kv_heads", f"must divide NUM_HEADS={heads}: set {math.gcd(heads, self.num_kv_heads)}"
		if self.train_batch_tokens % unit == 0 and rows % parts:
			fits = [g for g in range(1, rows + 1) if rows % (world_size * g) == 0] or [0]
			fit = min(fits, key=lambda g: (g < steps, abs(g - steps)))
			yield "grad_accum_steps", (f"{world_size} ranks x {steps} steps must divide {rows} rows: set " +
				f"{fit}, or " * (fit > 0) + f"TRAIN_BATCH_TOKENS={math.lcm(unit, parts * T)}")
		if self.val_batch_size < parts * T:
			yield "val_batch_size", f"no row for each of {world_size} ranks x {steps} steps: set at least {parts * T}"
		if self.trace_steps and self.training_timing_breakdown:
			yield "trace_steps", "shows overlap, TRAINING_TIMING_BREAKDOWN=1 turns it off: set one of them"

SETTINGS = {f.name.upper(): f for f in fields(Config)}
FOREIGN = re.compile(r"(GPTQ|CHECKPOINT|TRACE|TRAINING_TIMING|MTP)_\w+|MUON_BETA2|INT8_KEEP_\w+|"
	r"DATA_VERIFY|RESUME|VAL_RESIDENT|ATTENTION_BACKEND")
def shown(value): return f"{value:g}" if isinstance(value, float) else str(value * 1)  # as in the environment
@functools.cache
def edit_distance(a, b):
	"""Damerau-Levenshtein."""
	if not a or not b: return len(a + b)
	if a[0] == b[0]: return edit_distance(a[1:], b[1:])
	rests = [(a[1:], b), (a, b[1:]), (a[1:], b[1:])] + [(a[2:], b[2:])] * (a[:2] == b[1::-1])
	return 1 + min(itertools.starmap(edit_distance, rests))
def foreign_names(environ):
	"""(faults: nearly a setting; warnings: a setting of other scripts)."""
	names, faults = sorted(environ.keys() - SETTINGS.keys() - {"MODEL_DIR"}), []  # common, a letter from ours
	for name in itertools.filterfalse(FOREIGN.fullmatch, names):
		near = (o for o in SETTINGS if abs(len(o) - len(name)) <= 2 >= len(set(o) - set(name)))
		distance, best = min(((edit_distance(name, o), o) for o in near), default=(9, ""))
		if distance <= 1 + (len(name) >= 12): faults.append(f"{name}={environ[name]}: no such setting: did you mean {best}?")
	others = ", ".join(filter(FOREIGN.fullmatch, names))
	return faults, [f"set, but this script has no such setting: {others}"] * bool(others)
def print_help():
	"""With units and meanings from README.md, if at hand."""
	print(__doc__)
	table = "\n".join(f"| `{name}` | - | - |" for name in SETTINGS)
	with suppress(OSError, IndexError):
		table = Path(__file__).with_name("README.md").read_text("utf-8").split("\n## Settings\n")[1]
	for group, name, unit, meaning in re.findall(r"(?m)^### (.+)$|^\| `(\w+)` \| (.*?) \| (.*) \|$", table):
		default = getattr(Config, name.lower(), "")
		print(f"  {name}={shown(default)}  ({type(default).__name__}, {unit}) {meaning}" if name else f"\n{group}")
	return 0

# === RUNTIME ===
GROUP_TIMEOUT, LEAVE_SECONDS = datetime.timedelta(minutes=5), 5  # longest wait for a rank; once told to stop
class RunError(Exception): """A foreseeable failure in one line: what, where, which value, what to do."""
class Stop(Exception): """Told to stop: the others learn it in the next collective."""
class Halt(Exception): """All ranks end after one step: (their signals' sum,) or (0, what is not finite)."""
def first_line(error): return (str(error).strip() or repr(error)).splitlines()[0]
def runtime_faults(cfg):
	"""Of torch and the devices; creates no context on one."""
	version, cuda, driver = torch.__version__, cfg.device != "cpu" and torch.cuda.is_available(), ""
	if version < "2.6.dev": yield "", f"torch {version}: loads files unsafely: pip install torch==2.13.0"
	if cuda and int(ranks := os.getenv("LOCAL_WORLD_SIZE", "1")) > (count := torch.cuda.device_count()):
		yield "", f"LOCAL_WORLD_SIZE={ranks}: {count} CUDA devices here: set --nproc_per_node={count}"
	with suppress(OSError): driver = Path("/proc/driver/nvidia/version").read_text()
	if not cuda and cfg.device != "cpu" and (driver or os.path.exists("/dev/nvidia0")):
		number = re.search(r"\d+\.\d[\d.]*|$", driver).group() or "?"
		yield "device", (f"torch {version} (CUDA {torch.version.cuda}) cannot use NVIDIA driver {number} "
			"(see CUDA_VISIBLE_DEVICES): fit torch to it, or set DEVICE=cpu")
	elif cfg.device == "cuda" and not cuda: yield "device", "torch sees no CUDA device: set auto or cpu"
	if cfg.val_bytecount_device == "cuda" and not cuda: yield "val_bytecount_device", "no CUDA in use: set cpu"

class Watch:
	"""Stands in for the root's, which hears signals: here they end the process."""
	signum, since, longest_s = 0, math.inf, 0.0
	def start(self): pass

@dataclass(frozen=True)
class Runtime:
	"""This process; collectives are the main thread's."""
	rank: int = 0
	world_size: int = 1
	device: torch.device = torch.device("cpu")
	dtype: torch.dtype = torch.float32
	watch: Watch = Watch()
	@classmethod
	def start(cls, cfg, env):
		"""Takes the device, joins the group: NCCL with CUDA, else gloo."""
		device, dtype, watch = torch.device("cpu"), torch.float32, Watch()
		watch.start()
		if cuda := cfg.device != "cpu" and torch.cuda.is_available():
			torch.cuda.set_device(device := torch.device("cuda", int(env.get("LOCAL_RANK", 0))))
			if torch.cuda.get_device_capability(device) >= (8, 0): dtype = torch.bfloat16
			torch.set_float32_matmul_precision("high")  # TF32 where a product is in float32
			torch.backends.cuda.enable_cudnn_sdp(False)
		if "RANK" in env:
			store, rank, W = next(dist.rendezvous("env://", timeout=GROUP_TIMEOUT))
			store = dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)  # one for all restarts
			dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=W, timeout=GROUP_TIMEOUT,
				device_id=device if cuda else None)
		return cls(int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1)), device, dtype, watch)
	@property
	def cuda(self): return self.device.type == "cuda"
	def all_reduce(self, tensor):
		self._collective(dist.all_reduce, tensor)  # a sum, in place
		return tensor
	def broadcast(self, value):
		"""Rank 0's `value` on every rank (synchronisation point: start and end of a run)."""
		self._collective(dist.broadcast_object_list, box := [value], src=0, device=self.device)
		return box[0]
	def _collective(self, call, *args, **options):
		"""On one rank: nothing."""
		self.watch.since = now()
		try:
			if dist.is_initialized(): call(*args, **options)
		except RuntimeError as error:
			raise RunError(f"rank {self.rank}: another rank died, or hung for {GROUP_TIMEOUT}: {first_line(error)}")
		self.watch.since = math.inf
	def synchronize(self):
		"""Synchronisation point: the device has finished all it was given."""
		if self.cuda: torch.cuda.synchronize(self.device)
	def close(self):
		if dist.is_initialized(): dist.destroy_process_group()

class RunLog:
	"""Rank 0's console, logs/<RUN_ID>.txt and .jsonl; an older log, unless resumed, is kept under its time."""
	def __init__(self, run_id, enabled, resumed=False):
		self.path, self.lost = Path("logs", f"{run_id}.txt"), set()
		names = self.path, self.path.with_suffix(".jsonl")
		try:
			if enabled:
				self.path.parent.mkdir(exist_ok=True)
				mark = time.time_ns()
				for name in () if resumed else filter(Path.exists, names): name.rename(name.with_suffix(f".{mark}{name.suffix}"))
			self.text, self.events = (open(name if enabled else os.devnull, "a", 1, encoding="utf-8") for name in names)
		except OSError as error:
			raise RunError(f"{self.path}: cannot open the log: {error.strerror}: run where you can write")
		self.stdout = sys.stdout if enabled else self.text
	def _print(self, stream, text):
		"""A full disk or a closed terminal costs the log, not the run."""
		try: print(text, file=getattr(self, stream), flush=True)
		except OSError as error:
			if stream not in self.lost: print(f"warning: {self.path}: lines of its {stream} are lost: {error}", file=sys.stderr)
			self.lost.add(stream)
	def file(self, text): self._print("text", text)
	def console(self, text): self._print("stdout", text)
	def line(self, text): self.file(text), self.console(text)
	def event(self, name, **fields):
		self._print("events", json.dumps({"event": name, "time": round(time.time(), 3), **fields}))
	def say(self, event, template, **fields):
		"""Fields as an event and, in the template's order, as text."""
		self.line(template.format(*fields.values()))
		self.event(event, **fields)
	def close(self):
		with suppress(OSError): self.text.close(), self.events.close()

def words(fields, digits=2):
	return " ".join(f"{k}:{v:.{digits}f}" if isinstance(v, float) else f"{k}:{v}" for k, v in fields.items())
def write_atomic(path, data):
	"""The whole file or none."""
	temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
	try:
		with open(temporary, "wb") as file:
			file.write(data)
			file.flush()
			os.fsync(file.fileno())
		os.replace(temporary, path)
	except OSError as error:
		raise RunError(f"{path}: cannot write {len(data)} bytes: {error.strerror}: free the disk")
	finally: temporary.unlink(missing_ok=True)

# === INSTRUMENTS ===
def timed_event(): return torch.cuda.Event(enable_timing=True, blocking=True)
HOST, DEVICE, COPY = "main thread", "compute stream", "copy stream"  # tracks
class Clock:
	"""Training time in ms; both edges are synchronisation points."""
	total_ms, since = 0.0, math.inf
	def __init__(self, rt): self.rt = rt
	def now_ms(self): return self.total_ms + 1e3 * max(0.0, now() - self.since)
	def start(self): self.since = self.rt.synchronize() or now()
	def stop(self):
		self.rt.synchronize()
		self.total_ms, self.since = self.now_ms(), math.inf

def forecast(rt, log, unit, count, *, pieces=1, cap_s=0.0, compiles=False):
	"""Advanced around each piece of work; once one ran (not the one that compiles) it tells how long all take."""
	for _ in range(1 + compiles):
		start = rt.synchronize() or now()  # synchronisation points: four at most
		yield
		unit_s = pieces * ((rt.synchronize() or now()) - start)
		yield
	total_s = min(count * unit_s, cap_s if cap_s > 0 else math.inf)
	hint = f"; on a CPU try `{QUICKSTART}`" * (total_s > 600 and not rt.cuda)
	log.console(f"({unit}: {unit_s:.3g} s each, {total_s / 60:.1f} min in all{hint})")
	while True: yield

class Spans:
	"""Instruments, off. `with spans("forward"):` marks a phase."""
	nothing = contextlib.nullcontext()
	def __init__(self, *_): pass
	def __call__(self, name, track=DEVICE): return self.nothing
	instant = handed = step_done = close = lambda *_: None  # (name, track), (pipeline), (step); close may come twice
class Unverified:  # no DATA_VERIFY
	def digest(self, plain): return plain
	def consumed(self, pipeline, batch, place): pass
	def settle(self, total=False): pass

# === DATA ===
CRC = 0xFFFFFFFF
SPANS_A_STEP = 8  # of TRAIN_BATCH_TOKENS / 8 + 1 tokens: the challenge's order
HEADER_BYTES, TOKEN_BYTES = 1024, 2  # of a shard
STALE_SECONDS = 30    # without a sign of life a producer is dead
QUICKSTART = "python3 data/quickstart.py"
def shard_tokens(path):
	"""A shard's token count; RunError if it is not whole."""
	try: header, (size, _) = np.fromfile(path, "<i4", 3).tolist(), stamp(path)
	except OSError as error: raise RunError(f"{path}: {error.strerror}: make it readable, or remove it")
	magic, version, n = (header + [0] * 3)[:3]
	whole = HEADER_BYTES + TOKEN_BYTES * n
	if (magic, version) == (20240520, 1) and size == whole > HEADER_BYTES: return n
	raise RunError(f"{path}: no whole shard: magic {magic}, version {version} (not 20240520, 1), {size} bytes "
		f"({n} tokens need {whole}): delete it, fetch it again")
def stamp(file): return (found := os.stat(file)).st_size, found.st_mtime_ns
def read_json(path):
	with suppress(OSError, ValueError): return dict(json.loads(path.read_bytes()))
	return {}
def promised(folder, split):
	"""How many shards the manifest promises; 0: unknown."""
	with suppress(KeyError, TypeError, StopIteration): return next(d["stats"][f"files_{split}"]
		for d in read_json(folder / "../../manifest.json")["datasets"] if d["name"] == folder.resolve().name)
	return 0
def producing(folder):
	"""What the producer at work there last said; {}: none is."""
	state = read_json(folder / ".producing")
	return {"error": "has died"} | state if time.time() - state.get("time", math.inf) > 30 else state

class Shards:
	"""A split's files by name, an endless stream of tokens; those of a live producer join in turn."""
	def __init__(self, folder, split):
		self.folder, self.awaited = Path(folder), None
		self.growing = split == "train" and "error" not in (producing(self.folder) or "error")
		paths = self.folder.glob(f"fineweb_{split}_*.bin")
		if self.growing: paths = itertools.takewhile(Path.exists, map(self.numbered, itertools.count()))
		self.paths, self.ends, self.stamps = [], [0], []
		for path in sorted(paths): self.add(path)
	@property
	def total(self): return sys.maxsize if self.growing else self.ends[-1]
	def numbered(self, i): return self.folder / f"fineweb_train_{i:06d}.bin"
	def add(self, path):
		self.ends += [self.ends[-1] + shard_tokens(path)]
		self.paths += [path]
		self.stamps += [stamp(path)]
	def await_token(self, token, reader):
		"""Until `token` is on disk, or the set complete. RunError if the producer fails."""
		moved = now()
		while self.growing and token >= self.ends[-1] and not reader.closed:
			state, path = producing(self.folder), self.numbered(n := len(self.paths))
			if path.exists(): self.add(path)
			elif n and (not state or state.get("shards_promised") == n): self.growing = False
			elif not state or "error" in state or now() - moved > reader.stall_seconds:
				raise RunError(f"{path} will not come: its producer {state.get('error', 'stands still')}")
			else:
				if (done := state.get("progress")) != self.growing: moved, self.growing = now(), done or True
				if path != self.awaited: reader.log.say("stall", "waiting for {}: it is being made", shard=str(path))
				self.awaited = path
				time.sleep(0.05)
	def pieces(self, first, count):
		"""A stretch of the stream as (file index, byte offset, tokens)."""
		while count > 0:
			at = first % self.total
			i = bisect.bisect_right(self.ends, at) - 1
			n = min(count, self.ends[i + 1] - at)
			yield i, HEADER_BYTES + TOKEN_BYTES * (at - self.ends[i]), n
			first, count = first + n, count - n

def dataset_faults(cfg):
	"""Shards that are missing, damaged, of another vocabulary."""
	folder = Path(cfg.data_path)
	for split in ("train", "val"):
		paths, tokens = sorted(folder.glob(f"fineweb_{split}_*.bin")), 0
		if not paths and not Shards(folder, split).growing:
			yield "data_path", f"no fineweb_{split}_*.bin: {where_else(cfg, 'data_path')}"
		elif split == "val" and len(paths) < (whole := promised(folder, split)):
			yield "data_path", f"{len(paths)} of {whole} val shards are there: a score needs all: fetch them"
		for path in paths:
			try: tokens += shard_tokens(path)
			except RunError as error: yield "", str(error)
			else:
				ids = np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)
				if (worst := max(ids[:32768].max(), ids[-32768:].max())) >= cfg.vocab_size:
					yield "vocab_size", f"{path} holds token {worst}: set that of its tokenizer, or another DATA_PATH"
	if tokens and cut_val_tokens(cfg, tokens) <= cfg.train_seq_len:  # of val, the last
		yield "train_seq_len", f"the {tokens} val tokens (VAL_TOKENS={cfg.val_tokens}) make no row: set less"
def where_else(cfg, name):
	for parent in Path.cwd().parents:
		if (found := parent / getattr(cfg, name)).exists(): return f"it is further up: set {name.upper()}={found.resolve()}"
	return (f"make some: `{QUICKSTART} --prepare-only`; or fetch it: `python3 data/cached_challenge_fineweb.py --variant "
		"sp1024`")
def cut_val_tokens(cfg, total):
	"""Whole rows, and one more to predict."""
	return (min(total, cfg.val_tokens or total) - 1) // (T := cfg.train_seq_len) * T + 1

class BatchPlan(namedtuple("BatchPlan", "seq_len span_rows first_row stride batch_rows end_row")):
	"""A rank's rows of seq_len + 1 tokens: arithmetic, so order cannot depend on timing. stride: from batch to batch."""
	@classmethod
	def train(cls, cfg, rank, W):
		"""Batch k is micro-step k % accumulation of step k // accumulation."""
		rows = cfg.train_batch_tokens // (T := cfg.train_seq_len)
		n = rows // (W * cfg.accumulation(W))
		return cls(T, rows // SPANS_A_STEP, rank * n, W * n, n, sys.maxsize)
	@classmethod
	def val(cls, cfg, tokens, rank, W):
		rows = (tokens - 1) // (T := cfg.train_seq_len)
		first, end = rows * rank // W, rows * (rank + 1) // W
		n = min(cfg.val_batch_size // (W * cfg.accumulation(W)) // T, max(1, end - first))
		return cls(T, rows, first, n, n, end)
	def num_batches(self): return -((self.first_row - self.end_row) // self.stride)
	def rows(self, k):
		return range(first := self.first_row + k * self.stride, min(first + self.batch_rows, self.end_row))
	def token(self, row): return row * self.seq_len + row // self.span_rows  # a span's last begins no row
	def tokens(self, rows):
		"""(first token, tokens) of a batch."""
		return (first := self.token(rows.start)), self.token(rows.stop - 1) + self.seq_len + 1 - first
	def last_token(self, rows):
		"""Of the rows' step: every rank's reader waits for it."""
		n = SPANS_A_STEP * self.span_rows
		return self.token((rows.start // n + 1) * n) - 1
	def segments(self, rows):
		"""The batch cut where spans end: (row, rows, token) in it."""
		first, n = rows.start, self.span_rows
		cuts = [first, *range((first // n + 1) * n, rows.stop, n), rows.stop]
		return [(a - first, b - a, self.token(a) - self.token(first)) for a, b in zip(cuts, cuts[1:])]
def data_crc(plan, rows, tokens):
	"""Sum of the rows' crc32, each started with the row's number: the same for any ranks."""
	data, step = memoryview(tokens).cast("B"), TOKEN_BYTES * plan.seq_len
	return sum(zlib.crc32(data[(at := TOKEN_BYTES * begin + i * step):at + step + TOKEN_BYTES], rows.start + row + i & CRC)
		for row, n, begin in plan.segments(rows) for i in range(n)) & CRC
def widen(x, y, tokens, segments):
	"""uint16 tokens -> int64 x, y (rows, T); numpy or tensors."""
	T = x.shape[1]
	for row, n, begin in segments:
		part = tokens[begin:begin + n * T + 1]
		x[row:row + n], y[row:row + n] = part[:-1].reshape(-1, T), part[1:].reshape(-1, T)

class Overlap(namedtuple("Overlap", "prefetch queue copy_stream device_slots words")):
	"""A split's settings, less what rules them out. queue: host batches; device_slots: 0 on the CPU; words: logged."""
	@classmethod
	def of(cls, cfg, split, cuda):
		on, depth, stream = (getattr(cfg, split + name) for name in ("_prefetch", "_prefetch_queue", "_copy_stream"))
		off, no_cuda = "(timing_breakdown)" * cfg.training_timing_breakdown, "(no_cuda)" * (not cuda)
		why, stream_why = off * on, (off or no_cuda) * stream
		on, stream = on and not why, stream and not stream_why
		slots = int(cuda and (cfg.gpu_prefetch if on else 1))
		words = f"prefetch:{on}{why} copy_stream:{stream}{stream_why} prefetch_queue:{depth if on else '0(prefetch_off)'}"
		if split == "val": words = f"overlap:{on or stream} {words} bytecount_device:{cfg.val_bytecount_device}"
		why = no_cuda or "(prefetch_off)" * (slots != cfg.gpu_prefetch)
		return cls(on, depth if on else 1, stream, slots, f"{words} gpu_prefetch:{slots}{why}")


class Slot:
	"""One batch: uint16 tokens; where handed out, int64 x and y."""
	def __init__(self, plan, device, widened=True):
		rows, T = plan.batch_rows, plan.seq_len
		self.tokens = torch.empty(rows * T + rows // plan.span_rows + 2, dtype=torch.uint16, device=device,
			pin_memory=not widened and torch.cuda.is_available())
		self.x, self.y = (torch.zeros(rows * widened, T, dtype=torch.int64, device=device) for _ in "xy")
	def batch(self): return self.x[:self.rows], self.y[:self.rows], self.digest

class HostHandOut:
	"""The CPU's last stage: hands out host slots; the next call frees them."""
	bytes_copied = wait_ms = copy_ms = 0  # wait_ms: sum of waits_ms, the input waits
	def __init__(self): self.pending, self.waits_ms = [], []  # host slots in use
	def ask(self): pass
	close = ask
	def waited(self, ms):
		self.waits_ms.append(ms)
		self.wait_ms += ms
	def submit(self, slot): self.pending.append(slot)
	def recycle(self, block=False):
		"""Host slots no longer needed; block: at least one."""
		return [self.pending.pop(0) for _ in [*self.pending]]
	def hand_out(self): return self.pending[-1].batch()

class DeviceRing(HostHandOut):
	"""CUDA's last stage: the ring of README.md. `ready`: tokens have arrived; `free`: they were read. A wait for an event
	never recorded passes: hence `free` at construction, and the refusal of copies beyond the ring."""
	def __init__(self, plan, overlap, device, spans=Spans()):
		super().__init__()
		self.depth, self.submitted, self.handed, self.spans = overlap.device_slots, 0, 0, spans
		self.compute = torch.cuda.current_stream(device)
		self.copy = torch.cuda.Stream(device) if overlap.copy_stream else self.compute
		self.idle, self.slots = [], [Slot(plan, device) for _ in range(self.depth)]  # (asked, fed) events
		for slot in self.slots:
			slot.ready, slot.free = torch.cuda.Event(), torch.cuda.Event()
			slot.free.record(self.compute)
	def ask(self):
		"""The compute stream begins to wait here."""
		while self.idle and self.idle[0][1].query():
			asked, fed = self.idle.pop(0)
			self.waited(asked.elapsed_time(fed))
		self.wait = timed_event(), timed_event()
		self.wait[0].record(self.compute)
	def submit(self, slot):
		"""The one crossing from host to device."""
		if self.submitted - self.handed >= self.depth: raise RuntimeError(f"copy {self.submitted} is beyond the ring")
		target, n = self.slots[self.submitted % self.depth], slot.size
		with torch.cuda.stream(self.copy):
			self.copy.wait_event(target.free)
			slot.begun.record(self.copy)
			with self.spans("h2d", COPY): target.tokens[:n].copy_(slot.tokens[:n], non_blocking=True)
			target.ready.record(self.copy)
			slot.copied.record(self.copy)
		target.rows, target.segments, target.digest = slot.rows, slot.segments, slot.digest
		self.pending.append(slot)
		self.submitted, self.bytes_copied = self.submitted + 1, self.bytes_copied + TOKEN_BYTES * n
	def recycle(self, block=False):
		if block: self.pending[0].copied.synchronize()  # synchronisation point: every host slot waits
		done = []
		while self.pending and self.pending[0].copied.query():
			done.append(slot := self.pending.pop(0))
			self.copy_ms += slot.begun.elapsed_time(slot.copied)
		return done
	def hand_out(self):
		slot = self.slots[self.handed % self.depth]
		self.compute.wait_event(slot.ready)
		self.wait[1].record(self.compute)
		self.idle.append(self.wait)
		widen(slot.x, slot.y, slot.tokens, slot.segments)
		slot.free.record(self.compute)
		self.handed += 1
		return slot.batch()
	def close(self): self.copy.synchronize()  # synchronisation point: no copy outlives its slots

class Pipeline:
	"""Shard files -> reader thread -> host slots -> device slots -> x, y. The reader calls digest(plan, rows, tokens); its
	error comes as RunError after the good batches."""
	def __init__(self, source, name, digest, spans=Spans()):  # source: a run, or its validation
		rt, self.log, self.shards, self.plan, overlap = source.rt, source.log, source.shards, source.plan, source.overlap
		self.name, self.spans, self.digest, self.overlap = name, spans, source.verify.digest(digest), overlap
		self.stall_seconds, self.end, self.watch = source.cfg.data_stall_seconds, self.plan.num_batches(), rt.watch
		self.who, self.slots = f"rank {rt.rank}: the {name} reader", (slots := overlap.device_slots)
		self.stage = DeviceRing(self.plan, overlap, rt.device, spans) if slots else HostHandOut()
		self.given = self.filled = self.taken = self.handed = self.late_copies = self.bytes_read = self.closed = 0
		self.read_ms = self.busy_ms = 0  # of the reader
		self.host_waits_ms, self.crossings, self.spare = [], [], []  # ms; batches in a new shard or epoch; slots at rest
		self.free, self.ready = queue.SimpleQueue(), queue.SimpleQueue()  # slots to fill, filled
		self.place = self.opened = self.error = None  # (epoch, shard); shard
		self.where, self.since, self.file = "no file", math.inf, io.BytesIO()  # in a read since
		for _ in range(overlap.queue + max(1, slots)):
			self.spare.append(slot := Slot(self.plan, "cpu", widened=not slots))
			slot.host = [part.numpy() for part in (slot.tokens, slot.x, slot.y)]
			if slots: slot.begun, slot.copied = timed_event(), timed_event()
		if overlap.prefetch: self._feed()
		self.thread = threading.Thread(target=self._read_all, name=f"{name} reader", daemon=True)
		self.thread.start()
	def _read_all(self):
		try:
			for k in range(self.end):
				slot = self.free.get()
				if self.closed: break
				self._fill(slot, k)
				self.ready.put(slot)
				self.filled += 1
				self._advise(k + 1 + self.overlap.queue)
		except BaseException as error: self.error = error  # all, or the consumer waits for ever
		finally: self.ready.put(None), self.file.close()
	def _fill(self, slot, k):
		rows = (plan := self.plan).rows(k)
		self.shards.await_token(plan.last_token(rows), self)
		start, (first, slot.size), at, track = now(), plan.tokens(rows), 0, self.thread.name
		slot.rows, slot.segments, tokens = len(rows), plan.segments(rows), slot.host[0][:slot.size]
		with self.spans("disk_read", track):
			for i, offset, n in self.shards.pieces(first, slot.size):
				before, self.place = self.place, ((first + at) // self.shards.total, i)
				if before and before != self.place:
					self.spans.instant("shard_boundary" if before[0] == self.place[0] else "epoch", track)
					self.crossings.append(k)
				self._read(i, offset, memoryview(tokens[at:at + n]).cast("B"))
				at += n
		self.read_ms += 1e3 * (now() - start)
		slot.digest = self.digest(plan, rows, tokens)
		if not self.slots: widen(*slot.host[1:], tokens, slot.segments)
		self.busy_ms += 1e3 * (now() - start)
	def _read(self, i, offset, out):
		"""Fills `out`; EOFError: the file shrank (mapped: a crash)."""
		done, file = 0, self._open(i, offset)
		file.seek(offset)
		while done < len(out):
			n = file.readinto(out[done:])
			if not n: raise EOFError(f"it ends at byte {offset + done}, {len(out) - done} short")
			done += n
		if stamp(file.fileno()) != self.shards.stamps[i]: raise EOFError("changed since this run began")
		self.bytes_read, self.since = self.bytes_read + done, math.inf
	def _open(self, i, offset):
		path = self.shards.paths[i]
		self.where, self.since = f"{path} at byte {offset}", now()
		if self.opened != i:
			self.opened = self.file.close()
			self.opened, self.file = i, open(path, "rb", buffering=0)
		return self.file
	def _advise(self, k):
		"""Has the kernel read batch k ahead."""
		if k >= self.end or self.shards.growing: return
		with suppress(OSError, AttributeError):  # macOS has no such call
			for i, offset, n in self.shards.pieces(*self.plan.tokens(self.plan.rows(k))):
				os.posix_fadvise(self._open(i, offset).fileno(), offset, TOKEN_BYTES * n, os.POSIX_FADV_WILLNEED)
		self.since = math.inf
	def _feed(self, slots=()):
		"""Takes slots back, hands out those to fill."""
		self.spare += slots
		while self.spare and self.given < self.taken + self.overlap.queue:
			self.given += 1
			self.free.put(self.spare.pop(0))
	def _take(self):
		self._feed(self.stage.recycle())
		while self.ready.empty() and self.stage.pending:  # the device is busy with what copies wait for
			self._feed(self.stage.recycle(block=True))
		start = now()
		with self.spans("input_wait", HOST): slot = self._await()
		self.taken += 1
		if self.overlap.prefetch: self._feed()
		self.host_waits_ms.append(ms := 1e3 * (now() - start))
		if not self.slots: self.stage.waited(ms)
		self.stage.submit(slot)
	def _await(self):
		while True:
			try: slot = self.ready.get(timeout=0.2)
			except queue.Empty:
				if self.watch.signum: raise Stop from None
				if now() - self.since < self.stall_seconds: continue
				faulthandler.dump_traceback()
				raise RunError(f"{self.who} has waited for {self.where} over DATA_STALL_SECONDS={self.stall_seconds:g}: move "
					"DATA_PATH to a local disk") from None
			if slot: return slot
			self.ready.put(None)
			what = self.error if isinstance(self.error, RunError) else f"{self.where}: {self.error!r}"
			raise RunError(f"{self.who} failed on {what}") from self.error
	def __iter__(self): return self
	def __next__(self):
		"""x, y (rows, T) int64, valid until the next call (CUDA: GPU_PREFETCH-th), and their digest."""
		if self.handed >= self.end: raise StopIteration
		if self.watch.signum: raise Stop
		self.stage.ask()
		if self.taken == self.handed:
			self.late_copies += self.handed > 0 < self.slots
			self._take()
		batch = self.stage.hand_out()
		self.handed += 1
		while self.taken < min(self.filled, self.handed + self.slots - 1): self._take()
		self.spans.handed(self)
		return batch
	def close(self):
		"""Within a second; a reader stuck in a read is left."""
		self.closed = True
		self.free.put(None)
		self.thread.join(timeout=0.8)
		self.stage.close()

# === MODEL ===
class Linear(nn.Linear):
	"""Float32, cast at use: torch 2.12's autocast keeps the residual stream in float32 (pytorch PR 174824)."""
	def __init__(self, *sizes, zero=False):
		super().__init__(*sizes, bias=False)
		if zero: nn.init.zeros_(self.weight)
	def forward(self, x): return F.linear(x, self.weight.to(x.dtype))
def rms_norm(x): return F.rms_norm(x, (x.size(-1),))
def rotate(x, rotary):
	"""Rotary positions (arXiv:2104.09864), halves of a head paired: x (B, heads, T, d), rotary (2, T, d / 2)."""
	(cos, sin), (left, right) = rotary.to(x.dtype), x.chunk(2, dim=-1)
	return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)

class Gate(nn.Linear):
	"""Sigmoid of a linear map, at first of its bias."""
	def __init__(self, fan_in, fan_out, bias):
		super().__init__(fan_in, fan_out)
		nn.init.zeros_(self.weight), nn.init.constant_(self.bias, bias)
	def forward(self, x): return torch.sigmoid(F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)))
class Lookup(nn.Module):  # narrow
	def __init__(self, rows, width, fan_out, *, std, scale):
		super().__init__()
		self.embed, self.proj = nn.Embedding(rows, width), Linear(width, fan_out)
		self.scale = nn.Parameter(torch.tensor(scale))
		nn.init.normal_(self.embed.weight, std=std), nn.init.orthogonal_(self.proj.weight)
	def forward(self, ids):
		x = self.proj(self.embed(ids))
		return x * self.scale.to(x.dtype)
def bigram_ids(ids, rows):
	"""A hash of each token (B, T) and the one before it, int32; the first of a row has an id of its own."""
	t = ids.int()
	return F.pad((36313 * t[:, 1:] ^ 27191 * t[:, :-1]) % (rows - 1), (1, 0), value=rows - 1)
def without_own_value(y, v):
	"""XSA: y (B, heads, T, d) less its part along the own value v (B, KV heads, T, d); in float32."""
	own = F.normalize(v.float(), dim=-1).unsqueeze(2)
	y32 = y.float().unflatten(1, (v.size(1), -1))  # neighbouring query heads share a KV head
	return (y32 - (y32 * own).sum(-1, keepdim=True) * own).flatten(1, 2).to(y.dtype)

class Attention(nn.Module):
	"""Causal attention: grouped queries, rms norm on queries and keys, a gain per query head."""
	def __init__(self, cfg, layer, flash):
		super().__init__()
		D, heads, self.flash, self.gqa = cfg.model_dim, cfg.num_heads, flash, cfg.num_heads != cfg.num_kv_heads
		self.head_dim, self.xsa = D // heads, layer >= cfg.num_layers - cfg.xsa_last_n
		self.q_gain = nn.Parameter(torch.full((heads,), cfg.qk_gain_init))
		self.attn_gate = Gate(D, heads, 4.0) if cfg.gated_attention else None
		self.vr_lambda = nn.Parameter(torch.full((2,), 0.5)) if cfg.value_residual and layer else None
	def heads(self, x): return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, T, head_dim)
	def rotated(self, x, rotary):
		x, width = rms_norm(x), 2 * rotary.size(-1)
		return torch.cat((rotate(x[..., :width], rotary), x[..., width:]), dim=-1)
	def forward(self, x, w, rotary, ve, first_v):
		"""x (B, T, D); ve: added to the values; first_v: layer 0's values. Returns its values too."""
		q, k, v = map(self.heads, (F.linear(x, w.q), F.linear(x, w.k), F.linear(x, w.v) + ve))
		if self.vr_lambda is not None:
			mix = self.vr_lambda.to(v.dtype)
			v = mix[0] * first_v + mix[1] * v
		q, k = self.rotated(q, rotary) * self.q_gain.to(q.dtype)[:, None, None], self.rotated(k, rotary)
		if self.flash: y = self.flash(*(t.transpose(1, 2) for t in (q, k, v)), causal=True).transpose(1, 2)
		else: y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.gqa)
		if self.xsa: y = without_own_value(y, v)
		if self.attn_gate: y = y * self.attn_gate(x).transpose(1, 2).unsqueeze(-1)
		return F.linear(y.transpose(1, 2).flatten(2), w.out), v

class Block(nn.Module):
	"""Attention and the MLP down(leaky(up x)^2), slope 0.5, scaled by channel; the embedding x0 is mixed in."""
	def __init__(self, cfg, layer, flash):
		super().__init__()
		ones, self.fused_form = torch.ones(cfg.model_dim), cfg.mlp_fused_form
		self.attn, self.branch_scale = Attention(cfg, layer, flash), (layer + 1) ** -0.5 if cfg.ln_scale else 1.0
		self.attn_scale, self.mlp_scale = nn.Parameter(ones.clone()), nn.Parameter(ones.clone())
		self.resid_mix = nn.Parameter(torch.stack((ones, 0 * ones)))
		self.dtg_gate = Gate(cfg.model_dim, 1, 2.0) if cfg.dtg_enabled else None
	def forward(self, x, x0, w, rotary, ve, first_v):
		mix = self.resid_mix.to(x.dtype)
		start = mix[0] * x + mix[1] * x0
		y, v = self.attn(self.branch_scale * rms_norm(start), w, rotary, ve, first_v)
		x = start + self.attn_scale.to(x.dtype) * y
		hidden = F.leaky_relu(F.linear(self.branch_scale * rms_norm(x), w.up), 0.5)
		# One value, rounded once: a product, or, as autocast has it, a square in float32.
		hidden = hidden * hidden if self.fused_form else hidden.float().square().to(x.dtype)
		x = x + self.mlp_scale.to(x.dtype) * F.linear(hidden, w.down)
		return start + self.dtg_gate(start.detach()) * (x - start) if self.dtg_gate else x, v

def parameters(module): return sum(p.numel() for p in module.parameters())
def is_table(name): return name.endswith(("tok_emb.weight", ".embed.weight"))
def orthogonal(n, rows, cols): return torch.stack([nn.init.orthogonal_(torch.empty(rows, cols)) for _ in range(n)])
Matrices = namedtuple("Matrices", "q k v out up down")  # one layer's slices of the banks, as activations
class GPT(nn.Module):
	"""The matrices of all layers lie in four banks (slices, rows, columns), float32, cast to `dtype` at use; embedding
	tables are kept in `dtype` itself."""
	def __init__(self, cfg, dtype, flash=None):
		super().__init__()
		L, D, V, self.cfg, self.dtype = cfg.num_layers, cfg.model_dim, cfg.vocab_size, cfg, dtype
		kv, hidden, self.num_encoder = D // cfg.num_heads * cfg.num_kv_heads, int(cfg.mlp_mult * D), L // 2
		self.ve_layers = [int(layer) for layer in cfg.ve_layers.split(",")] if cfg.ve_enabled else []
		self.tok_emb = nn.Embedding(V, D)
		if cfg.tie_embeddings: nn.init.normal_(self.tok_emb.weight, std=cfg.tied_embed_init_std)
		rows, self.bigram = cfg.bigram_vocab_size, None
		if rows: self.bigram = Lookup(rows, cfg.bigram_dim, D, std=0.0, scale=0.05)
		self.ve_shared = Lookup(V, cfg.ve_dim, kv, std=0.01, scale=0.1) if self.ve_layers else None
		self.ve_layer_scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in self.ve_layers)
		self.smear, self.skip_weights = nn.ParameterDict({"gate": torch.zeros(D)}), nn.Parameter(torch.ones(L // 2, D))
		# First all queries (keys), then outputs (values). Outputs and down-projections start at zero.
		self.qo_bank = nn.Parameter(torch.cat((orthogonal(L, D, D), torch.zeros(L, D, D))))
		self.kv_bank, self.mlp_up_bank = nn.Parameter(orthogonal(2 * L, kv, D)), nn.Parameter(orthogonal(L, hidden, D))
		self.mlp_down_bank = nn.Parameter(torch.zeros(L, D, hidden))
		self.blocks = nn.ModuleList(Block(cfg, layer, flash) for layer in range(L))
		self.lm_head = None if cfg.tie_embeddings else Linear(D, V, zero=True)
		qat = torch.tensor(float(cfg.qat_enabled)) if cfg.qat_enabled or cfg.late_qat else None
		self.register_buffer("qat", qat, persistent=False)  # 0 or 1: a tensor costs no recompilation
		for name, p in self.named_parameters():  # all begin as values of `dtype`
			p.data = p.data.to(dtype) if is_table(name) else p.data.to(dtype).float()
	def banks(self): return [self.qo_bank, self.kv_bank, self.mlp_up_bank, self.mlp_down_bank]
	def matrices(self):
		"""Each layer's; unbound at once, so that backward writes each bank's gradient once."""
		L, (qo, kv, up, down) = len(self.blocks), [self.trained(bank).to(self.dtype).unbind() for bank in self.banks()]
		return [Matrices(qo[i], kv[i], kv[L + i], qo[L + i], up[i], down[i]) for i in range(L)]
	def trained(self, bank):
		"""QAT, where something learns: forward sees the export's int6 values, backward the bank (straight-through)."""
		if self.qat is None or not torch.is_grad_enabled(): return bank
		scale = int6_scale((raw := bank.detach()).abs().amax(-1, keepdim=True)).float()
		return bank + self.qat * ((raw / scale).round() * scale - raw)
	def rotary(self, T, device):
		"""cos and sin (2, T, ROPE_DIMS / 2) in float32."""
		dims = self.cfg.rope_dims or self.cfg.model_dim // self.cfg.num_heads
		base = self.cfg.rope_base * max(1.0, T / 1024) ** (dims / max(dims - 2, 1))  # stretched for longer T, in training too
		angle = torch.outer(torch.arange(T, device=device).float(), base ** -(torch.arange(0, dims, 2, device=device) / dims))
		return torch.stack((angle.cos(), angle.sin()))
	def hidden(self, ids):
		"""Tokens (B, T) -> (B, T, D), ready for a head."""
		x, skips, first_v, rotary = self.tok_emb(ids), [], None, self.rotary(ids.size(1), ids.device)
		if self.bigram: x = x + self.bigram(bigram_ids(ids, self.cfg.bigram_vocab_size))
		x, g = rms_norm(x), torch.sigmoid(self.smear["gate"].to(x.dtype))
		x = x0 = (1 - g) * x + g * F.pad(x, (0, 0, 1, -1))  # each position mixed with the one before it
		shared = self.ve_shared and self.ve_shared(ids)
		for i, (block, w) in enumerate(zip(self.blocks, self.matrices())):
			if i >= self.num_encoder and skips: x = x + self.skip_weights[i - self.num_encoder].to(x.dtype) * skips.pop()
			ve = self.ve_layer_scales[self.ve_layers.index(i)].to(x.dtype) * shared if i in self.ve_layers else 0
			x, v = block(x, x0, w, rotary, ve, first_v)
			if i == 0: first_v = v
			if i < self.num_encoder: skips.append(x)
		return rms_norm(x)
	def nats(self, x, y):
		"""Of predicting each y from x, both (B, T): float32."""
		head, cap = (self.lm_head or self.tok_emb).weight, self.cfg.logit_softcap
		logits = cap * torch.tanh(F.linear(self.hidden(x), head.to(self.dtype)) / cap)
		return F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
	def forward(self, x, y): return self.nats(x, y).mean()

def compiled(model, log):
	"""`model` compiled; eager, with one warning, where that cannot work."""
	calls = [torch.compile(model, dynamic=False, fullgraph=True), model]
	def call(x, y):
		try: return calls[0](x, y)
		except (torch._dynamo.exc.TorchDynamoException, ImportError, OSError) as error:
			if calls.pop(0) is model: raise
			log.line(f"warning: torch.compile does not work here: {first_line(error)}")
			return model(x, y)
	return call

# === OPTIMIZERS ===
def newton_schulz(x, steps, dtype):
	"""(n, rows, cols) -> about the nearest semi-orthogonal, in `dtype` (https://kellerjordan.github.io/posts/muon/)."""
	tall = x.size(-2) > x.size(-1)
	x = (x.mT if tall else x).to(dtype)
	x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
	for _ in range(steps):
		gram = x @ x.mT
		x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
	return x.mT if tall else x

class FlatParameters:
	"""Parameters of one dtype, and gradients, as one vector each, of which every Parameter and .grad is a view: one
	reduction a step, which `tail` more elements ride."""
	def __init__(self, groups, tail=0):
		ends = list(itertools.accumulate(-(-sum(p.numel() for p in group) // 64) * 64 for group in groups))  # aligned
		self.values, self.reduced = (groups[0][0].detach().new_zeros(ends[-1] + more) for more in (0, tail))
		self.grads, self.tail = self.reduced[:ends[-1]], self.reduced[ends[-1]:]
		self.groups = []  # one-dimensional (values, gradients) of each
		for group, start in zip(groups, [0, *ends]):
			end = start
			for p in group:
				here = slice(end, end := end + p.numel())
				self.values[here] = p.detach().flatten()
				p.data, p.grad = self.values[here].view(p.shape), self.grads[here].view(p.shape)
			self.groups.append((self.values[start:end], self.grads[start:end]))

SCATTER, GATHER = (getattr(dist, new, None) or getattr(dist, old) for new, old in (  # renamed in torch 2.13
	("reduce_scatter_single", "reduce_scatter_tensor"), ("all_gather_single", "all_gather_into_tensor")))
class Shard:
	"""A bank for Muon: its slices, padded with zeros to a multiple of the ranks, and this rank's; on CUDA in bfloat16."""
	def __init__(self, bank, cfg, rt):
		self.bank, self.cfg, self.rt, self.works, share = bank, cfg, rt, [], -(-len(bank) // rt.world_size)
		dtype = torch.bfloat16 if bank.is_cuda else torch.float32
		self.padded, self.update = (bank.new_zeros(share * rt.world_size, *bank.shape[1:], dtype=dtype) for _ in "pu")
		self.grad, self.average, bank.grad = *(torch.zeros_like(self.padded[:share]) for _ in "ga"), torch.zeros_like(bank)
	def begin(self, call, out, source):  # a collective; on one rank a copy
		if self.rt.world_size == 1: out.copy_(source)
		else: self.rt._collective(lambda: self.works.append(call(out, source, async_op=True)))
	def wait(self):  # on CUDA the stream waits, not the host
		while self.works: self.rt._collective(self.works.pop().wait)
	def scatter(self):
		"""Begins: this rank's slices of the summed gradient."""
		self.padded[:len(self.bank)] = self.bank.grad
		self.begin(SCATTER, self.grad, self.padded)
	def orthogonalize(self, momentum):
		"""This rank's slices of the update; begins: all slices."""
		self.wait()
		self.average.mul_(momentum).add_(self.grad)
		update = self.grad.add(self.average, alpha=momentum)
		self.sent = newton_schulz(update, self.cfg.muon_backend_steps, update.dtype).contiguous()
		self.begin(GATHER, self.update, self.sent)
	def apply(self, lr):
		"""Decays the bank, adds the update times sqrt(max(1, rows / cols))."""
		self.wait()
		scale = max(1.0, self.bank.size(-2) / self.bank.size(-1)) ** 0.5
		self.bank.mul_(1 - lr * self.cfg.muon_wd).add_(self.update[:len(self.bank)], alpha=-lr * scale)

class Optimizers:
	"""Parallel Muon on the banks, the largest first; AdamW on tables, head, and all that is small."""
	def __init__(self, model, cfg, rt, tail):
		self.cfg, self.limit, banks, kinds = cfg, cfg.grad_clip_norm / rt.world_size, model.banks(), defaultdict(list)
		self.muon = [Shard(bank, cfg, rt) for bank in sorted(banks, key=torch.numel, reverse=True)]
		for name, p in model.named_parameters():
			kinds["bank" if "_bank" in name else "table" if is_table(name) else "head" * ("_head" in name)].append(p)
		self.tables = FlatParameters([kinds["table"]])
		self.flat = FlatParameters([kinds[""], *filter(None, [kinds["head"]])], tail)
		rates, groups = (cfg.tied_embed_lr if cfg.tie_embeddings else cfg.embed_lr, cfg.scalar_lr, cfg.head_lr), []
		for (values, grads), lr, decay in zip(self.tables.groups + self.flat.groups, rates, (cfg.adam_wd, cfg.adam_wd, 0)):
			(vector := nn.Parameter(values)).grad = grads
			groups.append(dict(params=[vector], lr=lr, base_lr=lr, weight_decay=decay))
		self.adam = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
		self.values = [*(bank.data for bank in banks), self.flat.values, self.tables.values]
		self.grads = [*(bank.grad for bank in banks), self.flat.grads, self.tables.grads]
	def zero(self): torch._foreach_zero_(self.grads)
	def clip(self):
		"""Each rank its own gradient, as published: of loss / ranks, so to limit / ranks."""
		if self.limit <= 0: return
		norm = torch.stack([g.float().norm() for g in self.grads]).norm()
		for g in self.grads: g.mul_((self.limit / (norm + 1e-7)).clamp(max=1.0))
	@torch.no_grad()
	def step(self, lr_scale, momentum):
		"""One update; small gradients are reduced. Scatters run under AdamW and the banks before, a bank's gather under the
		Newton-Schulz of the next: it is awaited behind that."""
		lr = self.cfg.matrix_lr * lr_scale
		for shard in self.muon: shard.scatter()
		for group in self.adam.param_groups: group["lr"] = group["base_lr"] * lr_scale
		self.adam.step()
		for before, shard in zip([None, *self.muon], self.muon):
			shard.orthogonalize(momentum)
			if before: before.apply(lr)
		self.muon[-1].apply(lr)
	def state(self): return self.values + [shard.average for shard in self.muon]
	def snapshot(self): return copy.deepcopy((self.state(), self.adam.state_dict()))
	def restore(self, saved):
		for mine, theirs in zip(self.state(), saved[0]): mine.copy_(theirs)
		self.adam.load_state_dict(copy.deepcopy(saved[1]))  # it would change the saved tensors

def floats(tensors): return [t.float().clone() for t in tensors]
class Averages:
	"""Means over the run, float32; LAWA's, else SWA's (of the EMA, if any), else the EMA, ends up as the weights."""
	def __init__(self, cfg, values):
		self.cfg, self.values, self.swa, self.count, self.lawa = cfg, values, [], 0, deque([], cfg.lawa_k)
		self.ema = floats(values) if cfg.ema_enabled else []
	def update(self, step, lr_scale, log):
		c = self.cfg
		for mean, value in zip(self.ema, self.values): mean.lerp_(value.float(), 1 - c.ema_decay)
		if c.swa_enabled and lr_scale < 0.2 and step % c.swa_every == 0:
			if not self.swa: log.line(f"swa:start step:{step}")
			source, self.count = self.ema or self.values, self.count + 1
			self.swa = self.swa or floats(source)
			for mean, value in zip(self.swa, source): mean.lerp_(value.float(), 1 / self.count)
		if c.lawa_enabled and step % c.lawa_freq == 0: self.lawa.append(floats(self.values))
	def apply(self):  # returns what to log
		mean, text = self.ema, "ema:applying EMA weights" * bool(self.ema)
		if self.swa: mean, text = self.swa, f"swa:applying SWA weights n={self.count}"
		if (k := len(self.lawa)) > 1:
			mean, text = [sum(ts) / k for ts in zip(*self.lawa)], f"lawa:applying LAWA averaging k={k}"
		for value, new in zip(self.values, mean): value.copy_(new)
		return text

def named(name, patterns): return any(part in name for part in patterns.split(",") if part)
def lr_multiplier(cfg, step, elapsed_ms):
	"""1, at the end linearly to 0."""
	n, cap_s = cfg.warmdown_iters, cfg.max_wallclock_seconds
	if not n: return 1.0
	if cap_s <= 0: return min(1.0, (cfg.iterations - step) / n)
	return min(1.0, max(0.0, 1e3 * cap_s - elapsed_ms) * max(step, 1) / max(n * elapsed_ms, 1e-9))
def muon_momentum(cfg, step):
	"""Linear up to MUON_MOMENTUM."""
	share = step / n if step < (n := cfg.muon_momentum_warmup_steps) else 1.0
	return (1 - share) * cfg.muon_momentum_warmup_start + share * cfg.muon_momentum

Agreed = namedtuple("Agreed", "elapsed_ms train_loss data_crc wait_ms")  # wait_ms: of each rank
class Control:
	"""The control vector, the tail of a step's gradient reduction: what the ranks agree on. Read two steps late its event
	has long passed, so nothing drains the device; every rank waits for it and none queries it, so all decide alike at
	the same step. A crc travels in three parts of 11 bits: exact float32 sums."""
	def __init__(self, tail, rt):
		self.tail, self.rt = tail, rt
		self.ring = [torch.zeros(2, len(tail), pin_memory=rt.cuda) for _ in range(3)]  # (sent, received) of a step
		self.events = [torch.cuda.Event(blocking=True) if rt.cuda else None for _ in range(3)]
	def agree(self, step, reduced, loss, *, elapsed_ms, wait_ms, data_crc):
		"""Sums gradients and tail over the ranks. loss: a device scalar, this rank's share of the mean loss."""
		(sent, received), rank, waits = self.ring[step % 3], self.rt.rank, [0.0] * self.rt.world_size
		waits[rank] = wait_ms
		parts = [data_crc >> bits & 0x7FF for bits in (0, 11, 22)]
		sent.copy_(torch.tensor([*parts, elapsed_ms * (rank == 0), 0.0, *waits]))
		self.tail.copy_(sent, non_blocking=True)
		self.tail[4] = loss
		self.rt.all_reduce(reduced)
		received.copy_(self.tail, non_blocking=True)
		if self.rt.cuda: self.events[step % 3].record()
	def read(self, step):
		"""Synchronisation point: waits for the reduction of `step`, two steps ago (for a log line: just now)."""
		if self.rt.cuda: self.events[step % 3].synchronize()
		low, mid, high, elapsed_ms, loss, *waits = self.ring[step % 3][1].tolist()
		return Agreed(elapsed_ms, loss, int(low) + (int(mid) << 11) + (int(high) << 22) & CRC, waits)

# === EVALUATION ===
class ByteTable(namedtuple("ByteTable", "base leading_space boundary")):
	"""Of each id: UTF-8 bytes without a leading space; has it one (counted unless after a boundary)? is it one (control,
	unknown, unused)? numpy or tensors."""
	@classmethod
	def load(cls, path):
		"""From a SentencePiece .model, or a .json {"kind": "byte", "offset": n}: ids below n are controls."""
		if path.endswith(".json"):
			boundary = np.arange(256 + (offset := read_json(Path(path))["offset"])) < offset
			return cls(1 - boundary, np.zeros_like(boundary), boundary)
		model = sentencepiece.SentencePieceProcessor(model_file=path)
		ids = list(range(len(model)))
		pieces = [piece.replace("\u2581", " ") for piece in model.id_to_piece(ids)]
		boundary = np.any([model.is_control(ids), model.is_unknown(ids), model.is_unused(ids)], axis=0)
		space = np.array([piece[:1] == " " for piece in pieces]) & ~boundary
		base = np.where(model.is_byte(ids), 1, [len(piece.encode()) for piece in pieces] - space)
		return cls(np.where(boundary, 0, base), space, boundary)
	def count(self, previous, target):
		"""Bytes of the ids `target`, each after its `previous`."""
		return self.base[target].sum() + (self.leading_space[target] & ~self.boundary[previous]).sum()

def tokenizer_faults(cfg):
	path = cfg.tokenizer_path
	try:
		if not os.path.isfile(path): yield "tokenizer_path", f"no such file: {where_else(cfg, 'tokenizer_path')}"
		elif (size := len(ByteTable.load(path).base)) != cfg.vocab_size:
			yield "vocab_size", f"the tokenizer {path} has {size} tokens: set {size}"
	except Exception as error:	# whatever a damaged file raises
		yield "tokenizer_path", f"no SentencePiece .model, no byte .json ({first_line(error)}): set one"

class Validation:
	"""The validation split: nats from the model; bytes from the tokens, counted once."""
	def __init__(self, cfg, rt, log, verify):
		self.cfg, self.rt, self.log, self.verify, self.shards = cfg, rt, log, verify, Shards(cfg.data_path, "val")
		self.tokens, self.bytes, self.table = cut_val_tokens(cfg, self.shards.total), 0, ByteTable.load(cfg.tokenizer_path)
		self.plan = BatchPlan.val(cfg, self.tokens, rt.rank, rt.world_size)
		self.overlap = Overlap.of(cfg, "val", rt.cuda)
		self.on_device = cfg.val_bytecount_device == "cuda"
		if self.on_device: self.table = ByteTable(*(torch.tensor(part, device=rt.device) for part in self.table))
	def host_bytes(self, plan, rows, tokens):  # in the reader thread
		return 0 if self.bytes or self.on_device else int(self.table.count(tokens[:-1], tokens[1:]))
	@torch.no_grad()
	def evaluate(self, loss_of, scope, compiles, spans):
		"""(nats a token, bits per byte, ms). Halt: a signal came."""
		every, log, seen, total = self.cfg.val_progress_log_every, self.log, 0, self.plan.num_batches()
		sums, start = torch.zeros(3, dtype=torch.float64, device=self.rt.device), now()  # nats, bytes, signals
		told, foretell = start, forecast(self.rt, log, f"{scope}: {total} batches", total, compiles=compiles)
		with suppress(Stop), closing(Pipeline(self, "val", self.host_bytes, spans)) as pipeline, spans("validate"):
			next(foretell)
			for k, batch in enumerate(pipeline, 1):
				x, y, digest = batch
				with spans("forward"): sums[0] += loss_of(x, y).double() * y.numel()
				sums[1] += self.table.count(x, y) if self.on_device and not self.bytes else digest & CRC
				self.verify.consumed(pipeline, batch, k)
				seen, at = seen + y.numel(), f"{scope} batch {k}/{total}"
				next(foretell), next(foretell)
				if every and k % every == 0:  # a synchronisation point
					log.line(f"val_progress:{at} partial_mean_loss:{sums[0].item() / seen:.4f} tokens_seen:{seen}")
				if now() - told > 30: told = log.console(f"({at})") or now()
		sums[2] = self.rt.watch.signum
		nats, counted, stop = self.rt.all_reduce(sums).tolist()  # synchronisation point: the end of a validation
		if stop: raise Halt(stop)
		self.verify.settle()
		self.bytes = self.bytes or int(counted)
		return nats / (self.tokens - 1), nats / math.log(2) / self.bytes, 1e3 * (now() - start)

SCORE_ROWS = 32  # windows a forward pass
Piece = namedtuple("Piece", "rows counted share")  # a batch: its last `counted` are scored; or: share of a step
def part(rows, rank, world_size): return rows[len(rows) * rank // world_size:len(rows) * (rank + 1) // world_size]
class WindowPlan:
	"""Windows over `targets` predicted tokens, arithmetic like BatchPlan. Row j: seq_len + 1 tokens from token j * stride
	(past the end the stream begins again: nothing there counts). A chunk: the windows whose first scored target lies in
	it, then, except the last, for each epoch the sequences of just its targets."""
	span_rows = sys.maxsize  # no spans
	def __init__(self, cfg, rt, targets, *, seq_len, stride, chunk_tokens=0):
		self.targets, self.seq_len, self.stride, self.rt, size = targets, seq_len, stride, rt, chunk_tokens or targets
		self.windows, begins = range(-(-targets // stride)), range(0, targets, size)
		cuts = [bisect.bisect_left(self.windows, b, key=lambda row: row * stride + self.counted(row)[0]) for b in begins]
		self.chunks = []  # (pieces to score, pieces to train on), in order
		for begin, first, end in zip(begins, cuts, [*cuts[1:], None]):
			sequences = range(begin // stride, (begin + size) // stride if end else 0, seq_len // stride)
			trained = self.trained(sequences, cfg.ttt_batch_seqs) * cfg.ttt_epochs
			self.chunks.append((self.scored(self.windows[first:end]), trained))
		self.pieces = [piece for piece in itertools.chain(*itertools.chain(*self.chunks)) if piece.rows]
		self.batch_rows = max((len(piece.rows) for piece in self.pieces), default=1)
	def scored(self, rows):
		"""Batches of one size, for one graph: the last reaches back."""
		rows = part(rows, self.rt.rank, self.rt.world_size)
		stops = ((begin, min(begin + SCORE_ROWS, rows.stop)) for begin in rows[::SCORE_ROWS])
		return [Piece(range(max(0, stop - SCORE_ROWS), stop), stop - begin, 0.0) for begin, stop in stops]
	def trained(self, rows, size):
		"""Steps of up to `size` sequences a rank. Every rank takes every step, if with nothing, so none waits for ever;
		shares make the gradient the mean over its sequences."""
		parts = [part(rows, r, self.rt.world_size) for r in range(self.rt.world_size)]
		steps = ([p[i:i + size] for p in parts] for i in range(0, max(map(len, parts)), size))
		return [Piece(mine := step[self.rt.rank], 0, len(mine) / sum(map(len, step))) for step in steps]
	def num_batches(self): return len(self.pieces)
	def rows(self, k): return self.pieces[k].rows
	def tokens(self, rows): return rows[0] * self.stride, (rows[-1] - rows[0]) * self.stride + self.seq_len + 1
	def last_token(self, rows): return 0  # a val split is complete
	def segments(self, rows): return [(i, 1, (row - rows[0]) * self.stride) for i, row in enumerate(rows)]
	def counted(self, row):
		"""Positions of a row that are scored: all of the first, else the last `stride`."""
		end = min(self.seq_len, self.targets - row * self.stride)
		return max(end - self.stride, 0) if row else 0, end
	def byte_count(self, table):
		"""The pipeline's digest, asked for in order: bytes of a batch's scored targets."""
		pieces = iter(self.pieces)
		def count(plan, rows, tokens):
			new = rows[len(rows) - next(pieces).counted:]
			cuts = [[(row - rows[0]) * self.stride + edge for edge in self.counted(row)] for row in new]
			return sum(int(table.count(tokens[a:b], tokens[a + 1:b + 1])) for a, b in cuts)
		return count

class Learner:
	"""Test-time training: SGD on scored targets; momentum persists."""
	def __init__(self, run, plan):
		self.run, self.last, c = run, max(len(plan.chunks) - 1, 1), run.cfg
		frozen = tuple(f"blocks.{i}." for i in range(c.ttt_freeze_blocks))  # the banks always learn
		for name, p in run.model.named_parameters(): p.requires_grad_(not name.startswith(frozen))
		self.params = [p for p in run.model.parameters() if p.requires_grad]
		self.sgd = torch.optim.SGD(self.params, lr=c.ttt_lr, momentum=c.ttt_momentum)
		learning = sum(p.numel() for p in self.params)
		run.log.line(f"ttt_sliding:start chunks={len(plan.chunks)} chunk_tokens={c.ttt_chunk_tokens} total_windows="
			f"{len(plan.windows)} stride={c.eval_stride} ttt_lr={c.ttt_lr} ttt_epochs={c.ttt_epochs} freeze_blocks="
			f"{c.ttt_freeze_blocks}\nttt_sliding:params unfrozen={learning} frozen={parameters(run.model) - learning}")
	def step(self, piece, batches, chunk):
		run, c = self.run, self.run.cfg
		run.optimizers.zero()
		if piece.rows:
			x, y, _ = next(batches)
			(run.loss_of(x, y) * piece.share).backward()
		for grads in run.optimizers.grads: run.rt.all_reduce(grads)
		if c.ttt_grad_clip > 0: nn.utils.clip_grad_norm_(self.params, c.ttt_grad_clip)
		self.sgd.param_groups[0]["lr"] = c.ttt_lr * 0.5 * (1 + math.cos(math.pi * chunk / self.last))
		self.sgd.step()

def score_windows(run, plan, scope, learner=None):
	"""(nats a target, bits per byte, milliseconds). A learner trains on a chunk after all of it is scored: no score comes
	from weights that have seen its target."""
	log, val, last, started = run.log, run.validation, len(plan.chunks) - 1, (told := now())
	sums = torch.zeros(3, dtype=torch.float64, device=run.rt.device)  # nats, bytes, targets
	def means():  # so far, of all ranks: a synchronisation point
		nats, size, targets = run.rt.all_reduce(sums.clone()).tolist()
		return nats / targets, nats / math.log(2) / size
	def eta(): return f"eta:{(now() - started) * (plan.num_batches() / max(batches.handed, 1) - 1):.0f}s"
	(source := copy.copy(val)).plan = plan
	with closing(batches := Pipeline(source, "val", plan.byte_count(val.table))):
		for chunk, (scored, trained) in enumerate(plan.chunks):
			for piece in scored:
				x, y, digest = next(batches)
				with torch.no_grad(): nats = run.nats_of(x, y)[-piece.counted:]  # (windows, T)
				cuts = [plan.counted(row) for row in piece.rows[-piece.counted:]]
				for cut in set(cuts):  # equal ones are neighbours
					scores = nats[cuts.index(cut):, slice(*cut)][:cuts.count(cut)]
					sums[0] += scores.sum(dtype=torch.float64)
					sums[2] += scores.numel()
				sums[1] += digest & CRC
				if now() - told > 15: told = log.console(f"({scope} batch {batches.handed}/{plan.num_batches()} {eta()})") or now()
			for piece in trained: learner.step(piece, batches, chunk)
			if learner and (chunk % 10 == 0 or chunk == last):
				log.line(f"  ttt_chunk [{chunk + 1}/{last + 1}] bpb={means()[1]:.6f} time={now() - started:.1f}s {eta()}")
	return *means(), 1e3 * (now() - started)

# === ARTIFACT ===
CAP_BYTES = 16_000_000  # of script and artifact together
SMALL_ELEMENTS, CLIP_QUANTILE, INT6_QUANTILES = 65_536, 0.9999984, (0.999, 0.9995, 0.9999, 0.99999, 1.0)
SLOTS = {"qo_bank": ("attn.c_q", "attn.proj"), "kv_bank": ("attn.c_k", "attn.c_v"), "mlp_up_bank": ("mlp.fc",),
	"mlp_down_bank": ("mlp.proj",)}
def quantize(t):
	"""Float tensor -> (int8 of its shape, scale): float16 (rows,) for a matrix, else a float32 scalar."""
	t, matrix = t.float(), t.ndim == 2
	clip = torch.quantile(t.abs(), CLIP_QUANTILE, dim=1 if matrix else None, keepdim=True)
	scale = (clip / 127).clamp(min=1 / 127) if matrix else torch.where(clip > 0, clip / 127, 1.0)
	q = (t.clamp(-clip, clip) / scale).round().clamp(-127, 127).to(torch.int8)
	return q, scale[:, 0].half() if matrix else scale.view(())
def dequantize(q, scale):
	"""Inverse of quantize() up to half a scale, float32."""
	return q.float() * scale.float().view(-1, *[1] * (q.ndim - 1))
def saved(thing):
	"""A torch file, as bytes."""
	torch.save(thing, buffer := io.BytesIO())
	return buffer.getvalue()
def int6_scale(clip):
	"""float16 steps of rows. Their floor fits the record under the cap, and ruins short runs."""
	return (clip / 31).clamp(min=1 / 31).half()
def quantize_int6(t):
	"""Matrix -> (int8 codes of -31 .. 31, float16 steps of its rows), of five clips by the one with the least error."""
	least, t = math.inf, t.float()
	for clip in torch.quantile(t.abs(), torch.tensor(INT6_QUANTILES), dim=1):
		q = (t / int6_scale(clip).float()[:, None]).round().clamp(-31, 31).to(torch.int8)
		if (error := (t - dequantize(q, int6_scale(clip))).square().mean().item()) < least:
			least, best = error, (q, int6_scale(clip))
	return best
def bank_slices(state):
	"""(bank, names of its matrices in the order of its slots) of each."""
	L = range(len(state["mlp_up_bank"]))
	return [(bank, [f"blocks.{i}.{part}.weight" for part in parts for i in L]) for bank, parts in SLOTS.items()]
def unbanked(state):
	"""A state with matrices by layer, under the challenge's names, in the place of banks."""
	return {name: t for name, t in state.items() if name not in SLOTS} | {
		name: matrix for bank, names in bank_slices(state) for name, matrix in zip(names, state[bank])}
def pack(state, cfg):
	"""The artifact: torch.save of {"w": tensors, "m": how each is stored}, as xz."""
	w, m = {}, {}
	for name, t in unbanked(state).items():
		t, m[name], real = t.detach().cpu(), "passthrough", t.is_floating_point()
		if not real or t.numel() <= SMALL_ELEMENTS: w[name] = t.half() if real else t.clone()
		elif named(name, cfg.control_tensor_name_patterns): w[name] = t.float().clone()
		else:
			kind, encode = ("int6", quantize_int6) if named(name, ".mlp.,.attn.,.proj.") else ("int8", quantize)
			(w[name + ".q"], w[name + ".scale"]), m[name] = encode(t), {"type": kind}
	return lzma.compress(saved({"w": w, "m": m}), preset=6)
def unpack(data, state):
	"""The state in an artifact; RunError unless it fits `state`. Bounded in size and memory."""
	expected, found = unbanked(state), {}
	try:
		limit = (1 << 20) + sum(8 * t.numel() for t in state.values())
		raw = (stream := lzma.LZMADecompressor(memlimit=1 << 28)).decompress(data, limit)
		if not stream.eof: raise ValueError(f"it is cut short, or larger than {limit} bytes when decompressed")
		w = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)["w"]  # executes nothing
		for name, t in expected.items():
			found[name] = w[name] if name in w else dequantize(w[name + ".q"], w[name + ".scale"]).to(t.dtype)
			if found[name].shape != t.shape: raise ValueError(f"{name} has the shape {tuple(found[name].shape)}")
		return found | {bank: torch.stack(list(map(found.pop, names))).float() for bank, names in bank_slices(state)}
	except Exception as error:  # whatever a damaged or hostile file raises, people get one line
		raise RunError(f"the artifact cannot be loaded: {type(error).__name__}: {first_line(error)}") from error

# === TRAINING ===
class Run:
	"""The model and all that trains it; rank 0's weights on every rank."""
	first = 0  # no resumed runs
	def __init__(self, cfg, rt, log):
		torch.manual_seed(cfg.seed)
		self.cfg, self.rt, self.log, self.clock = cfg, rt, log, Clock(rt)
		self.accumulation = cfg.accumulation(rt.world_size)
		self.step_tokens = cfg.train_batch_tokens + SPANS_A_STEP  # read by one step
		self.flash = flash_attn_func if rt.cuda and torch.cuda.get_device_capability() == (9, 0) else None
		self.model = GPT(cfg, rt.dtype, self.flash).to(rt.device)
		for p in self.model.parameters(): rt._collective(dist.broadcast, p.data, src=0)
		self.compiles = cfg.torch_compile == "1" or cfg.torch_compile == "auto" and rt.cuda
		self.loss_of, self.nats_of = (compiled(f, log) if self.compiles else f for f in (self.model, self.model.nats))
		self.optimizers = Optimizers(self.model, cfg, rt, tail=5 + rt.world_size)
		self.control, self.averages = Control(self.optimizers.flat.tail, rt), Averages(cfg, self.optimizers.values)
		self.shards = Shards(cfg.data_path, "train")
		self.overlap, self.plan = Overlap.of(cfg, "train", rt.cuda), BatchPlan.train(cfg, rt.rank, rt.world_size)
		self.verify = Unverified()
		self.validation, self.qat = Validation(cfg.evaluated(), rt, log, self.verify), cfg.qat_enabled
		self.partial = " partial_val:1" * (cfg.val_tokens > 0)
		self.logged = 0, 0.0, [0.0] * rt.world_size  # step, clock and input waits of the last training line
	def late_qat(self, step, lr_scale):
		if self.qat or not self.cfg.late_qat or lr_scale >= self.cfg.late_qat_threshold: return
		self.qat = bool(self.model.qat.fill_(1.0))
		self.log.line(f"late_qat:enabled step:{step} scale:{lr_scale:.4f}")
	def batches(self, spans=Spans()): return Pipeline(self, "train", data_crc, spans)

def train_step(run, batches, step, elapsed_ms, crc, foretell):
	"""Fetch, forward, backward, reduce, update. Returns this rank's data_crc."""
	loss_share, optimizers = torch.zeros((), device=run.rt.device), run.optimizers
	optimizers.zero()
	for _ in range(run.accumulation):
		next(foretell)
		x, y, digest = next(batches)
		loss = run.loss_of(x, y) / (run.accumulation * run.rt.world_size)
		loss.backward()
		loss_share += loss.detach()
		crc = crc + digest & CRC
		next(foretell)
	optimizers.clip()
	run.rt.all_reduce(optimizers.tables.grads)  # what is small; the banks' reduction runs under the optimizers
	run.control.agree(step, optimizers.flat.reduced, loss_share, elapsed_ms=run.clock.now_ms(),
		wait_ms=batches.stage.wait_ms, data_crc=crc)
	optimizers.step(lr_multiplier(run.cfg, step, elapsed_ms), muon_momentum(run.cfg, step))
	return crc
def warm_up(run, foretell):
	"""Priming steps: compile, allocate, fill caches off the clock; then rolled back."""
	saved, count = run.optimizers.snapshot(), run.cfg.warmup_steps
	with closing(run.batches()) as batches:
		for step in range(count):
			train_step(run, batches, step, 0.0, 0, foretell)
			if count <= 20 or step % 10 == 9 or step + 1 == count: run.log.line(f"warmup_step:{step + 1}/{count}")
	run.optimizers.restore(saved)
def validate(run, step, spans):
	"""Validates with the clock stopped; returns the milliseconds it took."""
	run.clock.stop()
	val_loss, val_bpb, val_ms = run.validation.evaluate(run.loss_of, f"step_{step}", run.compiles, spans)
	ms = run.clock.total_ms
	run.log.say("validation", "step:{0}/{1} val_loss:{2:.4f} val_bpb:{3:.4f} train_time:{4:.0f}ms step_avg:{5:.2f}ms"
		+ run.partial + "\nval_stage_time_ms:{6:.0f}ms step:{0}/{1}", step=step, iterations=run.cfg.iterations,
		val_loss=val_loss, val_bpb=val_bpb, train_time_ms=ms, step_avg_ms=ms / max(step, 1), val_ms=val_ms,
		val_tokens=run.validation.tokens - 1, val_bytes=run.validation.bytes)
	run.clock.start()
	return val_ms

def log_step(run, step):
	"""A training line; rates since the last. Synchronisation point: its time has to be true."""
	run.rt.synchronize()
	run.verify.settle()
	c, ms, agreed = run.cfg, run.clock.now_ms(), run.control.read(step - 1)
	(last_step, last_ms, last_waits), cap_ms = run.logged, 1e3 * c.max_wallclock_seconds
	since_ms, left_ms = ms - last_ms, (c.iterations - step) * ms / step
	run.log.say("step", "step:{}/{} train_loss:{:.4f} train_time:{:.0f}ms step_avg:{:.2f}ms tok_s:{:.0f} "
		"input_wait:{:.2f}% data_crc:{} eta:{:.0f}s", step=step, iterations=c.iterations, train_loss=agreed.train_loss,
		train_time_ms=ms, step_avg_ms=ms / step, tok_s=1e3 * (step - last_step) * c.train_batch_tokens / since_ms,
		input_wait_percent=100 * max(a - b for a, b in zip(agreed.wait_ms, last_waits)) / since_ms,
		data_crc=f"{agreed.data_crc:08x}", eta_s=max(0, min(left_ms, cap_ms - ms) if cap_ms > 0 else left_ms) / 1e3)
	run.logged = step, ms, agreed.wait_ms

def train(run):
	c, log, clock, step, crc, val_ms, epochs = run.cfg, run.log, run.clock, 0, 0, 0.0, 1
	foretell = forecast(run.rt, log, f"{c.warmup_steps} + {c.iterations} steps", c.warmup_steps + c.iterations,
		pieces=run.accumulation, cap_s=c.max_wallclock_seconds, compiles=run.compiles)
	warm_up(run, foretell)
	with closing(run.batches()) as batches:
		clock.start()
		while True:
			# Synchronisation point: the reduction of two steps ago, past unless the host runs far ahead.
			elapsed_ms = run.control.read(step - 2).elapsed_ms if step >= 2 else 0.0
			mean_ms = elapsed_ms / max(step - 1, 1)
			capped = 0 < 1e3 * c.max_wallclock_seconds <= elapsed_ms + 2 * mean_ms and step < c.iterations
			last = capped or step == c.iterations
			if last or c.val_loss_every and step % c.val_loss_every == 0: val_ms += validate(run, step, batches.spans)
			if last: break
			if epochs == 1 and step >= run.shards.total // run.step_tokens:
				epochs = 2
				log.line(f"WARNING: step {step + 1} begins a second epoch: {len(run.shards.paths)} shards, all used up")
			lr_scale = lr_multiplier(c, step, elapsed_ms + mean_ms)
			run.late_qat(step, lr_scale)
			crc = train_step(run, batches, step, elapsed_ms + mean_ms, crc, foretell)
			step += 1
			run.averages.update(step, lr_scale, log)
			if step <= 10 or c.train_log_every and step % c.train_log_every == 0: log_step(run, step)
		clock.stop()
		if capped: log.line(f"stopping_early: wallclock_cap train_time:{clock.total_ms:.0f}ms step:{step}/{c.iterations}")
		report(run, batches, step, val_ms)
def waits(waits_ms, batches, micro_steps, train_ms, first=0):
	steps = np.reshape(waits_ms or [0.0] * micro_steps, (-1, micro_steps)).sum(1)
	total, worst, (median, p99, most) = steps.sum(), int(steps.argmax()), np.percentile(steps, (50, 99, 100)).tolist()
	return dict(total_ms=float(total), percent=float(100 * total / train_ms), median_ms=median, p99_ms=p99, max_ms=most,
		worst_step=first + worst + 1, at_shard_boundary=worst in {k // micro_steps for k in batches.crossings})
def verdict(percent, hidden_percent, prefetch, needed, delivered, awaited=None):
	"""needed, delivered: MB/s."""
	cost = f"input cost {percent:.2f} % of training"
	if percent < 0.5: return f"{cost}: overlap " + (
		"settings do not matter here" if hidden_percent < 0.5 else f"hides {hidden_percent:.2f} %")
	if not prefetch: return f"{cost}, and nothing overlaps: set TRAIN_PREFETCH=1"
	if awaited: return f"{cost}: shards were still being made"
	if delivered > needed: return f"{cost}, in stalls: raise TRAIN_PREFETCH_QUEUE"
	need = f"{needed:.3g} MB/s needed, {delivered:.3g} MB/s delivered"
	return f"reads are the limit: {need}: move DATA_PATH to a local disk"
def report(run, batches, step, val_ms):
	"""What the run and its input have cost; the device is idle."""
	stage, train_ms, tokens = batches.stage, run.clock.total_ms, step * run.step_tokens
	stage.ask()
	host, device = (waits(w[:batches.handed], batches, run.accumulation, train_ms)
		for w in (batches.host_waits_ms, stage.waits_ms))
	peak = [torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20] if run.rt.cuda else [
		resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)] * 2
	percent = 100 * max(run.control.read(step - 1).wait_ms if step else [0.0]) / train_ms  # of the slowest rank
	hidden = 100 * (batches.busy_ms + stage.copy_ms) / train_ms - device["percent"]
	needed, delivered = (batches.bytes_read / 1e3 / max(ms, 1e-9) for ms in (train_ms - stage.wait_ms, batches.read_ms))
	moved = dict(read=batches.bytes_read, read_gb_s=delivered / 1e3, copied=stage.bytes_copied,
		copy_gb_s=stage.bytes_copied / 1e6 / (stage.copy_ms or 1),
		late_copies_percent=100 * batches.late_copies / max(batches.handed, 1))
	seen = dict(tokens_seen=tokens, epochs=tokens / run.shards.ends[-1])
	advice = verdict(percent, hidden, run.overlap.prefetch, needed, delivered, run.shards.awaited)
	run.log.line(f"timing_train_loop_ms:{train_ms:.0f}ms timing_val_total_ms:{val_ms:.0f}ms\nhost_wait {words(host, 3)}\n"
		f"device_wait {words(device, 3)}\ninput_bytes {words(moved)}\ninput: {advice}\n{words(seen, 3)}\n"
		f"peak memory allocated: {peak[0]} MiB reserved: {peak[1]} MiB")
	run.log.event("input", step=step, train_time_ms=train_ms, val_total_ms=val_ms, host_wait=host, device_wait=device,
		percent_of_slowest_rank=percent, bytes=moved, verdict=advice, **seen, peak_mib=peak)
	run.verify.settle(total=True)
	batches.spans.close()
def artifact(run, code_bytes):
	log, state = run.log, {name: t.detach().cpu().clone() for name, t in run.model.state_dict().items()}
	write_atomic(Path("final_model.pt"), model := saved(state))
	write_atomic(Path("final_model.int6.ptz"), data := pack(state, run.cfg))
	total = len(data) + code_bytes
	log.say("artifact", "Serialized model: {} bytes\nCode size: {} bytes\nSerialized model int6+lzma: {} bytes\n"
		"Total submission size int6+lzma: {} bytes", model_bytes=len(model), code_bytes=code_bytes,
		artifact_bytes=len(data), total_bytes=total)
	if total > CAP_BYTES: log.line(f"WARNING: {total} bytes, the challenge's cap is {CAP_BYTES}")
	return data
def announce(run, label, scored, *exact, words=""):
	"""A score; under the names in `exact` to eight places."""
	lines = "".join(f"\n{name} val_loss:{{1:.8f}} val_bpb:{{2:.8f}}{{5}}" for name in exact)
	run.log.say("score", "{0} val_loss:{1:.4f} val_bpb:{2:.4f}{4} eval_time:{3:.0f}ms{5}" + lines, scope=label,
		val_loss=scored[0], val_bpb=scored[1], eval_ms=scored[2], words=words, partial=run.partial)
def export_and_score(run, code_bytes):
	"""Rank 0 writes the artifact; all decode its very bytes: every score but the first is its."""
	c, log, rt, model, targets = run.cfg, run.log, run.rt, run.model, run.validation.tokens - 1
	eval_len = run.validation.cfg.train_seq_len
	def standard(scope): return run.validation.evaluate(run.loss_of, scope, False, Spans())
	if averaged := run.averages.apply():
		log.line(averaged)
		announce(run, "DIAGNOSTIC post_ema", standard("post_ema"))
	model.qat = None
	data = rt.broadcast(artifact(run, code_bytes) if rt.rank == 0 else None)
	model.load_state_dict(unpack(data, model.state_dict()))
	announce(run, label := "final_int6_roundtrip", standard(label), f"{label}_exact")
	for stride in dict.fromkeys((c.eval_stride, 64) if c.eval_stride else ()):
		if stride >= eval_len: continue
		label = "final_int6_sliding_window" + "_s64" * (stride != c.eval_stride)
		scored = score_windows(run, WindowPlan(c, rt, targets, seq_len=eval_len, stride=stride), label)
		announce(run, label, scored, f"{label}_exact", "final_int8_zlib_roundtrip_exact", words=f" stride:{stride}")
	if not c.ttt_enabled: return
	plan = WindowPlan(c, rt, targets, seq_len=c.train_seq_len, stride=c.eval_stride, chunk_tokens=c.ttt_chunk_tokens)
	val_loss, val_bpb, ms = scored = score_windows(run, plan, "ttt", Learner(run, plan))
	log.line(f"ttt_sliding:done val_loss={val_loss:.6f} val_bpb={val_bpb:.6f} elapsed={ms / 1e3:.1f}s")
	announce(run, "legal_ttt", scored, "legal_ttt_exact")

# === MAIN ===
def log_header(run, source):
	c, log, rt, val, shards, smi = run.cfg, run.log, run.rt, run.validation, run.shards, ""
	with suppress(OSError, subprocess.SubprocessError):
		smi = subprocess.run("nvidia-smi", capture_output=True, text=True, timeout=30).stdout
	rule, found = "=" * 100, len(shards.paths)
	log.file(f"{source}\n{rule}\nRunning Python {sys.version}\nRunning PyTorch {torch.__version__}\n{smi}\n{rule}")
	def of(names): return " ".join(f"{name}:{getattr(c, name)}" for name in names.split())
	sdp = (f"{k}={getattr(torch.backends.cuda, k + '_sdp_enabled')()}" for k in "cudnn flash mem_efficient math".split())
	log.line(f"val_bpb:enabled tokenizer_kind={('sentencepiece', 'byte')[c.tokenizer_path.endswith('.json')]} "
		f"tokenizer_path={c.tokenizer_path}\ntrain_loader:dataset:{shards.folder.resolve().name} train_shards:{found}\n"
		f"val_loader:shards pattern={c.data_path}/fineweb_val_*.bin tokens:{val.tokens - 1}{run.partial}\n"
		f"model_params:{parameters(run.model)}\nmtp_num_heads:0 mtp_loss_weight:0.2 mtp_params:0\n"
		f"XSA:last_{c.xsa_last_n} active_layers:{[i for i, block in enumerate(run.model.blocks) if block.attn.xsa]}\n"
		f"world_size:{rt.world_size} grad_accum_steps:{run.accumulation}\nsdp_backends:{' '.join(sdp)}\n"
		f"attention_mode:gqa {of('num_heads num_kv_heads')} attention:{'fa3' if run.flash else 'sdpa'}\n"
		f"{of('tie_embeddings')} embed_lr:{c.tied_embed_lr if c.tie_embeddings else c.embed_lr} "
		f"head_lr:{0.0 if c.tie_embeddings else c.head_lr} {of('matrix_lr scalar_lr')}\n"
		f"{of('train_batch_tokens train_seq_len iterations warmup_steps')} max_wallclock_seconds:"
		f"{c.max_wallclock_seconds:.3f}\nseed:{c.seed}\ntrain_io:{run.overlap.words}\nval_io:{val.overlap.words}")
	if found < (whole := promised(shards.folder, "train")): log.line(f"WARNING: train_shards: {found} of {whole}")
	log.event("config", **asdict(c))
	log.event("hardware", device=torch.cuda.get_device_name() if rt.cuda else os.uname().machine, cpus=os.cpu_count(),
		torch=torch.__version__, cuda=torch.version.cuda, python=sys.version.split()[0], world_size=rt.world_size)
def out_of_memory(cfg, rt):
	steps, (free, total) = cfg.accumulation(rt.world_size), torch.cuda.mem_get_info()
	return (f"rank {rt.rank}: out of memory at {cfg.train_batch_tokens // (rt.world_size * steps)} tokens a micro-step, "
		f"{free >> 20} of {total >> 20} MiB free: set GRAD_ACCUM_STEPS={2 * steps}")
def execute(cfg, warnings):
	"""The run, to its exit code. A foreseeable failure is one line, any other a traceback."""
	rt, log, code, status, problem = Runtime(), None, 1, "failed", ""
	try:
		rt = Runtime.start(cfg, os.environ)
		cfg = replace(cfg, run_id=rt.broadcast(cfg.run_id))
		log, source = RunLog(cfg.run_id, rt.rank == 0), Path(__file__).read_text(encoding="utf-8")
		log.console(str(log.path))
		log.event("run", run_id=cfg.run_id, argv=sys.argv)
		log_header(run := Run(cfg, rt, log), source)
		for warning in warnings: log.line(f"warning: {warning}")
		train(run)
		export_and_score(run, len(source.encode()))
		code, status = 0, "finished"
	except torch.OutOfMemoryError: problem = out_of_memory(cfg, rt)
	except RunError as error: problem = str(error)
	except KeyboardInterrupt: code, status, problem = 130, "interrupted", "interrupted"
	finally:
		if problem: print(f"train_gpt.py: {problem}", file=sys.stderr, flush=True)
		if log:
			if problem: log.file(f"error: {problem}")
			log.event("end", status=status, exit_code=code, error=problem)
			log.console(f"{status}: see {log.path}")
			log.close()
		rt.close()
	return code
def main():
	environ, arguments = os.environ, sys.argv[1:]
	if arguments in (["--help"], ["-h"]): return print_help()
	cfg, faults = Config.from_environment(environ)
	misspelt, warnings = foreign_names(environ)
	faults += misspelt + [f"{word}: no such argument: see --help" for word in arguments if word != "--print-config"]
	if arguments and not faults:
		print(json.dumps({name: dict(value=value, source=("default", "environment")[name.upper() in environ])
			for name, value in asdict(cfg).items()}, indent=1))
		return 0
	faults += cfg.problems(int(environ.get("WORLD_SIZE", 1)))
	if torch.__version__ < "2.11.dev": warnings.append(f"torch {torch.__version__}: the oldest tried is 2.11")
	if not faults: return execute(cfg, warnings)
	if int(environ.get("LOCAL_RANK", 0)) == 0:
		print("train_gpt.py: nothing was started, settings are wrong:", *faults, sep="\n  ", file=sys.stderr)
	return 2
# Python's own exit aborts now and then, in gloo's threads (torch 2.13: "terminate called ...").
if __name__ == "__main__": os._exit((main(), sys.stdout.flush())[0])
