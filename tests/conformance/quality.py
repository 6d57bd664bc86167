"""Compares the perplexity of the sample model, and the logits of random files, with those of the numpy reference, and
measures the rounding errors of the served model."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Iterator

import numpy as np

import engines
import kquants
import make_random
import oracle
import reference
from oracle import HERE, Check

WINDOW = 384
# The fractions of the attention mass that sparse attention retains for long prompts.
SHARES = (0.99, 0.95, 0.9)
# The maximum relative difference between our perplexity and that of the reference. On the IR, our perplexity may exceed
# that of the peer by at most this fraction.
PERPLEXITY_SHARE_MAX = 0.01
RANDOM_SEQUENCES, RANDOM_TOKENS = 2, 200
# The maximum noise of the default configuration, as a multiple of that of bf16 inference.
NOISE_RATIO_MAX = 1.1
# All logits of every fourth position are compared, because those of all positions would need a gigabyte for each setup.
NOISE_STRIDE = 4
# The number of sequences that the reference computes at a time.
REFERENCE_SEQUENCES = 4
# With these properties, the plugin's kernels replace native kernels: with PLUGIN_PROJECTIONS, they compute the
# projections, without rounding activations to 8 bits; with PLUGIN_CACHE, they compute the attention.
PLUGIN_PROJECTIONS = ("DYNAMIC_QUANTIZATION_GROUP_SIZE=0",)
PLUGIN_CACHE = ("KEY_CACHE_PRECISION=u8", "VALUE_CACHE_PRECISION=u8")
# The limits on the maximum and the root mean square difference of logits, as fractions of their standard deviation,
# in f32 with an f32 KV cache. The logits differ mostly because zero points that are not integers are rounded to f16.
LOGITS_SHARE_MAX = (0.04, 0.006)


def windows(ir: pathlib.Path) -> list[list[int]]:
    """Returns the tokens of corpus.txt, divided into windows."""
    import openvino_genai

    text = (HERE / "corpus.txt").read_text()
    encoded = openvino_genai.Tokenizer(str(ir)).encode(text, add_special_tokens=False).input_ids.data[0].tolist()
    cut = [encoded[start : start + WINDOW] for start in range(0, len(encoded), WINDOW)]
    return [window for window in cut if len(window) > 1]


def reference_perplexity(model: pathlib.Path, work: list[list[int]]) -> float:
    """Returns the perplexity according to the reference. It is cached in the work directory, because computing it takes
    minutes."""
    code = (HERE / "reference.py").read_bytes()
    stat = model.stat()
    key = f"{zlib.crc32(code):08x}-{zlib.crc32(json.dumps(work).encode()):08x}-{stat.st_size}-{stat.st_mtime_ns}"
    kept = engines.WORK / f"perplexity-{key}.json"
    if not kept.exists():
        value = reference.perplexity(reference.Reference(str(model)).score(work))
        kept.write_text(json.dumps(value))
    return json.loads(kept.read_text())


def scored(model: pathlib.Path, ir: pathlib.Path) -> tuple[list[list[int]], dict, float]:
    """Returns the windows, the scenario that scores them, and their perplexity according to the reference."""
    work = windows(ir)
    return work, {"kind": "score", "sequences": work}, reference_perplexity(model, work)


def cost(engine: pathlib.Path, setup: engines.Setup, ir: pathlib.Path, directory: pathlib.Path) -> Check:
    """Reports the perplexity with a setting that reduces accuracy, without checking it."""
    _, scenario, wanted = scored(setup.model, ir)
    ours = reference.perplexity(engines.run_engine(engine, setup, scenario, directory)["sequences"])
    name = f"perplexity, {setup.inference_precision} with {setup.kv_cache_precision} KV, not a default"
    return Check(name, True, f"ours {ours:.3f} ({ours / wanted - 1:+.2%})")


def long_costs(engine: pathlib.Path, setup: engines.Setup, ir: pathlib.Path, directory: pathlib.Path) -> Iterator[Check]:
    """Reports the increase in perplexity with sparse attention, without checking it. All of corpus.txt is one
    sequence."""
    work = [[token for window in windows(ir) for token in window]]
    scenario = {"kind": "score", "sequences": work}
    exact = reference.perplexity(engines.run_engine(engine, setup, scenario, directory)["sequences"])
    for share in SHARES:
        sparse = setup.with_model(setup.model, sparse_attention=share)
        ours = reference.perplexity(engines.run_engine(engine, sparse, scenario, directory)["sequences"])
        name = f"perplexity, {len(work[0])} tokens at once, --sparse-attention {share}, not a default"
        yield Check(name, True, f"{ours:.3f} ({ours / exact - 1:+.2%}), with all of the cache {exact:.3f}")


def perplexities(
    engine: pathlib.Path, setups: list[engines.Setup], ir: pathlib.Path, directory: pathlib.Path
) -> Iterator[Check]:
    """Compares our perplexity in each setup with that of the reference, and our perplexity in the first setup on the IR
    with that of the peer."""
    work, scenario, wanted = scored(setups[0].model, ir)
    peer = reference.perplexity(engines.run_peer(setups[0].with_model(ir), scenario, directory)["sequences"])
    tokens = sum(len(sequence) for sequence in work)
    for setup in setups:
        ours = reference.perplexity(engines.run_engine(engine, setup, scenario, directory)["sequences"])
        share = ours / wanted - 1
        detail = (
            f"ours {ours:.3f} ({share:+.2%}), dequantized model {wanted:.3f}, openvino_genai's IR {peer:.3f} "
            f"({peer / wanted - 1:+.2%}); {tokens} tokens in windows of {WINDOW}; at most ±{PERPLEXITY_SHARE_MAX:.0%}"
        )
        name = f"perplexity, {setup.inference_precision} with {setup.kv_cache_precision} KV"
        yield Check(name, abs(share) <= PERPLEXITY_SHARE_MAX, detail)
    # Compare the peer's kernels, which round activations to 8 bits on some processors, with the native kernels on the
    # same graph.
    setup = setups[0].with_model(ir)
    ours = reference.perplexity(engines.run_engine(engine, setup, scenario, directory)["sequences"])
    name = f"perplexity, {setup.inference_precision} with {setup.kv_cache_precision} KV, the IR"
    share = ours / peer - 1
    detail = f"ours {ours:.3f} ({share:+.2%}), openvino_genai's {peer:.3f}; at most {PERPLEXITY_SHARE_MAX:+.0%}"
    yield Check(name, share <= PERPLEXITY_SHARE_MAX, detail)


@dataclasses.dataclass(frozen=True)
class Noise:
    """The differences between the distributions of a setup and those of a reference."""

    # The mean Kullback-Leibler divergence from the reference.
    kl: float
    # The fraction of positions at which the setup and the reference have the same most probable token.
    top1: float
    # The root mean square difference between the log probabilities that the setup and the reference assign to the
    # tokens of the text.
    rms: float
    perplexity: float

    def __str__(self) -> str:
        return f"KL {self.kl:.6f}, top-1 {self.top1:.1%}, RMS {self.rms:.4f}, perplexity {self.perplexity:.3f}"


@dataclasses.dataclass(frozen=True)
class Scored:
    """The results of a setup: the log probability of each token, and the logits of the whole vocabulary at some
    positions."""

    sequences: list
    logits: np.ndarray

    @staticmethod
    def read(result: dict, directory: pathlib.Path) -> Scored:
        """Reads the result of an engine."""
        path = directory / "logits.f32"
        logits = np.fromfile(path, dtype="<f4").reshape(-1, result["vocabulary"])
        path.unlink()
        return Scored(result["sequences"], logits)

    @staticmethod
    def compute(model: reference.Reference, scenario: dict) -> Scored:
        """Computes the results of the scenario with a reference model."""
        work, scores, selected = scenario["sequences"], [], []
        for start in range(0, len(work), REFERENCE_SEQUENCES):
            group = work[start : start + REFERENCE_SEQUENCES]
            for index, (sequence, logits) in enumerate(zip(group, model.logits(group)), start):
                scores.append(reference.log_softmax(logits[:-1])[np.arange(len(sequence) - 1), sequence[1:]])
                selected.append(logits[[position for row, position in scenario["logits"]["rows"] if row == index]])
        return Scored(scores, np.concatenate(selected))

    def noise(self, wanted: Scored) -> Noise:
        kl, same = 0.0, 0
        for ours, theirs in zip(self.logits, wanted.logits, strict=True):
            p, q = reference.log_softmax(theirs), reference.log_softmax(ours)
            kl += float(np.sum(np.exp(p) * (p - q)))
            same += int(p.argmax() == q.argmax())
        count = len(wanted.logits)
        differences = np.concatenate(self.sequences) - np.concatenate(wanted.sequences)
        rms = float(np.sqrt(np.mean(differences**2)))
        return Noise(kl / count, same / count, rms, reference.perplexity(self.sequences))


def noises(engine: pathlib.Path, served: engines.Setup, ir: pathlib.Path, directory: pathlib.Path) -> Iterator[Check]:
    """Measures the noise of the default, of int8 activations, of bf16 inference and of the peer. The plugin computes
    the bf16 inference, with the cache precision of the default; on processors without bf16, the reference computes it.
    Each result is compared with that of the same model in f32 with an f32 cache (`plain_f32`)."""
    work = windows(ir)
    rows = [
        [index, position] for index, sequence in enumerate(work) for position in range(0, len(sequence), NOISE_STRIDE)
    ]
    scenario = {"kind": "score", "sequences": work, "logits": {"file": "logits.f32", "rows": rows}}

    def peers(setup: engines.Setup) -> Scored:
        return Scored.read(engines.run_peer(setup.with_model(ir), scenario, directory), directory)

    setups = {"by default": served}
    if has_bf16():
        setups["in bf16 without rounding"] = plain_bf16(served)
    yield from own_noises(engine, served, scenario, directory)
    wanted = peers(plain_f32(served))
    cache = f"{served.kv_cache_precision} KV"
    for name, setup in setups.items():
        yield Check(f"noise, openvino_genai {name} with {cache}", True, str(peers(setup).noise(wanted)))


def has_bf16() -> bool:
    """Whether the plugin computes in bf16 on this processor. On other processors, the plugin computes in f32."""
    return engines.served_precision() == "bf16"


def plain_bf16(served: engines.Setup) -> engines.Setup:
    """Returns the settings for the plugin's kernels in bf16, without further rounding and with the cache precision of
    `served`."""
    return dataclasses.replace(served, inference_precision="bf16", properties=(*PLUGIN_PROJECTIONS, *PLUGIN_CACHE))


def plain_f32(served: engines.Setup) -> engines.Setup:
    """Returns the settings for f32 with an f32 cache. The plugin computes the projections; in our engine, the native
    kernels compute the attention."""
    return dataclasses.replace(
        served, inference_precision="f32", kv_cache_precision="f32", properties=PLUGIN_PROJECTIONS
    )


def own_noises(
    engine: pathlib.Path, served: engines.Setup, scenario: dict, directory: pathlib.Path
) -> Iterator[Check]:
    """Checks the noise of the default against that of bf16, and reports that of int8 activations."""

    def scored(setup: engines.Setup) -> Scored:
        return Scored.read(engines.run_engine(engine, setup, scenario, directory), directory)

    model, wanted = served.model.stem, scored(plain_f32(served))
    name = f"{model}, {served.kv_cache_precision} KV"
    default = scored(served).noise(wanted)
    if has_bf16():
        compared, base = default, scored(plain_bf16(served)).noise(wanted)
        yield Check(f"noise of {name}, plugin in bf16, not a default", True, str(base))
    else:
        # The reference does not round its KV cache, so run the default with an f32 cache for the comparison.
        yield Check(f"noise of {name}, as served", True, str(default))
        name = f"{model}, f32 KV"
        compared = scored(dataclasses.replace(served, kv_cache_precision="f32")).noise(wanted)
        base = Scored.compute(reference.Bf16Reference(str(served.model)), scenario).noise(wanted)
        yield Check(f"noise of {name}, reference in bf16", True, str(base))
    ratios = compared.kl / base.kl, compared.rms / base.rms
    detail = f"{compared}; {ratios[0]:.2f} and {ratios[1]:.2f} times KL and RMS of bf16, at most {NOISE_RATIO_MAX}"
    yield Check(f"noise of {name}, by default", max(ratios) <= NOISE_RATIO_MAX, detail)
    int8 = scored(dataclasses.replace(served, activation_precision="int8")).noise(wanted)
    yield Check(
        f"noise of {model}, {served.kv_cache_precision} KV, --activation-precision int8, not a default", True, str(int8)
    )


def random_noises(engine: pathlib.Path, served: engines.Setup, directory: pathlib.Path) -> Iterator[Check]:
    """Checks the noise of every random file."""
    for path in make_random.make(engines.WORK / f"random-{make_random.edition()}"):
        yield from own_noises(engine, served.with_model(path), random_scenario(), directory)


def random_scenario() -> dict:
    """Returns the scenario that scores the random sequences and records all of their logits."""
    rows = [[sequence, position] for sequence in range(RANDOM_SEQUENCES) for position in range(RANDOM_TOKENS)]
    return {"kind": "score", "sequences": random_sequences(), "logits": {"file": "logits.f32", "rows": rows}}


def random_sequences() -> list[list[int]]:
    """Returns random tokens, in sequences longer than the sliding windows of gemma3 and of phi3's variant `window`."""
    rng = np.random.default_rng(8)
    return rng.integers(3, make_random.VOCABULARY, (RANDOM_SEQUENCES, RANDOM_TOKENS)).tolist()


