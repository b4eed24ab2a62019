"""Train a small GPT for the parameter-golf challenge: the best bits per byte that fit in 16,000,000 bytes.

  torchrun --standalone --nproc_per_node=8 train_gpt.py   eight GPUs (1, 2 or 4: the same order of tokens)
  python train_gpt.py                                     one process, on a GPU or on the CPU
  python train_gpt.py --help | --print-config             the settings (environment variables) | their values

One pipeline feeds training and validation; overlap off is a setting of it. Because bytes count, an indent
is a tab, and types stand at data alone.

Contents: CONFIG, RUNTIME, INSTRUMENTS, DATA, MODEL, OPTIMIZERS, EVALUATION, ARTIFACT, TRAINING, MAIN.
"""
from __future__ import annotations
import bisect, contextlib, copy, datetime, functools, gzip, io, itertools, json, math, os, queue, re, resource
import subprocess, sys, threading, time, uuid, zlib
from collections import Counter, defaultdict, deque, namedtuple
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter as now
from typing import NamedTuple

import numpy as np, sentencepiece, torch
import torch.distributed as dist, torch.nn.functional as F
from torch import Tensor, nn

# === CONFIG ===
CONTROLS = "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,skip_weights"
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

@dataclass(frozen=True)
class Config:
	"""Every setting (its variable: the name in upper case), grouped as in README.md, which has units and meanings."""
	data_path: text = "./data/datasets/fineweb10B_sp1024"
	tokenizer_path: text = "./data/tokenizers/fineweb_1024_bpe.model"
	run_id: name = "random_uuid4"; seed: natural = 1337
	val_batch_size: count = 524_288; val_loss_every: natural = 1000; val_tokens: natural = 0
	val_progress_log_every: natural = 0; train_log_every: natural = 200
	iterations: natural = 20_000; warmdown_iters: natural = 1200; warmup_steps: natural = 20
	train_batch_tokens: count = 524_288; train_seq_len: count = 1024; max_wallclock_seconds: number = 600.0
	vocab_size: vocab = 1024; num_layers: count = 9; model_dim: count = 512; num_heads: count = 8; num_kv_heads: count = 4
	mlp_mult: count = 2; tie_embeddings: switch = True
	rope_base: positive = 10_000.0; logit_softcap: positive = 30.0; qk_gain_init: number = 1.5
	embed_lr: rate = 0.6; head_lr: rate = 0.008; tied_embed_lr: rate = 0.05; tied_embed_init_std: rate = 0.005
	matrix_lr: rate = 0.04; muon_momentum: share = 0.95; muon_backend_steps: count = 5
	muon_momentum_warmup_start: share = 0.85; muon_momentum_warmup_steps: natural = 500
	scalar_lr: rate = 0.04; beta1: share = 0.9; beta2: share = 0.95; adam_eps: rate = 1e-8; grad_clip_norm: rate = 0.0
	control_tensor_name_patterns: text = CONTROLS; int8_keep_float_fp32_name_patterns: text = CONTROLS
	train_prefetch: switch = True; train_prefetch_queue: count = 2; train_copy_stream: switch = True
	val_prefetch: switch = True; val_prefetch_queue: count = 2; val_copy_stream: switch = True
	gpu_prefetch: count = 2; val_bytecount_device: counter = "cpu"
	training_timing_breakdown: switch = False; training_timing_every: count = 200; trace_steps: natural = 0
	data_verify: switch = False; data_stall_seconds: positive = 60.0
	device: where = "auto"; torch_compile: mode = "auto"; grad_accum_steps: natural = 0
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
	def fitting_accumulation(self, world_size, least):
		"""The least GRAD_ACCUM_STEPS from `least` on that divides a rank's rows, else the greatest, else 0."""
		rows = self.train_batch_tokens // self.train_seq_len
		fits = (g for g in range(1, rows // world_size + 1) if rows % (world_size * g) == 0)
		return min(fits, default=0, key=lambda g: (g < least, abs(g - least)))
	def val_batch_rows(self, world_size):  # of one rank
		return self.val_batch_size // (world_size * self.accumulation(world_size)) // self.train_seq_len
	def problems(self, world_size):
		"""Every fault, with value and remedy. Reads data files, starts nothing on a device."""
		faults = runtime_faults(self), self._shape_faults(world_size), tokenizer_faults(self), dataset_faults(self)
		return [f"{name.upper()}={shown(getattr(self, name))}: {text}" if name else text
			for name, text in itertools.chain(*faults)]
	def _shape_faults(self, world_size):
		"""Like the others: (a setting or "", what is wrong, what to do)."""
		heads, T, steps = self.num_heads, self.train_seq_len, self.accumulation(world_size)
		rows, unit, parts = self.train_batch_tokens // T, SPANS_A_STEP * T, world_size * steps
		for name, of, words in ("model_dim", 2 * heads, "2 x NUM_HEADS"), ("train_batch_tokens", unit, "8 x TRAIN_SEQ_LEN"):
			if (value := getattr(self, name)) % of:
				yield name, f"must divide by {words}: set {of * max(1, round(value / of))}"
		if heads % self.num_kv_heads:
			yield "num_kv_heads", f"must divide NUM_HEADS={heads}: set {math.gcd(heads, self.num_kv_heads)}"
		if self.train_batch_tokens % unit == 0 and rows % parts:
			fits = self.fitting_accumulation(world_size, steps)
			yield "grad_accum_steps", (f"{world_size} ranks x {steps} steps must divide {rows} rows: set " +
				f"{fits}, or " * (fits > 0) + f"TRAIN_BATCH_TOKENS={math.lcm(unit, parts * T)}")
		if self.val_batch_size < parts * T:
			yield "val_batch_size", f"no row for each of {world_size} ranks x {steps} steps: set at least {parts * T}"
		if self.trace_steps and self.training_timing_breakdown:
			yield "trace_steps", "shows overlap, TRAINING_TIMING_BREAKDOWN=1 turns it off: set one of them"

SETTINGS = {f.name.upper(): f for f in fields(Config)}
FOREIGN = re.compile(r"(EMA|SWA|TTT|QAT|LATE|XSA|BIGRAM|VE|MTP|EVAL|GPTQ|CHECKPOINT)_\w+|(MUON|ADAM)_WD|"
	r"MUON_BETA2|ROPE_DIMS|LN_SCALE|GATED_ATTENTION|VALUE_RESIDUAL|RESUME|VAL_RESIDENT|ATTENTION_BACKEND")
def shown(value): return f"{value:g}" if isinstance(value, float) else str(value * 1)  # as in the environment
@functools.cache
def edit_distance(a, b):
	"""Damerau-Levenshtein: insert, delete, replace, swap two neighbours."""
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
	"""Names, types, defaults; the rest from README.md, if at hand."""
	print(__doc__)
	table = "\n".join(f"| `{name}` | - | see README.md |" for name in SETTINGS)
	with suppress(OSError, IndexError):  # a record has another README.md
		table = Path(__file__).with_name("README.md").read_text("utf-8").split("\n## Settings\n")[1]
	for group, name, unit, meaning in re.findall(r"(?m)^### (.+)$|^\| `(\w+)` \| (.*?) \| (.*) \|$", table):
		default = getattr(Config, name.lower(), "")
		print(f"  {name}={shown(default)}  ({type(default).__name__}, {unit}) {meaning}" if name else f"\n{group}")
	return 0

# === RUNTIME ===
GROUP_TIMEOUT = datetime.timedelta(minutes=5)  # longest wait for a rank
class RunError(Exception): """A foreseeable failure in one line: what, where, which value, what to do."""
def first_line(error): return (str(error).strip() or repr(error)).splitlines()[0][:160]
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
			f"(CUDA_VISIBLE_DEVICES={os.getenv('CUDA_VISIBLE_DEVICES', 'unset')}): fit torch to it, or set DEVICE=cpu")
	elif cfg.device == "cuda" and not cuda: yield "device", "torch sees no CUDA device: set auto or cpu"
	if cfg.val_bytecount_device == "cuda" and not cuda: yield "val_bytecount_device", "no CUDA in use: set cpu"

@dataclass(frozen=True)
class Runtime:
	"""This process: rank, device, dtype of activations, collectives (main thread only)."""
	rank: int = 0
	world_size: int = 1
	device: torch.device = torch.device("cpu")
	dtype: torch.dtype = torch.float32
	@classmethod
	def start(cls, cfg, environ):
		"""Takes the device, joins the process group: NCCL with CUDA, gloo without; none for one process."""
		device, dtype = torch.device("cpu"), torch.float32
		if cuda := cfg.device != "cpu" and torch.cuda.is_available():
			torch.cuda.set_device(device := torch.device("cuda", int(environ.get("LOCAL_RANK", 0))))
			if torch.cuda.get_device_capability(device) >= (8, 0): dtype = torch.bfloat16
			torch.set_float32_matmul_precision("high")  # TF32 where a product is in float32
			torch.backends.cuda.enable_cudnn_sdp(False)
		if "RANK" in environ and "WORLD_SIZE" in environ:
			dist.init_process_group("nccl" if cuda else "gloo", timeout=GROUP_TIMEOUT, device_id=device if cuda else None)
		return cls(int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1)), device, dtype)
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
		"""On one rank: nothing. A failure means that another rank died or hung."""
		try:
			if dist.is_initialized(): call(*args, **options)
		except RuntimeError as error:
			raise RunError(f"rank {self.rank}: another rank died, or hung for {GROUP_TIMEOUT}: see its error: "
				f"{first_line(error)}") from error
	def synchronize(self):
		"""Synchronisation point: the device has finished all it was given."""
		if self.cuda: torch.cuda.synchronize(self.device)
	def close(self):
		if dist.is_initialized(): dist.destroy_process_group()

