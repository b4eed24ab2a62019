"""Train a small GPT for the parameter-golf challenge: the best bits per byte that fit in 16,000,000 bytes.

  torchrun --standalone --nproc_per_node=8 train_gpt.py  (eight GPUs; 1, 2, 4: the same order of tokens)
  python train_gpt.py  (one process, GPU or CPU)
  python train_gpt.py --help | --print-config  (the settings, environment variables | their values)

One pipeline feeds training and validation; off is a setting of it. An indent is a tab, as bytes count.
Contents: CONFIG, RUNTIME, INSTRUMENTS, DATA, MODEL, OPTIMIZERS, EVALUATION, ARTIFACT, CHECKPOINT, TRAINING, MAIN.
"""
import bisect, datetime, difflib, faulthandler, functools, gzip, io, itertools, json, math, os, pickle, queue, re
import resource, select, shlex, signal, socket, sys, threading, time, uuid, zipfile, zlib
from collections import defaultdict, namedtuple
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter as now

import numpy as np, sentencepiece, torch
import torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn import attention as attention_impls

# === CONFIG ===
CONTROLS = "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,skip_weights"
# Kinds of settings: (in words, from text to value or an error).
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
steps, attention = ("auto or a count", lambda t: t if t == "auto" else natural[1](t)), word("auto|fa3|cudnn|flash|math")
resumable = "", str.strip

@dataclass(frozen=True)
class Config:
	"""Every setting; README.md has units and meanings."""
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
	gpu_prefetch: count = 2; val_resident: switch = False; val_bytecount_device: counter = "cpu"
	training_timing_breakdown: switch = False; training_timing_every: count = 200; trace_steps: natural = 0
	data_verify: switch = False; data_stall_seconds: positive = 60.0
	checkpoint_every: natural = 0; checkpoint_keep: count = 3; resume: resumable = ""
	device: where = "auto"; torch_compile: mode = "auto"; attention_backend: attention = "auto"
	grad_accum_steps: steps = 0
	@classmethod
	def from_environment(cls, env):
		"""(the settings, faults: of a wrong value the default is taken)."""
		values, faults = {"run_id": str(uuid.uuid4())}, []
		for name in filter(env.__contains__, SETTINGS):
			meaning, parse = SETTINGS[name].type
			try: values[name.lower()] = parse(env[name])
			except Exception:  # whatever a wrong text raises
				faults.append(f"{name}={env[name]}: set {meaning}; the default is {shown(SETTINGS[name].default)}")
		if values.get("resume") == "auto" and "RUN_ID" not in env: faults.append("RESUME=auto: set RUN_ID, too")
		return cls(**values), faults
	def accumulation(self, W):
		return max(1, SPANS_A_STEP // W) if self.grad_accum_steps in (0, "auto") else self.grad_accum_steps
	def problems(self, W):
		"""Every fault on W ranks, with value and remedy."""
		return [f"{name.upper()}={shown(getattr(self, name))}: {text}" if name else text for name, text in (
			*runtime_faults(self), *shape_faults(self, W), *tokenizer_faults(self), *dataset_faults(self))]

def shape_faults(cfg, W):
	"""(a setting or "", what is wrong, what to do)."""
	heads, T, batch, steps = cfg.num_heads, cfg.train_seq_len, cfg.train_batch_tokens, cfg.accumulation(W)
	rows, unit, parts = batch // T, SPANS_A_STEP * T, W * steps
	if over := cfg.model_dim % (2 * heads):
		yield "model_dim", f"must divide by 2 x NUM_HEADS: set {cfg.model_dim - over + 2 * heads}"
	if heads % cfg.num_kv_heads:
		yield "num_kv_heads", f"must divide NUM_HEADS={heads}: set {math.gcd(heads, cfg.num_kv_heads)}"
	if over := batch % unit: yield "train_batch_tokens", f"must divide by 8 x TRAIN_SEQ_LEN: set {batch - over + unit}"
	elif rows % parts:
		near = *range(steps, rows + 1), *range(steps, 0, -1)
		fit = next((f"{g}, or " for g in near if rows % (W * g) == 0), "")
		yield "grad_accum_steps", (f"{W} ranks x {steps} steps must divide {rows} rows: set {fit}"
			f"TRAIN_BATCH_TOKENS={math.lcm(unit, parts * T)}")
	if cfg.val_batch_size < parts * T:
		yield "val_batch_size", f"no row for each of {W} ranks x {steps} steps: set at least {parts * T}"
	if cfg.trace_steps and cfg.training_timing_breakdown:
		yield "trace_steps", "shows overlap, TRAINING_TIMING_BREAKDOWN=1 turns it off: set one of them"

SETTINGS = {f.name.upper(): f for f in fields(Config)}
FOREIGN = re.compile(r"(EMA|SWA|TTT|QAT|LATE|XSA|BIGRAM|VE|MTP|EVAL|GPTQ)_\w+|(MUON|ADAM)_(WD|BETA2)|"
	r"ROPE_DIMS|LN_SCALE|GATED_ATTENTION|VALUE_RESIDUAL")
def shown(value): return f"{value:g}" if isinstance(value, float) else str(value * 1)  # as in the environment
@functools.cache
def edit_distance(a, b):
	"""Damerau-Levenshtein."""
	if not a or not b: return len(a + b)
	if a[0] == b[0]: return edit_distance(a[1:], b[1:])
	rests = [(a[1:], b), (a, b[1:]), (a[1:], b[1:])] + [(a[2:], b[2:])] * (a[:2] == b[1::-1])
	return 1 + min(itertools.starmap(edit_distance, rests))
def foreign_names(env):
	"""(faults: nearly a setting; warnings: other scripts' settings)."""
	faults, others = [], []
	for name in sorted(env.keys() - SETTINGS - {"MODEL_DIR"}):  # common, a letter from ours
		near = difflib.get_close_matches(name, SETTINGS, 9)
		distance, best = min(((edit_distance(name, o), o) for o in near), default=(9, ""))
		if FOREIGN.fullmatch(name): others.append(name)
		elif distance < 2 + (len(name) >= 12): faults.append(f"{name}={env[name]}: no such setting: did you mean {best}?")
	return faults, [f"set, but this script has no such setting: {', '.join(others)}"] * bool(others)
def print_help():
	"""From README.md, if at hand."""
	print(__doc__)
	table = "\n".join(f"| `{name}` | - | - |" for name in SETTINGS)
	with suppress(OSError, IndexError):
		table = Path(__file__).with_name("README.md").read_text("utf-8").split("\n## Settings\n")[1]
	for group, name, unit, meaning in re.findall(r"(?m)^### (.+)$|^\| `(\w+)` \| (.*?) \| (.*) \|$", table):
		default = getattr(Config, name.lower(), "")
		print(f"  {name}={shown(default)}  ({type(default).__name__}, {unit}) {meaning}" if name else f"\n{group}")
	return 0

# === RUNTIME ===
FIRST_WAIT_SECONDS, LEAVE_SECONDS = 300, 5  # longest wait for ranks where they meet first; once told to stop
class RunError(Exception): """A foreseeable failure in one line: what, where, which value, what to do."""
class Stop(Exception): """Told to stop: the others learn it in the next collective."""
class Halt(Exception): """All ranks end after one step: (their signals' sum,) or (0, what is not finite)."""
def first_line(error): return (str(error).strip() or repr(error)).splitlines()[0]
def runtime_faults(cfg):
	"""Of torch and the devices; creates no context on one."""
	version, driver = torch.__version__, ""
	if version < "2.6.dev": yield "", f"torch {version}: loads files unsafely: pip install torch==2.13.0"
	if cfg.device != "cpu" and torch.cuda.is_available():
		if int(ranks := os.getenv("LOCAL_WORLD_SIZE", "1")) > (count := torch.cuda.device_count()):
			yield "", f"LOCAL_WORLD_SIZE={ranks}: {count} CUDA devices here: set --nproc_per_node={count}"
		return
	if cfg.val_bytecount_device == "cuda": yield "val_bytecount_device", "no CUDA in use: set cpu"
	if cfg.device == "cpu": return
	with suppress(OSError): driver = Path("/proc/driver/nvidia/version").read_text()
	if driver or os.path.exists("/dev/nvidia0"):
		number = re.search(r"\d+\.\d[\d.]*|$", driver).group() or "?"
		yield "device", (f"torch {version} (CUDA {torch.version.cuda}) cannot use NVIDIA driver {number} "
			"(see CUDA_VISIBLE_DEVICES): fit torch to it, or set DEVICE=cpu")
	elif cfg.device == "cuda": yield "device", "torch sees no CUDA device: set auto or cpu"

class Watch:
	"""A thread that hears signals, as the main one may sit in a collective, tells all ranks, by the group's store, and
	ends a wait for ranks that do not come: it names them."""
	signum = meetings = longest_s = 0  # heard; begun; longest step
	since, place, store, log = math.inf, "", None, None  # waiting for ranks
	def __init__(self, stall_seconds=60.0, rank=0, world_size=1):
		self.stall_seconds, self.rank, self.world_size, self.met = stall_seconds, rank, world_size, set()
	def start(self):
		self.hears, self.wakes = socket.socketpair()
		self.wakes.setblocking(False)
		signal.set_wakeup_fd(self.wakes.fileno())
		for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda *_: None)
		threading.Thread(target=self._run, daemon=True).start()
	@contextmanager
	def waiting(self, place):
		self.place, self.since = place, now()
		yield
		self.since = math.inf
		self.met.add(place)
	def _run(self):
		while True:
			heard = self.hears.recv(1) if select.select([self.hears], [], [], 0.5)[0] else b""
			with suppress(AttributeError, RuntimeError):  # no group, or its store is gone
				if heard: self.store.set("signal", str(heard[0]))
				self.store.set(str(self.rank), str(self.meetings))
				heard = heard or [self.store.add("signal", 0)]
			self.signum = self.signum or sum(heard)
			limit_s = max(self.stall_seconds + 60, 20 * self.longest_s) if self.place in self.met else FIRST_WAIT_SECONDS
			if self.signum: limit_s = LEAVE_SECONDS + 2 * self.longest_s
			if now() - self.since > limit_s: self._leave(limit_s)
	def _leave(self, limit_s):
		late = []
		with suppress(AttributeError, RuntimeError):
			late = [f"rank {r}" for r in range(self.world_size) if self.store.add(str(r), 0) < self.meetings]
		faulthandler.dump_traceback()  # of all threads
		last_words(self.log, 1, "failed", f"rank {self.rank} waited {limit_s:.0f} s at the {self.place} for "
			f"{', '.join(late) or 'its device'}")
		os._exit(1)

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
		rank, W = (int(env.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
		device, dtype, watch = torch.device("cpu"), torch.float32, Watch(cfg.data_stall_seconds, rank, W)
		watch.start()
		if cuda := cfg.device != "cpu" and torch.cuda.is_available():
			torch.cuda.set_device(device := torch.device("cuda", int(env.get("LOCAL_RANK", 0))))
			if torch.cuda.get_device_capability(device) >= (8, 0): dtype = torch.bfloat16
			torch.set_float32_matmul_precision("high")  # TF32 where a product is in float32
		if "RANK" in env:
			store, *_ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=FIRST_WAIT_SECONDS)))
			store = dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)  # one for all restarts
			watch.store = dist.PrefixStore("watch", store.clone())  # a connection of its own
			with watch.waiting("start"):  # the watch bounds all waits
				dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=W,
					timeout=datetime.timedelta(1), device_id=device if cuda else None)
		return cls(rank, W, device, dtype, watch)
	@property
	def cuda(self): return self.device.type == "cuda"
	def all_reduce(self, tensor, place):
		self._meet(place, dist.all_reduce, tensor)  # a sum, in place
		return tensor
	def broadcast(self, value):
		"""Rank 0's `value` on every rank (synchronisation point: start and end of a run)."""
		self._meet("broadcast", dist.broadcast_object_list, box := [value], src=0, device=self.device)
		return box[0]
	def _meet(self, place, call, *args, **options):
		"""On one rank: nothing. Synchronisation point, but for a step's: Control reads that."""
		self.watch.meetings += 1
		with self.watch.waiting(place):
			try:
				if dist.is_initialized(): call(*args, **options)
			except RuntimeError as error: raise RunError(f"rank {self.rank}: another rank died: {first_line(error)}")
			if place != "step": self.synchronize()
	def synchronize(self):
		"""Synchronisation point: the device has finished all it was given."""
		if self.cuda: torch.cuda.synchronize(self.device)
	def close(self):
		if dist.is_initialized(): dist.destroy_process_group()