def random_files(engine: pathlib.Path, setup: engines.Setup, directory: pathlib.Path) -> Iterator[Check]:
    """Compares, for every random file, all logits and the perplexity with those of the reference."""
    kquants.check()
    paths = make_random.make(engines.WORK / f"random-{make_random.edition()}")
    for path in paths:
        yield random_file(engine, setup.with_model(path), directory)


def random_file(engine: pathlib.Path, setup: engines.Setup, directory: pathlib.Path) -> Check:
    """Compares the logits and the perplexity of one random file with those of the reference."""
    work, scenario = random_sequences(), random_scenario()
    name = f"logits of {setup.model.stem}"
    wanted = np.concatenate(reference.Reference(str(setup.model)).logits(work))
    try:
        result = engines.run_engine(engine, setup, scenario, directory)
    except engines.Failed as error:
        return Check(name, False, str(error).replace("\n", " ")[-300:])
    got = np.fromfile(directory / "logits.f32", dtype="<f4").reshape(wanted.shape)
    difference = np.abs(got - wanted) / wanted.std()
    worst, mean = float(difference.max()), float(np.sqrt(np.mean(difference**2)))
    most = LOGITS_SHARE_MAX
    ours = reference.perplexity(result["sequences"])
    scores = [
        reference.log_softmax(logits[:-1])[np.arange(RANDOM_TOKENS - 1), sequence[1:]]
        for logits, sequence in zip(np.split(wanted, RANDOM_SEQUENCES), work, strict=True)
    ]
    theirs = reference.perplexity(scores)
    detail = (
        f"largest difference {worst:.4f}, root mean square {mean:.5f} standard deviations of the logits (at most {most[0]}, "
        f"{most[1]}); perplexity {ours:.1f}, reference {theirs:.1f}"
    )
    good = worst <= most[0] and mean <= most[1] and abs(ours / theirs - 1) <= PERPLEXITY_SHARE_MAX
    return Check(name, good, detail)