class RunLog:
	"""Rank 0's console, logs/<RUN_ID>.txt and .jsonl; an older log is kept under its time. Elsewhere: /dev/null."""
	def __init__(self, run_id, enabled):
		self.path = Path("logs", f"{run_id}.txt")
		names = self.path, self.path.with_suffix(".jsonl")
		try:
			if enabled:
				self.path.parent.mkdir(exist_ok=True)
				old = [*filter(Path.exists, names)]
				last = datetime.datetime.fromtimestamp(max(map(os.path.getmtime, old), default=0))
				for name in old: name.rename(name.with_suffix(f".{last:%Y%m%d-%H%M%S-%f}{name.suffix}"))
			self.text, self.events = (open(name if enabled else os.devnull, "w", 1, encoding="utf-8") for name in names)
		except OSError as error:
			raise RunError(f"{self.path}: cannot open the log: {error.strerror}: run where you can write") from error
		self.stdout = sys.stdout if enabled else self.text
	def file(self, text): print(text, file=self.text)
	def console(self, text): print(text, file=self.stdout, flush=True)
	def line(self, text): self.file(text), self.console(text)
	def event(self, name, **fields):
		print(json.dumps({"event": name, "time": round(time.time(), 3), **fields}), file=self.events)
	def say(self, event, template, **fields):
		"""Fields as an event and, in the order of the template's braces, as text."""
		self.line(template.format(*fields.values()))
		self.event(event, **fields)
	def close(self): self.text.close(), self.events.close()

def words(fields, digits=2):
	return " ".join(f"{k}:{v:.{digits}f}" if isinstance(v, float) else f"{k}:{v}" for k, v in fields.items())
def write_atomic(path, data):
	"""The whole file or none: a temporary beside it, fsync, rename."""
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

# === INSTRUMENTS ===
def timed_event(): return torch.cuda.Event(enable_timing=True, blocking=True)
HOST, DEVICE, COPY = "main thread", "compute stream", "copy stream"  # tracks, beside "<split> reader"
TRACE_EVENTS, TRACE_VAL_BATCHES = 150_000, 50  # below 20 MB before compression, at 100 bytes an event
class Clock:
	"""Training time in ms, without validation; both edges wait for the device (synchronisation points)."""
	def __init__(self, rt): self.rt, self.total_ms, self.since = rt, 0.0, math.inf
	def now_ms(self): return self.total_ms + 1e3 * max(0.0, now() - self.since)
	def start(self):
		self.rt.synchronize()
		self.since = now()
	def stop(self):
		self.rt.synchronize()
		self.total_ms, self.since = self.now_ms(), math.inf

def forecast(rt, log, unit, count, *, pieces=1, cap_s=0.0, compiles=False):
	"""A generator, advanced before and after each piece of work. After the first (that compiles: the second) the console
	says how long `count` units of `pieces` take and, on too slow a CPU, what to run instead."""
	for _ in range(1 + compiles):
		rt.synchronize()  # synchronisation points: four at most
		started = now()
		yield
		rt.synchronize()
		unit_s = pieces * (now() - started)
		yield
	total_s = round(min(count * unit_s, cap_s if cap_s > 0 else math.inf))
	log.console(f"({unit}: about {unit_s:.3g} s each, {datetime.timedelta(seconds=total_s)} in all)")
	if total_s > 600 and not rt.cuda: log.console(f"(long: on a CPU `python3 {QUICKSTART}` takes two minutes)")
	while True: yield

class Spans:
	"""Instruments, off. Code marks its phases, `with spans("forward"):`, and never asks whether anyone listens."""
	nothing = contextlib.nullcontext()
	def __call__(self, name, track=DEVICE): return self.nothing
	def instant(self, name, track): pass
	def handed(self, pipeline): pass  # after each batch
	def step_done(self, step): pass
	def close(self): pass  # says what was found
class Recorder(Spans):
	"""mark(track) begins and ends a phase, add() keeps it."""
	def __init__(self, cfg, rt, log): self.cfg, self.rt, self.log = cfg, rt, log
	@contextmanager
	def __call__(self, name, track=DEVICE):
		begin = self.mark(track)
		yield
		self.add(name, track, begin, self.mark(track))

class Breakdown(Recorder):
	"""TRAINING_TIMING_BREAKDOWN: each phase alone, a synchronisation point at both its ends."""
	def __init__(self, cfg, rt, log):
		super().__init__(cfg, rt, log)
		self.ms, self.totals, self.since = defaultdict(float), Counter(), now()
		log.line("timing_breakdown:enabled: costs all overlap and two waits for the device a phase")
	def mark(self, track):
		if track.endswith("reader"): return 0.0  # it does no CUDA work
		started = now()
		self.rt.synchronize()
		self.ms["sync"] += 1e3 * (now() - started)
		return now()
	def add(self, name, track, begin, end):
		if name == "validate": self.ms.clear()  # of its own phases: a step's are meant
		self.ms[name] += 1e3 * (end - begin)
	def step_done(self, step):
		ms, n = self.ms, self.cfg.accumulation(self.rt.world_size)
		micro = {"batch_cpu": "input_wait", "batch_h2d": "h2d", "forward": "forward", "backward": "backward"}
		whole = {"grad_clip": "grad_clip", "optimizer": "optimizer", "val": "validate", "explicit_sync": "sync"}
		times = {f"{word}_ms": ms[name] / (n if word in micro else 1) for word, name in (micro | whole).items()}
		if step <= 10 or step % self.cfg.training_timing_every == 0: self.log.line(
			f"timing_breakdown step:{step} micro_steps:{n} {words(times)} (per_optimizer_step; forward/backward/batch "
			f"averaged over micro_steps; grad_accum_steps={n}) reduce_ms:{ms['reduce']:.2f}")
		self.totals.update(input=ms["input_wait"] + ms["h2d"], all=1e3 * (now() - self.since) - ms["validate"], steps=1)
		self.since = now()
		ms.clear()
	def close(self):
		total, self.totals = self.totals, None
		if not total: return
		x, y = total["input"] / total["steps"], total["all"] / total["steps"]
		share = f"{x:.2f} ms of {y:.2f} ms a step ({100 * x / y:.2f} %)"
		self.log.line(f"overlappable: {share}: the most that overlap can win here")

class Trace(Recorder):
	"""TRACE_STEPS: what ran when, in steps with overlap on and a validation, cut. Host times; with CUDA the device's, by
  events: it is waited for at the start and the end alone."""
	def __init__(self, cfg, rt, log):
		super().__init__(cfg, rt, log)
		self.steps, self.on, self.events = min(cfg.trace_steps, cfg.iterations), True, []
		self.path = log.path.with_suffix(".trace.json.gz")
		rt.synchronize()  # synchronisation point: here host and device times are one
		self.base = self.mark(DEVICE)
		self.instant("warm_up_end", HOST)
	def mark(self, track):
		"""(host seconds, for DEVICE and COPY also an event on the current stream)."""
		event = None
		if self.rt.cuda and track in (DEVICE, COPY): (event := timed_event()).record()
		return now(), event
	def __call__(self, name, track=DEVICE):
		if name == "validate": self.on = self.steps == 0  # the first one after the steps
		return super().__call__(name, track) if self.on else self.nothing
	def add(self, name, track, begin, end=None):
		if name == "validate": self.steps = -1
		if len(self.events) < TRACE_EVENTS: self.events.append((name, track, begin, end))
	def instant(self, name, track):
		if self.on: self.add(name, track, self.mark(HOST))
	def handed(self, pipeline):
		self.on = self.steps > 0 if pipeline.name == "train" else self.on and pipeline.handed <= TRACE_VAL_BATCHES
		depths = {"host": pipeline.ready.qsize(), "device": pipeline.taken - pipeline.handed}
		self.instant(f"{pipeline.name} queues", depths)
	def step_done(self, step): self.steps -= self.steps > 0
	def rows(self):
		"""Chrome's trace-event format, times in microseconds."""
		tracks = defaultdict(itertools.count().__next__)  # name -> thread id
		def micros(a, b): return 1e3 * a[1].elapsed_time(b[1]) if b[1] else 1e6 * (b[0] - a[0])
		for name, track, begin, end in self.events:
			row = {"name": name, "pid": 0, "ts": micros(self.base, begin)}
			if isinstance(track, dict): yield row | {"ph": "C", "args": track}
			else: yield row | {"tid": tracks[track if begin[1] or track != DEVICE else HOST]} | (  # DEVICE: on CUDA alone
				{"ph": "X", "dur": micros(begin, end)} if end else {"ph": "i", "s": "p"})
		for track, tid in tracks.items(): yield dict(name="thread_name", ph="M", pid=0, tid=tid, args={"name": track})
	def close(self):
		"""Writes the file, once; if that fails the run goes on."""
		path, self.path, self.on = self.path, None, False
		if not path: return
		try:
			self.rt.synchronize()  # synchronisation point: all events have passed
			write_atomic(path, gzip.compress(json.dumps({"traceEvents": list(self.rows())}).encode()))
			self.log.line(f"trace: {path} (https://ui.perfetto.dev, or python3 logs/trace.py {path})")
		except (RunError, RuntimeError) as error: self.log.line(f"warning: no trace: {first_line(error)}")

