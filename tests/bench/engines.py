"""Runs scenarios (README.md) on our engine and on the peer, each in its own process, and describes the machine."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPS = ROOT / ".deps"
WORK = DEPS / "work"
SAMPLE = DEPS / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PEER = pathlib.Path(__file__).with_name("peer.py")
ENGINE = ROOT / "target" / "release" / "examples" / "engine-bench"
# A run that takes longer than this is considered stuck.
RUN_SECONDS_MAX = 1800
# A run is stopped when fewer bytes of memory than this are available, before the kernel kills arbitrary processes.
MEMORY_FREE_MIN = 1 << 30
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")


class Failed(Exception):
    """Raised if a run fails or its result is incomplete."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings of both engines that affect speed or results."""

    model: pathlib.Path
    inference_precision: str = "f32"
    kv_cache_precision: str = "u8"
    threads: int = len(os.sched_getaffinity(0))
    max_num_batched_tokens: int = 512
    kv_cache_gib: int = 2
    prefix_caching: bool = False
    # Tokens that end a sequence.
    stop_tokens: tuple[int, ...] = ()
    # Only for our engine: the maximum number of tokens in a step with both prompts and decodes (None: the default).
    max_chunk_tokens: int | None = None
    max_itl_ms: int | None = None
    # Only for our engine: the precision in which native projections multiply activations.
    activation_precision: str = "auto"
    # Additional properties of the plugin, as KEY=VALUE.
    properties: tuple[str, ...] = ()
    # Additional properties only for the peer.
    peer_properties: tuple[str, ...] = ()
    # Only for our engine: the directory of the model cache.
    cache_dir: pathlib.Path | None = None
    # Only for our engine: the directories of the adapters.
    adapters: tuple[pathlib.Path, ...] = ()
    # Only for our engine: the adapters that the requests use in turn, as numbers from 1 (0: no adapter).
    adapter_turns: tuple[int, ...] = ()
    # Only for our engine: the fraction of the attention mass that sparse attention must cover in long prompts (None:
    # full attention).
    sparse_attention: float | None = None

    def with_model(self, model: pathlib.Path, **changes) -> Setup:
        """Returns these settings with another model and other changes."""
        return dataclasses.replace(self, model=model, **changes)


def find_engine(path: str | None) -> pathlib.Path:
    """Returns the path of the `engine-bench` binary, and exits if it has not been built."""
    found = pathlib.Path(path) if path else ENGINE
    if not found.is_file():
        raise SystemExit(f"{found} does not exist: build it with `cargo build --release --example engine-bench`")
    return found


