"""Prints as JSON whether openvino_genai answers each case of a tiny vision-language model as transformers does.

    python peer.py DIRECTORY

DIRECTORY is a model that `make_models.py` made. As in the comparison with transformers, everything is computed in f32, and
the prompt is the text of the case without a chat template.
"""

import json
import re
import sys
from itertools import count
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from PIL import Image

IMAGE = re.compile(
    r"<start_of_image>|\(<image>\./</image>\)|<image>|<\|endoftext10\|>|<\|vision_start\|><\|image_pad\|><\|vision_end\|>"
)


def pixels(path):
    """Returns the pixels of an image in RGB."""
    image = Image.open(path)
    if image.mode == "I;16":
        # Pillow's own conversion would clip 16-bit gray to 255 instead of scaling it.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return ov.Tensor(np.array(image.convert("RGB"))[None])


def main():
    directory = Path(sys.argv[1])
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = False
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", precision)
    tokenizer = pipeline.get_tokenizer()
    answers = []
    for case in json.loads((directory / "reference" / "cases.json").read_text()):
        if "refused" in case:
            continue
        config = genai.GenerationConfig()
        config.max_new_tokens = len(case["answer"])
        config.ignore_eos = True
        config.apply_chat_template = False
        images = [pixels(directory / "reference" / name) for name in case["images"]]
        number = count()
        prompt = IMAGE.sub(lambda _, number=number: f"<ov_genai_image_{next(number)}>", case["text"])
        try:
            [result] = pipeline.generate([prompt], images=[images], generation_config=[config])
            outcome = "equal" if result.texts[0] == tokenizer.decode(case["answer"]) else "different"
        except RuntimeError as error:
            outcome = f"error: {str(error).splitlines()[-1]}"
        answers.append({"name": case["name"], "outcome": outcome})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
