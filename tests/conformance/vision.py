"""The part `images`: the answers of tiny vision-language models of every family, compared with those of transformers.

The comparison itself is `server/openvino/tests/vision.rs`, which runs the image processor, the encoder, the engine and the
runner of this server. The models and the expected answers are made by `images/make_models.py`.
"""

from __future__ import annotations

import os
import re
import subprocess

from oracle import Check, engines

MODELS = engines.ROOT / ".deps" / "models" / "vision"
SETUP = engines.ROOT / "tests" / "conformance" / "images" / "setup.sh"
TESTS = ("cargo", "test", "--locked", "--package", "server-openvino", "--test", "vision", "--", "--ignored")
COMPARED = re.compile(r"logits differ by at most ([\d.e+-]+)")


def checks():
    """Yields a check for each test: a family, or the memory for a large image."""
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
            detail = f"{len(differences)} answers have the tokens of transformers; logits differ by at most {max(differences):.1e}"
        else:
            detail = "passed" if good else output[:1000]
        yield Check(f"images {name}", good, detail)