def batch_sum(x, y):
	"""Position-weighted int64 sum, wrapping; numpy or torch."""
	return (3 * x + y).reshape(-1).cumsum(0).sum()
class Unverified:
	"""DATA_VERIFY off."""
	def digest(self, plain): return plain
	def consumed(self, pipeline, batch, place): pass
	def settle(self, total=False): pass
class Verify(Unverified):
	"""DATA_VERIFY: a sum of what was read, above the digest's 32 bits, against what x and y hold after use."""
	def __init__(self, log): self.log, self.pending, self.checked = log, [], 0
	def digest(self, plain):
		def summed(plan, rows, tokens):
			x, y = np.empty((2, len(rows), plan.seq_len), np.int64)
			widen(x, y, tokens, plan.segments(rows))
			return plain(plan, rows, tokens) & CRC | int(batch_sum(x, y)) << 32
		return summed
	def consumed(self, pipeline, batch, place):
		slot = (pipeline.handed - 1) % (pipeline.overlap.device_slots or pipeline.host_slots)  # they are used in turn
		self.pending.append((f"{pipeline.who}, {place}, slot {slot}", batch[2] >> 32, batch_sum(*batch[:2])))
		if len(self.pending) >= 1024: self.settle()
	def settle(self, total=False):
		"""Synchronisation point, at log time. RunError if a batch was overwritten while in use."""
		for where, read, held in self.pending:
			if held.item() != read: raise RunError(f"{where}: the batch was overwritten while in use: its sum was {read}, is "
				f"{held}: set GPU_PREFETCH=1, report it")
		self.pending, self.checked = [], self.checked + len(self.pending)
		if total: self.log.line(f"data_verify: {self.checked} batches, unchanged in use")

# === DATA ===
CRC = 0xFFFFFFFF  # the low 32 bits
SPANS_A_STEP = 8  # the challenge's order: a step is 8 spans of TRAIN_BATCH_TOKENS / 8 + 1 tokens
MAGIC_VERSION, HEADER_BYTES, TOKEN_BYTES = (20240520, 1), 1024, 2	# of a shard
EDGE_TOKENS = 32_768  # at both ends of a shard, held against the vocabulary
STALE_SECONDS = 30    # without a sign of life a producer is dead
QUICKSTART, DOWNLOAD = "data/quickstart.py", "data/cached_challenge_fineweb.py --variant sp1024"
def shard_tokens(path):
	"""The token count of a shard; RunError unless magic, version, count and size are right."""
	try:
		with open(path, "rb") as file: header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
	except OSError as error: raise RunError(f"{path}: {error.strerror}: make it readable, or remove it") from error
	magic, version, count = np.frombuffer(header.ljust(12, b"\0")[:12], dtype="<i4").tolist()
	whole = HEADER_BYTES + TOKEN_BYTES * count
	if (magic, version) == MAGIC_VERSION and 0 < count and size == whole: return count
	raise RunError(f"{path}: magic {magic}, version {version} (not {MAGIC_VERSION}), {size} bytes ({count} tokens need "
		f"{whole}): no whole shard: delete it, fetch or make it again")
def read_json(path):
	"""What a JSON file holds; {} where there is none."""
	with suppress(OSError, ValueError): return dict(json.loads(path.read_text(encoding="utf-8")))
	return {}
def promised(folder, split):
	"""How many shards the manifest promises; 0: it says nothing."""
	with suppress(KeyError, TypeError):
		sets = {d["name"]: d["stats"] for d in read_json(folder / "../../manifest.json")["datasets"] if "stats" in d}
		return sets[folder.resolve().name][f"files_{split}"]
	return 0
def producing(folder):
	"""What the producer at work in a folder (a download, a tokenizer) last said; {}: there is none."""
	state = read_json(folder / ".producing")
	return {"error": "has died"} | state if time.time() - state.get("time", math.inf) > STALE_SECONDS else state

class Shards:
	"""The tokens of one split: its files in name order, one stream that begins again after its end. While a producer is
	at work, training shards join in the order of their numbers as they appear."""
	def __init__(self, folder, split, log=None, stall_seconds=60.0):
		self.folder, self.log, self.stall_seconds, self.awaited = Path(folder), log, stall_seconds, None
		self.growing = split == "train" and "error" not in (producing(self.folder) or "error")
		paths = self.folder.glob(f"fineweb_{split}_*.bin")
		if self.growing: paths = itertools.takewhile(Path.exists, map(self.numbered, itertools.count()))
		self.paths, self.ends = [], [0]
		for path in sorted(paths): self.add(path)
	@property
	def total(self): return sys.maxsize if self.growing else self.ends[-1]
	def numbered(self, i): return self.folder / f"fineweb_train_{i:06d}.bin"
	def add(self, path):
		self.ends.append(self.ends[-1] + shard_tokens(path))
		self.paths.append(path)
	def await_token(self, token, reader):
		"""In the reader thread: returns once `token` is on disk, or the set complete. RunError if the producer has failed,
		died, or stands still."""
		moved = time.monotonic()
		while self.growing and token >= self.ends[-1] and not reader.closed:
			state, path, still_s = producing(self.folder), self.numbered(len(self.paths)), time.monotonic() - moved
			if path.exists(): self.add(path)
			elif self.paths and (not state or state.get("shards_promised") == len(self.paths)): self.growing = False
			elif not state or "error" in state or still_s > self.stall_seconds:
				raise RunError(f"{path} will not come: its producer {state.get('error', 'stands still')}")
			else:
				if state.get("progress") != self.growing: moved, self.growing = time.monotonic(), state.get("progress") or True
				if path != self.awaited: self.log.say("stall", "waiting for {}: it is being made", shard=str(path))
				self.awaited = path
				time.sleep(0.05)
	def pieces(self, first, count):
		"""Tokens [first, first + count) of the stream as (file index, byte offset, tokens)."""
		while count > 0:
			position = first % self.total
			index = bisect.bisect_right(self.ends, position) - 1
			taken = min(count, self.ends[index + 1] - position)
			yield index, HEADER_BYTES + TOKEN_BYTES * (position - self.ends[index]), taken
			first, count = first + taken, count - taken

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
				if (worst := max(ids[:EDGE_TOKENS].max(), ids[-EDGE_TOKENS:].max())) >= cfg.vocab_size:
					yield "vocab_size", f"{path} holds token {worst}: set that of its tokenizer, or another DATA_PATH"
	if tokens and cut_val_tokens(cfg, tokens) <= cfg.train_seq_len:  # of val, the last
		yield "train_seq_len", f"the {tokens} val tokens (VAL_TOKENS={cfg.val_tokens}) make no row: set less"
def where_else(cfg, name):
	"""For a missing path: the setting that finds it further up, or how to get data."""
	for parent in Path.cwd().parents:
		if (found := parent / getattr(cfg, name)).exists(): return f"it is further up: set {name.upper()}={found.resolve()}"
	return f"make some: `python3 {QUICKSTART} --prepare-only` prints paths; or fetch it: `python3 {DOWNLOAD}`"
def cut_val_tokens(cfg, total):
	"""Tokens of validation: whole rows, and one more to predict."""
	return (min(total, cfg.val_tokens or total) - 1) // cfg.train_seq_len * cfg.train_seq_len + 1