class RunLog:
	"""Rank 0's console, logs/<RUN_ID>.txt, .jsonl; an older log, unless resumed, is kept under another name."""
	def __init__(self, run_id, enabled, resumed=False):
		self.path, self.lost = Path("logs", f"{run_id}.txt"), set()
		files, mark = (self.path, self.path.with_suffix(".jsonl")), time.time_ns()
		try:
			if enabled: self.path.parent.mkdir(exist_ok=True)
			for file in filter(Path.exists, files * (enabled and not resumed)):
				file.rename(file.with_suffix(f".{mark}{file.suffix}"))
			self.text, self.events = (open(file if enabled else os.devnull, "a", encoding="utf-8") for file in files)
		except OSError as error:
			raise RunError(f"{self.path}: cannot open the log: {error.strerror}: run where you can write")
		self.stdout = sys.stdout if enabled else self.text
	def _print(self, stream, text):
		"""A full disk or a closed terminal costs the log, not the run."""
		try: print(text, file=getattr(self, stream), flush=True)
		except OSError as error:
			if stream not in self.lost: print(f"warning: {self.path}: {stream} lines are lost: {error}", file=sys.stderr)
			self.lost.add(stream)
	def file(self, text): self._print("text", text)
	def console(self, text): self._print("stdout", text)
	def line(self, text): self.file(text), self.console(text)
	def event(self, name, **fields):
		self._print("events", json.dumps(dict(event=name, time=round(time.time(), 3), **fields)))
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
	temporary = path.with_suffix(f".{os.getpid()}.tmp")
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
TRACE_EVENTS = 150_000  # below 20 MB uncompressed
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
	"""Advanced around pieces of work; from the first (after one that compiles) it tells how long all take."""
	for _ in range(1 + compiles):
		start = rt.synchronize() or now()  # synchronisation points: four at most
		yield
		unit_s = pieces * ((rt.synchronize() or now()) - start)
		yield
	total_s = min(count * unit_s, max(0, cap_s) or math.inf)
	hint = f"; on a CPU try `{QUICKSTART}`" * (total_s > 600 and not rt.cuda)
	log.console(f"({unit}: {unit_s:.3g} s each, {total_s / 60:.1f} min in all{hint})")
	while True: yield

class Spans:
	"""Instruments, off. `with spans("forward"):` marks a phase."""
	nothing = nullcontext()
	def __init__(self, cfg=None, rt=None, log=None):
		self.cfg, self.rt, self.log = cfg, rt, log
		self.begin()
	def __call__(self, name, track=DEVICE): return self.nothing
	begin = instant = handed = step_done = close = lambda *_: None  # (name, track), (pipeline), (step); close: twice, too
class Recorder(Spans):
	@contextmanager
	def __call__(self, name, track=DEVICE):
		begin = self.mark(track)
		yield
		self.add(name, track, begin, self.mark(track))
class Breakdown(Recorder):
	"""Each phase alone, a synchronisation point at both its ends."""
	def begin(self):
		self.ms, self.steps, self.since = defaultdict(float), [], now()
		self.log.line("timing_breakdown:enabled: no overlap, two waits for the device a phase")
	def mark(self, track):
		if track.endswith("reader"): return 0.0  # no CUDA work
		start, end = now(), self.rt.synchronize() or now()
		self.ms["sync"] += 1e3 * (end - start)
		return end
	def add(self, name, track, begin, end):
		if name == "validate": self.ms.clear()  # of its own phases
		self.ms[name] += 1e3 * (end - begin)
	def step_done(self, step):
		ms, self.ms, n, start = self.ms, defaultdict(float), self.cfg.accumulation(self.rt.world_size), self.since
		self.since = now()
		self.steps.append((ms["input_wait"] + ms["h2d"], 1e3 * (self.since - start) - ms["validate"]))
		if step > 10 and step % self.cfg.training_timing_every: return
		shown = words(dict(batch_cpu_ms=ms["input_wait"] / n, batch_h2d_ms=ms["h2d"] / n, forward_ms=ms["forward"] / n,
			backward_ms=ms["backward"] / n, grad_clip_ms=ms["grad_clip"], optimizer_ms=ms["optimizer"], val_ms=ms["validate"],
			explicit_sync_ms=ms["sync"]))
		self.log.line(f"timing_breakdown step:{step} micro_steps:{n} {shown} (per_optimizer_step; forward/backward/batch "
			f"averaged over micro_steps; grad_accum_steps={n}) reduce_ms:{ms['reduce']:.2f}")
	def close(self):
		if not self.steps: return
		(x, y), self.steps = np.mean(self.steps, 0), []
		self.log.line(f"overlappable: {x:.2f} ms of {y:.2f} ms a step ({100 * x / y:.2f} %): the most that overlap can win here")
class Trace(Recorder):
	"""What ran when in steps with overlap on and, cut, one validation; the device's by its clock."""
	def begin(self):
		self.steps, self.on, self.events = min(self.cfg.trace_steps, self.cfg.iterations), True, []
		self.rt.synchronize()  # synchronisation point: host and device times meet
		self.base = self.mark(DEVICE)
		self.instant("warm_up_end", HOST)
	def mark(self, track):
		if event := self.rt.cuda and track in (DEVICE, COPY) and timed_event(): event.record()
		return now(), event  # host seconds; the device's time
	def __call__(self, name, track=DEVICE):
		if name == "validate": self.on, self.steps = self.steps == 0, self.steps or -1  # the first after the steps
		return super().__call__(name, track) if self.on else self.nothing
	def add(self, *event):
		if len(self.events) < TRACE_EVENTS: self.events.append(event)
	def instant(self, name, track, **kind):
		if self.on: self.add(name, track, self.mark(HOST), kind or dict(ph="i", s="p"))
	def handed(self, pipe):
		self.on = self.steps > 0 if pipe.name == "train" else self.on and pipe.handed <= 50
		ready = dict(host=pipe.ready.qsize(), device=pipe.taken - pipe.handed)
		self.instant(f"{pipe.name} queues", HOST, ph="C", args=ready)
	def step_done(self, step): self.steps -= self.steps > 0
	def rows(self):
		"""Chrome's format, in microseconds."""
		tracks = defaultdict(itertools.count().__next__)  # name -> thread id
		def micros(a, b): return 1e3 * a[1].elapsed_time(b[1]) if b[1] else 1e6 * (b[0] - a[0])
		for name, track, begin, end in self.events:
			kind = end if isinstance(end, dict) else dict(ph="X", dur=micros(begin, end))
			tid = tracks[track if begin[1] or track != DEVICE else HOST]
			yield dict(name=name, pid=0, tid=tid, ts=micros(self.base, begin), **kind)
		for track, tid in tracks.items(): yield dict(name="thread_name", ph="M", pid=0, tid=tid, args={"name": track})
	def close(self):
		path, self.close, self.on = self.log.path.with_suffix(".trace.json.gz"), super().close, False
		try:
			self.rt.synchronize()  # synchronisation point
			write_atomic(path, gzip.compress(json.dumps(dict(traceEvents=[*self.rows()])).encode()))
			self.log.line(f"trace: {path}")
		except (RunError, RuntimeError) as error: self.log.line(f"warning: no trace: {first_line(error)}")

