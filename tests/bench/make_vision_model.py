#!/usr/bin/env python3
"""Writes a vision-language model with random weights, as optimum-intel exports it: `make_vision_model.py TOKENIZER DIRECTORY`.

The model has half the width and half the depth of Qwen2-VL 2B, in the image encoder and in the language model, so the
ratio of their costs is about that of the published model. The weights have 8 bits, as
`optimum-cli export openvino --weight-format int8` writes them. TOKENIZER is the path of a `tokenizer.json`. The program
runs in the environment `.deps/venv-vision`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "conformance" / "images"))

import torch
import transformers
from make_models import CHATML, draw_weights
from optimum.commands.optimum_cli import main as optimum_cli
from tokenizers import Tokenizer

SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
# The number of rows of the output matrix is a multiple of this number, as in published models.
VOCABULARY_MULTIPLE = 64
TEXT = {
    "hidden_size": 768,
    "intermediate_size": 4480,
    "num_hidden_layers": 14,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
VISION = {"depth": 16, "embed_dim": 640, "hidden_size": 768, "num_heads": 8, "mlp_ratio": 4}
# The limits of the image size, as in the published model.
PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}


def tokenizer_of(path: pathlib.Path) -> transformers.Qwen2TokenizerFast:
    """Returns the tokenizer with image tokens, and with unused tokens that round up the size of the vocabulary."""
    tokenizer = Tokenizer.from_file(str(path))
    unused = -(tokenizer.get_vocab_size() + len(SPECIAL)) % VOCABULARY_MULTIPLE
    return transformers.Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL + [f"<|unused_{number}|>" for number in range(unused)],
    )


def save(tokenizer: transformers.Qwen2TokenizerFast, directory: str) -> None:
    """Saves the model in the format of transformers."""
    token = tokenizer.convert_tokens_to_ids
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "vocab_size": len(tokenizer)},
        vision_config=VISION,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        # With tied embeddings, a model with random weights repeats its last token.
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    draw_weights(model, 1.0, seed=21)
    processor = transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**PIXELS),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=CHATML.replace("IMAGE", IMAGE),
    )
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=pathlib.Path)
    parser.add_argument("directory", type=pathlib.Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory.parent) as original:
        save(tokenizer_of(args.tokenizer), original)
        options = ["--model", original, "--task", "image-text-to-text", "--weight-format", "int8"]
        sys.argv[1:] = ["export", "openvino", *options, str(args.directory)]
        optimum_cli()


if __name__ == "__main__":
    main()