def run_engine(engine: pathlib.Path, setup: Setup, scenario: dict, directory: pathlib.Path) -> dict:
    """Runs our engine once."""
    command = [
        engine,
        f"--model={setup.model}",
        f"--activation-precision={setup.activation_precision}",
        f"--kv-cache-mib={setup.kv_cache_gib * 1024}",
        f"--max-num-batched-tokens={setup.max_num_batched_tokens}",
        f"--plugin-config=INFERENCE_PRECISION_HINT={setup.inference_precision}",
        f"--plugin-config=KV_CACHE_PRECISION={setup.kv_cache_precision}",
        f"--plugin-config=INFERENCE_NUM_THREADS={setup.threads}",
        *(f"--plugin-config={one}" for one in setup.properties),
        *(f"--stop-token={token}" for token in setup.stop_tokens),
        *([f"--max-chunk-tokens={setup.max_chunk_tokens}"] if setup.max_chunk_tokens else []),
        *([f"--max-itl-ms={setup.max_itl_ms}"] if setup.max_itl_ms else []),
        *([f"--sparse-attention={setup.sparse_attention}"] if setup.sparse_attention else []),
        *([f"--cache-dir={setup.cache_dir}"] if setup.cache_dir else []),
        *(f"--lora={path}" for path in setup.adapters),
        *(f"--lora-turns={number}" for number in setup.adapter_turns),
        *([] if setup.prefix_caching else ["--no-prefix-caching"]),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OVFLEET_")}
    return run(command, scenario, directory, environment)


def run_peer(setup: Setup, scenario: dict, directory: pathlib.Path, program: pathlib.Path = PEER) -> dict:
    """Runs openvino_genai once on an IR directory."""
    command = [
        sys.executable,
        program,
        f"--model={setup.model}",
        f"--inference-precision={setup.inference_precision}",
        f"--kv-cache-precision={setup.kv_cache_precision}",
        f"--threads={setup.threads}",
        f"--max-num-batched-tokens={setup.max_num_batched_tokens}",
        f"--kv-cache-gib={setup.kv_cache_gib}",
        *(f"--property={one}" for one in (*setup.properties, *setup.peer_properties)),
        *(f"--stop-token={token}" for token in setup.stop_tokens),
        *(["--prefix-caching"] if setup.prefix_caching else []),
    ]
    return run(command, scenario, directory, dict(os.environ))


def run(command: list, scenario: dict, directory: pathlib.Path, environment: dict) -> dict:
    """Writes the scenario, runs the command on it, and reads the result."""
    paths = directory / "scenario.json", directory / "result.json"
    paths[0].write_text(json.dumps(scenario))
    paths[1].unlink(missing_ok=True)
    command = [str(part) for part in (*command, f"--scenario={paths[0]}", f"--out={paths[1]}")]
    done = watched(command, environment)
    if done.exit_code != 0 or not paths[1].exists():
        raise Failed(f"{' '.join(command)}\n{done.fault or f'exit {done.exit_code}'}: {done.output[-2000:]}")
    result = json.loads(paths[1].read_text())
    result["anon_peak_bytes"] = done.anon_peak_bytes
    for index, request in enumerate(result.get("requests", [])):
        if request["error"] is not None:
            raise Failed(f"{' '.join(command)}\nrequest {index} failed: {request['error']}")
    return result


@dataclasses.dataclass
class Watched:
    """The exit code, the output and the memory use of a process that has ended."""

    exit_code: int
    output: str
    # The largest sampled resident memory of the process in bytes, without memory that is mapped from files.
    anon_peak_bytes: int
    # The reason why the process was stopped; None if it ended by itself.
    fault: str | None


def watched(command: list[str], environment: dict) -> Watched:
    """Runs a command. Stops the process if it takes too long, or before the machine runs out of memory."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        status, peak, fault = pathlib.Path(f"/proc/{process.pid}/status"), 0, None
        end = time.monotonic() + RUN_SECONDS_MAX
        while process.poll() is None:
            found = re.search(r"^RssAnon:\s*(\d+)", status.read_text(), re.M)
            peak = max(peak, int(found.group(1)) * 1024) if found else peak
            if time.monotonic() > end:
                fault = f"stopped after {RUN_SECONDS_MAX} s"
            elif memory_available() < MEMORY_FREE_MIN:
                fault = f"stopped because less than {MEMORY_FREE_MIN / 2**30:.0f} GiB of memory were available"
            if fault:
                process.kill()
                process.wait()
            time.sleep(0.02)
        output.seek(0)
        return Watched(process.returncode, output.read(), peak, fault)


def memory_available() -> int:
    """Returns the bytes that processes can still allocate on this machine."""
    found = re.search(r"MemAvailable:\s*(\d+)", pathlib.Path("/proc/meminfo").read_text())
    return int(found.group(1)) * 1024


def scratch() -> tempfile.TemporaryDirectory:
    """Creates a temporary directory for the runs of a benchmark. It is deleted together with the returned object."""
    WORK.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=WORK, prefix="run-")


def peer_ir(model: pathlib.Path) -> pathlib.Path:
    """Returns the IR directory to which openvino_genai converts a GGUF file. A file is converted only once.

    If the file's zero points are not integers, the conversion rounds them, so the IR is a slightly different model."""
    directory = WORK / f"ir-{model.stem}"
    if (directory / "complete").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / model.name
    link.unlink(missing_ok=True)
    link.symlink_to(model.resolve())
    program = (
        "import sys, openvino_genai\n"
        "openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)\n"
    )
    done = watched([sys.executable, "-c", program, str(link)], dict(os.environ))
    if done.exit_code != 0 or not (directory / "openvino_model.xml").exists():
        raise Failed(f"openvino_genai saved no IR of {model.name}: {done.fault or done.output[-500:].strip()}")
    (directory / "complete").touch()
    return directory


def machine() -> str:
    """Describes the machine in one line: the processor, the usable cores, the memory, and the processor's flags that
    affect precision and speed."""
    text = pathlib.Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.*)$", text, re.M)
    flags = set((re.search(r"^flags\s*: (.*)$", text, re.M) or re.match("()", "")).group(1).split())
    memory = int(re.search(r"MemTotal:\s*(\d+)", pathlib.Path("/proc/meminfo").read_text()).group(1)) / 2**20
    has = " ".join(flag for flag in CPU_FLAGS if flag in flags) or "none of the flags that matter"
    return f"{name.group(1) if name else 'unknown'}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB; {has}"


def served_precision() -> str:
    """Returns the default inference precision of the CPU plugin."""
    return "bf16" if {"avx512_bf16", "amx_bf16"} & set(machine().split()) else "f32"


@functools.cache
def versions() -> str:
    """Returns the commit of ovfleet and the versions of OpenVINO and openvino_genai. They are read only at the first call, because recording
    results makes the work tree dirty."""
    import importlib.metadata

    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=9"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    runtime, peer = (importlib.metadata.version(name) for name in ("openvino", "openvino-genai"))
    return f"ovfleet {commit or 'unknown'}, OpenVINO {runtime}, openvino_genai {peer}"