def batch_sum(x, y): return (3 * x + y).reshape(-1).cumsum(0).sum()  # by position, int64, wraps
class Verify:
	"""A batch's sum as read, above 32 bits of digest, against that of x and y after use."""
	def __init__(self, on, log): self.on, self.log, self.pending, self.checked = on, log, [], 0
	def consumed(self, pipe, batch, place):
		if not self.on: return
		slot, (x, y, digest) = (pipe.handed - 1) % (pipe.slots or pipe.overlap.queue + 1), batch  # used in turn
		self.pending.append((f"{pipe.who}, {place}, slot {slot}", digest >> 32, batch_sum(x, y)))
		if len(self.pending) >= 1024: self.settle()
	def settle(self, total=False):
		"""Synchronisation point; RunError if a batch changed while in use."""
		for where, read, held in self.pending:
			if held.item() != read: raise RunError(f"{where}: the batch was overwritten in use: set GPU_PREFETCH=1")
		self.pending, self.checked = [], self.checked + len(self.pending)
		if total and self.on: self.log.line(f"data_verify: {self.checked} batches, unchanged in use")

# === DATA ===
CRC = 0xFFFFFFFF
SPANS_A_STEP = 8  # of TRAIN_BATCH_TOKENS / 8 + 1 tokens: the challenge's order
HEADER_BYTES = 1024  # of a shard; a token has 2
QUICKSTART = "python3 data/quickstart.py"
def shard_tokens(path):
	"""A shard's token count; RunError if it is not whole."""
	try: (magic, version, n, *_), size = (*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0), os.path.getsize(path)
	except OSError as error: raise RunError(f"{path}: {error.strerror}: make it readable")
	whole = HEADER_BYTES + 2 * n
	if (magic, version, size) == (20240520, 1, whole) and n > 0: return n
	raise RunError(f"{path}: no whole shard: magic {magic}, version {version} (not 20240520, 1), {size} bytes "
		f"({n} tokens need {whole}): delete it, fetch anew")
def stamp(file): return (found := os.stat(file)).st_size, found.st_mtime_ns
def read_json(path):
	with suppress(OSError, ValueError): return dict(json.loads(path.read_bytes()))
	return {}
def promised(folder, split):
	"""How many shards the manifest promises; 0: unknown."""
	try: return sum(d["stats"][f"files_{split}"] for d in read_json(folder / "../../manifest.json")["datasets"]
		if d["name"] == folder.resolve().name)
	except (KeyError, TypeError): return 0
def producing(folder):
	"""What the producer at work there last said; {}: none is."""
	state = read_json(folder / ".producing")
	return {"error": "has died"} | state if time.time() - state.get("time", math.inf) > 30 else state

class Shards:
	"""A split's files by name, an endless stream; those of a live producer join in turn."""
	awaited = None
	def __init__(self, folder, split):
		self.folder, self.paths, self.ends, self.stamps = Path(folder), [], [0], []
		self.growing = split == "train" and "error" not in (producing(self.folder) or "error")
		for path in sorted(self.folder.glob(f"fineweb_{split}_*.bin")):
			if not self.growing or path == self.following(): self.add(path)
	@property
	def total(self): return sys.maxsize if self.growing else self.ends[-1]
	def following(self): return self.folder / f"fineweb_train_{len(self.paths):06d}.bin"
	def add(self, path):
		self.ends += [self.ends[-1] + shard_tokens(path)]
		self.paths += [path]
		self.stamps += [stamp(path)]
	def await_token(self, token, reader):
		"""Until it is on disk, or the set complete. RunError if the producer fails."""
		moved, done = now(), None
		while self.growing and token >= self.ends[-1] and not reader.closed:
			state, path = producing(self.folder), self.following()
			if path.exists(): self.add(path)
			elif self.paths and (not state or state.get("shards_promised") == len(self.paths)): self.growing = False
			elif not state or "error" in state or now() - moved > reader.watch.stall_seconds:
				raise RunError(f"{path} will not come: its producer {state.get('error', 'stands still')}")
			else:
				if done != (said := state.get("progress")): moved, done = now(), said
				if path != self.awaited: reader.log.say("stall", "waiting for {}: it is being made", shard=str(path))
				self.awaited = path
				time.sleep(0.05)
	def pieces(self, first, count):
		"""A stretch of the stream as (epoch, file index, byte offset, bytes)."""
		while count > 0:
			epoch, at = divmod(first, self.total)
			i = bisect.bisect_right(self.ends, at) - 1
			n = min(count, self.ends[i + 1] - at)
			yield epoch, i, HEADER_BYTES + 2 * (at - self.ends[i]), 2 * n
			first, count = first + n, count - n

def dataset_faults(cfg):
	"""Shards that are missing, damaged, of another vocabulary."""
	folder = Path(cfg.data_path)
	for split in ("train", "val"):
		paths, tokens = sorted(folder.glob(f"fineweb_{split}_*.bin")), 0
		if not (paths or Shards(folder, split).growing):
			yield "data_path", f"no fineweb_{split}_*.bin: {where_else(cfg, 'data_path')}"
		elif split == "val" and len(paths) < (whole := promised(folder, split)):
			yield "data_path", f"{len(paths)} of {whole} val shards for a score: fetch all"
		for path in paths:
			try:
				tokens, ids = tokens + shard_tokens(path), np.memmap(path, "<u2", "r", HEADER_BYTES)
				if (worst := max(ids[:32768].max(), ids[-32768:].max())) >= cfg.vocab_size:
					yield "vocab_size", f"{path} holds token {worst}: set its tokenizer's, or another DATA_PATH"
			except RunError as error: yield "", str(error)
	if tokens and cut_val_tokens(cfg, tokens) == 1:  # of val, the last
		yield "train_seq_len", f"{tokens} val tokens (VAL_TOKENS={cfg.val_tokens}) make no row: set less"