@dataclass(frozen=True)
class BatchPlan:
	"""The rows of batch k of a rank: arithmetic, no state, so order cannot depend on timing.
	A row is seq_len + 1 tokens; row j begins at token j * seq_len + j // span_rows: none with the last of a span."""
	seq_len: int
	span_rows: int   # in a span
	first_row: int   # of batch 0
	stride: int      # rows from one batch of the rank to its next
	batch_rows: int  # in a full batch
	end_row: int     # of the rank's share; training: never
	@classmethod
	def train(cls, cfg, rank, world_size):
		"""Batch k is micro-step k % accumulation of step k // accumulation."""
		rows = cfg.train_batch_tokens // cfg.train_seq_len
		share = rows // (world_size * cfg.accumulation(world_size))
		return cls(cfg.train_seq_len, rows // SPANS_A_STEP, rank * share, world_size * share, share, sys.maxsize)
	@classmethod
	def val(cls, cfg, tokens, rank, world_size):
		"""Rows floor(S * rank / W) to floor(S * (rank + 1) / W) of the S rows of `tokens` tokens."""
		rows = (tokens - 1) // cfg.train_seq_len
		first, end = rows * rank // world_size, rows * (rank + 1) // world_size
		share = min(cfg.val_batch_rows(world_size), max(1, end - first))
		return cls(cfg.train_seq_len, rows, first, share, share, end)
	def num_batches(self): return -((self.first_row - self.end_row) // self.stride)
	def rows(self, k):
		first = self.first_row + k * self.stride
		return range(first, min(first + self.batch_rows, self.end_row))
	def token(self, row): return row * self.seq_len + row // self.span_rows
	def tokens(self, rows):
		"""(first token, tokens) of a batch: one stretch of the stream."""
		return self.token(rows.start), self.token(rows.stop - 1) + self.seq_len + 1 - self.token(rows.start)
	def last_token(self, rows):
		"""Of the rows' step: for it all ranks wait alike, in their readers and not in a collective."""
		step_rows = SPANS_A_STEP * self.span_rows
		return self.token((rows.start // step_rows + 1) * step_rows - 1) + self.seq_len
	def segments(self, rows):
		"""The batch cut where spans end: (row within the batch, rows, token within the batch)."""
		ends = range((rows.start // self.span_rows + 1) * self.span_rows, rows.stop, self.span_rows)
		cuts = [rows.start, *ends, rows.stop]
		return [(a - rows.start, b - a, self.token(a) - self.token(rows.start)) for a, b in zip(cuts, cuts[1:])]
def data_crc(plan, rows, tokens):
	"""Sum of crc32 of rows, each started with its number: the same for any ranks and accumulation."""
	data, step, size = memoryview(tokens).cast("B"), TOKEN_BYTES * plan.seq_len, TOKEN_BYTES * (plan.seq_len + 1)
	starts = [(TOKEN_BYTES * begin + i * step, rows.start + row + i & CRC)
		for row, count, begin in plan.segments(rows) for i in range(count)]
	return sum([zlib.crc32(data[start:start + size], row) for start, row in starts]) & CRC
def widen(x, y, tokens, segments):
	"""uint16 tokens -> int64 x, y (rows, T); numpy arrays in the reader thread, or tensors on the device."""
	T = x.shape[1]
	for row, rows, begin in segments:
		x[row:row + rows] = tokens[begin:begin + rows * T].reshape(rows, T)
		y[row:row + rows] = tokens[begin + 1:begin + 1 + rows * T].reshape(rows, T)

class Overlap(NamedTuple):
	"""The overlap of a split in effect: its settings, less what rules them out."""
	prefetch: bool     # off: read when asked for
	queue: int         # host batches ready
	copy_stream: bool  # off: uploads queue on the compute stream
	device_slots: int  # batches on the device; 0: CPU
	words: str         # for the log, with reasons
	@classmethod
	def of(cls, cfg, split, cuda):
		on, depth, stream = (getattr(cfg, split + name) for name in ("_prefetch", "_prefetch_queue", "_copy_stream"))
		off = "(timing_breakdown)" * cfg.training_timing_breakdown
		why, stream_why = off * on, (off or "(no_cuda)" * (not cuda)) * stream
		on, stream = on and not why, stream and not stream_why
		slots = int(cuda and (cfg.gpu_prefetch if on else 1))
		words = f"prefetch:{on}{why} copy_stream:{stream}{stream_why} prefetch_queue:{depth if on else '0(prefetch_off)'}"
		if split == "val": words = f"overlap:{on or stream} {words} bytecount_device:{cfg.val_bytecount_device}"
		why = "(no_cuda)" if not cuda else "(prefetch_off)" if slots != cfg.gpu_prefetch else ""
		return cls(on, depth if on else 1, stream, slots, f"{words} gpu_prefetch:{slots}{why}")

# x, y (rows, T) int64, valid until the next call (CUDA: the GPU_PREFETCH-th), and what `digest` said of them.
Batch = tuple[Tensor, Tensor, int]

class Slot:
	"""One batch: uint16 tokens and, where handed out, int64 x and y, each its own tensor."""
	def __init__(self, plan, device, *, pinned=False, widened=True):
		size, rows = plan.batch_rows * plan.seq_len + plan.batch_rows // plan.span_rows + 2, plan.batch_rows * widened
		self.full, self.tokens = rows, torch.empty(size, dtype=torch.uint16, device=device, pin_memory=pinned)
		self.x, self.y = (torch.zeros(rows, plan.seq_len, dtype=torch.int64, device=device) for _ in "xy")
	def batch(self):
		x, y = (self.x, self.y) if self.rows == self.full else (self.x[:self.rows], self.y[:self.rows])
		return x, y, self.digest

class HostHandOut:
	"""The CPU's last stage: a host slot itself is handed out, free again at the next call."""
	ahead = bytes_copied = 0
	wait_ms = copy_ms = 0.0  # wait_ms: the sum of waits_ms, the input waits
	def __init__(self): self.pending, self.waits_ms = deque(), []  # host slots in use
	def ask(self): pass
	def close(self): pass
	def waited(self, ms):
		self.waits_ms.append(ms)
		self.wait_ms += ms
	host_waited = waited
	def submit(self, slot): self.pending.append(slot)
	def recycle(self, block=False):
		"""Host slots no longer needed; block: at least one."""
		return [self.pending.popleft() for _ in range(len(self.pending))]
	def hand_out(self): return self.pending[-1].batch()

class DeviceRing(HostHandOut):
	"""CUDA's last stage: a ring of device slots, written on the copy stream, read on the compute stream.
	`ready`: the tokens have arrived; `free`: they have been read. A wait for an event never recorded passes at once, one
	for a re-recorded event meets the old record: so `free` is recorded at construction, and copy j refused until `free`
	of copy j - depth was recorded. x and y are valid until the depth-th later call."""
	def __init__(self, plan, overlap, device, spans=Spans()):
		super().__init__()
		self.depth, self.ahead, self.submitted, self.handed = overlap.device_slots, overlap.device_slots - 1, 0, 0
		self.spans, self.compute = spans, torch.cuda.current_stream(device)
		self.copy = torch.cuda.Stream(device) if overlap.copy_stream else self.compute
		self.slots = [Slot(plan, device) for _ in range(self.depth)]
		for slot in self.slots:
			slot.ready, slot.free = torch.cuda.Event(), torch.cuda.Event()
			slot.free.record(self.compute)
		self.idle = deque()  # (asked, fed) events
	def ask(self):
		"""An event where the compute stream begins to wait; adds up the waits that have passed, waits for none."""
		while self.idle and self.idle[0][1].query():
			asked, fed = self.idle.popleft()
			self.waited(asked.elapsed_time(fed))
		self.asked, self.fed = timed_event(), timed_event()
		self.asked.record(self.compute)
	def submit(self, slot):
		"""The one crossing from host to device: uploads a slot, two bytes a token. The host does not wait."""
		if self.submitted - self.handed >= self.depth:
			raise RuntimeError(f"copy {self.submitted} would overwrite a batch that was not handed out yet")
		target = self.slots[self.submitted % self.depth]
		with torch.cuda.stream(self.copy):
			self.copy.wait_event(target.free)
			slot.begun.record(self.copy)
			with self.spans("h2d", COPY): target.tokens[:slot.size].copy_(slot.tokens[:slot.size], non_blocking=True)
			target.ready.record(self.copy)
			slot.copied.record(self.copy)
		target.rows, target.segments, target.digest = slot.rows, slot.segments, slot.digest
		self.pending.append(slot)
		self.submitted, self.bytes_copied = self.submitted + 1, self.bytes_copied + TOKEN_BYTES * slot.size
	def recycle(self, block=False):
		if block: self.pending[0].copied.synchronize()  # synchronisation point: every host slot waits
		done = []
		while self.pending and self.pending[0].copied.query():
			done.append(self.pending.popleft())
			self.copy_ms += done[-1].begun.elapsed_time(done[-1].copied)
		return done
	def hand_out(self):
		"""The compute stream waits for the copy, widens it, marks the slot free; the host waits for nothing."""
		slot = self.slots[self.handed % self.depth]
		self.compute.wait_event(slot.ready)
		self.fed.record(self.compute)
		self.idle.append((self.asked, self.fed))
		widen(slot.x, slot.y, slot.tokens, slot.segments)
		slot.free.record(self.compute)
		self.handed += 1
		return slot.batch()
	def host_waited(self, ms): pass  # the device may be busy: events tell when it was idle
	def close(self): self.copy.synchronize()  # synchronisation point: no copy outlives its slots

class Pipeline:
	"""The one path of tokens: shard files -> reader thread -> host slots -> device slots -> x, y; batches 0, 1, 2, ...
	The reader reads exactly this rank's bytes, calls digest(plan, rows, tokens) and does no CUDA work: the main thread
	iterates, and so issues copies. The reader's error is raised as RunError, after the good batches."""
	def __init__(self, shards, plan, overlap, rt, *, name, digest, stall_seconds, spans=Spans()):
		self.shards, self.plan, self.overlap, self.digest, self.end = shards, plan, overlap, digest, plan.num_batches()
		self.name, self.spans, self.stall_seconds = name, spans, stall_seconds
		self.who = f"rank {rt.rank}: the {name} reader"
		self.stage = DeviceRing(plan, overlap, rt.device, spans) if overlap.device_slots else HostHandOut()
		self.filled = self.taken = self.handed = self.late_copies = self.bytes_read = 0
		self.host_waits_ms, self.crossings = [], []  # of each batch; batches in a new shard or epoch
		self.read_ms, self.busy_ms, self.place = 0.0, 0.0, None  # of the reader; (epoch, shard)
		self.free = queue.SimpleQueue()   # slots for the reader to fill; None: it has to go
		self.ready = queue.SimpleQueue()  # slots from the reader; None: nothing more will come
		self.spare, self.due = [], overlap.queue * overlap.prefetch  # slots at rest; how many it may fill yet
		self.doing = math.inf, "no file", 0  # in a read since, file, offset
		self.opened, self.file = None, io.BytesIO()  # the reader's open shard
		self.error, self.closed, self.host_slots = None, False, overlap.queue + max(1, overlap.device_slots)
		for _ in range(self.host_slots):
			self.spare.append(slot := Slot(plan, torch.device("cpu"), pinned=rt.cuda, widened=not overlap.device_slots))
			slot.host = [part.numpy() for part in (slot.tokens, slot.x, slot.y)]
			if overlap.device_slots: slot.begun, slot.copied = timed_event(), timed_event()
		self._feed([], 0)
		self.thread = threading.Thread(target=self._read_all, name=f"{name} reader", daemon=True)
		self.thread.start()
	def _read_all(self):
		try:
			for k in range(self.end):
				if (slot := self.free.get()) is None or self.closed: break
				self._fill(slot, k)
				self.ready.put(slot)
				self.filled += 1
				self._advise(k + 1 + self.overlap.queue)
		except BaseException as error: self.error = error  # all: or the consumer would wait for ever
		finally: self.ready.put(None), self.file.close()
	def _fill(self, slot, k):
		rows = self.plan.rows(k)
		self.shards.await_token(self.plan.last_token(rows), self)
		started, (first, slot.size), begin = now(), self.plan.tokens(rows), 0
		slot.rows, slot.segments, tokens = len(rows), self.plan.segments(rows), slot.host[0][:slot.size]
		with self.spans("disk_read", self.thread.name):
			for index, offset, count in self.shards.pieces(first, slot.size):
				self._enter(k, (first + begin) // self.shards.total, index)
				self._read(index, offset, memoryview(tokens[begin:begin + count]).cast("B"))
				begin += count
		self.read_ms += 1e3 * (now() - started)
		slot.digest = self.digest(self.plan, rows, tokens)
		if not self.overlap.device_slots:  # on the CPU the reader does it
			widen(*slot.host[1:], tokens, slot.segments)
		self.busy_ms += 1e3 * (now() - started)
	def _enter(self, k, epoch, index):
		if self.place and self.place != (epoch, index):
			self.spans.instant("shard_boundary" if self.place[0] == epoch else "epoch", self.thread.name)
			self.crossings.append(k)
		self.place = epoch, index
	def _read(self, index, offset, out):
		"""Exactly len(out) bytes; a file that shrank is an error (mapped: a crash)."""
		done, file = 0, self._open(index, offset)
		file.seek(offset)
		while done < len(out):
			count = file.readinto(out[done:])
			if not count: raise EOFError(f"it ends at byte {offset + done}, {len(out) - done} short: it changed")
			done += count
		self.bytes_read, self.doing = self.bytes_read + done, (math.inf, *self.doing[1:])
	def _open(self, index, offset):
		self.doing = time.monotonic(), self.shards.paths[index], offset
		if self.opened != index:
			self.opened = self.file.close()
			self.opened, self.file = index, open(self.shards.paths[index], "rb", buffering=0)
		return self.file
	def _advise(self, k):
		"""Has the kernel read batch k ahead."""
		if k >= self.end or not hasattr(os, "posix_fadvise") or self.shards.growing: return
		with suppress(OSError):
			for index, offset, count in self.shards.pieces(*self.plan.tokens(self.plan.rows(k))):
				os.posix_fadvise(self._open(index, offset).fileno(), offset, TOKEN_BYTES * count, os.POSIX_FADV_WILLNEED)
		self.doing = math.inf, *self.doing[1:]
	def _feed(self, slots, more):
		"""Takes back unused slots, and hands the reader as many as it may fill."""
		self.spare, self.due = self.spare + slots, self.due + more
		while self.due and self.spare:
			self.due -= 1
			self.free.put(self.spare.pop(0))
	def _take(self):
		"""The next host batch; a wait has a bound."""
		self._feed(self.stage.recycle(), not self.overlap.prefetch)
		while self.ready.empty() and self.stage.pending:  # the device is busy with what its copies wait for
			self._feed(self.stage.recycle(block=True), 0)
		started = now()
		with self.spans("input_wait", HOST): slot = self._await()
		self._feed([], self.overlap.prefetch)
		self.taken += 1
		self.host_waits_ms.append(1e3 * (now() - started))
		self.stage.host_waited(self.host_waits_ms[-1])
		return slot
	def where(self): return f"{self.doing[1]} at byte {self.doing[2]}"
	def _await(self):
		while True:
			try: slot = self.ready.get(timeout=0.2)
			except queue.Empty:
				if time.monotonic() - self.doing[0] < self.stall_seconds: continue
				raise RunError(f"{self.who} has waited for {self.where()} for over DATA_STALL_SECONDS="
					f"{shown(self.stall_seconds)}: move DATA_PATH to a local disk") from None
			if slot is not None: return slot
			self.ready.put(None)
			what = self.error if isinstance(self.error, RunError) else f"{self.where()}: {self.error!r}"
			raise RunError(f"{self.who} failed on {what}") from self.error
	def __iter__(self): return self
	def __next__(self):
		"""The next batch; uploads of later ones that were read are issued too."""
		if self.handed >= self.end: raise StopIteration
		self.stage.ask()
		if self.taken == self.handed:
			self.late_copies += bool(self.handed and self.overlap.device_slots)
			self.stage.submit(self._take())
		batch = self.stage.hand_out()
		self.handed += 1
		while self.taken < min(self.filled, self.handed + self.stage.ahead):
			self.stage.submit(self._take())
		self.spans.handed(self)
		return batch
	def close(self):
		"""Ends the reader within a second; one stuck in a read is left."""
		self.closed = True
		self.free.put(None)
		self.thread.join(timeout=0.8)
		self.stage.close()

# === MODEL ===
class Linear(nn.Linear):
	"""A float32 weight, no bias, cast to the activation's dtype at use: from torch 2.12 on autocast computes rms_norm,
	and with it the residual stream, in float32 (pytorch/pytorch PR 174824)."""
	def __init__(self, fan_in, fan_out, zero=False):
		super().__init__(fan_in, fan_out, bias=False)
		if zero: nn.init.zeros_(self.weight)
	def forward(self, x): return F.linear(x, self.weight.to(x.dtype))
def rms_norm(x): return F.rms_norm(x, (x.size(-1),))
def rotate(x, rotary):
	"""Rotary positions (arXiv:2104.09864), halves of a head paired: x (B, heads, T, d), rotary (2, T, d / 2)."""
	(cos, sin), (left, right) = rotary.to(x.dtype), x.chunk(2, dim=-1)
	return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)

class Attention(nn.Module):
	"""Causal attention: grouped queries, rms norm on queries and keys, a gain for each query head."""
	def __init__(self, cfg):
		super().__init__()
		D, self.gqa = cfg.model_dim, cfg.num_heads != cfg.num_kv_heads
		self.head_dim = D // cfg.num_heads
		self.c_q, self.proj = Linear(D, D), Linear(D, D, zero=True)
		self.c_k, self.c_v = (Linear(D, cfg.num_kv_heads * self.head_dim) for _ in "kv")
		self.q_gain = nn.Parameter(torch.full((cfg.num_heads,), cfg.qk_gain_init))
	def forward(self, x, rotary):
		q, k, v = (c(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for c in (self.c_q, self.c_k, self.c_v))
		q = rotate(rms_norm(q), rotary) * self.q_gain.to(q.dtype)[:, None, None]  # (B, heads, T, head_dim)
		y = F.scaled_dot_product_attention(q, rotate(rms_norm(k), rotary), v, is_causal=True, enable_gqa=self.gqa)
		return self.proj(y.transpose(1, 2).flatten(2))

class Block(nn.Module):
	"""Attention and the MLP down(relu(up x)^2) (arXiv:2109.08668), scaled by channel; the embedding x0 is mixed in."""
	def __init__(self, cfg):
		super().__init__()
		D, hidden, ones = cfg.model_dim, cfg.mlp_mult * cfg.model_dim, torch.ones(cfg.model_dim)
		self.attn = Attention(cfg)
		self.mlp = nn.ModuleDict({"fc": Linear(D, hidden), "proj": Linear(hidden, D, zero=True)})
		self.attn_scale, self.mlp_scale = nn.Parameter(ones.clone()), nn.Parameter(ones.clone())
		self.resid_mix = nn.Parameter(torch.stack((ones, 0 * ones)))
	def forward(self, x, x0, rotary):
		mix = self.resid_mix.to(x.dtype)
		x = mix[0] * x + mix[1] * x0
		x = x + self.attn_scale.to(x.dtype) * self.attn(rms_norm(x), rotary)
		return x + self.mlp_scale.to(x.dtype) * self.mlp.proj(F.relu(self.mlp.fc(rms_norm(x))).square())

class GPT(nn.Module):
	"""The challenge's baseline: the first half of the blocks pushes its outputs, the second half adds them back."""
	def __init__(self, cfg, dtype):
		super().__init__()
		self.dtype, self.logit_softcap, self.num_encoder = dtype, cfg.logit_softcap, cfg.num_layers // 2
		self.tok_emb = nn.Embedding(cfg.vocab_size, cfg.model_dim)
		self.skip_weights = nn.Parameter(torch.ones(self.num_encoder, cfg.model_dim))
		self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.num_layers))
		self.lm_head = None if cfg.tie_embeddings else Linear(cfg.model_dim, cfg.vocab_size, zero=True)
		if cfg.tie_embeddings: nn.init.normal_(self.tok_emb.weight, std=cfg.tied_embed_init_std)
		channels = torch.arange(0, cfg.model_dim // cfg.num_heads, 2) / (cfg.model_dim // cfg.num_heads)
		angle = torch.outer(torch.arange(cfg.train_seq_len).float(), cfg.rope_base ** -channels)
		self.register_buffer("rotary", torch.stack((angle.cos(), angle.sin())), persistent=False)
	def forward(self, x, y):
		"""Mean cross-entropy in nats, a float32 scalar, of predicting y from x, both (B, T)."""
		x, skips = rms_norm(self.tok_emb(x).to(self.dtype)), []  # (B, T, D)
		x0 = x
		for i, block in enumerate(self.blocks):
			if i >= self.num_encoder and skips: x = x + self.skip_weights[i - self.num_encoder].to(x.dtype) * skips.pop()
			x = block(x, x0, self.rotary)
			if i < self.num_encoder: skips.append(x)
		head = self.tok_emb.weight if self.lm_head is None else self.lm_head.weight
		logits = F.linear(rms_norm(x), head.to(x.dtype))
		logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
		return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

def compiled(model, log):
	"""`model` through torch.compile; eager, with one warning, where that cannot work."""
	calls = [torch.compile(model, dynamic=False, fullgraph=True), model]
	def call(x, y):
		try: return calls[0](x, y)
		except (torch._dynamo.exc.TorchDynamoException, ImportError, OSError) as error:
			if calls.pop(0) is model: raise
			log.line(f"warning: torch.compile does not work here, so without it: {first_line(error)}")
			return model(x, y)
	return call

# === OPTIMIZERS ===
def newton_schulz(matrices, iterations, dtype):
	"""(n, rows, cols) -> about the nearest semi-orthogonal: Muon's quintic iteration in `dtype`
	(Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""
	tall = matrices.size(-2) > matrices.size(-1)
	x = (matrices.mT if tall else matrices).to(dtype)
	x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
	for _ in range(iterations):
		gram = x @ x.mT
		x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
	return x.mT if tall else x

class FlatParameters:
	"""All parameters, and all gradients, as one float32 vector each (every Parameter and .grad is a view): one reduction
  a step. `tail` more elements carry the control vector."""
	def __init__(self, groups, tail):
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
	"""Muon on the blocks' matrices; Adam on embedding, head and all that is small."""
	def __init__(self, model, cfg, tail):
		self.cfg, self.muon_dtype = cfg, torch.bfloat16 if model.skip_weights.is_cuda else torch.float32
		banks, small = defaultdict(list), [model.skip_weights] if model.num_encoder else []
		for name, p in model.blocks.named_parameters():
			(small if p.ndim != 2 or named(name, cfg.control_tensor_name_patterns) else banks[p.shape]).append(p)
		adam = [([model.tok_emb.weight], cfg.tied_embed_lr if cfg.tie_embeddings else cfg.embed_lr),
			([model.lm_head.weight] if model.lm_head else [], cfg.head_lr), (small, cfg.scalar_lr)]
		adam = [(group, lr) for group, lr in adam if group]
		self.flat = FlatParameters([*banks.values(), *(group for group, _ in adam)], tail)
		self.banks = [(values.view(-1, *shape), grads.view(-1, *shape))  # (n, rows, cols)
			for shape, (values, grads) in zip(banks, self.flat.groups)]
		self.averages = [torch.zeros_like(values) for values, _ in self.banks]
		groups = []
		for (values, grads), (_, lr) in zip(self.flat.groups[len(banks):], adam):
			(vector := nn.Parameter(values)).grad = grads
			groups.append({"params": [vector], "lr": lr, "base_lr": lr})
		self.adam = torch.optim.Adam(groups, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
	def clip(self):
		if (limit := self.cfg.grad_clip_norm) > 0:
			self.flat.grads.mul_((limit / (self.flat.grads.norm() + 1e-6)).clamp(max=1.0))
	@torch.no_grad()
	def step(self, lr_scale, momentum):
		"""One update from the reduced gradients; Muon's is scaled by sqrt(max(1, rows / cols))."""
		for (values, grads), average in zip(self.banks, self.averages):
			average.mul_(momentum).add_(grads)
			update = newton_schulz(grads.add(average, alpha=momentum), self.cfg.muon_backend_steps, self.muon_dtype)
			scale = max(1.0, values.size(-2) / values.size(-1)) ** 0.5
			values.add_(update, alpha=-self.cfg.matrix_lr * lr_scale * scale)
		for group in self.adam.param_groups: group["lr"] = group["base_lr"] * lr_scale
		self.adam.step()
	def snapshot(self): return copy.deepcopy((self.flat.values, self.averages, self.adam.state_dict()))
	def restore(self, saved):
		for mine, theirs in zip([self.flat.values, *self.averages], [saved[0], *saved[1]]): mine.copy_(theirs)
		self.adam.load_state_dict(copy.deepcopy(saved[2]))  # it would change the saved tensors

def named(name, patterns): return any(part in name for part in patterns.split(",") if part)
def lr_multiplier(cfg, step, elapsed_ms):
	"""The learning rate's factor at a step (from 0): 1, then linearly to 0 at the last step or the cap."""
	if cfg.warmdown_iters == 0: return 1.0
	if cfg.max_wallclock_seconds <= 0: return min(1.0, (cfg.iterations - step) / cfg.warmdown_iters)
	remaining_ms = max(0.0, 1e3 * cfg.max_wallclock_seconds - elapsed_ms)
	return min(1.0, remaining_ms * max(step, 1) / max(cfg.warmdown_iters * elapsed_ms, 1e-9))
def muon_momentum(cfg, step):
	"""Linear from MUON_MOMENTUM_WARMUP_START to MUON_MOMENTUM over the warm-up steps."""
	share = 1.0 if step >= cfg.muon_momentum_warmup_steps else step / cfg.muon_momentum_warmup_steps
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
	"""Of each token id: UTF-8 bytes without a leading space; has it one (counted unless the token before is a
	boundary)? is it a boundary (control, unknown, unused)? numpy arrays or tensors."""
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
	"""The validation split: nats from the model, bytes from the tokens alone: counted once."""
	def __init__(self, cfg, rt, log, verify):
		self.cfg, self.rt, self.log, self.verify, self.shards = cfg, rt, log, verify, Shards(cfg.data_path, "val")
		self.tokens, self.bytes, self.table = cut_val_tokens(cfg, self.shards.total), 0, ByteTable.load(cfg.tokenizer_path)
		self.plan = BatchPlan.val(cfg, self.tokens, rt.rank, rt.world_size)
		self.overlap = Overlap.of(cfg, "val", rt.cuda)
		on_device = ByteTable(*(torch.from_numpy(part).to(rt.device) for part in self.table))
		self.device_table = on_device if cfg.val_bytecount_device == "cuda" else None
	def host_bytes(self, plan, rows, tokens):
		"""Runs in the reader thread, behind the first validation."""
		return 0 if self.bytes or self.device_table else int(self.table.count(tokens[:-1], tokens[1:]))
	@torch.no_grad()
	def evaluate(self, loss_of, scope, compiles, spans):
		"""(nats a token, bits per byte, milliseconds); waits for the device only where it says so."""
		every, log, seen, batches = self.cfg.val_progress_log_every, self.log, 0, self.plan.num_batches()
		sums, started = torch.zeros(2, dtype=torch.float64, device=self.rt.device), now()  # nats, bytes
		told, foretell = started, forecast(self.rt, log, f"{scope}: {batches} batches", batches, compiles=compiles)
		pipeline = Pipeline(self.shards, self.plan, self.overlap, self.rt, name="val", spans=spans,
			digest=self.verify.digest(self.host_bytes), stall_seconds=self.cfg.data_stall_seconds)
		with closing(pipeline), spans("validate"):
			next(foretell)
			for done, batch in enumerate(pipeline, 1):
				x, y, digest = batch
				with spans("forward"): sums[0] += loss_of(x, y).double() * y.numel()
				sums[1] += self.device_table.count(x, y) if self.device_table and not self.bytes else digest & CRC
				self.verify.consumed(pipeline, batch, done)
				seen, at = seen + y.numel(), f"{scope} batch {done}/{batches}"
				next(foretell), next(foretell)
				if every and done % every == 0:  # a synchronisation point
					log.line(f"val_progress:{at} partial_mean_loss:{sums[0].item() / seen:.4f} tokens_seen:{seen}")
				if now() - told > 30: told = log.console(f"({at})") or now()
		nats, counted = self.rt.all_reduce(sums).tolist()  # synchronisation point: the end of a validation
		self.verify.settle()
		self.bytes = self.bytes or int(counted)
		return nats / (self.tokens - 1), nats / math.log(2) / self.bytes, 1e3 * (now() - started)

# === ARTIFACT ===
CAP_BYTES = 16_000_000  # of script and artifact together
SMALL_ELEMENTS, CLIP_QUANTILE, QUANT_FORMAT = 65_536, 0.9999984, "int8_clean_per_row_v1"
def quantize(t):
	"""Float tensor -> (int8 of its shape, scale): float16 (rows,) for a matrix, else a float32 scalar."""
	t, matrix = t.float(), t.ndim == 2
	clip = torch.quantile(t.abs(), CLIP_QUANTILE, dim=1 if matrix else None, keepdim=True)
	scale = (clip / 127).clamp(min=1 / 127) if matrix else torch.where(clip > 0, clip / 127, 1.0)
	q = (t.clamp(-clip, clip) / scale).round().clamp(-127, 127).to(torch.int8)
	return q, scale[:, 0].half() if matrix else scale.view(())
def dequantize(q, scale):
	"""The inverse of quantize() up to half a scale, in float32."""
	return q.float() * scale.float().view(-1, *[1] * (q.ndim - 1))
def saved(thing):
	"""A torch file, as bytes."""
	torch.save(thing, buffer := io.BytesIO())
	return buffer.getvalue()
def pack(state, cfg):
	"""(the artifact, bytes of its tensors, bytes of the torch file in it) of tensors on the CPU, each its own."""
	parts = quantized, scales, dtypes, kept, meta, originals = [{} for _ in range(6)]
	for name, t in state.items():
		dtype, real = str(t.dtype).removeprefix("torch."), t.is_floating_point()
		if real and t.numel() > SMALL_ELEMENTS:
			(quantized[name], scales[name]), dtypes[name] = quantize(t), dtype
			if t.ndim == 2: meta[name] = {"scheme": "per_row", "axis": 0}
		elif real and not named(name, cfg.int8_keep_float_fp32_name_patterns):
			kept[name], originals[name] = t.half(), dtype
		else: kept[name] = t.float() if real else t
	names = "quantized", "scales", "dtypes", "passthrough", "qmeta", "passthrough_orig_dtypes"
	raw = saved({"__quant_format__": QUANT_FORMAT, **dict(zip(names, parts))})
	payload = sum(t.nbytes for part in (quantized, scales, kept) for t in part.values())
	return zlib.compress(raw, 9), payload, len(raw)
def unpack(data, expected):
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
		pairs = {name: (q, file["scales"][name]) for name, q in file["quantized"].items()}
		if any(scale.shape not in ((), q.shape[:1]) for q, scale in pairs.values()): raise ValueError("its scales misfit")
		return {name: dequantize(*pair) for name, pair in pairs.items()} | {
			name: t.to(expected[name].dtype) for name, t in file["passthrough"].items()}
	except Exception as error:  # whatever a damaged or hostile file raises, people get one line
		raise RunError(f"the artifact cannot be loaded: {type(error).__name__}: {first_line(error)}") from error

# === TRAINING ===
class Run:
	"""The model and all that trains it; the same weights on every rank, from SEED."""
	def __init__(self, cfg, rt, log):
		torch.manual_seed(cfg.seed)
		self.cfg, self.rt, self.log, self.clock = cfg, rt, log, Clock(rt)
		self.accumulation = cfg.accumulation(rt.world_size)
		self.step_tokens = cfg.train_batch_tokens + SPANS_A_STEP  # read by one step
		self.model = GPT(cfg, rt.dtype).to(rt.device)
		self.compiles = cfg.torch_compile == "1" or cfg.torch_compile == "auto" and rt.cuda
		self.loss_of = compiled(self.model, log) if self.compiles else self.model
		self.optimizers = Optimizers(self.model, cfg, tail=5 + rt.world_size)
		self.control = Control(self.optimizers.flat.tail, rt)
		self.shards = Shards(cfg.data_path, "train", log, cfg.data_stall_seconds)
		self.overlap, self.plan = Overlap.of(cfg, "train", rt.cuda), BatchPlan.train(cfg, rt.rank, rt.world_size)
		self.verify = Verify(log) if cfg.data_verify else Unverified()
		self.validation, self.partial = Validation(cfg, rt, log, self.verify), " partial_val:1" * (cfg.val_tokens > 0)
		self.logged = 0, 0.0, [0.0] * rt.world_size  # step, clock and input waits of the last training line
	def batches(self, spans=Spans()):
		return Pipeline(self.shards, self.plan, self.overlap, self.rt, name="train", spans=spans,
			digest=self.verify.digest(data_crc), stall_seconds=self.cfg.data_stall_seconds)
	def instruments(self):
		"""What listens to measured steps: a breakdown, rank 0's trace, nothing."""
		c = self.cfg
		kind = Breakdown if c.training_timing_breakdown else Trace if c.trace_steps and self.rt.rank == 0 else None
		return kind(c, self.rt, self.log) if kind else Spans()

def train_step(run, batches, step, elapsed_ms, crc, foretell):
	"""Fetch, forward, backward, reduce, update. elapsed_ms: agreed; crc: this rank's data_crc, returned."""
	spans, loss_share = batches.spans, torch.zeros((), device=run.rt.device)
	run.optimizers.flat.reduced.zero_()
	for _ in range(run.accumulation):
		next(foretell)
		x, y, digest = batch = next(batches)
		with spans("forward"): loss = run.loss_of(x, y) / (run.accumulation * run.rt.world_size)
		with spans("backward"): loss.backward()
		run.verify.consumed(batches, batch, step + 1)
		loss_share += loss.detach()
		crc = crc + digest & CRC
		next(foretell)
	with spans("reduce"):
		run.control.agree(step, run.optimizers.flat.reduced, loss_share, elapsed_ms=run.clock.now_ms(),
			wait_ms=batches.stage.wait_ms, data_crc=crc)
	with spans("grad_clip"): run.optimizers.clip()
	with spans("optimizer"): run.optimizers.step(lr_multiplier(run.cfg, step, elapsed_ms), muon_momentum(run.cfg, step))
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
	"""A training line; rates since the last one. Synchronisation point: its time has to be true."""
	run.rt.synchronize()
	run.verify.settle()
	c, ms, agreed = run.cfg, run.clock.now_ms(), run.control.read(step - 1)
	(last_step, last_ms, last_waits), cap_s = run.logged, c.max_wallclock_seconds
	since_ms = max(ms - last_ms, 1e-9)
	run.log.say("step", "step:{}/{} train_loss:{:.4f} train_time:{:.0f}ms step_avg:{:.2f}ms tok_s:{:.0f} "
		"input_wait:{:.2f}% data_crc:{} eta:{:.0f}s", step=step, iterations=c.iterations, train_loss=agreed.train_loss,
		train_time_ms=ms, step_avg_ms=ms / step, tok_s=1e3 * (step - last_step) * c.train_batch_tokens / since_ms,
		input_wait_percent=100 * max(a - b for a, b in zip(agreed.wait_ms, last_waits)) / since_ms,
		data_crc=f"{agreed.data_crc:08x}",
		eta_s=max(0, min((c.iterations - step) * ms / step, 1e3 * cap_s - ms if cap_s > 0 else math.inf) / 1e3))
	run.logged = step, ms, agreed.wait_ms

def train(run):
	c, log, clock, step, crc, val_ms, epochs = run.cfg, run.log, run.clock, 0, 0, 0.0, 1
	foretell = forecast(run.rt, log, f"{c.warmup_steps} + {c.iterations} steps", c.warmup_steps + c.iterations,
		pieces=run.accumulation, cap_s=c.max_wallclock_seconds, compiles=run.compiles)
	warm_up(run, foretell)
	with closing(run.instruments()) as spans, closing(run.batches(spans)) as batches:
		clock.start()
		while True:
			# Synchronisation point: the reduction of two steps ago, past unless the host runs far ahead.
			elapsed_ms = run.control.read(step - 2).elapsed_ms if step >= 2 else 0.0
			mean_ms = elapsed_ms / max(step - 1, 1)
			capped = 0 < 1e3 * c.max_wallclock_seconds <= elapsed_ms + 2 * mean_ms and step < c.iterations
			last = capped or step == c.iterations
			if last or c.val_loss_every and step % c.val_loss_every == 0: val_ms += validate(run, step, spans)
			if last: break
			if epochs == 1 and step >= run.shards.total // run.step_tokens:
				epochs = 2
				log.line(f"WARNING: step {step + 1} begins a second epoch: {len(run.shards.paths)} shards, all used up")
			crc = train_step(run, batches, step, elapsed_ms + mean_ms, crc, foretell)
			step += 1
			if step <= 10 or c.train_log_every and step % c.train_log_every == 0: log_step(run, step)
			spans.step_done(step)
		clock.stop()
		if capped: log.line(f"stopping_early: wallclock_cap train_time:{clock.total_ms:.0f}ms step:{step}/{c.iterations}")
		report(run, batches, step, val_ms)
def waits(waits_ms, batches, micro_steps, train_ms):
	"""What a run, and a step of it, has waited; did the worst read from a new shard?"""
	steps = np.reshape(waits_ms, (-1, micro_steps)).sum(1) if waits_ms else np.zeros(1)
	total, worst = float(steps.sum()), int(steps.argmax())
	return dict(total_ms=total, percent=100 * total / (train_ms or 1), median_ms=float(np.median(steps)),
		p99_ms=float(np.percentile(steps, 99)), max_ms=float(steps[worst]), worst_step=worst + 1,
		at_shard_boundary=worst in {k // micro_steps for k in batches.crossings})
def verdict(percent, hidden_percent, prefetch, needed, delivered, awaited=None):
	"""What input cost (percent of training; hidden by overlap), what to do; needed, delivered: MB/s."""
	cost = f"input cost {percent:.2f} % of training"
	if percent < 0.5: return cost + (": overlap settings do not matter here" if hidden_percent < 0.5 else
		f": overlap hides {hidden_percent:.2f} %")
	if not prefetch: return f"{cost}, and nothing overlaps: set TRAIN_PREFETCH=1"
	if awaited: return f"{cost}: shards were still being made"
	if delivered > needed: return f"{cost}, in stalls: raise TRAIN_PREFETCH_QUEUE"
	rates = f"{needed:.3g} MB/s needed, {delivered:.3g} MB/s delivered"
	return f"reads are the limit: {rates}: move DATA_PATH to a local disk"
def report(run, batches, step, val_ms):
	"""What the run and its input have cost; the device is idle."""
	stage, train_ms, cuda, tokens = batches.stage, run.clock.total_ms, run.rt.cuda, step * run.step_tokens
	stage.ask()
	host, device = (waits(w[:batches.handed], batches, run.accumulation, train_ms)
		for w in (batches.host_waits_ms, stage.waits_ms))
	peak = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)] * 2
	if cuda: peak = [torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20]
	percent = 100 * max(run.control.read(step - 1).wait_ms if step else [0.0]) / (train_ms or 1)	# of the slowest rank
	hidden = 100 * (batches.busy_ms + stage.copy_ms) / (train_ms or 1) - device["percent"]
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
def export_and_score(run, code_bytes):
	"""Rank 0 writes the artifact; all ranks decode its very bytes: their score is the run's."""
	log, data = run.log, None
	if run.rt.rank == 0:
		state = {name: t.detach().cpu().clone() for name, t in run.model.state_dict().items()}
		write_atomic(Path("final_model.pt"), model := saved(state))
		data, payload, raw = pack(state, run.cfg)
		write_atomic(Path("final_model.int8.ptz"), data)
		log.say("artifact", "Serialized model: {} bytes\nCode size: {} bytes\nTotal submission size: {} bytes\nSerialized"
			" model int8+zlib: {} bytes (payload:{} raw_torch:{} payload_ratio:{:.2f}x)\nTotal submission size int8+zlib:"
			" {} bytes", model_bytes=len(model), code_bytes=code_bytes, raw_total_bytes=len(model) + code_bytes,
			artifact_bytes=len(data), payload_bytes=payload, raw_torch_bytes=raw,
			payload_ratio=sum(t.nbytes for t in state.values()) / payload, total_bytes=(total := len(data) + code_bytes))
		if total > CAP_BYTES: log.line(f"WARNING: {total} bytes, the challenge's cap is {CAP_BYTES}")
	run.model.load_state_dict(unpack(run.rt.broadcast(data), run.model.state_dict()))
	loss, bpb, ms = run.validation.evaluate(run.loss_of, "final_int8_zlib_roundtrip", False, Spans())
	log.say("score", "final_int8_zlib_roundtrip val_loss:{0:.4f} val_bpb:{1:.4f} eval_time:{2:.0f}ms{3}\n"
		"final_int8_zlib_roundtrip_exact val_loss:{0:.8f} val_bpb:{1:.8f}{3}",
		val_loss=loss, val_bpb=bpb, eval_ms=ms, partial=run.partial)

# === MAIN ===
def log_header(run, source):
	c, log, rt, val, shards, smi = run.cfg, run.log, run.rt, run.validation, run.shards, ""
	with suppress(OSError, subprocess.SubprocessError):
		smi = subprocess.run("nvidia-smi", capture_output=True, text=True, timeout=30).stdout
	rule, found = "=" * 100, len(shards.paths)
	log.file(f"{source}\n{rule}\nRunning Python {sys.version}\nRunning PyTorch {torch.__version__}\n{smi}\n{rule}")
	def of(names): return " ".join(f"{name}:{getattr(c, name)}" for name in names.split())
	sdp = (f"{k}={getattr(torch.backends.cuda, k + '_sdp_enabled')()}" for k in "cudnn flash mem_efficient math".split())
	# No line of the source, which the log begins with, may look like one of these.
	log.line(f"val_bpb:enabled tokenizer_kind={('sentencepiece', 'byte')[c.tokenizer_path.endswith('.json')]} "
		f"tokenizer_path={c.tokenizer_path}\ntrain_loader:dataset:{shards.folder.resolve().name} train_shards:{found}\n"
		f"val_loader:shards pattern={c.data_path}/fineweb_val_*.bin tokens:{val.tokens - 1}{run.partial}\n"
		f"model_params:{sum(p.numel() for p in run.model.parameters())}\n"
		f"world_size:{rt.world_size} grad_accum_steps:{run.accumulation}\nsdp_backends:{' '.join(sdp)}\n"
		f"attention_mode:gqa {of('num_heads num_kv_heads')}\n"
		f"{of('tie_embeddings')} embed_lr:{c.tied_embed_lr if c.tie_embeddings else c.embed_lr} "
		f"head_lr:{0.0 if c.tie_embeddings else c.head_lr} {of('matrix_lr scalar_lr')}\n"
		f"{of('train_batch_tokens train_seq_len iterations warmup_steps')} max_wallclock_seconds:"
		f"{c.max_wallclock_seconds:.3f}\nseed:{c.seed}\ntrain_io:{run.overlap.words}\nval_io:{val.overlap.words}")
	expected = producing(shards.folder).get("shards_promised") or promised(shards.folder, "train")
	if shards.growing: log.line(f"train_shards: {found} of {expected or '?'} so far: their producer is at work")
	elif found < expected: log.line(f"WARNING: train_shards: {found} of {expected}, and nothing brings the others")
	if rt.cuda and rt.dtype == torch.float32: log.line("no native bfloat16 on this GPU: float32")
	log.event("config", **asdict(c))
	log.event("hardware", device=torch.cuda.get_device_name() if rt.cuda else os.uname().machine, cpus=os.cpu_count(),
		torch=torch.__version__, cuda=torch.version.cuda, python=sys.version.split()[0], world_size=rt.world_size)
def out_of_memory(cfg, rt):
	steps, (free, total) = cfg.accumulation(rt.world_size), torch.cuda.mem_get_info()
	return (f"rank {rt.rank}: out of memory at {cfg.train_batch_tokens // (rt.world_size * steps)} tokens a micro-step, "
		f"{free >> 20} of {total >> 20} MiB free: set "
		f"GRAD_ACCUM_STEPS={cfg.fitting_accumulation(rt.world_size, 2 * steps)}")
def execute(cfg, warnings):
	"""The run, to its exit code. A foreseeable failure is one line, any other a traceback."""
	rt, log, code, status, problem = Runtime(), None, 1, "failed", ""
	try:
		rt = Runtime.start(cfg, dict(os.environ))
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
