"""Train a small GPT for the parameter-golf challenge: the best bits per byte in 16,000,000 bytes.

  torchrun --standalone --nproc_per_node=8 train_gpt.py  (eight GPUs, or 1, 2, 4)
  python train_gpt.py  (one process, GPU or CPU)
  python train_gpt.py --help | --print-config  (environment variables | their values)

One pipeline feeds training and validation; off is a setting of it.
Contents: CONFIG, RUNTIME, INSTRUMENTS, DATA, OPERATORS, MODEL, OPTIMIZERS,
EVALUATION, ARTIFACT, CHECKPOINT, TRAINING, MAIN.
"""
import bisect, datetime, faulthandler, gzip, io, json, math, os, pickle, queue, re, resource, select, shlex, signal
import sys, threading, time, uuid, zipfile, zlib
from collections import defaultdict, namedtuple
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter as now

import numpy as np, sentencepiece, torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F

# === CONFIG ===
CONTROLS = "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,skip_weights"
# Kinds of settings: in words; from text to value, or an error.
def within(low, below=2**63):
	kind = type(low)
	return f"{low:g} <= {kind.__name__} < {below:g}", lambda t: next(n for n in [kind(t)] if low <= n < below)
def word(pattern, means=""): return means or pattern.replace("|", " or "), lambda t: re.fullmatch(pattern, t)[0]
whole, count, share = within(0), within(1), within(0.0, 1.0)
number, rate, positive = within(-1e18), within(0.0), within(1e-6)
name, text = word(r"[.-]*\w[\w.-]*", "letters, digits, '.', '_', '-'"), word(r".*\S.*", "a value")
flag = "0 or 1", {"0": False, "1": True}.__getitem__

