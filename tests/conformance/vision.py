"""The part `images`: the answers of tiny vision-language models of every family, compared with those of transformers.

`server/openvino/tests/vision.rs` makes the comparison: it runs the image processor, the encoder, the engine and the
runner of this server. `images/make_models.py` creates the models and records the expected answers. The detail of a
family's check also reports how many answers of openvino_genai (`images/peer.py`) equal those of transformers.
"""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess

from oracle import Check, engines

MODELS = engines.ROOT / ".deps" / "models" / "vision"
IMAGES = engines.ROOT / "tests" / "conformance" / "images"
SETUP = IMAGES / "setup.sh"
PYTHON = engines.ROOT / ".deps" / "venv-vision" / "bin" / "python"
TESTS = ("cargo", "test", "--locked", "--package", "server-openvino", "--test", "vision", "--", "--ignored")
COMPARED = re.compile(r"logits differ by at most ([\d.e+-]+)")
FEATURES = re.compile(r"features differ from those of transformers by at most ([\d.e+-]+)")
NOISE = re.compile(r"noise with 8-bit weights: ([\d.e+-]+)")


def peer(model):
    """Returns how many answers of openvino_genai equal those of transformers, differ from them, or are errors. If
    `images/peer.py` fails, returns the last line of its errors."""
    run = subprocess.run([PYTHON, IMAGES / "peer.py", model], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return run.stderr.strip().splitlines()[-1]
    outcomes = collections.Counter(case["outcome"].split(":")[0] for case in json.loads(run.stdout))
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))


def checks():
    """Yields one check per test: one for each model family, and one for the memory that a large image needs."""
    subprocess.run([SETUP], check=True)
    environment = {**os.environ, "OVFLEET_VISION_MODELS": str(MODELS)}
    tests = subprocess.run(
        [*TESTS, "--nocapture", "--test-threads", "1"],
        cwd=engines.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # With `--nocapture`, the output of a test is between its name and its result.
    _, *parts = re.split(r"^test (\w+) \.\.\. ", tests.stdout, flags=re.MULTILINE)
    if not parts:
        yield Check("images", False, tests.stdout[-2000:])
    for name, output in zip(parts[::2], parts[1::2], strict=True):
        good = re.search(r"^ok$", output, re.MULTILINE) is not None
        differences = [float(number) for number in COMPARED.findall(output)]
        if good and differences:
            family, _, _ = name.partition("_answers_")
            features, noise = (float(found.search(output)[1]) for found in (FEATURES, NOISE))
            detail = (
                f"{len(differences)} answers have the tokens of transformers; logits differ by at most {max(differences):.1e}; "
                f"features differ by at most {features:.1e} of the largest one; "
                f"noise of the encoder with weights of 8 bits: {noise:.1e}; "
                f"openvino_genai: {peer(MODELS / family)}"
            )
        else:
            detail = "passed" if good else output[:1000]
        yield Check(f"images {name}", good, detail)