def where_else(cfg, name):
	for parent in Path.cwd().parents:
		if (found := parent / getattr(cfg, name)).exists(): return f"set {name.upper()}={found.resolve()}"
	return f"make it: `{QUICKSTART} --prepare-only`; fetch it: `python3 data/cached_challenge_fineweb.py --variant sp1024`"
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
		n = max(1, min(cfg.val_batch_size // (W * cfg.accumulation(W)) // T, end - first))
		return cls(T, rows, first, n, n, end)
	def num_batches(self): return -((self.first_row - self.end_row) // self.stride)
	def rows(self, k): return range(first := self.first_row + k * self.stride, min(first + self.batch_rows, self.end_row))
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
		cuts = [first, *range(first - first % n + n, rows.stop, n), rows.stop]
		return [(a - first, b - a, self.token(a) - self.token(first)) for a, b in zip(cuts, cuts[1:])]
def data_crc(plan, rows, tokens):
	"""Sum of the rows' crc32, each started with the row's number: the same for any ranks."""
	T, n, data, first = plan.seq_len, plan.span_rows, memoryview(tokens), plan.token(rows.start)
	return sum(zlib.crc32(data[(at := row * T + row // n - first):at + T + 1], row) for row in rows) & CRC
def widen(x, y, tokens, segments):
	"""uint16 tokens -> int64 x, y (rows, T); numpy or tensors. Rows to spare: no targets (-100)."""
	T = x.shape[1]
	for row, n, begin in segments:
		part = tokens[begin:begin + n * T + 1]
		x[row:row + n], y[row:row + n] = part[:-1].reshape(-1, T), part[1:].reshape(-1, T)
	if row + n < len(y): x[row + n:], y[row + n:] = 0, -100

class Overlap(namedtuple("Overlap", "queue copy_stream device_slots resident words")):
	"""A split's settings, less what rules them out. queue: 0: no prefetch; device_slots: 0 on the CPU; resident: one for
	each batch."""
	@classmethod
	def of(cls, cfg, split, cuda):
		off, no_cuda = "(timing_breakdown)" * cfg.training_timing_breakdown, "(no_cuda)" * (not cuda)
		*asked, depth = (getattr(cfg, split + name) for name in ("_prefetch", "_copy_stream", "_prefetch_queue"))
		asked, gone = (*asked, split == "val" and cfg.val_resident), off or no_cuda
		on, stream, stay = (a and not why for a, why in zip(asked, (off, gone, gone)))
		depth, slots, on_demand = on * depth, cuda * (on * cfg.gpu_prefetch or 1), "(prefetch_off)" * (not on)
		words = f"prefetch:{on}{off * asked[0]} copy_stream:{stream}{gone * asked[1]} prefetch_queue:{depth}{on_demand}"
		if split == "val": words = (f"overlap:{on or stream} {words} bytecount_device:{cfg.val_bytecount_device} "
			f"resident:{stay:d}{gone * asked[2]}")
		words += f" gpu_prefetch:{slots}{no_cuda or on_demand * (slots != cfg.gpu_prefetch)}"
		return cls(depth, stream, slots, stay, words)

class Slot:
	"""One batch: uint16 tokens; where handed out, int64 x and y."""
	def __init__(self, plan, device, pinned=False):
		rows, T = plan.batch_rows, plan.seq_len
		size = rows * T + rows // plan.span_rows + 2
		self.tokens = torch.empty(size, dtype=torch.uint16, device=device, pin_memory=pinned)
		self.x, self.y = (torch.zeros(rows, T, dtype=torch.int64, device=device) for _ in "xy")
	def batch(self): return self.x, self.y, self.digest  # whole, as slices cost 50 us and new shapes compile anew

class HostHandOut:
	"""The CPU's last stage: hands out host slots; the next call frees them."""
	bytes_copied = wait_ms = copy_ms = 0  # wait_ms: the sum of waits_ms
	def __init__(self): self.pending, self.waits_ms = [], []  # host slots in use
	ask = close = lambda self: None
	def waited(self, ms):
		self.waits_ms.append(ms)
		self.wait_ms += ms
	def submit(self, slot): self.pending.append(slot)
	def recycle(self, block):
		"""The first in use, if no longer needed; block: once it is."""
		return self.pending.pop(0)
	def hand_out(self): return self.pending[-1].batch()

class DeviceRing(HostHandOut):
	"""CUDA's last stage: the ring of README.md. `ready`: tokens have arrived; `free`: they were read. A wait for an event
	never recorded passes: hence `free` at construction, and the refusal of copies beyond the ring."""
	def __init__(self, plan, overlap, device, spans=Spans()):
		super().__init__()
		self.spans, self.resident, self.compute = spans, overlap.resident, torch.cuda.current_stream(device)
		self.copy = torch.cuda.Stream(device) if overlap.copy_stream else self.compute
		self.idle, self.full, self.empty = [], [], []
		for _ in range(plan.num_batches() if self.resident else overlap.device_slots):
			self.empty.append(slot := Slot(plan, device))
			if self.resident: slot.x, slot.y = self.empty[0].x, self.empty[0].y  # of all, in turn
			slot.ready, slot.free = torch.cuda.Event(), torch.cuda.Event()
			slot.free.record(self.compute)
	def ask(self):
		"""The compute stream begins to wait here."""
		while self.idle and self.idle[0][1].query():  # (asked, fed) events
			asked, fed = self.idle.pop(0)
			self.waited(asked.elapsed_time(fed))
		self.wait = timed_event(), timed_event()
		self.wait[0].record(self.compute)
	def submit(self, slot):
		if not self.empty: raise RuntimeError("a copy beyond the ring")
		target, n = self.empty.pop(0), slot.size
		with torch.cuda.stream(self.copy):
			self.copy.wait_event(target.free)
			slot.begun.record(self.copy)
			with self.spans("h2d", COPY): target.tokens[:n].copy_(slot.tokens[:n], non_blocking=True)
			target.ready.record(self.copy)
			slot.copied.record(self.copy)
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
		slot = self.full.pop(0)
		self.compute.wait_event(slot.ready)
		self.wait[1].record(self.compute)
		self.idle.append(self.wait)
		widen(slot.x, slot.y, slot.tokens, slot.segments)
		slot.free.record(self.compute)
		(self.full if self.resident else self.empty).append(slot)
		return slot.batch()
	def close(self): self.copy.synchronize()  # synchronisation point: no copy outlives its slots

class Pipeline:
	"""Shard files -> reader thread -> host slots -> device slots -> x, y. The reader calls digest(plan, rows, tokens); its
	error comes as RunError after the good batches."""
	filled = taken = handed = late_copies = bytes_read = closed = read_ms = busy_ms = 0  # _ms: of the reader
	place, where, since = None, "no file", math.inf  # (epoch, shard); in a read since
	def __init__(self, source, name, digest, spans=Spans()):  # source: a run, or its validation
		rt, self.log, self.shards, self.plan, overlap = source.rt, source.log, source.shards, source.plan, source.overlap
		self.name, self.spans, self.digest, self.overlap, self.verify = name, spans, digest, overlap, source.verify
		self.who, self.watch, self.end = f"rank {rt.rank}: the {name} reader", rt.watch, self.plan.num_batches()
		self.slots = slots = overlap.device_slots
		self.stage = DeviceRing(self.plan, overlap, rt.device, spans) if slots else HostHandOut()
		self.host_waits_ms, self.crossings, self.file = [], [], open(os.devnull)  # crossings: batches in a new shard or epoch
		self.free, self.ready = queue.SimpleQueue(), queue.SimpleQueue()  # slots to fill, filled
		for i in range(overlap.queue + max(1, slots)):
			slot = Slot(self.plan, "cpu", rt.cuda)
			slot.host = [part.numpy() for part in (slot.tokens, slot.x, slot.y)]
			if slots:
				slot.begun, slot.copied = timed_event(), timed_event()
				slot.begun.record(), slot.copied.record()
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
		except BaseException as error: self.ready.put(error)  # all, or the consumer waits for ever
		finally: self.file.close()
	def _fill(self, slot, k):
		rows = (plan := self.plan).rows(k)
		self.shards.await_token(plan.last_token(rows), self)
		start, (first, n), track = now(), plan.tokens(rows), self.thread.name
		slot.size, slot.segments, tokens = n, plan.segments(rows), slot.host[0][:n]
		with self.spans("disk_read", track):
			out = memoryview(tokens).cast("B")
			for epoch, i, offset, size in self.shards.pieces(first, n):
				if self.place not in (None, (epoch, i)):
					self.spans.instant("shard_boundary" if self.place[0] == epoch else "epoch", track)
					self.crossings.append(k)
				self.place = epoch, i
				self._read(i, offset, out[:size])
				out = out[size:]
		self.read_ms += 1e3 * (now() - start)
		slot.digest = self.digest(plan, rows, tokens)
		if self.verify.on or not self.slots: widen(*slot.host[1:], tokens, slot.segments)
		if self.verify.on: slot.digest |= int(batch_sum(*slot.host[1:])) << 32
		self.busy_ms += 1e3 * (now() - start)
	def _read(self, i, offset, out):
		"""Fills `out`; EOFError: the file shrank (mapped: a crash)."""
		file = self._open(i, offset)
		file.seek(offset)
		while out:
			n = file.readinto(out)
			if not n: raise EOFError(f"it ends at byte {file.tell()}, {len(out)} short")
			out, self.bytes_read = out[n:], self.bytes_read + n
		if not self.filled % 8 and stamp(file.fileno()) != self.shards.stamps[i]:
			raise EOFError("changed since this run began")
		self.since = math.inf
	def _open(self, i, offset):
		path = str(self.shards.paths[i])
		self.where, self.since = f"{path} at byte {offset}", now()
		if self.file.name != path:
			old, self.file = self.file, open(path, "rb", buffering=0)
			old.close()
		return self.file
	def _advise(self, k):
		"""Has the kernel read batch k ahead."""
		if k >= self.end or self.shards.growing: return
		with suppress(OSError, AttributeError):  # macOS has no such call
			for _, i, offset, size in self.shards.pieces(*self.plan.tokens(self.plan.rows(k))):
				os.posix_fadvise(self._open(i, offset).fileno(), offset, size, os.POSIX_FADV_WILLNEED)
		self.since = math.inf
	def _take(self):
		"""A slot back for each taken: the reader fills no more than the queue ahead."""
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
			try: slot = self.ready.get(timeout=0.2)
			except queue.Empty: pass
			else:
				if isinstance(slot, Slot): return slot
				self.ready.put(slot)
				what = slot if isinstance(slot, RunError) else f"{self.where}: {slot!r}"
				raise RunError(f"{self.who} failed on {what}") from slot
			if self.watch.signum: raise Stop
			if now() - self.since > (limit_s := self.watch.stall_seconds):
				faulthandler.dump_traceback()
				raise RunError(f"{self.who} waits for {self.where} over DATA_STALL_SECONDS={limit_s:g}: use a local disk")
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
	def close(self):  # within a second; a reader stuck in a read is left
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
	def forward(self, x, scale=None):
		"""scale (outputs): multiplied into the small weight, not the large result."""
		return F.linear(x, (self.weight if scale is None else scale[:, None] * self.weight).to(x.dtype))
def rms_norm(x): return F.rms_norm(x, (x.size(-1),))
def rotate(x, rotary):
	"""Rotary positions (arXiv:2104.09864), halves of a head paired: x (B, T, heads, d), rotary (2, T, 1, d / 2)."""
	(cos, sin), (left, right) = rotary.to(x.dtype), x.chunk(2, dim=-1)
	return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)
def attend(q, k, v):
	"""Causal attention of (B, T, heads, d), fewer heads in k and v."""
	q, k, v = (t.transpose(1, 2) for t in (q, k, v))
	y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
	return y.transpose(1, 2)
def use_attention(backend):
	"""For scaled_dot_product_attention, from now on; an error if it is not there."""
	if backend == "fa3": attention_impls.activate_flash_attention_impl("FA3")
	for name in "cudnn", "flash", "mem_efficient", "math":
		getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == {"fa3": "flash"}.get(backend, backend))
def choose_attention(cfg, rt):
	"""The first backend whose output and gradients on one batch are those of math in float32."""
	shape = 2, min(cfg.train_seq_len, 1024), cfg.num_heads, cfg.model_dim // cfg.num_heads
	q, y = (torch.randn(shape, device=rt.device, dtype=rt.dtype) for _ in "qy")
	inputs = [t.detach().requires_grad_() for t in (q, q.flip(1)[:, :, :cfg.num_kv_heads], y[:, :, :cfg.num_kv_heads])]
	def results(backend, dtype):
		use_attention(backend)
		out = attend(*(t.to(dtype) for t in inputs))
		return [out, *torch.autograd.grad(out, inputs, y.to(dtype))]
	expected = results("math", torch.float32)
	for backend in "fa3 cudnn flash math".split() if cfg.attention_backend == "auto" else [cfg.attention_backend]:
		try: off = max(float((a - b).norm() / b.norm()) for a, b in zip(results(backend, rt.dtype), expected))
		except (RuntimeError, ImportError, AttributeError) as error: off = first_line(error)
		else:
			if off < 0.02: return backend
		if backend == "fa3": attention_impls.restore_flash_attention_impl(_raise_warn=False)
	raise RunError(f"ATTENTION_BACKEND={backend}: does not work here, or is wrong ({off}): set auto")

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
		q, k, v = (c(x).unflatten(-1, (-1, self.head_dim)) for c in (self.c_q, self.c_k, self.c_v))  # (B, T, heads, d)
		q = rotate(rms_norm(q), rotary) * self.q_gain.to(q.dtype)[:, None]
		return self.proj(attend(q, rotate(rms_norm(k), rotary), v).flatten(2), scale)

class Block(nn.Module):
	"""Attention and the MLP down(relu(up x)^2) (arXiv:2109.08668), scaled by channel; x0, the embedding, is mixed in."""
	def __init__(self, cfg):
		super().__init__()
		ones = torch.ones(D := cfg.model_dim)
		self.attn = Attention(cfg)
		self.mlp = nn.ModuleDict({"fc": Linear(D, cfg.mlp_mult * D), "proj": Linear(cfg.mlp_mult * D, D, zero=True)})
		self.attn_scale, self.mlp_scale = (nn.Parameter(ones.clone()) for _ in "am")
		self.resid_mix = nn.Parameter(torch.stack((ones, 0 * ones)))
	def forward(self, x, x0, rotary):
		a, b = self.resid_mix.to(x.dtype)
		x = a * x + b * x0
		x = x + self.attn(rms_norm(x), rotary, self.attn_scale)
		return x + self.mlp.proj(F.relu(self.mlp.fc(rms_norm(x))).square(), self.mlp_scale)

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
		matrices = (m.weight.numel() for m in self.blocks.modules() if isinstance(m, Linear))
		self.flops = 6 * (sum(matrices) + cfg.vocab_size * D + cfg.num_layers * cfg.train_seq_len * D)
		channels = torch.arange(0, d := D // cfg.num_heads, 2) / d
		angle = torch.arange(cfg.train_seq_len)[:, None, None] * cfg.rope_base ** -channels
		self.register_buffer("rotary", torch.stack((angle.cos(), angle.sin())), persistent=False)
	def forward(self, x, y):
		"""Mean nats, a float32 scalar, of predicting y from x, both (B, T)."""
		x = x0 = rms_norm(self.tok_emb(x).to(self.dtype))  # (B, T, D)
		skips = []
		for i, block in enumerate(self.blocks, -len(self.skip_weights)):
			if i >= 0 and skips: x = x + self.skip_weights[i].to(x.dtype) * skips.pop()
			x = block(x, x0, self.rotary)
			if i < 0: skips.append(x)
		logits = F.linear(rms_norm(x), (self.lm_head or self.tok_emb).weight.to(x.dtype))
		return F.cross_entropy((self.cap * torch.tanh(logits / self.cap)).float().flatten(0, 1), y.flatten())

def compiled(function, log):
	"""`function` compiled; eager, with one warning, where that cannot work."""
	if torch.__version__.startswith("2.11.") and "TORCHINDUCTOR_MIX_ORDER_REDUCTION" not in os.environ:
		from torch._inductor import config
		config.triton.mix_order_reduction = False  # costs 6 ms of 67 there on an H100 (parameter-golf PR 1420)
	calls = [torch.compile(function, dynamic=False, fullgraph=True), function]
	def call(*args):
		try: return calls[0](*args)
		except (torch._dynamo.exc.TorchDynamoException, ImportError, OSError) as error:
			if calls.pop(0) is function: raise
			log.line(f"warning: torch.compile does not work here: {first_line(error)}")
			return function(*args)
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

class Flat:
	"""Parameters and gradients as views of one float32 vector each: one reduction a step, which `tail` elements ride."""
	def __init__(self, groups, tail):
		sizes, device = [-(-sum(p.numel() for p in group) // 64) * 64 for group in groups], groups[0][0].device  # aligned
		self.values, self.reduced = (torch.zeros(sum(sizes) + n, device=device) for n in (0, tail))
		self.grads, self.tail = self.reduced.split((sum(sizes), tail))
		self.halted, self.groups = torch.zeros((), dtype=torch.bool, device=device), []  # 1-D (values, gradients)
		for group, values, grads in zip(groups, self.values.split(sizes), self.grads.split(sizes)):
			end = 0
			for p in group:
				here = slice(end, end := end + p.numel())
				values[here] = p.detach().flatten()
				p.data, p.grad = values[here].view(p.shape), grads[here].view(p.shape)
			self.groups.append((values[:end], grads[:end]))

class Optimizers:
	"""Muon on the blocks' matrices; Adam on all else."""
	def __init__(self, model, cfg, tail):
		self.cfg, banks, small = cfg, defaultdict(list), [model.skip_weights]
		for name, p in model.blocks.named_parameters():
			(small if p.ndim != 2 or named(name, cfg.control_tensor_name_patterns) else banks[p.shape]).append(p)
		adam, rates = [[model.tok_emb.weight]], [cfg.tied_embed_lr]
		if head := model.lm_head: adam, rates = [*adam, [head.weight]], [cfg.embed_lr, cfg.head_lr]
		self.flat = Flat([*banks.values(), *adam, small], tail)
		self.banks = [[flat.view(-1, *shape) for flat in group]  # values, gradients: (n, rows, cols)
			for shape, group in zip(banks, self.flat.groups)]
		self.adam = [(*group, lr) for group, lr in zip(self.flat.groups[len(banks):], [*rates, cfg.scalar_lr])]
		self.averages, self.means, self.squares = ([torch.zeros_like(part[0]) for part in parts]
			for parts in (self.banks, self.adam, self.adam))
		self.count, self.lr_scale, self.momentum = torch.zeros(3, device=self.flat.values.device).unbind()
	def clip(self):
		if (limit := self.cfg.grad_clip_norm) > 0:
			self.flat.grads.mul_((limit / (self.flat.grads.norm() + 1e-6)).clamp(max=1.0))
	@torch.no_grad()
	def step(self, lr_scale, momentum):
		self.lr_scale.fill_(lr_scale)
		self.momentum.fill_(momentum)
		self.update()
	def update(self):
		"""By the schedules on the device; one graph if compiled. Muon's is scaled by sqrt(max(1, rows / cols)). Once
		flat.halted is set nothing changes."""
		cfg, halted, dtype = self.cfg, self.flat.halted, (torch.float32, torch.bfloat16)[self.count.is_cuda]
		for (values, grads), average in zip(self.banks, self.averages):
			average.mul_(torch.where(halted, 1.0, self.momentum)).add_(grads)
			update = newton_schulz(grads + self.momentum * average, cfg.muon_backend_steps, dtype)
			rate = cfg.matrix_lr * self.lr_scale * max(1.0, values.size(-2) / values.size(-1)) ** 0.5
			values.sub_((rate * update).masked_fill(halted, 0))
		self.count.add_(~halted)
		for (values, grads, lr), mean, square in zip(self.adam, self.means, self.squares):
			mean.lerp_(grads, (1 - cfg.beta1) * ~halted)
			square.lerp_(grads.square(), (1 - cfg.beta2) * ~halted)
			root = (square / (1 - cfg.beta2 ** self.count)).sqrt() + cfg.adam_eps
			update = lr * self.lr_scale * mean / (1 - cfg.beta1 ** self.count) / root
			values.sub_(update.masked_fill(halted, 0))
	def snapshot(self): return [t.clone() for t in self.tensors()]
	def tensors(self):
		return [self.flat.values, *self.averages, *self.means, *self.squares, self.count]
	def restore(self, saved):
		for mine, theirs in zip(self.tensors(), saved): mine.copy_(theirs)

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
	def __init__(self, flat, rt):
		self.flat, self.rt, self.lag = flat, rt, 1 + rt.cuda
		self.ring = [torch.zeros(2, len(flat.tail), pin_memory=rt.cuda) for _ in range(4)]  # (sent, received)
		self.events = [torch.cuda.Event(blocking=True) for _ in range(4 * rt.cuda)]
	def agree(self, step, loss, *, elapsed_ms, wait_ms, data_crc):
		"""Sums gradients and tail over the ranks; loss: this rank's share of the mean, a device scalar."""
		(sent, received), rt, flat = self.ring[step % 4], self.rt, self.flat
		tail, grads, bad = flat.tail, flat.grads, flat.tail[self.FIELDS + rt.world_size:]
		parts = [data_crc >> n & 0x7FF for n in (0, 11, 22)]
		sent[:self.FIELDS] = torch.tensor([*parts, elapsed_ms * (rt.rank == 0), 0.0, rt.watch.signum])
		sent[self.FIELDS + rt.rank] = wait_ms
		tail.copy_(sent, non_blocking=True)
		tail[4], bad[rt.rank] = loss, ~torch.isfinite(loss + grads.sum())
		rt.all_reduce(flat.reduced, "step")
		flat.halted |= tail[5] + bad.sum() > 0
		grads.masked_fill_(flat.halted, 0)
		received.copy_(tail, non_blocking=True)
		if rt.cuda: self.events[step % 4].record()
	def read(self, step):
		"""Synchronisation point: the reduction of `step`, two steps ago (logging: just now)."""
		with self.rt.watch.waiting("step"):
			if self.rt.cuda: self.events[step % 4].synchronize()
		low, mid, high, ms, loss, stop, *ranks = self.ring[step % 4][1].tolist()
		crc, W = int(low + 2**11 * mid + 2**22 * high) & CRC, self.rt.world_size
		return Agreed(ms, loss, stop, crc, ranks[:W], ranks[W:])

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
		self.on_device, self.resident = cfg.val_bytecount_device == "cuda", None  # the pipeline that keeps its batches
		if self.on_device: self.table = ByteTable(*(torch.tensor(part, device=rt.device) for part in self.table))
	def host_bytes(self, plan, rows, tokens):  # in the reader thread
		return 0 if self.bytes or self.on_device else int(self.table.count(tokens[:-1], tokens[1:]))
	@torch.no_grad()
	def evaluate(self, loss_of, scope, compiles, spans):
		"""(nats a token, bits per byte, ms). Halt: a signal came."""
		every, log, seen, total = self.cfg.val_progress_log_every, self.log, 0, self.plan.num_batches()
		sums, start = torch.zeros(3, dtype=torch.float64, device=self.rt.device), now()  # nats, bytes, signals
		told, foretell = start, forecast(self.rt, log, f"{scope}: {total} batches", total, compiles=compiles)
		pipeline = self.resident or Pipeline(self, "val", self.host_bytes, spans)
		if self.overlap.resident: self.resident = pipeline
		pipeline.spans, pipeline.handed = spans, 0  # from its start
		with suppress(Stop), closing(pipeline), spans("validate"):
			next(foretell)
			for k, batch in enumerate(pipeline, 1):
				x, y, digest = batch
				n = len(self.plan.rows(k - 1))
				with spans("forward"): sums[0] += loss_of(x, y).double() * n * y.size(1)
				sums[1] += self.table.count(x[:n], y[:n]) if self.on_device and not self.bytes else digest & CRC
				self.verify.consumed(pipeline, batch, k)
				seen, at = seen + n * y.size(1), f"{scope} batch {k}/{total}"
				next(foretell), next(foretell)
				if every and k % every == 0:  # a synchronisation point
					log.line(f"val_progress:{at} partial_mean_loss:{sums[0].item() / seen:.4f} tokens_seen:{seen}")
				if now() - told > 30: told = log.console(f"({at})") or now()
		sums[2] = self.rt.watch.signum
		place = "validation" if scope[0] == "s" else scope  # synchronisation point: its end
		nats, counted, stop = self.rt.all_reduce(sums, place).tolist()
		if stop: raise Halt(stop)
		self.verify.settle()
		self.bytes = self.bytes or int(counted)
		return nats / (self.tokens - 1), nats / math.log(2) / self.bytes, 1e3 * (now() - start)

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
	"""Inverse of quantize() up to half a scale, float32."""
	return q.float() * scale.float().view(-1, *[1] * (q.ndim - 1))
def saved(thing):
	"""A torch file, as bytes."""
	torch.save(thing, buffer := io.BytesIO())
	return buffer.getvalue()
def pack(state, cfg):
	"""(the artifact, bytes of its tensors, of its torch file) of CPU tensors, each its own."""
	quantized, scales, dtypes, kept, meta, originals = [{} for _ in range(6)]
	for name, t in state.items():
		dtype, real = str(t.dtype).removeprefix("torch."), t.is_floating_point()
		if real and t.numel() > SMALL_ELEMENTS:
			(quantized[name], scales[name]), dtypes[name] = quantize(t), dtype
			if t.ndim == 2: meta[name] = {"scheme": "per_row", "axis": 0}
		elif real and not named(name, cfg.int8_keep_float_fp32_name_patterns):
			kept[name], originals[name] = t.half(), dtype
		else: kept[name] = t.float() if real else t
	raw = saved(dict(__quant_format__=QUANT_FORMAT, quantized=quantized, scales=scales, dtypes=dtypes, passthrough=kept,
		qmeta=meta, passthrough_orig_dtypes=originals))
	payload = sum(t.nbytes for part in (quantized, scales, kept) for t in part.values())
	return zlib.compress(raw, 9), payload, len(raw)
def load(data, limit):
	"""What torch.save wrote. Executes nothing; ValueError above `limit` bytes."""
	if len(data) > limit: raise ValueError(f"it has over {limit} bytes")
	with zipfile.ZipFile(io.BytesIO(data)) as archive:
		if sum(entry.file_size for entry in archive.infolist()) > limit: raise ValueError(f"it holds over {limit} bytes")
		if any(b"bytearray" in archive.read(name) for name in archive.namelist() if name.endswith(".pkl")):
			raise ValueError("it asks for memory")  # bytearray(n)
	try: return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
	except pickle.UnpicklingError: raise ValueError("it holds code")
def unpack(data, expected):
	"""The state in an artifact, ours or the challenge's; RunError unless it fits `expected`."""
	limit = 8 * sum(t.numel() for t in expected.values()) + (1 << 20)
	try:
		raw = (stream := zlib.decompressobj()).decompress(data, limit)
		if not stream.eof: raise ValueError(f"it is cut short, or unpacks to over {limit} bytes")
		file = load(raw, limit)
		if file["__quant_format__"] != QUANT_FORMAT: raise ValueError(f"its format is {file['__quant_format__']}")
		quantized, scales, plain = (file[part] for part in ("quantized", "scales", "passthrough"))
		found, wanted = ({(name, t.shape) for name, t in state.items()} for state in (quantized | plain, expected))
		if wrong := sorted({name for name, _ in found ^ wanted}):
			raise ValueError(f"missing, unknown or of another shape: {', '.join(wrong[:5])}")
		if any(scales[name].shape not in ((), q.shape[:1]) for name, q in quantized.items()):
			raise ValueError("its scales misfit")
		return {name: dequantize(q, scales[name]) for name, q in quantized.items()} | {
			name: t.to(expected[name].dtype) for name, t in plain.items()}
	except Exception as error:  # whatever a damaged or hostile file raises
		raise RunError(f"the artifact cannot be loaded: {type(error).__name__}: {first_line(error)}")

# === CHECKPOINT ===
def fingerprint(cfg):
	"""What a checkpoint is bound to."""
	names = list(fields := asdict(cfg))
	bound = ["seed", *names[names.index("iterations"):names.index("train_prefetch")]]
	return {name: fields[name] for name in bound} | {n: Path(fields[n]).name for n in ("data_path", "tokenizer_path")}
def find_checkpoint(cfg):
	"""The path of the checkpoint that RESUME names; None: start anew."""
	newest = max(Path("checkpoints", cfg.run_id).glob("step_*.pt"), default=None)
	path = {"": None, "auto": newest}.get(cfg.resume, Path(cfg.resume))
	try: return path and path.stat() and path
	except OSError as error: raise RunError(f"RESUME={path}: {error.strerror}: name a checkpoint")

# === TRAINING ===
class Run:
	"""The model and all that trains it; the same weights on every rank."""
	step = first = heeded = crc = 0  # steps taken, at the start, looked at; data_crc at the start
	resumed_ms, final = 0.0, None  # training time at the start; the state before the export
	def __init__(self, cfg, rt, log):
		self.cfg, self.rt, self.log, self.clock, self.attention = cfg, rt, log, Clock(rt), choose_attention(cfg, rt)
		torch.manual_seed(cfg.seed)
		self.accumulation = cfg.accumulation(rt.world_size)
		self.step_tokens = cfg.train_batch_tokens + SPANS_A_STEP  # read by one step
		self.model = GPT(cfg, rt.dtype).to(rt.device)
		self.compiles = {"0": False, "1": True}.get(cfg.torch_compile, rt.cuda)
		self.loss_of = compiled(self.model, log) if self.compiles else self.model
		self.optimizers = Optimizers(self.model, cfg, tail=Control.FIELDS + 2 * rt.world_size)
		if self.compiles: self.optimizers.update = compiled(self.optimizers.update, log)
		self.control = Control(self.optimizers.flat, rt)
		self.shards = Shards(cfg.data_path, "train")
		self.overlap, self.plan = Overlap.of(cfg, "train", rt.cuda), BatchPlan.train(cfg, rt.rank, rt.world_size)
		self.verify = Verify(cfg.data_verify, log)
		self.validation, self.partial = Validation(cfg, rt, log, self.verify), " partial_val:1" * bool(cfg.val_tokens)
		self.generators = [torch.default_generator, *torch.cuda.default_generators]
		self.writer, self.history = threading.Thread(), []  # of a checkpoint; (step, val_loss, val_bpb, ms) of validations
		self.writer.start()
		self.logged = 0, 0.0, [0.0] * rt.world_size  # step, clock and input waits of the last training line
		self.hardware = torch.cuda.get_device_name() if rt.cuda else os.uname().machine
		self.peak = next((1e12 * n for name, n in PEAK_TFLOPS.items() if rt.cuda and name in self.hardware), None)
	def heed(self, step):
		"""Halt, at the first step before `step` that was not taken. All ranks ask alike."""
		while self.heeded < step:
			said, self.heeded = self.control.read(self.heeded), self.heeded + 1
			if said.stop or any(said.bad): self.step = self.heeded - 1
			if any(said.bad): raise Halt(0, f"rank {said.bad.index(1)}: step {self.heeded}: loss or gradient not finite: "
				"lower the learning rates")
			if said.stop: raise Halt(said.stop)
	def state(self):
		"""What training goes on from. Synchronisation point: copies to the host."""
		self.heed(self.step)
		tensors = [t.to("cpu", copy=True, non_blocking=True) for t in self.optimizers.tensors()]
		self.rt.synchronize()
		return dict(config=fingerprint(self.cfg), step=self.step, train_ms=self.clock.now_ms(),
			data_crc=self.control.read(self.step - 1).data_crc if self.step > self.first else self.crc,
			history=self.history[:], rng=[generator.get_state() for generator in self.generators], tensors=tensors)
	def write(self, state):
		"""step_<n>.pt, of which the last CHECKPOINT_KEEP stay. True if on the disk."""
		folder, start = Path("checkpoints", self.cfg.run_id), now()
		path = folder / f"step_{state['step']:08d}.pt"
		try:
			folder.mkdir(parents=True, exist_ok=True)
			for rest in folder.glob("*.tmp"): rest.unlink()  # of a process that was killed
			write_atomic(path, saved(state))
			for old in sorted(folder.glob("step_*.pt"))[:-self.cfg.checkpoint_keep]: old.unlink()
			self.log.event("checkpoint", step=state["step"], path=str(path), write_ms=1e3 * (now() - start))
			return True
		except (OSError, RunError) as error:
			self.log.line(f"warning: no checkpoint of step {state['step']}: {first_line(error)}")
	def checkpoint(self, spans):
		"""A thread writes it: training waits for no disk."""
		with spans("checkpoint", HOST): state = self.state()
		if self.writer.is_alive(): return self.log.line(f"warning: no checkpoint of step {self.step}: a busy disk")
		self.writer = threading.Thread(target=lambda: self.rt.rank or self.write(state), daemon=True)
		self.writer.start()
	def resume(self, path):
		"""RunError if it is another configuration's, or no checkpoint."""
		mine = self.optimizers.tensors()
		limit = sum(t.nbytes for t in mine) + (1 << 22)
		try:
			state = load(self.rt.broadcast(None if self.rt.rank else open(path, "rb").read(limit + 1)), limit)
			theirs, ours = state["config"], fingerprint(self.cfg)
			if other := [f"{k.upper()}={shown(theirs.get(k))}, not {shown(v)}" for k, v in ours.items() if theirs.get(k) != v]:
				raise ValueError("another configuration: " + "; ".join(other))
			if [t.shape for t in state["tensors"]] != [t.shape for t in mine]: raise ValueError("its tensors have other shapes")
			for generator, saved in zip(self.generators, state["rng"]): generator.set_state(saved)
			self.first = self.step = int(state["step"])
			self.crc, self.clock.total_ms = int(state["data_crc"]), float(state["train_ms"])
			self.history = [tuple(map(float, row)) for row in state["history"]]
		except Exception as error:  # whatever a damaged or hostile file raises
			raise RunError(f"RESUME={path}: {first_line(error)}")
		self.optimizers.restore(state["tensors"])
		self.plan = self.plan._replace(first_row=self.plan.rows(self.step * self.accumulation).start)
		self.resumed_ms = self.clock.total_ms
		self.logged = self.step, self.resumed_ms, self.logged[2]
		self.log.say("checkpoint", "resumed: step:{} from:{} train_time:{:.0f}ms", step=self.step, resumed_from=str(path),
			train_time_ms=self.resumed_ms)
	def batches(self, spans=Spans()): return Pipeline(self, "train", data_crc, spans)

def train_step(run, batches, step, elapsed_ms, crc, foretell):
	"""elapsed_ms: agreed; crc: this rank's data_crc, returned."""
	spans, loss_share, started = batches.spans, torch.zeros((), device=run.rt.device), now()
	run.optimizers.flat.reduced.zero_()
	with suppress(Stop):  # then all leave the step out
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
		run.control.agree(step, loss_share, elapsed_ms=run.clock.now_ms(), wait_ms=batches.stage.wait_ms, data_crc=crc)
	with spans("grad_clip"): run.optimizers.clip()
	with spans("optimizer"): run.optimizers.step(lr_multiplier(run.cfg, step, elapsed_ms), muon_momentum(run.cfg, step))
	run.rt.watch.longest_s = max(run.rt.watch.longest_s, now() - started)
	return crc
def warm_up(run, foretell):
	"""Priming steps, off the clock, rolled back."""
	saved, count, first, run.heeded = run.optimizers.snapshot(), run.cfg.warmup_steps, run.step, 0
	try:
		with closing(run.batches()) as batches:
			for step in range(count):
				train_step(run, batches, step, 0.0, 0, foretell)
				run.heed(step + 1)
				run.log.line(f"warmup_step:{step + 1}/{count}")
	finally:
		run.optimizers.restore(saved)
		run.step = run.heeded = first
def validate(run, step, spans):
	run.clock.stop()
	run.heed(step)
	val_loss, val_bpb, val_ms = run.validation.evaluate(run.loss_of, f"step_{step}", run.compiles, spans)
	ms = run.clock.total_ms
	run.log.say("validation", "step:{0}/{1} val_loss:{2:.4f} val_bpb:{3:.4f} train_time:{4:.0f}ms step_avg:{5:.2f}ms"
		+ run.partial + "\nval_stage_time_ms:{6:.0f}ms step:{0}/{1}", step=step, iterations=run.cfg.iterations,
		val_loss=val_loss, val_bpb=val_bpb, train_time_ms=ms, step_avg_ms=ms / max(step, 1), val_ms=val_ms,
		val_tokens=run.validation.tokens - 1, val_bytes=run.validation.bytes)
	run.history.append((step, val_loss, val_bpb, val_ms))
	run.clock.start()

# Dense bfloat16, NVIDIA's data sheets; the first that fits counts.
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312, "4090": 165}
def log_step(run, step):
	"""A training line; rates since the last. Synchronisation point: its time has to be true."""
	run.rt.synchronize()
	run.heed(step)
	run.verify.settle()
	c, ms, agreed = run.cfg, run.clock.now_ms(), run.control.read(step - 1)
	(last_step, last_ms, last_waits), cap_ms = run.logged, 1e3 * c.max_wallclock_seconds
	since_ms, left_ms = ms - last_ms, (c.iterations - step) * ms / step
	tok_s = 1e3 * (step - last_step) * c.train_batch_tokens / since_ms
	mfu = {} if not run.peak else {"mfu_percent": 100 * tok_s * run.model.flops / run.rt.world_size / run.peak}
	run.log.say("step", "step:{}/{} train_loss:{:.4f} train_time:{:.0f}ms step_avg:{:.2f}ms tok_s:{:.0f} "
		"input_wait:{:.2f}% data_crc:{} eta:{:.0f}s" + " mfu:{:.1f}%" * len(mfu), step=step, iterations=c.iterations,
		train_loss=agreed.train_loss, train_time_ms=ms, step_avg_ms=ms / step, tok_s=tok_s,
		input_wait_percent=100 * max(a - b for a, b in zip(agreed.wait_ms, last_waits)) / since_ms,
		data_crc=f"{agreed.data_crc:08x}", eta_s=max(0, min(left_ms, cap_ms - ms) if cap_ms > 0 else left_ms) / 1e3, **mfu)
	run.logged = step, ms, agreed.wait_ms

def train(run):
	c, log, clock = run.cfg, run.log, run.clock
	left, cap_s = c.iterations - run.step, c.max_wallclock_seconds
	foretell = forecast(run.rt, log, f"{c.warmup_steps} + {left} steps", c.warmup_steps + left,
		pieces=run.accumulation, cap_s=cap_s, compiles=run.compiles)
	warm_up(run, foretell)
	kind = Breakdown if c.training_timing_breakdown else Trace if c.trace_steps > 0 == run.rt.rank else Spans
	with closing(kind(c, run.rt, log)) as spans, closing(run.batches(spans)) as batches:
		elapsed_ms, crc = clock.total_ms, run.crc * (run.rt.rank == 0)
		clock.start()
		while True:
			step = run.step
			# Synchronisation point, past unless the host runs far ahead.
			run.heed(step - run.control.lag)
			if step >= run.first + 2: elapsed_ms = run.control.read(step - 2).elapsed_ms * step / (step - 1)
			capped = step < c.iterations and 0 < 1e3 * cap_s <= elapsed_ms + elapsed_ms / max(step, 1)
			last = capped or step == c.iterations
			if last or c.val_loss_every and step % c.val_loss_every == 0: validate(run, step, spans)
			if last: break
			if step == run.shards.total // run.step_tokens:
				log.line(f"WARNING: step {step + 1} begins a second epoch of {len(run.shards.paths)} shards")
			crc = train_step(run, batches, step, elapsed_ms, crc, foretell)
			run.step = step = step + 1
			if step <= 10 or c.train_log_every and step % c.train_log_every == 0: log_step(run, step)
			if c.checkpoint_every and step % c.checkpoint_every == 0: run.checkpoint(spans)
			spans.step_done(step)
		clock.stop()
		if capped: log.line(f"stopping_early: wallclock_cap train_time:{clock.total_ms:.0f}ms step:{step}/{c.iterations}")
		report(run, batches, step)
def waits(waits_ms, batches, micro_steps, train_ms, first=0):
	steps = np.reshape(waits_ms or [0.0] * micro_steps, (-1, micro_steps)).sum(1)
	total, worst, (median, p99, most) = steps.sum(), int(steps.argmax()), np.percentile(steps, (50, 99, 100))
	return dict(total_ms=total, percent=100 * total / train_ms, median_ms=median, p99_ms=p99, max_ms=most,
		worst_step=first + worst + 1, at_shard_boundary=worst in {k // micro_steps for k in batches.crossings})
def verdict(percent, hidden_percent, prefetch, needed, delivered, awaited=None):
	"""needed, delivered: MB/s."""
	cost = f"input cost {percent:.2f} % of training"
	if percent < 0.5: return f"{cost}: overlap " + (
		"settings do not matter here" if hidden_percent < 0.5 else f"hides {hidden_percent:.2f} %")
	if not prefetch: return f"{cost}, and nothing overlaps: set TRAIN_PREFETCH=1"
	if awaited: return f"{cost}: shards were still being made"
	if delivered > needed: return f"{cost}, in stalls: raise TRAIN_PREFETCH_QUEUE"
	return (f"reads are the limit: {needed:.3g} MB/s needed, {delivered:.3g} MB/s delivered: "
		"move DATA_PATH to a local disk")
def report(run, batches, step):
	"""What the run has cost, its input since resumed; the device is idle."""
	stage, train_ms, tokens = batches.stage, run.clock.total_ms - run.resumed_ms, step * run.step_tokens
	stage.ask()
	host, device = (waits(w[:batches.handed], batches, run.accumulation, train_ms, run.first)
		for w in (batches.host_waits_ms, stage.waits_ms))
	peak = [torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20] if run.rt.cuda else [
		resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)] * 2
	percent = 100 * max(run.control.read(step - 1).wait_ms if step > run.first else [0]) / train_ms
	hidden = 100 * (batches.busy_ms + stage.copy_ms) / train_ms - device["percent"]
	needed, delivered = (batches.bytes_read / 1e3 / max(ms, 1e-9) for ms in (train_ms - stage.wait_ms, batches.read_ms))
	moved = dict(read=batches.bytes_read, read_gb_s=delivered / 1e3, copied=stage.bytes_copied,
		copy_gb_s=stage.bytes_copied / 1e6 / (stage.copy_ms or 1),
		late_copies_percent=100 * batches.late_copies / max(batches.handed, 1))
	seen = dict(tokens_seen=tokens, epochs=tokens / run.shards.ends[-1])
	advice = verdict(percent, hidden, run.overlap.queue, needed, delivered, run.shards.awaited)
	val_ms = sum(row[3] for row in run.history)
	run.log.line(f"timing_train_loop_ms:{run.clock.total_ms:.0f}ms timing_val_total_ms:{val_ms:.0f}ms\n"
		f"host_wait {words(host, 3)}\ndevice_wait {words(device, 3)}\ninput_bytes {words(moved)}\ninput: {advice}\n"
		f"{words(seen, 3)}\npeak memory allocated: {peak[0]} MiB reserved: {peak[1]} MiB")
	run.log.event("input", step=step, train_time_ms=run.clock.total_ms, val_total_ms=val_ms, host_wait=host,
		device_wait=device, percent_of_slowest_rank=percent, bytes=moved, verdict=advice, **seen, peak_mib=peak)
	run.verify.settle(total=True)
	batches.spans.close()
def export_and_score(run, code_bytes):
	"""Rank 0 writes the artifact; all ranks score its very bytes."""
	log, data, run.final = run.log, None, run.state()
	if run.rt.rank == 0:
		state = {name: t.to("cpu", copy=True) for name, t in run.model.state_dict().items()}
		write_atomic(Path("final_model.pt"), model := saved(state))
		data, payload, raw = pack(state, run.cfg)
		write_atomic(Path("final_model.int8.ptz"), data)
		log.say("artifact", "Serialized model: {} bytes\nCode size: {} bytes\nTotal submission size: {} bytes\nSerialized"
			" model int8+zlib: {} bytes (payload:{} raw_torch:{} payload_ratio:{:.2f}x)\nTotal submission size int8+zlib:"
			" {} bytes", model_bytes=len(model), code_bytes=code_bytes, raw_total_bytes=len(model) + code_bytes,
			artifact_bytes=len(data), payload_bytes=payload, raw_torch_bytes=raw,
			payload_ratio=sum(t.nbytes for t in state.values()) / payload, total_bytes=(total := len(data) + code_bytes))
		if total > CAP_BYTES: log.line(f"WARNING: {total} bytes, the cap is {CAP_BYTES}")
	run.model.load_state_dict(unpack(run.rt.broadcast(data), run.model.state_dict()))
	loss, bpb, ms = run.validation.evaluate(run.loss_of, "final_int8_zlib_roundtrip", False, Spans())
	log.say("score", "final_int8_zlib_roundtrip val_loss:{0:.4f} val_bpb:{1:.4f} eval_time:{2:.0f}ms{3}\n"
		"final_int8_zlib_roundtrip_exact val_loss:{0:.8f} val_bpb:{1:.8f}{3}",
		val_loss=loss, val_bpb=bpb, eval_ms=ms, partial=run.partial)

# === MAIN ===
def log_header(run, source):
	c, log, rt, val, shards = run.cfg, run.log, run.rt, run.validation, run.shards
	rule, found, smi = "=" * 100, len(shards.paths), os.popen("timeout 30 nvidia-smi 2>/dev/null").read()
	log.file(f"{source}\n{rule}\nRunning Python {sys.version}\nRunning PyTorch {torch.__version__}\n{smi}\n{rule}")
	def of(names): return " ".join(f"{name}:{getattr(c, name)}" for name in names.split())
	sdp = (f"{k}={getattr(torch.backends.cuda, k + '_sdp_enabled')()}" for k in "cudnn flash mem_efficient math".split())
	# The source, at the log's top, has no lines like these.
	log.line(f"val_bpb:enabled tokenizer_kind={('sentencepiece', 'byte')[c.tokenizer_path.endswith('.json')]} "
		f"tokenizer_path={c.tokenizer_path}\ntrain_loader:dataset:{shards.folder.resolve().name} train_shards:{found}\n"
		f"val_loader:shards pattern={c.data_path}/fineweb_val_*.bin tokens:{val.tokens - 1}{run.partial}\n"
		f"model_params:{sum(p.numel() for p in run.model.parameters())}\n"
		f"world_size:{rt.world_size} grad_accum_steps:{run.accumulation}\nsdp_backends:{' '.join(sdp)}\n"
		f"attention_mode:gqa {of('num_heads num_kv_heads')} attention_backend:{run.attention}\n"
		f"{of('tie_embeddings')} embed_lr:{c.tied_embed_lr if c.tie_embeddings else c.embed_lr} "
		f"head_lr:{0.0 if c.tie_embeddings else c.head_lr} {of('matrix_lr scalar_lr')}\n"
		f"{of('train_batch_tokens train_seq_len iterations warmup_steps')} max_wallclock_seconds:"
		f"{c.max_wallclock_seconds:.3f}\nseed:{c.seed}\ntrain_io:{run.overlap.words}\nval_io:{val.overlap.words}")
	expected = producing(shards.folder).get("shards_promised") or promised(shards.folder, "train")
	if shards.growing: log.line(f"train_shards: {found} of {expected or '?'} so far: their producer is at work")
	elif found < expected: log.line(f"WARNING: train_shards: {found} of {expected}, and nothing brings the others")
	if rt.cuda and rt.dtype == torch.float32: log.line("no native bfloat16 on this GPU: float32")
	log.event("config", **vars(c))
	log.event("hardware", device=run.hardware, cpus=os.cpu_count(),
		torch=torch.__version__, cuda=torch.version.cuda, python=sys.version.split()[0], world_size=rt.world_size)
def fitting_accumulation(cfg, rt):
	"""The fewest micro-steps whose rows fit in nine tenths of the free memory, by a trial of eight, uncompiled."""
	if cfg.grad_accum_steps != "auto" or not rt.cuda: return cfg.grad_accum_steps
	model, rows = GPT(cfg, rt.dtype).to(rt.device), cfg.train_batch_tokens // cfg.train_seq_len // rt.world_size
	x = torch.zeros(min(rows, 8), cfg.train_seq_len, dtype=torch.int64, device=rt.device)
	free, before = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
	model(x, x).backward()
	fit = 0.9 * free * len(x) / (torch.cuda.max_memory_allocated() - before)
	return next(n for n in range(1, rows + 1) if rows % n == 0 and (rows / n <= fit or n == rows))
def out_of_memory(cfg, rt):
	steps, (free, total) = cfg.accumulation(rt.world_size), torch.cuda.mem_get_info()
	return (f"rank {rt.rank}: out of memory at {cfg.train_batch_tokens // (rt.world_size * steps)} tokens a micro-step, "
		f"{free >> 20} of {total >> 20} MiB free: set GRAD_ACCUM_STEPS={2 * steps}")
def resume_command(cfg, env):
	"""Goes on with this run."""
	settings = {name: env[name] for name in SETTINGS if name in env} | {"RUN_ID": cfg.run_id, "RESUME": "auto"}
	launch = f"torchrun --standalone --nproc_per_node={env['WORLD_SIZE']}" if "RANK" in env else "python3"
	return shlex.join(["env", *map("=".join, settings.items()), *launch.split(), sys.argv[0]])
def execute(cfg, env, warnings):
	"""An exit code. A foreseeable failure is one line."""
	rt, log, code, status, problem, hint = Runtime(), None, 1, "failed", "", ""
	try:
		rt = Runtime.start(cfg, env)
		run_id, steps = rt.broadcast((cfg.run_id, fitting_accumulation(cfg, rt)))
		cfg = replace(cfg, run_id=run_id, grad_accum_steps=steps)
		if cfg.resume != "auto" and env.get("TORCHELASTIC_RESTART_COUNT", "0") > "0":
			raise RunError("restarted by torchrun, from its first step: set RUN_ID and RESUME=auto")
		found = rt.broadcast(rt.rank or find_checkpoint(cfg))
		log = rt.watch.log = RunLog(cfg.run_id, rt.rank == 0, bool(found))
		source = Path(__file__).read_text("utf-8")
		log.console(log.path)
		log.event("run", run_id=cfg.run_id, argv=sys.argv)
		log_header(run := Run(cfg, rt, log), source)
		for warning in warnings: log.line(f"warning: {warning}")
		if found: run.resume(found)
		train(run)
		export_and_score(run, len(source.encode()))
		run.writer.join(60)
		code, status = 0, "finished"
	except Halt as halt:
		run.writer.join(60)
		saved = rt.broadcast(not rt.rank and run.write(run.final or run.state()))
		signum, *what = halt.args
		if signum: signum = rt.watch.signum or (signum if signum == signal.SIGINT else signal.SIGTERM)
		code, status = (128 + signum, "interrupted") if signum else (1, "nonfinite")
		if rt.rank == 0: problem = "".join(what) or f"{status} after step {run.step}"
		if saved and signum: hint = f"\n{resume_command(cfg, env)}"
	except torch.OutOfMemoryError: problem = out_of_memory(cfg, rt)
	except RunError as error: problem = str(error)
	finally:
		last_words(log, code, status, problem, hint)
		rt.close()
	return code
def last_words(log, code, status, problem, hint=""):
	if problem: print(f"train_gpt.py: {problem}", file=sys.stderr)
	if not log: return
	if problem: log.file(f"error: {problem}")
	log.event("end", status=status, exit_code=code, error=problem)
	log.console(f"{status}: see {log.path}{hint}")
	log.close()
def main():
	env, arguments = os.environ, sys.argv[1:]
	if arguments in (["--help"], ["-h"]): return print_help()
	cfg, faults = Config.from_environment(env)
	misspelt, warnings = foreign_names(env)
	faults += misspelt + [f"{word}: no such argument: see --help" for word in arguments if word != "--print-config"]
	if arguments and not faults:
		print(json.dumps({name: dict(value=value, source=("default", "environment")[name.upper() in env])
			for name, value in vars(cfg).items()}, indent=1))
		return 0
	faults += cfg.problems(int(env.get("WORLD_SIZE", 1)))
	if torch.__version__ < "2.11.dev": warnings.append(f"torch {torch.__version__}: the oldest tried is 2.11")
	if not faults: return execute(cfg, env, warnings)
	if int(env.get("LOCAL_RANK", 0)) == 0:
		print("train_gpt.py: nothing was started, settings are wrong:", *faults, sep="\n  ", file=sys.stderr)
	return 2
# Python's own exit aborts now and then, in gloo's threads (torch 2.13).
if __name__ == "__main__": os._exit((main(), sys.stdout.flush())[0])