@dataclass(frozen=True)
class Config:
	"""Units, meanings: README.md."""
	data_path: text = "./data/datasets/fineweb10B_sp1024"
	tokenizer_path: text = "./data/tokenizers/fineweb_1024_bpe.model"
	run_id: name = "random_uuid4"; seed: whole = 1337; val_progress_log_every: whole = 0; train_log_every: whole = 200
	val_batch_size: count = 524_288; val_loss_every: whole = 1000; val_tokens: whole = 0
	iterations: whole = 20_000; warmdown_iters: whole = 1200; warmup_steps: whole = 20
	train_batch_tokens: count = 524_288; train_seq_len: count = 1024; max_wallclock_seconds: number = 600.0
	vocab_size: within(1, 65_537) = 1024; num_layers: count = 9; model_dim: count = 512; num_heads: count = 8
	num_kv_heads: count = 4; mlp_mult: count = 2; tie_embeddings: flag = True; rope_base: positive = 10_000.0
	logit_softcap: positive = 30.0; qk_gain_init: number = 1.5
	embed_lr: rate = 0.6; head_lr: rate = 0.008; tied_embed_lr: rate = 0.05; tied_embed_init_std: rate = 0.005
	matrix_lr: rate = 0.04; muon_momentum: share = 0.95; muon_backend_steps: count = 5
	muon_momentum_warmup_start: share = 0.85; muon_momentum_warmup_steps: whole = 500
	scalar_lr: rate = 0.04; beta1: share = 0.9; beta2: share = 0.95; adam_eps: rate = 1e-8; grad_clip_norm: rate = 0.0
	control_tensor_name_patterns: text = CONTROLS; int8_keep_float_fp32_name_patterns: text = CONTROLS
	train_prefetch: flag = True; train_prefetch_queue: count = 2; train_copy_stream: flag = True
	val_prefetch: flag = True; val_prefetch_queue: count = 2; val_copy_stream: flag = True
	gpu_prefetch: count = 2; val_resident: flag = False; val_bytecount_device: word("cpu|cuda") = "cpu"
	training_timing_breakdown: flag = False; training_timing_every: count = 200; trace_steps: whole = 0
	data_verify: flag = False; data_stall_seconds: positive = 60.0
	checkpoint_every: whole = 0; checkpoint_keep: count = 3; resume: ("", str.strip) = ""
	device: word("auto|cuda|cpu") = "auto"; torch_compile: word("auto|0|1") = "auto"
	grad_accum_steps: ("auto or a count", lambda t: t if t == "auto" else whole[1](t)) = 0
	attention_backend: word("auto|fa3|cudnn|flash|math") = "auto"
	operators: word("auto|0|qkv|mlp") = "auto"
	@classmethod
	def from_environment(cls, env):
		"""(the settings, the default for a wrong one; faults)."""
		values, faults = {"run_id": str(uuid.uuid4())}, []
		for name in filter(env.__contains__, SETTINGS):
			meaning, parse = SETTINGS[name].type
			try: values[name.lower()] = parse(env[name])
			except Exception:  # of any kind
				faults.append(f"{name}={env[name]}: set {meaning}; default is {shown(SETTINGS[name].default)}")
		if values.get("resume") == "auto" and "RUN_ID" not in env: faults.append("RESUME=auto: set RUN_ID")
		return cls(**values), faults
	def accumulation(self, W):
		return max(1, SPANS_A_STEP // W) if self.grad_accum_steps in (0, "auto") else self.grad_accum_steps
	def problems(self, W):
		"""Every fault, on W ranks."""
		return [f"{name.upper()}={shown(getattr(self, name))}: {text}" if name else text for name, text in (
			*runtime_faults(self), *shape_faults(self, W), *tokenizer_faults(self), *dataset_faults(self))]

def shape_faults(cfg, W):
	"""(a setting, what is wrong, what to do)."""
	heads, T, batch, steps = cfg.num_heads, cfg.train_seq_len, cfg.train_batch_tokens, cfg.accumulation(W)
	rows, unit, need = batch // T, SPANS_A_STEP * T, W * steps * T
	if gap := -cfg.model_dim % (2 * heads): yield "model_dim", f"must divide by 2 x NUM_HEADS: set {cfg.model_dim + gap}"
	if heads % cfg.num_kv_heads:
		yield "num_kv_heads", f"must divide NUM_HEADS={heads}: set {math.gcd(heads, cfg.num_kv_heads)}"
	if gap := -batch % unit: yield "train_batch_tokens", f"must divide by 8 x TRAIN_SEQ_LEN: set {batch + gap}"
	elif batch % need:
		fit = next((f"{n}, or " for n in range(min(steps, rows // W) or 1, rows + 1) if rows % (W * n) == 0), "")
		fit += f"TRAIN_BATCH_TOKENS={math.lcm(unit, need)}"
		yield "grad_accum_steps", f"{W} ranks x {steps} steps must divide {rows} rows: set {fit}"
	if cfg.val_batch_size < need: yield "val_batch_size", f"{W} ranks x {steps} steps, a row each: set at least {need}"
	if cfg.trace_steps and cfg.training_timing_breakdown:
		yield "trace_steps", "nothing overlaps with TRAINING_TIMING_BREAKDOWN=1: set one"

SETTINGS = {f.name.upper(): f for f in fields(Config)}
FOREIGN = r"(EMA|SWA|TTT|QAT|LATE|XSA|BIGRAM|VE|MTP|EVAL|GPTQ|LN|GATED|VALUE)_\w+|(MUON|ADAM)_(WD|BETA2)|ROPE_DIMS"
def shown(value): return f"{value:g}" if isinstance(value, float) else str(value * 1)  # as in the environment
def similar(a, b, slips):
	"""Damerau-Levenshtein distance at most `slips`."""
	if a[:1] == b[:1]: return not a or similar(a[1:], b[1:], slips)
	cuts = [(1, 0), (0, 1), (1, 1)] + [(2, 2)] * (a[:2] == b[1::-1])
	return slips and any(similar(a[i:], b[j:], slips - 1) for i, j in cuts)
def foreign_names(env):
	"""(faults: nearly ours; warnings: other scripts' settings)."""
	faults, others = [], []
	for name in sorted(env.keys() - SETTINGS - {"MODEL_DIR"}):  # common, a letter from ours
		near = (other for slips in range(2 + (len(name) >= 12)) for other in SETTINGS if similar(name, other, slips))
		if re.fullmatch(FOREIGN, name): others.append(name)
		elif best := next(near, ""): faults.append(f"{name}={env[name]}: no such setting: did you mean {best}?")
	return faults, [f"set, but no settings here: {', '.join(others)}"] * bool(others)
def print_help():
	print(__doc__)
	table = "\n".join(f"| `{name}` | - | - |" for name in SETTINGS)
	with suppress(OSError, IndexError):
		table = Path(__file__).with_name("README.md").read_text("utf-8").split("\n## Settings\n")[1]
	for group, name, unit, meaning in re.findall(r"(?m)^### (.+)|^\| `(\w+)` \| (.*?) \| (.*) \|", table):
		default = getattr(Config, name.lower(), "")
		print(f"  {name}={shown(default)}  ({type(default).__name__}, {unit}) {meaning}" if name else f"\n{group}")

# === RUNTIME ===
FIRST_WAIT_S = 300  # for ranks, where they first meet
class RunError(Exception): """A foreseeable failure, in a line: what, where, which value, what to do."""
class Stop(Exception): """Told to stop; others learn it in the next collective."""
class Halt(Exception): """All ranks end after one step: (their signals' sum,) or (0, what is not finite)."""
def first_line(error): return (str(error).strip() or repr(error)).splitlines()[0]
def runtime_faults(cfg):
	"""Of torch, devices; creates no context on one."""
	version, driver = torch.__version__, "present" * os.path.exists("/dev/nvidia0")
	with suppress(OSError): driver = Path("/proc/driver/nvidia/version").read_text()
	if version < "2.6.dev": yield "", f"torch {version}: loads files unsafely: pip install torch==2.13.0"
	if cfg.device != "cpu" and torch.cuda.is_available():
		if int(ranks := os.getenv("LOCAL_WORLD_SIZE", 1)) > (count := torch.cuda.device_count()):
			yield "", f"LOCAL_WORLD_SIZE={ranks}: {count} CUDA devices: set --nproc_per_node={count}"
		return
	if cfg.val_bytecount_device == "cuda": yield "val_bytecount_device", "no CUDA in use: set cpu"
	if cfg.device == "cuda" or driver and cfg.device == "auto":
		yield "device", (f"torch {version} (CUDA {torch.version.cuda}) sees no GPU (driver {first_line(driver or 'none')}, "
			"see CUDA_VISIBLE_DEVICES): fit torch to it, or set DEVICE=cpu")

@dataclass
class Runtime:
	"""This process. Its main thread may sit in a collective: another hears signals, tells all ranks, ends long waits."""
	rank: int = 0
	world_size: int = 1
	stall_seconds: float = 60.0
	device, dtype, store, log = torch.device("cpu"), torch.float32, None, None
	signum = meetings = longest_s = 0  # heard; begun; longest step
	since, place, met = math.inf, "", frozenset()  # a wait for ranks: begun, where; ended, where
	def start(self, cfg, env):
		hears, wakes = os.pipe()
		os.set_blocking(wakes, False)
		signal.set_wakeup_fd(wakes)
		for number in signal.SIGINT, signal.SIGTERM: signal.signal(number, lambda *_: None)
		threading.Thread(target=self._watch, args=[hears], daemon=True).start()
		if cfg.device != "cpu" and torch.cuda.is_available():
			self.device = torch.device("cuda", int(env.get("LOCAL_RANK", 0)))
			torch.cuda.set_device(self.device)
			if torch.cuda.get_device_capability() >= (8, 0): self.dtype = torch.bfloat16
			torch.set_float32_matmul_precision("high")  # TF32 for products in float32
		if "RANK" not in env: return
		store = next(dist.rendezvous("env://", timeout=datetime.timedelta(0, FIRST_WAIT_S)))[0]
		store = dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)  # one for all restarts
		with suppress(AttributeError): self.store = dist.PrefixStore("watch", store.clone())  # own connection; torch >= 2.8
		with self.waiting("start"):  # bounds all waits, so the group need not
			dist.init_process_group("nccl" if self.cuda else "gloo", None, datetime.timedelta(1), self.world_size, self.rank,
				store, device_id=self.device if self.cuda else None)
	@property
	def cuda(self): return self.device.type == "cuda"
	@contextmanager
	def waiting(self, place):
		self.place, self.since = place, now()
		yield
		self.since, self.met = math.inf, self.met | {place}
	def all_reduce(self, tensor, place): return self._meet(place, dist.all_reduce, tensor) or tensor  # a sum, in place
	def begin(self, call, *args):
		"""Begins a collective; returns its wait: a synchronisation point, on CUDA of the stream alone."""
		work = self._meet("launch", lambda: call(*args, async_op=True))
		return lambda: self._meet("reduction", work and work.wait)
	def broadcast(self, value):
		"""Rank 0's `value` on every rank. Synchronisation point: start and end of a run."""
		return self._meet("broadcast", dist.broadcast_object_list, box := [value], 0, None, self.device) or box[0]
	def _meet(self, place, call, *args):
		"""Synchronisation point, but for a step's reductions: Control reads the tail."""
		self.meetings += 1
		with self.waiting(place):
			try: result = dist.is_initialized() and call(*args)
			except RuntimeError as error: raise RunError(f"rank {self.rank}: another rank died: {first_line(error)}")
			if place not in ("launch", "reduction"): self.synchronize(place)
		return result
	def synchronize(self, place="device"):
		"""Synchronisation point: when the device has done all it was given."""
		if self.cuda:
			with self.waiting(place): torch.cuda.synchronize()
		return now()
	def _watch(self, hears):
		gone = suppress(AttributeError, RuntimeError)  # no group, or its store is
		while now() - self.since <= self._limit_s():
			heard = os.read(hears, 1)[0] if select.select([hears], [], [], 0.5)[0] else 0
			with gone:
				if heard: self.store.set("signal", str(heard))
				self.store.set(str(self.rank), str(self.meetings))
				heard = self.store.add("signal", 0)
			self.signum = self.signum or heard
		late = []
		with gone: late = [f"rank {r}" for r in range(self.world_size) if self.store.add(str(r), 0) < self.meetings]
		faulthandler.dump_traceback()
		last_words(self.log, 1, "failed", f"rank {self.rank} waited {self._limit_s():.0f} s at the {self.place} for "
			+ (", ".join(late) or "its device"))
		os._exit(1)
	def _limit_s(self):
		if self.signum: return 5 + 2 * self.longest_s  # to leave
		return max(self.stall_seconds + 60, 20 * self.longest_s) if self.place in self.met else FIRST_WAIT_S
	def close(self): dist.is_initialized() and dist.destroy_process_group()

class RunLog:
	"""Rank 0's console, logs/<RUN_ID>.txt, .jsonl; unless resumed, an older log is renamed."""
	def __init__(self, run_id, enabled, resumed=False):
		self.path, self.events = files = Path(f"logs/{run_id}.txt"), Path(f"logs/{run_id}.jsonl")
		self.streams, self.lost, mark = {"stdout": enabled and sys.stdout}, set(), time.time_ns()
		try:
			for path in files * enabled:
				path.parent.mkdir(exist_ok=True)
				if path.exists() and not resumed: path.rename(path.with_suffix(f".{mark}{path.suffix}"))
				self.streams[path] = path.open("a", encoding="utf-8")
		except OSError as error: raise RunError(f"{path}: cannot open the log: {error.strerror}: run where you can write")
	def write(self, text, *names):
		"""A full disk or a closed terminal costs the log, not the run."""
		for name in filter(self.streams.get, names):
			try: print(text, file=self.streams[name], flush=True)
			except OSError as error:
				if name not in self.lost: print(f"warning: {name}: lines are lost: {error}", file=sys.stderr)
				self.lost.add(name)
	def console(self, text): self.write(text, "stdout")
	def line(self, text): self.write(text, self.path, "stdout")
	def event(self, name, **kw): self.write(json.dumps(dict(event=name, time=round(time.time(), 3), **kw)), self.events)
	def say(self, event, template, **fields):
		self.line(template.format(*fields.values()))
		self.event(event, **fields)

def words(fields, digits=2):
	return " ".join(f"{k}:{v:.{digits}f}" if isinstance(v, float) else f"{k}:{v}" for k, v in fields.items())
def write_atomic(path, data):
	temporary = path.with_suffix(f".{os.getpid()}.tmp")
	try:
		with open(temporary, "wb") as file: file.write(data), file.flush(), os.fsync(file.fileno())
		os.replace(temporary, path)
	except OSError as error: raise RunError(f"{path}: cannot write {len(data)} bytes: {error.strerror}: free the disk")
	finally: temporary.unlink(missing_ok=True)

# === INSTRUMENTS ===
def timed_event(): return torch.cuda.Event(enable_timing=True, blocking=True)
def recorded(): return torch.cuda.current_stream().record_event(timed_event())
HOST, DEVICE, COPY = "main thread", "compute stream", "copy stream"  # tracks
TRACE_EVENTS = 150_000  # below 20 MB uncompressed
@dataclass
class Clock:
	"""Training time in ms; both edges are synchronisation points."""
	rt: Runtime
	total_ms, since, edge = 0.0, math.inf, None
	def now_ms(self): return self.total_ms + 1e3 * max(0.0, now() - self.since)
	def ms_at(self, event): return self.total_ms + max(0.0, self.edge.elapsed_time(event))
	def start(self): self.edge, self.since = self.rt.cuda and recorded(), self.rt.synchronize()
	def stop(self): self.total_ms, self.since = self.rt.synchronize() and self.now_ms(), math.inf
def forecast(rt, log, unit, count, *, pieces=1, cap_s=0.0, compiles=False):
	"""Advanced as pieces of work begin and end; the first (but what compiles) tells how long all take."""
	yield from [None] * 2 * compiles
	start = rt.synchronize()  # a synchronisation point, and the next
	yield
	unit_s = pieces * (rt.synchronize() - start)
	total_s = min(count * unit_s, max(0, cap_s) or math.inf)
	hint = f"; on a CPU try `{QUICKSTART}`" * (total_s > 600 and not rt.cuda)
	log.console(f"({unit}: {unit_s:.3g} s each, {total_s / 60:.1f} min in all{hint})")
	while True: yield

@dataclass
class Spans:
	"""Instruments, off. `with spans("forward"):` marks a phase."""
	cfg: Config = None
	rt: Runtime = None
	log: RunLog = None
	nothing = nullcontext()
	def __call__(self, name, track=DEVICE): return self.nothing
	__post_init__ = instant = handed = step_done = close = lambda *_: None
	@contextmanager
	def phase(self, name, track=DEVICE):
		begin = self.mark(track)
		yield
		self.add(name, track, begin, self.mark(track))
class Breakdown(Spans):
	"""Each phase alone, between two synchronisation points."""
	__call__ = Spans.phase
	def __post_init__(self):
		self.ms, self.steps, self.since = defaultdict(float), [], now()
		self.log.line("timing_breakdown:enabled: no overlap, two waits a phase")
	def mark(self, track):
		if track.endswith("reader"): return 0.0  # no CUDA work
		self.add("sync", track, now(), end := self.rt.synchronize())
		return end
	def add(self, name, track, begin, end):
		if name == "validate": self.ms.clear()  # of its own phases
		self.ms[name] += 1e3 * (end - begin)
	def step_done(self, step):
		ms, self.ms, n = self.ms, defaultdict(float), self.cfg.accumulation(self.rt.world_size)
		start, self.since = self.since, now()
		self.steps.append((ms["input_wait"] + ms["h2d"], 1e3 * (self.since - start) - ms["validate"]))
		if step > 10 and step % self.cfg.training_timing_every: return
		self.log.line(f"timing_breakdown step:{step} micro_steps:{n} " + words(dict(batch_cpu_ms=ms["input_wait"] / n,
			batch_h2d_ms=ms["h2d"] / n, forward_ms=ms["forward"] / n, backward_ms=ms["backward"] / n,
			grad_clip_ms=ms["grad_clip"], optimizer_ms=ms["optimizer"], val_ms=ms["validate"], explicit_sync_ms=ms["sync"]))
			+ " (per_optimizer_step; forward/backward/batch averaged over micro_steps; "
			f"grad_accum_steps={n}) reduce_ms:{ms['reduce']:.2f}")
	def close(self):
		if not self.steps: return
		(x, y), self.steps = np.mean(self.steps, 0), []
		self.log.line(f"overlappable: {x:.2f} ms of {y:.2f} ms a step ({100 * x / y:.2f} %): "
			"the most that overlap can win here")
class Trace(Spans):
	"""What ran when in steps with overlap on and, cut, one validation; the device's by its clock."""
	def __post_init__(self):
		self.steps, self.on, self.events = min(self.cfg.trace_steps, self.cfg.iterations), True, []
		self.base = self.rt.synchronize() and self.mark(DEVICE)  # synchronisation point: their times meet
		self.instant("warm_up_end", HOST)
	def mark(self, track): return now(), self.rt.cuda and track in (DEVICE, COPY) and recorded()  # host's s, device's time
	def __call__(self, name, track=DEVICE):
		if name == "validate": self.on, self.steps = self.steps == 0, self.steps or -1  # the first after the steps
		return self.phase(name, track) if self.on else self.nothing
	def add(self, *event):
		if len(self.events) < TRACE_EVENTS: self.events.append(event)
	def instant(self, name, track, **kind):
		if self.on: self.add(name, track, self.mark(HOST), kind or dict(ph="i", s="p"))
	def handed(self, pipe):
		self.on = self.steps > 0 if pipe.name == "train" else self.on and pipe.handed <= 50
		self.instant(f"{pipe.name} queues", HOST, ph="C", args=dict(host=pipe.ready.qsize(), device=pipe.taken - pipe.handed))
	def step_done(self, step): self.steps -= self.steps > 0
	def rows(self):
		"""Chrome's format, in microseconds."""
		tracks = {}  # name -> thread id
		def micros(a, b): return 1e3 * a[1].elapsed_time(b[1]) if b[1] else 1e6 * (b[0] - a[0])
		for name, track, begin, end in self.events:
			if track == DEVICE and not begin[1]: track = HOST
			yield dict(name=name, pid=0, tid=tracks.setdefault(track, len(tracks)), ts=micros(self.base, begin),
				**(end if isinstance(end, dict) else dict(ph="X", dur=micros(begin, end))))
		for track, tid in tracks.items(): yield dict(name="thread_name", ph="M", pid=0, tid=tid, args={"name": track})
	def close(self):
		path, self.close, self.on = self.log.path.with_suffix(".trace.json.gz"), super().close, False
		try:
			self.rt.synchronize()  # synchronisation point
			write_atomic(path, gzip.compress(json.dumps(dict(traceEvents=[*self.rows()])).encode()))
			self.log.line(f"trace: {path}")
		except (RunError, RuntimeError) as error: self.log.line(f"warning: no trace: {first_line(error)}")

def batch_sum(x, y): return (3 * x + y).ravel().cumsum(0).sum()  # by position, int64, wraps
class Verify:
	"""A batch's sum as read, above 32 bits of digest, against that of x and y after use."""
	checked = 0
	def __init__(self, on, log): self.on, self.log, self.pending = on, log, []
	def consumed(self, pipe, batch, place):
		if not self.on: return
		slot, (x, y, digest) = (pipe.handed - 1) % (pipe.slots or pipe.overlap.queue + 1), batch  # used in turn
		self.pending.append((f"{pipe.who}, {place}, slot {slot}", digest >> 32, batch_sum(x, y)))
		self.checked += 1
		if len(self.pending) >= 1024: self.settle()
	def settle(self, total=False):
		"""Synchronisation point; RunError: a batch changed in use."""
		for where, read, held in self.pending:
			if held.item() != read: raise RunError(f"{where}: the batch was overwritten in use: set GPU_PREFETCH=1")
		self.pending.clear()
		if total and self.on: self.log.line(f"data_verify: {self.checked} batches, unchanged in use")

# === DATA ===
SPANS_A_STEP = 8  # of TRAIN_BATCH_TOKENS / 8 + 1 tokens: the challenge's order
HEADER_BYTES, CRC = 1024, 0xFFFFFFFF  # of a shard (a token has 2); of a sum
QUICKSTART = "python3 data/quickstart.py"
def shard_tokens(path):
	"""How many; RunError if it is not whole."""
	try: (magic, version, n, *_), size = (*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0), stamp(path)[0]
	except OSError as error: raise RunError(f"{path}: {error.strerror}: make it readable")
	if (magic, version, size) == (20240520, 1, whole := HEADER_BYTES + 2 * n) and n > 0: return n
	raise RunError(f"{path}: no whole shard: magic {magic}, version {version} (not 20240520, 1), {size} bytes "
		f"({n} tokens need {whole}): delete it, fetch anew")
def stamp(file): return (found := os.stat(file)).st_size, found.st_mtime_ns
def read_json(path):
	with suppress(OSError, ValueError): return dict(json.loads(path.read_bytes()))
	return {}
def promised(folder, split):
	"""Shards, by the manifest; 0: unknown."""
	try: return sum(d["stats"][f"files_{split}"] for d in read_json(folder / "../../manifest.json")["datasets"]
		if d["name"] == folder.resolve().name)
	except (KeyError, TypeError): return 0
def producing(folder):
	"""What the producer there last said; {}: none."""
	state = read_json(folder / ".producing")
	return {"error": "has died"} | state if time.time() - state.get("time", math.inf) > 30 else state

class Shards:
	"""A split's files by name, an endless stream; a live producer's join in turn."""
	awaited = None
	def __init__(self, folder, split):
		self.folder, self.paths, self.ends, self.stamps = Path(folder), [], [0], []
		self.growing = split == "train" and "error" not in (producing(self.folder) or "error")
		for path in sorted(self.folder.glob(f"fineweb_{split}_*.bin")):
			if not self.growing or path == self.following(): self.add(path)
	@property
	def total(self): return sys.maxsize if self.growing else self.ends[-1]
	def following(self): return self.folder / f"fineweb_train_{len(self.paths):06}.bin"
	def add(self, path):
		self.ends.append(self.ends[-1] + shard_tokens(path))
		self.paths.append(path), self.stamps.append(stamp(path))
	def await_token(self, token, reader):  # until on disk, or the set complete
		moved, done = now(), None
		while self.growing and token >= self.ends[-1] and not reader.closed:
			state, path = producing(self.folder), self.following()
			if path.exists(): self.add(path)
			elif self.paths and (not state or state.get("shards_promised") == len(self.paths)): self.growing = False
			elif not state or "error" in state or now() - moved > reader.rt.stall_seconds:
				raise RunError(f"{path} will not come: its producer {state.get('error', 'stands still')}")
			else:
				if done != (said := state.get("progress")): moved, done = now(), said
				if path != self.awaited: reader.rt.log.say("stall", "waiting for {}: it is being made", shard=str(path))
				self.awaited = path
				time.sleep(0.05)
	def pieces(self, first, count):
		"""A stretch as (epoch, file index, byte offset, bytes)."""
		while count:
			epoch, at = divmod(first, self.total)
			i = bisect.bisect(self.ends, at) - 1
			n = min(count, self.ends[i + 1] - at)
			yield epoch, i, HEADER_BYTES + 2 * (at - self.ends[i]), 2 * n
			first, count = first + n, count - n

def dataset_faults(cfg):
	folder = Path(cfg.data_path)
	for split in "train", "val":
		paths, tokens = sorted(folder.glob(f"fineweb_{split}_*.bin")), 0
		if not (paths or Shards(folder, split).growing):
			yield "data_path", f"no fineweb_{split}_*.bin: {where_else(cfg, 'data_path')}"
		elif split == "val" and len(paths) < (whole := promised(folder, split)):
			yield "data_path", f"{len(paths)} of {whole} val shards: fetch all"
		for path in paths:
			try:
				tokens, ids = tokens + shard_tokens(path), np.memmap(path, "<u2", "r", HEADER_BYTES)
				if (worst := np.r_[ids[:32768], ids[-32768:]].max()) >= cfg.vocab_size:
					yield "vocab_size", f"{path} holds token {worst}: set its tokenizer's, or DATA_PATH"
			except RunError as error: yield "", str(error)
	if tokens and cut_val_tokens(cfg, tokens) == 1:  # of val, the last
		yield "train_seq_len", f"{tokens} val tokens (VAL_TOKENS={cfg.val_tokens}) make no row: set less"
def where_else(cfg, name):
	for parent in Path.cwd().parents:
		if (found := parent / getattr(cfg, name)).exists(): return f"set {name.upper()}={found.resolve()}"
	return f"make: `{QUICKSTART} --prepare-only`; fetch: `python3 data/cached_challenge_fineweb.py --variant sp1024`"
def cut_val_tokens(cfg, total):  # whole rows, and one more to predict
	return (min(total, cfg.val_tokens or total) - 1) // (T := cfg.train_seq_len) * T + 1
class BatchPlan(namedtuple("BatchPlan", "seq_len span_rows first_row stride batch_rows end_row")):
	"""A rank's rows of seq_len + 1 tokens, by arithmetic, never by timing. stride: batch to batch."""
	@classmethod
	def train(cls, cfg, rank, W):  # micro-step k % accumulation of step k // accumulation
		n = (rows := cfg.train_batch_tokens // (T := cfg.train_seq_len)) // (W * cfg.accumulation(W))
		return cls(T, rows // SPANS_A_STEP, rank * n, W * n, n, sys.maxsize)
	@classmethod
	def val(cls, cfg, tokens, rank, W):
		rows = (tokens - 1) // (T := cfg.train_seq_len)
		first, end = rows * rank // W, rows * (rank + 1) // W
		n = min(cfg.val_batch_size // (W * cfg.accumulation(W)) // T, end - first) or 1
		return cls(T, rows, first, n, n, end)
	def num_batches(self): return -((self.first_row - self.end_row) // self.stride)
	def rows(self, k): return range(first := self.first_row + k * self.stride, min(first + self.batch_rows, self.end_row))
	def token(self, row): return row * self.seq_len + row // self.span_rows  # a span's last begins no row
	def tokens(self, rows):
		"""Of a batch: the first, how many."""
		return (first := self.token(rows.start)), self.token(rows.stop - 1) + self.seq_len + 1 - first
	def last_token(self, rows):  # of the step: every rank waits for it
		return self.token(rows.start // (n := SPANS_A_STEP * self.span_rows) * n + n) - 1
	def segments(self, rows):
		"""(row, end, token) in the batch, cut by spans."""
		first, n = rows.start, self.span_rows
		cuts = [first, *range(first - first % n + n, rows.stop, n), rows.stop]
		return [(a - first, b - first, self.token(a) - self.token(first)) for a, b in zip(cuts, cuts[1:])]
def data_crc(plan, rows, tokens):
	"""The rows' crc32, begun with their numbers, summed: the same for any ranks."""
	T, n, data, first = plan.seq_len, plan.span_rows, memoryview(tokens), plan.token(rows.start)
	return sum(zlib.crc32(data[(at := row * T + row // n - first):at + T + 1], row) for row in rows) & CRC
def widen(tokens, x, y, segments):
	"""uint16 -> int64 x, y (rows, T); numpy or tensors. Spare rows: no targets (-100)."""
	T = x.shape[1]
	for row, end, begin in segments:
		part = tokens[begin:begin + (end - row) * T + 1]
		x[row:end], y[row:end] = part[:-1].reshape(-1, T), part[1:].reshape(-1, T)
	if end < len(y): x[end:], y[end:] = 0, -100

class Overlap(namedtuple("Overlap", "queue copy_stream device_slots resident words")):
	"""A split's settings, less what is ruled out. queue, device_slots: 0: no prefetch, no CUDA."""
	@classmethod
	def of(cls, cfg, split, cuda):
		off, no_cuda = "(timing_breakdown)" * cfg.training_timing_breakdown, "(no_cuda)" * (not cuda)
		early, apart, depth = (getattr(cfg, split + name) for name in ("_prefetch", "_copy_stream", "_prefetch_queue"))
		gone, keep = off or no_cuda, split == "val" and cfg.val_resident
		on, stream, stay = early and not off, apart and not gone, keep and not gone
		slots, on_demand = cuda * (on * cfg.gpu_prefetch or 1), "(prefetch_off)" * (not on)
		words = f"prefetch:{on}{off * early} copy_stream:{stream}{gone * apart} prefetch_queue:{on * depth}{on_demand}"
		if split == "val": words = (f"overlap:{on or stream} {words} bytecount_device:{cfg.val_bytecount_device} "
			f"resident:{stay:d}{gone * keep}")
		words += f" gpu_prefetch:{slots}{no_cuda or on_demand * (slots != cfg.gpu_prefetch)}"
		return cls(on * depth, stream, slots, stay, words)

class Slot:
	"""A batch: uint16 tokens; where handed out, int64 x and y: whole, as slices cost 50 us, new shapes compile anew."""
	def __init__(self, plan, device, pinned=False):
		self.tokens = torch.empty(plan.token(plan.batch_rows) + 2, dtype=torch.uint16, device=device, pin_memory=pinned)
		self.x, self.y = (torch.zeros(plan.batch_rows, plan.seq_len, dtype=torch.int64, device=device) for _ in "xy")

class HandOut:
	"""The CPU's last stage: host slots; the next call frees them."""
	bytes_copied = wait_ms = copy_ms = 0  # wait_ms: sum(waits_ms)
	def __init__(self): self.pending, self.waits_ms = [], []  # host slots in use
	ask = close = lambda self: None
	def waited(self, ms):
		self.waits_ms.append(ms)
		self.wait_ms += ms
	def submit(self, slot): self.pending.append(slot)
	def recycle(self, block): return self.pending.pop(0)  # if no longer needed; block: once it is
	def hand_out(self): return self.pending[-1]

class DeviceRing(HandOut):
	"""CUDA's last stage: README.md's ring. `ready`: tokens have arrived; `free`: they were read."""
	def __init__(self, plan, overlap, device, spans):
		super().__init__()
		self.spans, self.compute = spans, torch.cuda.current_stream(device)
		self.copy = torch.cuda.Stream(device) if overlap.copy_stream else self.compute
		self.idle, self.full, self.empty = [], [], []
		for _ in range(plan.num_batches() if overlap.resident else overlap.device_slots):
			self.empty.append(slot := Slot(plan, device))
			if overlap.resident: slot.x, slot.y = self.empty[0].x, self.empty[0].y  # of all, in turn
			slot.ready, slot.free = torch.cuda.Event(), self.compute.record_event()  # unrecorded: a wait passes
	def ask(self):  # the compute stream begins to wait
		while self.idle and self.idle[0][1].query():
			asked, fed = self.idle.pop(0)
			self.waited(asked.elapsed_time(fed))
		self.asked = recorded()
	def submit(self, slot):
		if not self.empty: raise RuntimeError("a copy beyond the ring")
		target, n = self.empty.pop(0), slot.size
		with torch.cuda.stream(self.copy):
			self.copy.wait_event(target.free)
			slot.begun.record()
			with self.spans("h2d", COPY): target.tokens[:n].copy_(slot.tokens[:n], non_blocking=True)
			target.ready.record(), slot.copied.record()
		target.segments, target.digest = slot.segments, slot.digest
		self.full.append(target), self.pending.append(slot)
		self.bytes_copied += 2 * n
	def recycle(self, block):
		slot = self.pending[0]
		if block: slot.copied.synchronize()  # synchronisation point: every host slot waits
		if slot.copied.query():
			self.copy_ms += slot.begun.elapsed_time(slot.copied)
			return self.pending.pop(0)
	def hand_out(self):
		self.compute.wait_event((slot := self.full.pop(0)).ready)
		self.idle.append((self.asked, recorded()))
		widen(slot.tokens, slot.x, slot.y, slot.segments)
		slot.free.record(self.compute)
		self.empty.append(slot)
		return slot
	def close(self): self.copy.synchronize()  # synchronisation point: no copy outlives its slots

class Pipeline:
	"""Shards -> reader thread (whose error comes last) -> host slots -> device slots -> x, y."""
	filled = taken = handed = late_copies = bytes_read = closed = read_ms = busy_ms = 0  # _ms: of the reader
	place, where, since = None, "no file", math.inf  # (epoch, shard); in a read since
	def __init__(self, source, name, digest, spans=Spans()):  # source: a run, a validation
		rt, self.shards, self.plan, overlap = source.rt, source.shards, source.plan, source.overlap
		self.name, self.spans, self.digest, self.overlap, self.verify = name, spans, digest, overlap, source.verify.on
		self.who, self.rt, self.end = f"rank {rt.rank}: the {name} reader", rt, self.plan.num_batches()
		slots = self.slots = overlap.device_slots
		self.stage = DeviceRing(self.plan, overlap, rt.device, spans) if slots else HandOut()
		self.host_waits_ms, self.file, self.crossings = [], open(os.devnull), []  # batches in a new shard
		self.free, self.ready = queue.SimpleQueue(), queue.SimpleQueue()  # slots to fill, filled
		for i in range(overlap.queue + max(1, slots)):
			slot = Slot(self.plan, "cpu", rt.cuda)
			slot.host = [*map(np.asarray, (slot.tokens, slot.x, slot.y))]
			if slots: slot.begun, slot.copied = (self.stage.copy.record_event(timed_event()) for _ in "bc")
			(self.free.put if i < overlap.queue else self.stage.pending.append)(slot)
		self.thread = threading.Thread(target=self._read_all, name=f"{name} reader", daemon=True)
		self.thread.start()
	def _read_all(self):
		try:
			for k in range(self.end):
				slot = self.free.get()
				if self.closed: raise Stop
				self._fill(slot, k)
				self.ready.put(slot)
				self.filled += 1
				self._advise(k + 1 + self.overlap.queue)
		except BaseException as error: self.ready.put(error)  # or the consumer hangs
		finally: self.file.close()
	def _fill(self, slot, k):
		rows = (plan := self.plan).rows(k)
		self.shards.await_token(plan.last_token(rows), self)
		start, (first, n) = now(), plan.tokens(rows)
		slot.size, slot.segments, tokens = n, plan.segments(rows), slot.host[0][:n]
		with self.spans("disk_read", self.thread.name):
			out = memoryview(tokens).cast("B")
			for epoch, i, offset, size in self.shards.pieces(first, n):
				if self.place not in (None, (epoch, i)):
					self.spans.instant(("epoch", "shard_boundary")[self.place[0] == epoch], self.thread.name)
					self.crossings.append(k)
				self.place = epoch, i
				self._read(i, offset, out[:size])
				out = out[size:]
		self.bytes_read += 2 * n
		self.read_ms += 1e3 * (now() - start)
		slot.digest = self.digest(plan, rows, tokens)
		if self.verify or not self.slots: widen(*slot.host, slot.segments)
		if self.verify: slot.digest |= int(batch_sum(*slot.host[1:])) << 32
		self.busy_ms += 1e3 * (now() - start)
	def _read(self, i, offset, out):  # EOFError: the file shrank (mapped: a crash)
		(file := self._open(i, offset)).seek(offset)
		while out:
			if not (n := file.readinto(out)): raise EOFError(f"ends at byte {file.tell()}, {len(out)} short")
			out = out[n:]
		if stamp(file.fileno()) != self.shards.stamps[i]: raise EOFError("changed since this run began")
		self.since = math.inf
	def _open(self, i, offset):
		path = str(self.shards.paths[i])
		self.where, self.since = f"{path} at byte {offset}", now()
		if self.file.name != path:
			old, self.file = self.file, open(path, "rb", 0)
			old.close()
		return self.file
	def _advise(self, k):  # has the kernel read batch k ahead
		if k >= self.end or self.shards.growing: return
		with suppress(OSError, AttributeError):  # not on macOS
			for _, i, offset, size in self.shards.pieces(*self.plan.tokens(self.plan.rows(k))):
				os.posix_fadvise(self._open(i, offset).fileno(), offset, size, os.POSIX_FADV_WILLNEED)
		self.since = math.inf
	def _take(self):  # and a slot back: the reader stays within the queue
		stage = self.stage
		while len(stage.pending) >= (self.slots or 1) and (slot := stage.recycle(self.ready.empty())): self.free.put(slot)
		start = now()
		with self.spans("input_wait", HOST): slot = self._await()
		self.taken += 1
		self.host_waits_ms.append(ms := 1e3 * (now() - start))
		if not self.slots: stage.waited(ms)
		stage.submit(slot)
	def _await(self):
		while True:
			with suppress(queue.Empty):
				if isinstance(slot := self.ready.get(timeout=0.2), Slot): return slot
				self.ready.put(slot)
				what = slot if isinstance(slot, RunError) else f"{self.where}: {slot!r}"
				raise RunError(f"{self.who} failed on {what}") from slot
			if self.rt.signum: raise Stop
			if now() - self.since > (limit_s := self.rt.stall_seconds):
				faulthandler.dump_traceback()
				raise RunError(f"{self.who} waits for {self.where} over DATA_STALL_SECONDS={limit_s:g}: use a local disk")
	__iter__ = lambda self: self
	def __next__(self):
		"""int64 x, y (rows, T), valid until the next call (CUDA: GPU_PREFETCH-th); their digest."""
		if self.handed >= self.end: raise StopIteration
		if self.rt.signum: raise Stop
		self.stage.ask()
		if self.taken == self.handed:
			self.late_copies += self.handed > 0 < self.slots
			self._take()
		slot = self.stage.hand_out()
		self.handed += 1
		while self.taken < min(self.filled, self.handed + self.slots - 1): self._take()
		self.spans.handed(self)
		return slot.x, slot.y, slot.digest
	def again(self, spans):  # from its start, all on the device: a slot handed out goes to the end of `full`
		self.spans, self.handed, self.stage.full = spans, 0, self.stage.empty
		return self
	def close(self):  # within a second; a stuck reader is left
		self.closed = True
		self.free.put(None)
		self.thread.join(0.8)
		self.stage.close()

# === OPERATORS ===
# Two Triton operators beside their eager references. Outside this section: qkv_heads, relu2_mlp, use_operators.
try: import triton, triton.language as tl
except ImportError: triton = None  # all is eager then
kernel, constexpr = (triton.jit, tl.constexpr) if triton else (lambda function: function, None)
OPERATORS = frozenset()  # those in use, of "qkv" and "mlp"; the others are eager
RMS_EPS, INTERPRETED = torch.finfo(torch.float32).eps, os.getenv("TRITON_INTERPRET") == "1"  # F.rms_norm's, any dtype
def operator(schema): return torch.library.custom_op("steptime::" + schema.split("(")[0], mutates_args=(),
	schema=schema[schema.index("("):])

@kernel
def normed(at, half, here, eps):
	"""A head's two halves over its root mean square, and that factor; at: its left half."""
	left, right = tl.load(at, here, 0.0).to(tl.float32), tl.load(at + half, here, 0.0).to(tl.float32)
	scale = 1 / tl.sqrt(tl.sum(left * left + right * right, 1, keep_dims=True) / (2 * half) + eps)
	return left * scale, right * scale, scale
@kernel
def turned(left, right, cos, sin): return left * cos + right * sin, right * cos - left * sin
@kernel
def put(at, half, here, left, right):
	tl.store(at, left, here)
	tl.store(at + half, right, here)
@kernel
def rows_here(rotary, rows, T, half: constexpr, BLOCK: constexpr, WIDTH: constexpr):
	"""This program's rows, the channels of a half (WIDTH: the next power of two), which of them exist, their angles."""
	row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
	channel = tl.arange(0, WIDTH)[None, :]
	here, at = (row < rows) & (channel < half), rotary + row % T * half + channel
	return row, channel, here, tl.load(at, here, 0.0).to(tl.float32), tl.load(at + T * half, here, 0.0).to(tl.float32)
@kernel
def heads_kernel(packed, gain, rotary, q, k, v, rows, T, eps, H: constexpr, KV: constexpr, half: constexpr,
		BLOCK: constexpr, WIDTH: constexpr):
	row, channel, here, cos, sin = rows_here(rotary, rows, T, half, BLOCK, WIDTH)
	at = packed + row * ((H + 2 * KV) * 2 * half) + channel
	for head in range(H):
		left, right, _ = normed(at + head * 2 * half, half, here, eps)
		left, right = turned(left, right, cos, sin)
		g = tl.load(gain + head).to(tl.float32)
		put(q + (row * H + head) * (2 * half) + channel, half, here, g * left, g * right)
	for head in range(KV):
		left, right, _ = normed(at + (H + head) * 2 * half, half, here, eps)
		left, right = turned(left, right, cos, sin)
		to, value = (row * KV + head) * (2 * half) + channel, at + (H + KV + head) * 2 * half
		put(k + to, half, here, left, right)
		put(v + to, half, here, tl.load(value, here, 0.0), tl.load(value + half, here, 0.0))
@kernel
def unnormed(at, grad_at, out, half, here, eps, g, cos, sin):
	"""Writes a head's gradient before its norm; returns each row's share of its gain's gradient."""
	left, right, scale = normed(at, half, here, eps)
	dleft, dright = tl.load(grad_at, here, 0.0).to(tl.float32), tl.load(grad_at + half, here, 0.0).to(tl.float32)
	dleft, dright = turned(dleft, dright, cos, -sin)  # back by the same angle
	along = tl.sum(dleft * left + dright * right, 1, keep_dims=True)
	mean = along / (2 * half)
	put(out, half, here, g * scale * (dleft - left * mean), g * scale * (dright - right * mean))
	return along
@kernel
def heads_grad_kernel(dq, dk, dv, packed, gain, rotary, grad, gain_grad, rows, T, eps, H: constexpr,
		KV: constexpr, half: constexpr, BLOCK: constexpr, WIDTH: constexpr):
	row, channel, here, cos, sin = rows_here(rotary, rows, T, half, BLOCK, WIDTH)
	at = row * ((H + 2 * KV) * 2 * half) + channel
	for head in range(H):
		to, g = at + head * 2 * half, tl.load(gain + head).to(tl.float32)
		along = unnormed(packed + to, dq + (row * H + head) * (2 * half) + channel, grad + to, half, here, eps, g, cos, sin)
		tl.store(gain_grad + tl.program_id(0) * H + head, tl.sum(tl.sum(along, 1), 0))
	for head in range(KV):
		of, to = (row * KV + head) * (2 * half) + channel, at + (H + head) * 2 * half
		unnormed(packed + to, dk + of, grad + to, half, here, eps, 1.0, cos, sin)
		put(grad + to + KV * 2 * half, half, here, tl.load(dv + of, here, 0.0), tl.load(dv + of + half, here, 0.0))
def heads_sizes(packed, gain, rotary, kv):
	"""What both kernels are given: the grid, (rows, T, eps), constants."""
	(B, T, width), H = packed.shape, len(gain)
	half, block = width // (H + 2 * kv) // 2, 8 if INTERPRETED else 32
	constants = dict(H=H, KV=kv, half=half, BLOCK=block, WIDTH=1 << (half - 1).bit_length())
	return (-(-B * T // block),), (B * T, T, RMS_EPS), constants
def heads_empty(packed, gain, rotary, kv):
	(B, T, width), H = packed.shape, len(gain)
	return tuple(packed.new_empty(B, T, n, width // (H + 2 * kv)) for n in (H, kv, kv))
@operator("heads(Tensor packed, Tensor gain, Tensor rotary, int kv) -> (Tensor, Tensor, Tensor)")
def split_heads(packed, gain, rotary, kv):
	"""q (B, T, H, d), k, v (B, T, kv, d) of packed (B, T, (H + 2 kv) d); gain (H,), rotary (2, T, 1, d / 2)."""
	grid, sizes, constants = heads_sizes(packed, gain, rotary, kv)
	out = heads_empty(packed, gain, rotary, kv)
	heads_kernel[grid](packed.contiguous(), gain.contiguous(), rotary.contiguous(), *out, *sizes, **constants)
	return out
@operator("heads_grad(Tensor dq, Tensor dk, Tensor dv, Tensor packed, Tensor gain, Tensor rotary) -> (Tensor, Tensor)")
def split_heads_grad(dq, dk, dv, packed, gain, rotary):
	"""The gradients of packed, all of it in one tensor, and of gain: partial sums by program, so that runs repeat."""
	grid, sizes, constants = heads_sizes(packed, gain, rotary, dk.size(2))
	grad, parts = packed.new_empty(packed.shape), gain.new_empty(*grid, len(gain), dtype=torch.float32)
	sources = (t.contiguous() for t in (dq, dk, dv, packed, gain, rotary))
	heads_grad_kernel[grid](*sources, grad, parts, *sizes, **constants)
	return grad, parts.sum(0).to(gain.dtype)
split_heads.register_fake(heads_empty)
split_heads_grad.register_fake(lambda dq, dk, dv, packed, gain, rotary:
	(packed.new_empty(packed.shape), gain.new_empty(len(gain))))
split_heads.register_autograd(lambda ctx, *grads: (*split_heads_grad(*grads, *ctx.saved_tensors), None, None),
	setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3]))

@kernel
def relu2_kernel(x, w, a, out, M, N, K, w_n, w_k, GRAD: constexpr, BM: constexpr, BN: constexpr,
		BK: constexpr):
	"""A tile of out (M, N): relu(x w)^2, or 2 sqrt(a) (x w) with GRAD; x (M, K), w (K, N) by its strides, a (M, N)."""
	tiles = tl.cdiv(N, BN)  # neighbours share rows of x; all of w stays in the second-level cache
	row = (tl.program_id(0) // tiles).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
	column, inner = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)[None, :], tl.arange(0, BK)
	x_at, w_at = x + row * K + inner[None, :], w + inner[:, None] * w_k + column * w_n
	sums = tl.zeros((BM, BN), tl.float32)
	for k in range(0, K, BK):
		xs = tl.load(x_at, (row < M) & (inner[None, :] < K - k), 0.0)
		ws = tl.load(w_at, (column < N) & (inner[:, None] < K - k), 0.0)
		sums = tl.dot(xs, ws, sums, input_precision="ieee")
		x_at += BK
		w_at += BK * w_k
	here, to = (row < M) & (column < N), row * N + column
	if GRAD:
		sums = 2 * sums * tl.sqrt(tl.load(a + to, here, 0.0).to(tl.float32))
	else:
		sums = tl.where(sums < 0, 0.0, sums)  # not maximum: a NaN has to stay one
		sums = sums * sums
	tl.store(out + to, sums, here)
def relu2_gemm(x, weight, strides, a=None):
	"""relu(x weight^T)^2, or with a its gradient 2 sqrt(a) (x weight); strides: weight's, along out's channels first."""
	x, N = x.contiguous(), len(weight) if a is None else a.size(-1)
	M, K, out, big = x.numel() // x.size(-1), x.size(-1), x.new_empty(*x.shape[:-1], N), False
	if x.is_cuda: big = torch.cuda.get_device_capability(x.device)[0] in (9, 10)  # 144 KB of shared memory, not 96
	bm, bn, bk = (32, 32, 32) if INTERPRETED else (128, 256 if big else 128, 64)
	grid = (-(-M // bm) * -(-N // bn),)
	relu2_kernel[grid](x, weight, out if a is None else a.contiguous(), out, M, N, K, *strides, GRAD=a is not None,
		BM=bm, BN=bn, BK=bk, num_warps=8, num_stages=3)
	return out
@operator("mlp(Tensor x, Tensor up, Tensor down) -> (Tensor, Tensor)")
def mlp(x, up, down):
	"""(down a, a) with a = relu(up x)^2. Only a is written: relu(up x), which its gradient needs, is sqrt(a)."""
	a = relu2_gemm(x, up, up.stride())
	return F.linear(a, down), a
@operator("mlp_grad(Tensor dy, Tensor down, Tensor a) -> Tensor")
def mlp_grad(dy, down, a): return relu2_gemm(dy, down, down.stride()[::-1], a)  # of up x
def mlp_empty(x, up, down): return x.new_empty(*x.shape[:-1], len(down)), x.new_empty(*x.shape[:-1], len(up))
def mlp_context(ctx, inputs, output):
	ctx.save_for_backward(*inputs, output[1])
	ctx.mark_non_differentiable(output[1])
	ctx.set_materialize_grads(False)  # a's, which nobody asks for, would be a tensor of zeros
def mlp_backward(ctx, dy, _):
	x, up, down, a = ctx.saved_tensors
	dh = mlp_grad(dy, down, a)
	return dh @ up, dh.flatten(0, -2).T @ x.flatten(0, -2), dy.flatten(0, -2).T @ a.flatten(0, -2)
mlp.register_fake(mlp_empty)
mlp_grad.register_fake(lambda dy, down, a: a.new_empty(a.shape))
mlp.register_autograd(mlp_backward, setup_context=mlp_context)

def qkv_eager(x, weights, gain, rotary):
	q, k, v = (F.linear(x, w).unflatten(-1, (-1, 2 * rotary.size(-1))) for w in weights)
	return rotate(rms_norm(q), rotary) * gain.to(q.dtype)[:, None], rotate(rms_norm(k), rotary), v
def qkv_operator(x, weights, gain, rotary):
	return split_heads(F.linear(x, torch.cat(weights)), gain, rotary, len(weights[1]) // (2 * rotary.size(-1)))
def mlp_eager(x, up, down): return F.linear(F.relu(F.linear(x, up)).square(), down)
def mlp_operator(x, up, down): return mlp(x, up, down)[0]
FORMS = dict(qkv=(qkv_eager, qkv_operator), mlp=(mlp_eager, mlp_operator))
def qkv_heads(x, weights, gain, rotary):
	"""Normed, rotated, scaled queries (B, T, H, d), keys and values (B, T, KV, d) of x (B, T, D).

	weights: three matrices (heads d, D) in x's dtype; gain (H,); rotary (2, T, 1, d / 2), halves of a head paired.
	The operator is one product with the stacked matrices, then one pass over its output, (H + 2 KV) d numbers a token:
	in and out once; backward, they and their gradients in, one packed gradient out. Eager, each of norm, rotation,
	gain and layout is such a pass, and three products read x, three more write and add up its gradient."""
	return FORMS["qkv"][int("qkv" in OPERATORS)](x, weights, gain, rotary)  # int: torch 2.11 compiles no bool as index
def relu2_mlp(x, up, down):
	"""down relu(up x)^2 for x (..., D), up (F, D), down (D, F) in x's dtype.

	The operator squares where the product ends, and multiplies the gradient by 2 relu(up x) where its product ends: it
	moves 4 F numbers a token through memory (a = relu(up x)^2 out and in; a in and the gradient out), not 8, and keeps
	a alone for the backward pass. Weight gradients and down are torch's products."""
	return FORMS["mlp"][int("mlp" in OPERATORS)](x, up, down)

def trial(name, form, cfg, rt):
	"""Outputs and gradients of a form on two rows of random numbers."""
	random = torch.Generator(rt.device).manual_seed(1)
	def draw(*sizes, dtype=rt.dtype, scale=1.0):
		numbers = torch.randn(*sizes, generator=random, device=rt.device) * scale
		return numbers.to(dtype).requires_grad_()
	T, D, H, d = cfg.train_seq_len, cfg.model_dim, cfg.num_heads, cfg.model_dim // cfg.num_heads
	kv, wide = d * cfg.num_kv_heads, cfg.mlp_mult * D
	sizes = ((D, D), (kv, D), (kv, D)) if name == "qkv" else ((wide, D), (D, wide))
	x, weights = draw(2, T, D), [draw(*size, scale=D ** -0.5) for size in sizes]
	gain, rotary = draw(H, dtype=torch.float32), draw(2, T, 1, d // 2, dtype=torch.float32)
	outputs = form(x, weights, gain, rotary) if name == "qkv" else [form(x, *weights)]
	inputs = [x, *weights, *[gain] * (name == "qkv")]
	return [*outputs, *torch.autograd.grad(outputs, inputs, [draw(*t.shape) for t in outputs])]
def fault_of(name, cfg, rt):
	"""Why an operator cannot be used here, or ""."""
	if not triton: return "triton cannot be imported"
	if not INTERPRETED and (not rt.cuda or rt.dtype != torch.bfloat16): return "needs CUDA and bfloat16"
	try: wanted, found = (trial(name, form, cfg, rt) for form in FORMS[name])
	except Exception as error: return f"{type(error).__name__}: {first_line(error)}"  # whatever a compiler raises
	off = torch.stack([(a - b).float().norm() / a.float().norm() for a, b in zip(wanted, found)]).max().item()
	bound = 0.02 if rt.dtype == torch.bfloat16 else 1e-4
	return "" if off <= bound else f"relative to eager values it is off by {off:.2g}"  # NaN is, too
def use_operators(cfg, rt, log):
	"""Takes those of OPERATORS into use that give the eager values here, on every rank; a warning for each other."""
	global OPERATORS
	auto = cfg.operators == "auto" and (rt.cuda or INTERPRETED)
	faults = {name: fault_of(name, cfg, rt) for name in FORMS if auto or cfg.operators == name}
	sound = torch.tensor([not fault for fault in faults.values()], dtype=torch.float32, device=rt.device)
	rt.all_reduce(sound, "operators")
	OPERATORS = frozenset(name for name, ranks in zip(faults, sound.tolist()) if ranks == rt.world_size)
	for name in sorted(faults.keys() - OPERATORS):
		log.line(f"warning: operator {name} does not work here, it is eager: {faults[name] or 'so on another rank'}")
	log.line(f"operators:{'+'.join(sorted(OPERATORS)) or 'none'}")

# === MODEL ===
def folded(m, scale): return m.weight if scale is None else scale[:, None] * m.weight
class Cast(torch.autograd.Function):
	"""`low`, cast ahead from a float32 `master`, which gets its gradient."""
	@staticmethod
	def forward(ctx, low, master): return low.view_as(low)
	@staticmethod
	def backward(ctx, grad): return None, grad.float()
def used(m, scale=None): return Cast.apply(m.low, folded(m, scale)) if torch.is_grad_enabled() else m.low
class Linear(nn.Linear):
	"""Float32, cast by hand: torch 2.12's autocast keeps the residual stream in float32 (pytorch PR 174824)."""
	def __init__(self, *sizes, zero=False):
		super().__init__(*sizes, bias=False)
		if zero: nn.init.zeros_(self.weight)
	def forward(self, x, scale=None): return F.linear(x, used(self, scale))
def rms_norm(x): return F.rms_norm(x, x.shape[-1:])
def rotate(x, rotary):
	"""Rotary positions (arXiv:2104.09864), halves of a head paired: x (B, T, heads, d), rotary (2, T, 1, d / 2)."""
	(cos, sin), (left, right) = rotary.to(x.dtype), x.chunk(2, dim=-1)
	return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)
def attend(q, k, v):
	"""Causal attention of (B, T, heads, d), fewer heads in k and v."""
	q, k, v = (t.transpose(1, 2) for t in (q, k, v))
	return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1)).transpose(1, 2)
def choose_attention(cfg, rt):
	"""From now on attend() runs this: the first whose output and gradients on one batch are those of math in float32."""
	H, KV = cfg.num_heads, cfg.num_kv_heads
	q, k, v, y = (torch.randn(2, min(cfg.train_seq_len, 1024), heads, cfg.model_dim // H, device=rt.device,
		dtype=rt.dtype).requires_grad_() for heads in (H, KV, KV, H))
	def results(backend, dtype=rt.dtype):
		if backend == "fa3": nn.attention.activate_flash_attention_impl("FA3")
		for name in "cudnn", "flash", "mem_efficient", "math":
			getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == backend.replace("fa3", "flash"))
		out = attend(*(t.to(dtype) for t in (q, k, v)))
		return [out, *torch.autograd.grad(out, (q, k, v), y.to(dtype))]
	expected = results("math", torch.float32)
	for backend in cfg.attention_backend.replace("auto", "fa3 cudnn flash math").split():
		try:
			off = torch.stack([(a - b).norm() / b.norm() for a, b in zip(results(backend), expected)]).max().item()
			if off < 0.02: return backend
		except Exception as error: off = first_line(error)  # whatever one raises that is not there
		if backend == "fa3":
			with suppress(AttributeError): nn.attention.restore_flash_attention_impl(_raise_warn=False)  # from torch 2.11 on
	raise RunError(f"ATTENTION_BACKEND={backend} does not work here, or is wrong ({off}): set auto")

class Attention(nn.Module):
	"""Causal, grouped queries, rms norm on queries and keys, a gain per query head."""
	def __init__(self, cfg):
		super().__init__()
		D = cfg.model_dim
		self.head_dim = D // cfg.num_heads
		self.c_q, self.proj = Linear(D, D), Linear(D, D, zero=True)
		self.c_k, self.c_v = (Linear(D, cfg.num_kv_heads * self.head_dim) for _ in "kv")
		self.q_gain = nn.Parameter(torch.full((cfg.num_heads,), cfg.qk_gain_init))
	def forward(self, x, rotary, scale):
		weights = [used(c) for c in (self.c_q, self.c_k, self.c_v)]
		q, k, v = qkv_heads(x, weights, self.q_gain, rotary)  # (B, T, heads, d)
		return self.proj(attend(q, k, v).flatten(2), scale)

class Block(nn.Module):
	"""Attention and the MLP down(relu(up x)^2) (arXiv:2109.08668), scaled by channel; x0, the embedding, is mixed in."""
	def __init__(self, cfg):
		super().__init__()
		ones = torch.ones(D := cfg.model_dim)
		self.attn = Attention(cfg)
		self.mlp = nn.ModuleDict(dict(fc=Linear(D, n := cfg.mlp_mult * D), proj=Linear(n, D, zero=True)))
		self.attn_scale, self.mlp_scale = (nn.Parameter(ones.clone()) for _ in "am")
		self.resid_mix = nn.Parameter(torch.stack((ones, 0 * ones)))
	def forward(self, x, x0, rotary):
		a, b = self.resid_mix.to(x.dtype)
		x = a * x + b * x0
		x = x + self.attn(rms_norm(x), rotary, self.attn_scale)
		return x + relu2_mlp(rms_norm(x), used(self.mlp.fc), used(self.mlp.proj, self.mlp_scale))

class GPT(nn.Module):
	"""The challenge's baseline: half of the blocks push their outputs, the others add them back."""
	def __init__(self, cfg, dtype):
		super().__init__()
		D, self.dtype, self.cap = cfg.model_dim, dtype, cfg.logit_softcap
		self.tok_emb = nn.Embedding(cfg.vocab_size, D)
		self.skip_weights = nn.Parameter(torch.ones(cfg.num_layers // 2, D))
		self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.num_layers))
		self.lm_head = None if cfg.tie_embeddings else Linear(D, cfg.vocab_size, zero=True)
		if cfg.tie_embeddings: nn.init.normal_(self.tok_emb.weight, std=cfg.tied_embed_init_std)
		# Operations a token, with gradients: every matrix, and attention's causal half.
		matrices = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2 < len(p))
		self.flops = 6 * (matrices + cfg.vocab_size * D + cfg.num_layers * cfg.train_seq_len * D)
		channels = torch.arange(0, d := D // cfg.num_heads, 2) / d
		angle = torch.arange(cfg.train_seq_len)[:, None, None] * cfg.rope_base ** -channels
		self.register_buffer("rotary", torch.stack((angle.cos(), angle.sin())), persistent=False)
		scales = dict(self.named_parameters())
		self.casts = [(m, scales.get(n.replace(".proj", "_scale"))) for n, m in self.named_modules() if hasattr(m, "weight")]
		for m, _ in self.casts: m.register_buffer("low", m.weight.detach().to(dtype, copy=True), persistent=False)
	@torch.no_grad()
	def cast(self):
		"""Where weights have changed: once a step, not once a micro-step."""
		torch._foreach_copy_([m.low for m, _ in self.casts], [folded(*pair) for pair in self.casts])
	def forward(self, x, y):
		"""Mean nats, a float32 scalar, of predicting y from x, both (B, T)."""
		x = x0 = rms_norm(self.tok_emb(x).to(self.dtype))  # (B, T, D)
		skips = []
		for i, block in enumerate(self.blocks, -len(self.skip_weights)):
			if i >= 0 and skips: x = x + self.skip_weights[i].to(x.dtype) * skips.pop()
			x = block(x, x0, self.rotary)
			if i < 0: skips.append(x)
		logits = F.linear(rms_norm(x), used(self.lm_head or self.tok_emb))
		return F.cross_entropy((self.cap * torch.tanh(logits / self.cap)).float().flatten(0, 1), y.flatten())

def compiled(log, *functions):
	"""`functions` compiled; eager, with one warning, where that cannot work."""
	if "2.11." in torch.__version__:  # costs 6 ms of 67 there on an H100 (parameter-golf PR 1420)
		os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")
	broken = []
	def calling(slow):
		fast = torch.compile(slow, dynamic=False, fullgraph=True)
		def call(*args):
			try:
				if not broken: return fast(*args)
			except (torch._dynamo.exc.TorchDynamoException, ImportError, OSError) as error:
				log.line(f"warning: torch.compile does not work here: {first_line(error)}")
				broken.append(error)
			return slow(*args)
		return call
	return [*map(calling, functions)]

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

class Optimizers:
	"""Muon on the blocks' matrices, Adam on all else; float32 vectors: values; gradients and, reduced first, `tail`."""
	def __init__(self, model, cfg, tail):
		self.cfg, groups, small, head = cfg, defaultdict(list), [model.skip_weights], model.lm_head
		for name, p in model.blocks.named_parameters():
			(small if p.ndim != 2 or named(name, cfg.control_tensor_name_patterns) else groups[p.shape]).append(p)
		rates = {model.tok_emb.weight: cfg.embed_lr if head else cfg.tied_embed_lr} | dict.fromkeys(small, cfg.scalar_lr)
		if head: rates[head.weight] = cfg.head_lr
		members = [*sum(groups.values(), []), *rates]  # Muon's, by shape; then Adam's
		self.values = torch.cat([p.detach().flatten() for p in members])
		self.reduced = self.values.new_zeros(len(self.values) + tail)
		self.grads, self.tail = self.reduced.tensor_split([-tail])
		self.rates = torch.cat([p.new_full([p.numel()], lr) for p, lr in rates.items()])
		def cut(sizes): return zip(self.values.split(sizes), self.grads.split(sizes))
		for p, (values, grads) in zip(members, cut([p.numel() for p in members])):
			p.data, p.grad = values.view_as(p), grads.view_as(p)
		*banks, adam = cut([*(len(group) * shape.numel() for shape, group in groups.items()), len(self.rates)])
		self.adam = *adam, *map(torch.zeros_like, adam)  # values, gradients, their average, their squares'
		self.banks = [[v.view(-1, *shape) for v in (*pair, torch.zeros_like(pair[0]))] for shape, pair in zip(groups, banks)]
		self.buckets = [self.reduced[-tail - len(self.rates):], *(grads for _, grads, _ in self.banks)]
		self.count, self.lr_scale, self.momentum = self.values.new_zeros(3)
		self.halted, self.cast = self.count > 0, model.cast
	def reduce(self, rt):
		"""Begins all sums over ranks, awaits the tail's and Adam's: the others run under the updates before theirs."""
		self.waits = [rt.begin(dist.all_reduce, part) for part in self.buckets]
		for wait in self.waits[:None if self.cfg.grad_clip_norm or self.cfg.training_timing_breakdown else 1]: wait()
	def clip(self):
		if (limit := self.cfg.grad_clip_norm) > 0: self.grads.mul_((limit / (self.grads.norm() + 1e-6)).clamp(max=1.0))
	@torch.no_grad()
	def step(self, lr_scale, momentum):
		self.lr_scale.fill_(lr_scale)
		self.momentum.fill_(momentum)
		self.update_adam()
		for wait, bank in zip(self.waits[1:], self.banks):
			wait()
			self.update_muon(*bank)
		self.cast()
	# By the schedules on the device. Once `halted` is set nothing changes.
	def update_muon(self, values, grads, average):
		cfg, halted, dtype = self.cfg, self.halted, torch.bfloat16 if grads.is_cuda else torch.float32
		grads = grads.masked_fill(halted, 0)
		average.mul_(torch.where(halted, 1.0, self.momentum)).add_(grads)
		update = newton_schulz(grads + self.momentum * average, cfg.muon_backend_steps, dtype)
		rate = cfg.matrix_lr * self.lr_scale * max(1.0, values.size(-2) / values.size(-1)) ** 0.5
		values.sub_((rate * update).masked_fill(halted, 0))
	def update_adam(self):
		cfg, halted, (values, grads, mean, square) = self.cfg, self.halted, self.adam
		grads = grads.masked_fill(halted, 0)
		self.count.add_(~halted)
		mean.lerp_(grads, (1 - cfg.beta1) * ~halted)
		square.lerp_(grads.square(), (1 - cfg.beta2) * ~halted)
		root = (square / (1 - cfg.beta2 ** self.count)).sqrt() + cfg.adam_eps
		update = self.rates * self.lr_scale * mean / (1 - cfg.beta1 ** self.count) / root
		values.sub_(update.masked_fill(halted, 0))
	def snapshot(self): return [*map(torch.clone, self.tensors())]
	def tensors(self): return [self.values, *(average for *_, average in self.banks), *self.adam[2:], self.count]
	@torch.no_grad()
	def restore(self, saved):
		for mine, theirs in zip(self.tensors(), saved, strict=True): mine.copy_(theirs.view_as(mine))
		self.cast()

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

Agreed = namedtuple("Agreed", "elapsed_ms train_loss stop data_crc wait_ms bad")  # wait_ms, bad: of each rank
class Control:
	"""The control vector of README.md; a crc in parts of 11 bits: exact float32 sums."""
	FIELDS = 6  # before those of each rank
	def __init__(self, optimizers, rt):
		self.optimizers, self.rt, self.lag = optimizers, rt, 1 + rt.cuda
		self.ring = torch.zeros(4, 2, len(optimizers.tail), pin_memory=rt.cuda)  # steps, (sent, received)
		self.events = [recorded() for _ in range(4 * rt.cuda)]
	def agree(self, step, loss, *, clock, wait_ms, data_crc):
		"""Sums gradients and tail over the ranks; loss: this rank's share of the mean, a device scalar."""
		(sent, received), rt, mine = self.ring[step % 4], self.rt, self.optimizers
		tail, bad = mine.tail, mine.tail[-rt.world_size:]
		ms = clock.ms_at(self.events[step - 2 & 3]) if clock.edge else clock.now_ms()  # CUDA: the last sum surely there
		sent[:self.FIELDS] = torch.tensor([*(data_crc >> n & 0x7FF for n in (0, 11, 22)), ms * (rt.rank == 0), 0, rt.signum])
		sent[self.FIELDS + rt.rank] = wait_ms
		tail.copy_(sent, non_blocking=True)
		tail[4], bad[rt.rank] = loss, ~torch.isfinite(loss + mine.grads.sum())
		mine.reduce(rt)
		mine.halted |= tail[5] + bad.sum() > 0
		received.copy_(tail, non_blocking=True)
		if rt.cuda: self.events[step % 4].record()
	def read(self, step):
		"""Synchronisation point: the reduction of `step`, two steps ago (logging: just now)."""
		with self.rt.waiting("step"):
			if self.rt.cuda: self.events[step % 4].synchronize()
		low, mid, high, ms, loss, stop, *ranks = self.ring[step % 4][1].tolist()
		crc, W = int(low + 2**11 * mid + 2**22 * high) & CRC, self.rt.world_size
		return Agreed(ms, loss, stop, crc, ranks[:W], ranks[W:])

# === EVALUATION ===
class ByteTable(namedtuple("ByteTable", "base leading_space boundary")):
	"""Of each id, numpy or tensors: UTF-8 bytes less a leading space; has it one? is it control, unknown, unused?"""
	@classmethod
	def load(cls, path):
		"""A SentencePiece .model, or .json {"kind": "byte", "offset": n}: ids below n are controls."""
		if path.endswith(".json"):
			boundary = np.arange(256 + (offset := read_json(Path(path))["offset"])) < offset
			return cls(1 - boundary, 0 * boundary, boundary)
		ids = [*range(len(model := sentencepiece.SentencePieceProcessor(model_file=path)))]
		pieces = [piece.replace("\u2581", " ") for piece in model.id_to_piece(ids)]
		boundary = np.any([model.is_control(ids), model.is_unknown(ids), model.is_unused(ids)], 0)
		space = np.char.startswith(pieces, " ") & ~boundary
		base = np.where(model.is_byte(ids), 1, [len(piece.encode()) for piece in pieces] - space)
		return cls(base * ~boundary, space, boundary)
	def count(self, previous, target):
		"""Bytes of the ids `target`, each after its `previous`; no leading space after a boundary."""
		return self.base[target].sum() + (self.leading_space[target] & ~self.boundary[previous]).sum()

def tokenizer_faults(cfg):
	path = cfg.tokenizer_path
	try:
		if not os.path.isfile(path): yield "tokenizer_path", f"no such file: {where_else(cfg, 'tokenizer_path')}"
		elif (size := len(ByteTable.load(path).base)) != cfg.vocab_size:
			yield "vocab_size", f"the tokenizer {path} has {size} tokens: set {size}"
	except Exception as error:	# whatever a damaged file raises
		yield "tokenizer_path", f"no SentencePiece .model, no byte .json ({first_line(error)}): set one"

def due(every, step): return every and step % every == 0
class Validation:
	"""Nats from the model; bytes from the tokens, counted once."""
	bytes, resident = 0, None  # the pipeline that keeps its batches
	def __init__(self, cfg, rt, log, verify):
		self.cfg, self.rt, self.log, self.verify, self.shards = cfg, rt, log, verify, Shards(cfg.data_path, "val")
		self.tokens, self.table = cut_val_tokens(cfg, self.shards.total), ByteTable.load(cfg.tokenizer_path)
		self.plan = BatchPlan.val(cfg, self.tokens, rt.rank, rt.world_size)
		self.overlap, self.on_device = Overlap.of(cfg, "val", rt.cuda), cfg.val_bytecount_device == "cuda"
		if self.on_device: self.table = ByteTable(*(torch.tensor(part, device=rt.device) for part in self.table))
	def host_bytes(self, plan, rows, tokens):  # in the reader thread
		return 0 if self.bytes or self.on_device else int(self.table.count(tokens[:-1], tokens[1:]))
	@torch.no_grad()
	def evaluate(self, loss_of, scope, compiles, spans):
		"""(nats a token, bits per byte, ms). Halt: a signal."""
		log, plan, total = self.log, self.plan, self.plan.num_batches()
		sums = torch.zeros(3, dtype=torch.float64, device=self.rt.device)  # nats, bytes, signals
		start, foretell = (told := now()), forecast(self.rt, log, f"{scope}: {total} batches", total, compiles=compiles)
		pipeline = self.resident.again(spans) if self.resident else Pipeline(self, "val", self.host_bytes, spans)
		if self.overlap.resident: self.resident = pipeline
		with suppress(Stop), closing(pipeline), spans("validate"):
			for k, (x, y, digest) in enumerate(pipeline, 1):
				next(foretell)
				n = len(rows := plan.rows(k - 1))
				with spans("forward"): sums[0] += loss_of(x, y).double() * n * plan.seq_len
				sums[1] += self.table.count(x[:n], y[:n]) if self.on_device and not self.bytes else digest & CRC
				self.verify.consumed(pipeline, (x, y, digest), k)
				at = f"{scope} batch {k}/{total}"
				if due(self.cfg.val_progress_log_every, k):  # a synchronisation point
					seen = (rows.stop - plan.first_row) * plan.seq_len
					log.line(f"val_progress:{at} partial_mean_loss:{sums[0].item() / seen:.4f} tokens_seen:{seen}")
				if now() - told > 30: told = log.console(f"({at})") or now()
		sums[2] = self.rt.signum  # then a synchronisation point: the end
		nats, counted, stop = self.rt.all_reduce(sums, re.sub(r"step_\d+", "validation", scope)).tolist()
		if stop: raise Halt(stop)
		self.verify.settle()
		self.bytes = self.bytes or int(counted)
		return nats / (self.tokens - 1), nats / math.log(2) / self.bytes, 1e3 * (now() - start)

# === ARTIFACT ===
QUANT_FORMAT = "int8_clean_per_row_v1"
def quantize(t):
	"""Float tensor -> (int8 of its shape, scale): float16 (rows,) for a matrix, else a float32 scalar."""
	t, matrix = t.float(), t.ndim == 2
	clip = t.abs().quantile(0.9999984, 1 if matrix else None, True)
	scale = (clip / 127).clamp(1 / 127) if matrix else torch.where(clip > 0, clip / 127, 1.0)
	q = (t.clamp(-clip, clip) / scale).round().clamp(-127, 127).to(torch.int8)
	return q, scale[:, 0].half() if matrix else scale.view(())
def dequantize(q, scale):
	"""Undoes quantize() up to half a scale, float32."""
	return q.float() * scale.float().view(-1, *[1] * (q.ndim - 1))
def saved(thing):
	"""A torch file, as bytes."""
	torch.save(thing, buffer := io.BytesIO())
	return buffer.getvalue()
def pack(state, cfg):
	"""(the artifact, bytes of its tensors, of its torch file) of CPU tensors, each its own."""
	file = {part: {} for part in "quantized scales dtypes passthrough qmeta passthrough_orig_dtypes".split()}
	quantized, scales, dtypes, kept, meta, originals = file.values()
	for name, t in state.items():
		dtype = str(t.dtype)[6:]  # behind "torch."
		if not t.is_floating_point(): kept[name] = t
		elif t.numel() > 65_536:
			(quantized[name], scales[name]), dtypes[name] = quantize(t), dtype
			if t.ndim == 2: meta[name] = dict(scheme="per_row", axis=0)
		elif named(name, cfg.int8_keep_float_fp32_name_patterns): kept[name] = t.float()
		else: kept[name], originals[name] = t.half(), dtype
	raw = saved(dict(__quant_format__=QUANT_FORMAT, **file))
	payload = sum(t.nbytes for part in (quantized, scales, kept) for t in part.values())
	return zlib.compress(raw, 9), payload, len(raw)
@contextmanager
def refused(what):
	"""What a damaged or hostile file raises is a RunError."""
	try: yield
	except Exception as error: raise RunError(f"{what}: {first_line(error)}")
def load(data, limit):
	"""What torch.save wrote. Executes nothing; ValueError above `limit` bytes."""
	file = len(data) <= limit and zipfile.ZipFile(io.BytesIO(data))
	if not file or sum(part.file_size for part in file.infolist()) > limit: raise ValueError(f"it has over {limit} bytes")
	if any(b"bytearray" in file.read(part) for part in file.infolist()): raise ValueError("it asks for memory")
	try: return torch.load(io.BytesIO(data), "cpu", weights_only=True)
	except pickle.UnpicklingError: raise ValueError("it holds code")
def unpack(data, expected):
	"""The state in an artifact, ours or the challenge's; RunError unless it fits `expected`."""
	limit = 8 * sum(map(torch.numel, expected.values())) + (1 << 20)
	with refused("the artifact cannot be loaded"):
		raw = (stream := zlib.decompressobj()).decompress(data, limit)
		if not stream.eof: raise ValueError(f"it is cut short, or has over {limit} bytes")
		file = load(raw, limit)
		if (kind := file["__quant_format__"]) != QUANT_FORMAT: raise ValueError(f"its format is {kind}")
		quantized, scales, plain = file["quantized"], file["scales"], file["passthrough"]
		found, wanted = ({(name, t.shape) for name, t in state.items()} for state in (quantized | plain, expected))
		wrong = sorted({name for name, _ in found ^ wanted})[:5]
		if wrong: raise ValueError(f"missing, unknown or of another shape: {', '.join(wrong)}")
		if any(scales[name].shape not in ((), q.shape[:1]) for name, q in quantized.items()): raise ValueError("wrong scales")
		return {name: plain[name].to(t.dtype) if name in plain else dequantize(quantized[name], scales[name])
			for name, t in expected.items()}

# === CHECKPOINT ===
def fingerprint(cfg):
	"""What a checkpoint is bound to."""
	names = [*(values := vars(cfg))]
	bound = [*names[:2], "seed", *names[names.index("iterations"):names.index("train_prefetch")]]
	return {n: Path(values[n]).name if "_path" in n else values[n] for n in bound}
def find_checkpoint(cfg):
	"""The path of RESUME's; None: start anew."""
	newest = max(Path("checkpoints", cfg.run_id).glob("step_*.pt"), default=None)
	path = {"": None, "auto": newest}.get(cfg.resume, Path(cfg.resume))
	with refused(f"name a checkpoint: RESUME={path}"): return path and path.stat() and path

# === TRAINING ===
class Run:
	"""The model and all that trains it; the same weights on every rank."""
	step = heeded = crc = final = 0  # steps taken, looked at; their data_crc; the state before the export
	def __init__(self, cfg, rt, log):
		self.cfg, self.rt, self.log, self.clock, self.attention = cfg, rt, log, Clock(rt), choose_attention(cfg, rt)
		torch.manual_seed(cfg.seed)
		self.accumulation, self.compiles = cfg.accumulation(rt.world_size), cfg.torch_compile in ["1", "auto"][:1 + rt.cuda]
		self.loss_of = self.model = GPT(cfg, rt.dtype).to(rt.device)
		o = self.optimizers = Optimizers(self.model, cfg, tail=Control.FIELDS + 2 * rt.world_size)
		if self.compiles: self.loss_of, o.update_muon, o.update_adam, o.cast = compiled(log, self.model,
			o.update_muon, o.update_adam, o.cast)
		self.control, self.shards = Control(o, rt), Shards(cfg.data_path, "train")
		self.overlap, self.plan = Overlap.of(cfg, "train", rt.cuda), BatchPlan.train(cfg, rt.rank, rt.world_size)
		self.verify, self.partial = Verify(cfg.data_verify, log), " partial_val:1" * bool(cfg.val_tokens)
		self.validation = Validation(cfg, rt, log, self.verify)
		self.generators = [torch.default_generator, *torch.cuda.default_generators]
		self.writer, self.history = threading.Thread(), []  # of a checkpoint; [step, loss, bpb, ms] of validations
		self.writer.start()
		self.hardware = torch.cuda.get_device_name() if rt.cuda else os.uname().machine
	def heed(self, step):
		"""Halt at the first step before `step` that was not taken. All ranks ask alike."""
		while self.heeded < step:
			said = self.control.read(self.heeded)
			if said.stop or any(said.bad): self.step = self.heeded
			if any(said.bad): raise Halt(0, f"rank {said.bad.index(1)}: step {self.step + 1}: loss or gradient not finite: "
				"lower the learning rates")
			if said.stop: raise Halt(said.stop)
			self.heeded, self.crc = self.heeded + 1, said.data_crc
	def state(self):
		"""What to go on from. Synchronisation point: copies to the host."""
		self.heed(self.step)
		tensors = [t.to("cpu", copy=True, non_blocking=True) for t in self.optimizers.tensors()]
		self.rt.synchronize()
		return dict(config=fingerprint(self.cfg), step=self.step, train_ms=self.clock.now_ms(), data_crc=self.crc,
			history=self.history[:], rng=[g.get_state() for g in self.generators], tensors=tensors)
	def write(self, state):
		"""step_<n>.pt; the last CHECKPOINT_KEEP stay. True: on the disk."""
		folder, step, start = Path("checkpoints", self.cfg.run_id), state["step"], now()
		path = folder / f"step_{step:08d}.pt"
		try:
			folder.mkdir(parents=True, exist_ok=True)
			for rest in folder.glob("*.tmp"): rest.unlink()  # of a process that was killed
			write_atomic(path, saved(state))
			for old in sorted(folder.glob("step_*.pt"))[:-self.cfg.checkpoint_keep]: old.unlink()
			self.log.event("checkpoint", step=step, path=str(path), write_ms=1e3 * (now() - start))
			return True
		except (OSError, RunError) as error: self.log.line(f"warning: no checkpoint of step {step}: {first_line(error)}")
	def checkpoint(self, spans):
		"""A thread writes it: training waits for no disk."""
		with spans("checkpoint", HOST): state = self.state()
		if self.writer.is_alive(): return self.log.line(f"warning: no checkpoint of step {self.step}: a busy disk")
		self.writer = threading.Thread(target=lambda: self.rt.rank or self.write(state), daemon=True)
		self.writer.start()
	def resume(self, path):
		"""RunError: another configuration's, or no checkpoint."""
		limit = sum(t.nbytes for t in self.optimizers.tensors()) + (1 << 22)
		with refused(f"RESUME={path}"):
			state = load(self.rt.broadcast(self.rt.rank or open(path, "rb").read(limit + 1)), limit)
			theirs = state["config"]
			if other := [f"{k.upper()}={shown(theirs.get(k, ''))}, not {shown(v)}" for k, v in fingerprint(self.cfg).items()
				if theirs.get(k) != v]: raise ValueError("another configuration: " + "; ".join(other))
			self.optimizers.restore(state["tensors"])
			for g, rng in zip(self.generators, state["rng"]): g.set_state(rng)
			self.step, self.crc, self.clock.total_ms = int(state["step"]), int(state["data_crc"]), float(state["train_ms"])
			self.history = [[*map(float, row)] for row in state["history"]]
		self.plan = self.plan._replace(first_row=self.plan.rows(self.step * self.accumulation).start)
		self.log.say("checkpoint", "resumed: step:{} from:{} train_time:{:.0f}ms", step=self.step, resumed_from=str(path),
			train_time_ms=self.clock.total_ms)
	def batches(self, spans=Spans()): return Pipeline(self, "train", data_crc, spans)

def train_step(run, batches, step, elapsed_ms, crc, foretell):
	"""elapsed_ms: agreed; crc: this rank's data_crc, returned."""
	spans, o, share, started = batches.spans, run.optimizers, 0.0, now()  # share: of the loss
	o.reduced.zero_()
	with suppress(Stop):  # then all leave the step out
		for _ in range(run.accumulation):
			next(foretell)
			x, y, digest = batch = next(batches)
			with spans("forward"): loss = run.loss_of(x, y) / (run.accumulation * run.rt.world_size)
			with spans("backward"): loss.backward()
			run.verify.consumed(batches, batch, step + 1)
			share += loss.detach()
			crc = crc + digest & CRC
			next(foretell)
	with spans("reduce"): run.control.agree(step, share, clock=run.clock, wait_ms=batches.stage.wait_ms, data_crc=crc)
	with spans("grad_clip"): o.clip()
	with spans("optimizer"): o.step(lr_multiplier(run.cfg, step, elapsed_ms), muon_momentum(run.cfg, step))
	run.rt.longest_s = max(run.rt.longest_s, now() - started)
	return crc
def warm_up(run, foretell):
	"""Priming steps, off the clock, rolled back."""
	saved, count, first, run.heeded = run.optimizers.snapshot(), run.cfg.warmup_steps, (run.step, run.step, run.crc), 0
	try:
		with closing(run.batches()) as batches:
			for step in range(count):
				train_step(run, batches, step, 0.0, 0, foretell)
				run.heed(step + 1)
				run.log.line(f"warmup_step:{step + 1}/{count}")
	finally:
		run.optimizers.restore(saved)
		run.step, run.heeded, run.crc = first
def validate(run, step, spans):
	run.clock.stop()
	run.heed(step)
	val, ms = run.validation, run.clock.total_ms
	loss, bpb, val_ms = val.evaluate(run.loss_of, f"step_{step}", run.compiles, spans)
	run.log.say("validation", "step:{0}/{1} val_loss:{2:.4f} val_bpb:{3:.4f} train_time:{4:.0f}ms step_avg:{5:.2f}ms"
		+ run.partial + "\nval_stage_time_ms:{6:.0f}ms step:{0}/{1}", step=step, iterations=run.cfg.iterations, val_loss=loss,
		val_bpb=bpb, train_time_ms=ms, step_avg_ms=ms / max(step, 1), val_ms=val_ms, val_tokens=val.tokens - 1,
		val_bytes=val.bytes)
	run.history.append([step, loss, bpb, val_ms])
	run.clock.start()

# Dense bfloat16, NVIDIA's data sheets; the last that fits counts.
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "NVL": 835, "H100 PCIe": 756, "A100": 312, "4090": 165}
def log_step(run, step):
	"""A training line; rates since the last. Synchronisation point: its time must be true."""
	run.rt.synchronize()
	run.heed(step)
	run.verify.settle()
	c, ms, agreed = run.cfg, run.clock.now_ms(), run.control.read(step - 1)
	mark = step, ms, *agreed.wait_ms
	(steps, since_ms, *waits_ms), run.logged = np.subtract(mark, run.logged), mark
	tok_s = 1e3 * steps * c.train_batch_tokens / since_ms
	left_ms = min((c.iterations - step) * ms / step, (1e3 * max(0, c.max_wallclock_seconds) or math.inf) - ms)
	mfu = {"mfu_percent": tok_s * run.model.flops / run.rt.world_size / peak / 1e10
		for gpu, peak in PEAK_TFLOPS.items() if gpu in run.hardware}
	run.log.say("step", "step:{}/{} train_loss:{:.4f} train_time:{:.0f}ms step_avg:{:.2f}ms tok_s:{:.0f} "
		"input_wait:{:.2f}% data_crc:{} eta:{:.0f}s" + " mfu:{:.1f}%" * len(mfu), step=step, iterations=c.iterations,
		train_loss=agreed.train_loss, train_time_ms=ms, step_avg_ms=ms / step, tok_s=tok_s,
		input_wait_percent=100 * max(waits_ms) / since_ms, data_crc=f"{agreed.data_crc:08x}", eta_s=max(0, left_ms) / 1e3,
		**mfu)

def train(run):
	c, log, clock, rt = run.cfg, run.log, run.clock, run.rt
	left, cap_s = c.iterations - run.step, c.max_wallclock_seconds
	run.logged = run.start = run.step, clock.total_ms, *[0.0] * rt.world_size  # input waits; at the last line
	foretell = forecast(rt, log, f"{c.warmup_steps} + {left} steps", c.warmup_steps + left,
		pieces=run.accumulation, cap_s=cap_s, compiles=run.compiles)
	warm_up(run, foretell)
	kind = Breakdown if c.training_timing_breakdown else Trace if c.trace_steps > 0 == rt.rank else Spans
	with closing(kind(c, rt, log)) as spans, closing(run.batches(spans)) as batches:
		step, elapsed_ms, crc = run.step, clock.total_ms, run.crc * (rt.rank == 0)
		clock.start()
		while True:
			run.heed(step - run.control.lag)  # synchronisation point, past unless the host runs far ahead
			if step >= run.start[0] + 2:
				elapsed_ms = run.control.read(step - 2).elapsed_ms * min(1.5, step / max(1, step - 1 - 2 * rt.cuda))
			capped = step < c.iterations and 0 < 1e3 * cap_s <= elapsed_ms + elapsed_ms / max(step, 1)
			last = capped or step == c.iterations
			if last or due(c.val_loss_every, step): validate(run, step, spans)
			if last: break
			if step == run.shards.total // (c.train_batch_tokens + SPANS_A_STEP):
				log.line(f"WARNING: step {step + 1} begins a second epoch of {len(run.shards.paths)} shards")
			crc = train_step(run, batches, step, elapsed_ms, crc, foretell)
			run.step = step = step + 1
			if step <= 10 or due(c.train_log_every, step): log_step(run, step)
			if due(c.checkpoint_every, step): run.checkpoint(spans)
			spans.step_done(step)
		clock.stop()
		if capped: log.line(f"stopping_early: wallclock_cap train_time:{clock.total_ms:.0f}ms step:{step}/{c.iterations}")
		report(run, batches, step)
def waits(run, batches, waits_ms, train_ms):
	n = run.accumulation
	steps = np.reshape(waits_ms[:batches.handed] or [0.0] * n, (-1, n)).sum(1)
	worst = int(steps.argmax())
	return dict(total_ms=steps.sum(), percent=100 * steps.sum() / train_ms, median_ms=np.median(steps),
		p99_ms=np.percentile(steps, 99), max_ms=steps.max(), worst_step=run.start[0] + worst + 1,
		at_shard_boundary=worst in {k // n for k in batches.crossings})
def verdict(percent, hidden, prefetch, needed, delivered, awaited=None):
	"""hidden: %; needed, delivered: MB/s."""
	cost = f"input cost {percent:.2f} % of training: "
	if percent < 0.5 <= hidden: return f"{cost}overlap hides {hidden:.2f} %"
	if percent < 0.5: return cost + "overlap settings do not matter here"
	if not prefetch: return cost + "nothing overlaps: set TRAIN_PREFETCH=1"
	if awaited: return cost + "shards were still being made"
	if delivered > needed: return cost + "stalls: raise TRAIN_PREFETCH_QUEUE"
	return f"reads are the limit: {needed:.3g} MB/s needed, {delivered:.3g} MB/s delivered: move DATA_PATH to a local disk"
def report(run, batches, step):
	"""What the run has cost, its input since resumed; the device is idle."""
	stage, (first, first_ms, *_), total_ms, read = batches.stage, run.start, run.clock.total_ms, batches.bytes_read
	train_ms, tokens = total_ms - first_ms, step * (run.cfg.train_batch_tokens + SPANS_A_STEP)
	stage.ask()
	host, device = (waits(run, batches, ms, train_ms) for ms in (batches.host_waits_ms, stage.waits_ms))
	rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 * (sys.platform != "darwin")  # in bytes there
	peak = [(most() or rss) >> 20 for most in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)]
	percent = 100 * (step > first) * max(run.control.read(step - 1).wait_ms) / train_ms
	needed, delivered = (read / 1e3 / max(ms, 1e-9) for ms in (train_ms - stage.wait_ms, batches.read_ms))
	moved = dict(read=read, read_gb_s=delivered / 1e3, copied=stage.bytes_copied,
		copy_gb_s=stage.bytes_copied / 1e6 / (stage.copy_ms or 1),
		late_copies_percent=100 * batches.late_copies / (batches.handed or 1))
	seen, val_ms = dict(tokens_seen=tokens, epochs=tokens / run.shards.ends[-1]), sum(row[3] for row in run.history)
	advice = verdict(percent, 100 * (batches.busy_ms + stage.copy_ms) / train_ms - device["percent"], run.overlap.queue,
		needed, delivered, run.shards.awaited)
	run.log.line(f"timing_train_loop_ms:{total_ms:.0f}ms timing_val_total_ms:{val_ms:.0f}ms\n"
		f"host_wait {words(host, 3)}\ndevice_wait {words(device, 3)}\ninput_bytes {words(moved)}\ninput: {advice}\n"
		f"{words(seen, 3)}\npeak memory allocated: {peak[0]} MiB reserved: {peak[1]} MiB")
	run.log.event("input", step=step, train_time_ms=total_ms, val_total_ms=val_ms, host_wait=host, device_wait=device,
		percent_of_slowest_rank=percent, bytes=moved, verdict=advice, **seen, peak_mib=peak)
	run.verify.settle(total=True)
	batches.spans.close()
def export_and_score(run, code_bytes):
	"""Rank 0 writes the artifact; all ranks score its very bytes."""
	log, data, tag, run.final = run.log, None, "final_int8_zlib_roundtrip", run.state()
	if not run.rt.rank:
		state = {name: t.cpu().clone() for name, t in run.model.state_dict().items()}
		write_atomic(Path("final_model.pt"), model := saved(state))
		data, payload, raw = pack(state, run.cfg)
		write_atomic(Path("final_model.int8.ptz"), data)
		log.say("artifact", "Serialized model: {} bytes\nCode size: {} bytes\nTotal submission size: {} bytes\n"
			"Serialized model int8+zlib: {} bytes (payload:{} raw_torch:{} payload_ratio:{:.2f}x)\n"
			"Total submission size int8+zlib: {} bytes", model_bytes=len(model), code_bytes=code_bytes,
			raw_total_bytes=len(model) + code_bytes, artifact_bytes=len(data), payload_bytes=payload, raw_torch_bytes=raw,
			payload_ratio=sum(t.nbytes for t in state.values()) / payload, total_bytes=(total := len(data) + code_bytes))
		if total > 16_000_000: log.line(f"WARNING: {total} bytes, the cap is 16000000")
	run.model.load_state_dict(unpack(run.rt.broadcast(data), run.model.state_dict()))
	run.model.cast()
	loss, bpb, ms = run.validation.evaluate(run.loss_of, tag, False, Spans())
	log.say("score", tag + " val_loss:{0:.4f} val_bpb:{1:.4f} eval_time:{2:.0f}ms{3}\n"
		+ tag + "_exact val_loss:{0:.8f} val_bpb:{1:.8f}{3}", val_loss=loss, val_bpb=bpb, eval_ms=ms, partial=run.partial)

# === MAIN ===
def log_header(run, source):
	c, log, rt, val, shards = run.cfg, run.log, run.rt, run.validation, run.shards
	rule, found = "=" * 100, len(shards.paths)
	log.write(f"{source}\n{rule}\nRunning Python {sys.version}\nRunning PyTorch {torch.__version__}\n"
		f"{os.popen('timeout 30 nvidia-smi 2>/dev/null').read()}\n{rule}", log.path)
	def of(names): return " ".join(f"{name}:{getattr(c, name)}" for name in names.split())
	# The source, above them in the log, has no such lines.
	log.line(f"val_bpb:enabled tokenizer_kind={('sentencepiece', 'byte')[c.tokenizer_path.endswith('.json')]} "
		f"tokenizer_path={c.tokenizer_path}\ntrain_loader:dataset:{shards.folder.resolve().name} train_shards:{found}\n"
		f"val_loader:shards pattern={c.data_path}/fineweb_val_*.bin tokens:{val.tokens - 1}{run.partial}\n"
		f"model_params:{len(run.optimizers.values)}\nworld_size:{rt.world_size} grad_accum_steps:{run.accumulation}\n"
		f"sdp_backends:{run.attention}=True\nattention_mode:gqa {of('num_heads num_kv_heads')} attention_backend:"
		f"{run.attention}\n{of('tie_embeddings')} embed_lr:{(c.embed_lr, c.tied_embed_lr)[c.tie_embeddings]} "
		f"head_lr:{c.head_lr * (not c.tie_embeddings)} {of('matrix_lr scalar_lr')}\n"
		f"{of('train_batch_tokens train_seq_len iterations warmup_steps')} max_wallclock_seconds:"
		f"{c.max_wallclock_seconds:.3f}\n{of('seed')}\ntrain_io:{run.overlap.words}\nval_io:{val.overlap.words}")
	expected = producing(shards.folder).get("shards_promised") or promised(shards.folder, "train")
	if shards.growing: log.line(f"train_shards: {found} of {expected or '?'} so far: their producer is at work")
	elif found < expected: log.line(f"WARNING: train_shards: {found} of {expected}, and nothing brings the others")
	if rt.cuda and rt.dtype == torch.float32: log.line("no native bfloat16 on this GPU: float32")
	log.event("config", **vars(c))
	log.event("hardware", device=run.hardware, cpus=os.cpu_count(), torch=torch.__version__, cuda=torch.version.cuda,
		python=sys.version.split()[0], world_size=rt.world_size)
def fitting_accumulation(cfg, rt):
	"""The fewest micro-steps whose rows fit in 0.9 of the free memory, by a trial of eight, uncompiled."""
	if cfg.grad_accum_steps != "auto" or not rt.cuda: return cfg.grad_accum_steps
	rows = cfg.train_batch_tokens // cfg.train_seq_len // rt.world_size
	x = torch.zeros(8, cfg.train_seq_len, device=rt.device).long()
	GPT(cfg, rt.dtype).to(rt.device)(x, x).backward()
	fit = 0.9 * 8 * torch.cuda.mem_get_info()[0] / torch.cuda.max_memory_allocated()
	return next((n for n in range(1, rows) if rows % n == 0 and rows <= n * fit), rows)
def resume_command(cfg, env):
	env = env | dict(RUN_ID=cfg.run_id, RESUME="auto")
	launch = f"torchrun --standalone --nproc_per_node={env['WORLD_SIZE']}" if "RANK" in env else "python3"
	return shlex.join(["env", *(f"{k}={env[k]}" for k in SETTINGS if k in env), *launch.split(), sys.argv[0]])
def execute(cfg, rt, env, warnings):
	"""An exit code. A foreseeable failure is one line."""
	end = 1, "failed"
	try:
		rt.start(cfg, env)
		run_id, steps, found = rt.broadcast((cfg.run_id, fitting_accumulation(cfg, rt), rt.rank or find_checkpoint(cfg)))
		cfg = replace(cfg, run_id=run_id, grad_accum_steps=steps)
		log = rt.log = RunLog(run_id, rt.rank == 0, found)
		source = Path(__file__).read_text("utf-8")
		log.console(log.path)
		log.event("run", run_id=run_id, argv=sys.argv)
		log_header(run := Run(cfg, rt, log), source)
		for warning in warnings: log.line(f"warning: {warning}")
		use_operators(cfg, rt, log)
		if found: run.resume(found)
		train(run)
		export_and_score(run, len(source.encode()))
		run.writer.join(60)
		end = 0, "finished"
	except Halt as halt:
		run.writer.join(60)
		saved = rt.broadcast(not rt.rank and run.write(run.final or run.state()))
		signum, *bad = halt.args
		code = 128 + (rt.signum or (signal.SIGINT if signum % signal.SIGTERM else signal.SIGTERM))
		end = (1, "nonfinite", *bad) if bad else (code, "interrupted", f"interrupted after step {run.step}",
			f"\n{resume_command(cfg, env)}" * bool(saved))
		if rt.rank: end = end[0], ""
	except torch.OutOfMemoryError:
		n = cfg.train_batch_tokens // rt.world_size // (steps := cfg.accumulation(rt.world_size))
		end += (f"GRAD_ACCUM_STEPS={steps}: out of memory on rank {rt.rank} at {n} tokens a micro-step, "
			f"{torch.cuda.mem_get_info()[0] >> 20} MiB free: set {2 * steps}",)
	except RunError as error: end += (str(error),)
	finally:
		last_words(rt.log, *end)
		rt.close()
	return end[0]
def last_words(log, code, status, problem="", hint=""):
	if problem: print(f"train_gpt.py: {problem}", file=sys.stderr)
	if not log: return
	if problem: log.write(f"error: {problem}", log.path)
	log.event("end", status=status, exit_code=code, error=problem)
	log.console(f"{status}: see {log.path}{hint}")
def main():
	env, arguments = os.environ, sys.argv[1:]
	if arguments in (["--help"], ["-h"]): return print_help() or 0
	(cfg, faults), (misspelt, warnings) = Config.from_environment(env), foreign_names(env)
	faults += misspelt + [f"{word}: no such argument: see --help" for word in arguments if word != "--print-config"]
	if arguments and not faults:
		return print(json.dumps({name: dict(value=value, source=("default", "environment")[name.upper() in env])
			for name, value in vars(cfg).items()}, indent=1)) or 0
	rt = Runtime(int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1)), cfg.data_stall_seconds)
	faults += cfg.problems(rt.world_size)
	if torch.__version__ < "2.11.dev": warnings.append(f"torch {torch.__version__}: untried below 2.11")
	if not faults: return execute(cfg, rt, env, warnings)
	if env.get("LOCAL_RANK", "0") == "0":
		print("train_gpt.py: nothing started, wrong settings:", *faults, sep="\n  ", file=sys.stderr)
	return 2
# Python's own exit aborts now and then, in gloo's threads (torch 2.13).
if __name__ == "__main__": os._exit((main(), sys.stdout.flush())[0])
