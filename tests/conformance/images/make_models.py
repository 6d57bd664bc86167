"""Makes tiny vision-language models with random weights, exports them to OpenVINO, and records the answers of
transformers.

    python make_models.py DIRECTORY [FAMILY ...]

For each family, DIRECTORY/FAMILY is the exported model, and DIRECTORY/FAMILY/reference contains cases for tests. The
file `cases.json` contains the tokens of each prompt, their positions if the model uses M-RoPE, the tokens of the greedy
answer, and the logits of its first token. The other files are the images, and the features that replace the image
tokens of each prompt, as little-endian `f32` values. DIRECTORY/FAMILY-int8 is the same model with 8-bit weights in the
image encoder. requirements.txt lists the package versions with which the models are made. Phi-4-multimodal needs
another version of transformers (requirements-phi.txt) and is made only if it is named.
"""

import json
import math
import os
import shutil
import sys
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import nncf
import numpy as np
import openvino
import torch
import transformers
from optimum.intel import OVConfig
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast

import remote_models

SENTENCES = [
    "What is in this image? Describe the picture in one sentence.",
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "A red circle and a blue square are on a green background.",
    "user assistant system model: answer the question about the image.",
    "Compare the first image with the second image and count the colors.",
]
ANSWER_TOKENS = 16
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}


def train_tokenizer(special, bos=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(SENTENCES * 20, trainer)
    if bos:
        pair = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=pair),
            ]
        )
    return tokenizer


def draw_weights(model, embedding_deviation, seed, wide=()):
    """Draws matrices and biases at random. The standard deviations of matrices preserve the magnitude of activations,
    so that answers depend on the image. If the name of a matrix contains an element of `wide`, its standard deviation
    is four times as large."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.05, generator=generator)
                continue
            if "embed_tokens" in name or "lm_head" in name and model.config.tie_word_embeddings:
                deviation = embedding_deviation
            else:
                deviation = 1 / math.sqrt(parameter[0].numel())
            if any(part in name for part in wide):
                deviation *= 4
            parameter.normal_(0.0, deviation, generator=generator)


def fast_tokenizer(tokenizer, **special):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **special
    )


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def llava(prefix, seed, image_processor, **image):
    """Creates a model of the LLaVA family; `image` is the part of its configuration that determines the tokens of an
    image."""
    special = ["<unk>", "<s>", "</s>", "<image>", "<pad>", "<|im_start|>", "<|im_end|>"]
    tokenizer = fast_tokenizer(
        train_tokenizer(special, bos="<s>"),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=56,
            patch_size=14,
            projection_dim=64,
        ),
        # The native attention supports heads of this size.
        text_config=transformers.LlamaConfig(**{**TEXT, "head_dim": 32}, vocab_size=len(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        **image,
    )
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    draw_weights(model, 0.5, seed, wide=["multi_modal_projector.linear_2"])
    processor = getattr(transformers, f"{prefix}Processor")(
        image_processor=image_processor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHATML.replace("IMAGE", "<image>\n"),
    )
    return model, processor, "<image>"


def llava_next():
    grid = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]}
    return llava("LlavaNext", 13, partial(transformers.LlavaNextImageProcessor, **grid), **grid)


def gemma3():
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    special += ["<start_of_image>", "<end_of_image>", "<image_soft_token>", "<|im_start|>", "<|im_end|>"]
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer = fast_tokenizer(
        train_tokenizer(special, bos="<bos>"),
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens=names,
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=112,
            patch_size=14,
            vision_use_head=False,
        ),
        text_config=transformers.Gemma3TextConfig(
            **TEXT, vocab_size=len(tokenizer), sliding_window=32, query_pre_attn_scalar=16
        ),
        mm_tokens_per_image=16,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    draw_weights(model, 0.06, 2)
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": 112, "width": 112}),
        tokenizer=tokenizer,
        image_seq_length=16,
        chat_template=CHATML.replace("IMAGE", "<start_of_image>"),
    )
    return model, processor, "<start_of_image>"


def qwen_tokenizer():
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    special += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    return Qwen2TokenizerFast(
        tokenizer_object=train_tokenizer(special),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special,
    )


def qwen(names, vision, seed, rope, text=None, patch=14, colors=None):
    """Creates a model of a Qwen family; `names` are the names of the transformers classes for its configuration, model,
    processor and video processor."""
    config_class, model_class, processor_class, video_class = (getattr(transformers, name) for name in names)
    tokenizer = qwen_tokenizer()
    token = tokenizer.convert_tokens_to_ids
    # The text model of Qwen2-VL has heads of 16 elements, so the plugin computes its attention. The text models
    # of the other Qwen families have heads of 32 elements, which the native attention supports.
    text = {**{name: value for name, value in TEXT.items() if name != "head_dim"}, **(text or {})}
    config = config_class(
        text_config={**text, "vocab_size": len(tokenizer), "rope_scaling": rope},
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    model = model_class(config)
    draw_weights(model, 1.0, seed)
    edge = 2 * patch
    pixels = {"min_pixels": 4 * edge * edge, "max_pixels": 64 * edge * edge, "patch_size": patch, **(colors or {})}
    processor = processor_class(
        image_processor=transformers.Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=video_class(),
        chat_template=CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    return model, processor, "<|vision_start|><|image_pad|><|vision_end|>"


def qwen_names(version):
    """Returns the names of the transformers classes that implement a family."""
    video = "Qwen3VLVideoProcessor" if version == "Qwen3VL" else "Qwen2VLVideoProcessor"
    prefix = version.replace("2_5VL", "2_5_VL")
    return f"{prefix}Config", f"{prefix}ForConditionalGeneration", f"{prefix}Processor", video


def qwen2_vl():
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    return qwen(qwen_names("Qwen2VL"), vision, seed=3, rope=rope)


def qwen2_5_vl():
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "out_hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
    rope = {"type": "mrope", "mrope_section": [4, 6, 6]}
    text = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return qwen(qwen_names("Qwen2_5VL"), vision, seed=6, rope=rope, text=text)


def qwen3_vl():
    vision = {
        "depth": 4,
        "hidden_size": 64,
        "out_hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1, 2],
    }
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
    text = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 4}
    colors = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return qwen(qwen_names("Qwen3VL"), vision, seed=5, rope=rope, text=text, patch=16, colors=colors)


def internvl_chat():
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]
    tokenizer = Qwen2TokenizerFast(
        tokenizer_object=train_tokenizer(special),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special,
        chat_template=CHATML.replace("IMAGE", "<image>\n"),
    )
    text = {**{name: value for name, value in TEXT.items() if name != "head_dim"}, "vocab_size": len(tokenizer)}
    # The native attention supports heads of 32 elements.
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    config = remote_models.InternVLChatConfig(llm_config=transformers.Qwen2Config(**text))
    config.img_context_token_id = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    model = remote_models.InternVLChatModel(config)
    draw_weights(model, 0.5, 7, wide=["mlp1.3"])
    return model, remote_models.InternVLProcessor(tokenizer, config), "<image>"


def idefics3(prefix, edge, patch, seed, **parts):
    special = ["<unk>", "<|im_start|>", "<|im_end|>", "<pad>", "<fake_token_around_image>", "<image>", "<global-img>"]
    special += ["<end_of_utterance>", *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))]
    tokenizer = fast_tokenizer(
        train_tokenizer(special),
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        pad_token="<pad>",
        additional_special_tokens=special,
    )
    # The native attention supports heads of 32 elements.
    text = {**{name: value for name, value in TEXT.items() if name != "head_dim"}, "vocab_size": len(tokenizer)}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "model_type": "llama"}
    text |= {"pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": False}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = getattr(transformers, f"{prefix}Config")(
        vision_config={**vision, "image_size": edge, "patch_size": patch},
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    draw_weights(model, 0.5, seed, wide=["connector"])
    processor = getattr(transformers, f"{prefix}Processor")(
        image_processor=getattr(transformers, f"{prefix}ImageProcessor")(
            size={"longest_edge": 2 * edge}, max_image_size={"longest_edge": edge}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=CHATML.replace("IMAGE", "<image>"),
        **parts,
    )
    return model, processor, "<image>"


def smolvlm():
    return idefics3("SmolVLM", 64, 16, seed=17, video_processor=transformers.SmolVLMVideoProcessor())


def minicpmv():
    special = ["<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "</image>", "<slice>", "</slice>"]
    special += ["<image_id>", "</image_id>"]
    tokenizer = Qwen2TokenizerFast(
        tokenizer_object=train_tokenizer(special),
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special,
        chat_template=CHATML.replace("IMAGE", "(<image>./</image>)\n"),
    )
    text = {**{name: value for name, value in TEXT.items() if name != "head_dim"}, "vocab_size": len(tokenizer)}
    # The native attention supports heads of 32 elements.
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    vision = transformers.SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=980,
        patch_size=14,
        vision_use_head=False,
    )
    config = remote_models.MiniCPMVConfig(vision_config=vision, **text)
    config.text_options, config.image_token_id = text, tokenizer.convert_tokens_to_ids("<unk>")
    model = remote_models.MiniCPMV(config)
    draw_weights(model, 0.5, 11, wide=["resampler.proj"])
    return model, remote_models.MiniCPMVProcessor(tokenizer, config), "(<image>./</image>)"


def phi4_multimodal():
    """Creates the model. Requires transformers 4.53.3, the latest version with which optimum-intel can export it."""
    special = ["<|endoftext|>", "<|endoftext10|>", "<|endoftext11|>", "<|user|>", "<|assistant|>", "<|end|>"]
    names = {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"}
    tokenizer = transformers.GPT2TokenizerFast(
        tokenizer_object=train_tokenizer(special),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=names,
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    # The exporter traces the audio encoder with 1024 channels.
    audio = {"hidden_size": 1024, "intermediate_size": 64, "num_blocks": 1, "num_attention_heads": 4}
    audio |= {"ext_pw_out_channel": 1024, "depthwise_seperable_out_channel": 1024, "nemo_conv_channels": 64}
    text = {name: value for name, value in TEXT.items() if name != "head_dim"}
    # The native attention supports heads of 32 elements.
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    special_ids = {name: tokenizer.pad_token_id for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.Phi4MultimodalConfig(
        vision_config={**vision, "image_token_id": ids["image_token"]},
        audio_config={**audio, "audio_token_id": ids["audio_token"]},
        **text,
        **special_ids,
    )
    model = transformers.Phi4MultimodalForCausalLM(config)
    draw_weights(model, 0.5, 12, wide=["img_projection_down"])
    # With PyTorch's attention, transformers would make the attention between patches causal if no patch is masked.
    # Eager attention is never causal, like that of the exported model.
    model.model.embed_tokens_extend.image_embed.img_processor.config._attn_implementation = "eager"
    processor = transformers.Phi4MultimodalProcessor(
        # With 36 crops, the default, the tokens of a large image would not fit into the context.
        image_processor=transformers.Phi4MultimodalImageProcessorFast(dynamic_hd=4),
        audio_processor=transformers.Phi4MultimodalFeatureExtractor(),
        tokenizer=tokenizer,
    )
    return model, processor, "<|endoftext10|>"


FAMILIES = {
    "llava": lambda: llava("Llava", 1, transformers.CLIPImageProcessor, image_seq_length=16),
    "gemma3": gemma3,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "internvl_chat": internvl_chat,
    "idefics3": lambda: idefics3("Idefics3", 56, 14, seed=8),
    "smolvlm": smolvlm,
    "llava_next": llava_next,
    "minicpmv": minicpmv,
    "phi4_multimodal": phi4_multimodal,
}


def picture(seed, width, height):
    """Returns a picture with areas of random colors and some noise, so that resizing and the order of patches affect
    the features."""
    random = np.random.default_rng(seed)
    areas = random.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(areas).resize((width, height), Image.Resampling.BILINEAR)).astype(int)
    # With finer noise, the file of a large picture would exceed the server's limit on the size of an image file.
    edge = 4 if width * height > 1_000_000 else 1
    noise = random.integers(-20, 21, (-(-height // edge), -(-width // edge), 3)).repeat(edge, 0).repeat(edge, 1)
    pixels = np.clip(pixels + noise[:height, :width], 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


# The images of each case: width, height, and the color mode of the file unless it is RGB. With these sizes, resizing
# shrinks images, enlarges images, and hits rounding ties.
CASES = {
    "text only": [],
    "square": [(112, 112)],
    "wide": [(300, 100)],
    "tall and small": [(30, 75)],
    "tie": [(182, 126)],
    "two": [(90, 120), (200, 200)],
    "equal": [(140, 70), (140, 70)],
    "three": [(64, 200), (100, 100), (130, 90)],
    "one pixel": [(1, 1)],
    "strip": [(3, 2000)],
    "large": [(4000, 3000)],
    "grayscale": [(120, 80, "L")],
    "palette": [(80, 120, "P")],
    "16 bits": [(100, 90, "I;16")],
}


def save(image, path, mode="RGB"):
    """Writes an image in a color mode, and returns the pixels of the file in RGB."""
    if mode == "I;16":
        # Pillow's own conversion would not scale the values. 257 times an 8-bit value is the same color in 16 bits.
        gray = image.convert("L")
        Image.fromarray(np.asarray(gray).astype(np.uint16) * 257).save(path)
        return gray.convert("RGB")
    image = image.convert(mode)
    image.save(path)
    return image.convert("RGB")


def record_embeddings(model):
    """Returns a list to which every run of the model appends the embeddings that enter its text part."""
    runs = []
    [layer] = [part for name, part in model.named_modules() if name.endswith("layers.0") and "encoder" not in name]

    def record(_, positional, named):
        runs.append((positional[0] if positional else named["hidden_states"]).detach())

    layer.register_forward_pre_hook(record, with_kwargs=True)
    return runs


def cases(model, processor, marker, directory):
    image_token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    recorded = []
    runs = record_embeddings(model)
    # Some processors of transformers would mistake a picture of one pixel for one with a single channel.
    image_processor = type(getattr(processor, "image_processor", None)).__name__
    guesses_channels = image_processor.endswith("ImageProcessor")
    options = {"input_data_format": "channels_last"} if guesses_channels else {}
    for number, (name, pictures) in enumerate(CASES.items()):
        files = [f"image-{number}-{index}.png" for index in range(len(pictures))]
        images = []
        for index, (width, height, *mode) in enumerate(pictures):
            image = picture(10 if name == "equal" else 10 * number + index, width, height)
            images.append(save(image, directory / files[index], *mode))
        text = "".join(f"{marker} image {at + 1}. " for at in range(len(images))) + "Describe the picture."
        try:
            inputs = processor(text=text, images=images or None, return_tensors="pt", **(options if images else {}))
        except ValueError as error:
            recorded.append({"name": name, "text": text, "images": files, "refused": str(error)})
            print(f"  {name}: refused, {error}")
            continue
        prompt = inputs["input_ids"][0]
        runs.clear()
        with torch.no_grad():
            output = model.generate(
                **inputs,
                max_new_tokens=ANSWER_TOKENS,
                min_new_tokens=ANSWER_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits = torch.stack(output.logits)[:, 0].float()
        answer = output.sequences[0, -ANSWER_TOKENS:]
        top = logits.topk(2).values
        features = runs[0][0][prompt == image_token].float().numpy()
        features.astype("<f4").tofile(directory / f"features-{number}.bin")
        entry = {
            "name": name,
            "text": text,
            "images": files,
            "features": f"features-{number}.bin",
            "prompt": prompt.tolist(),
            "image_token": image_token,
            "answer": answer.tolist(),
            "smallest_gap": float((top[:, 0] - top[:, 1]).min()),
            "first_logits": logits[0].tolist(),
        }
        if hasattr(getattr(model, "model", None), "get_rope_index"):
            positions, delta = model.model.get_rope_index(
                inputs["input_ids"], inputs.get("image_grid_thw"), attention_mask=inputs["attention_mask"]
            )
            entry |= {"positions": positions[:, 0].tolist(), "delta": int(delta[0])}
        recorded.append(entry)
        print(f"  {name}: {len(prompt)} tokens, answer {answer.tolist()}, gap {entry['smallest_gap']:.3f}")
    answers = [tuple(entry["answer"]) for entry in recorded if "answer" in entry]
    assert len(set(answers)) > len(answers) // 2, "the answers must depend on the images"
    return recorded


def export_remote(model, processor, directory):
    """Exports a model whose class is not part of transformers."""
    from optimum.exporters.openvino import export_from_model
    from optimum.exporters.openvino.convert import export_tokenizer

    tokenizer = processor.tokenizer
    task = "image-text-to-text"
    export_from_model(model, directory, task=task, ov_config=OVConfig(dtype="fp32"), preprocessors=[tokenizer])
    export_tokenizer(tokenizer, directory, task=task)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor.image_processor_config(), indent=1))


def export(model, processor, directory, original):
    """Exports a model of transformers, which is first saved in the directory `original`."""
    from optimum.exporters.openvino import main_export

    model.save_pretrained(original)
    processor.save_pretrained(original)
    ov_config = OVConfig(dtype="fp32")
    main_export(str(original), directory, task="image-text-to-text", ov_config=ov_config, convert_tokenizer=True)
    tiles = getattr(processor.image_processor, "dynamic_hd", None)
    if tiles is not None:
        # The audio processor of Phi-4 has overwritten the configuration of the image processor.
        path = directory / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dynamic_hd": tiles}, indent=1))


def compress_encoder(exported, compressed):
    """Copies a model, and compresses the weights of its image encoder to 8 bits."""
    shutil.copytree(exported, compressed, ignore=shutil.ignore_patterns("reference"))
    for path in [*exported.glob("openvino_vision_*.xml"), *exported.glob("openvino_resampler_*.xml")]:
        model = nncf.compress_weights(openvino.Core().read_model(path), mode=nncf.CompressWeightsMode.INT8_ASYM)
        openvino.save_model(model, compressed / path.name, compress_to_fp16=False)


def make(name, directory):
    # Some models initialize vectors at random, and draw_weights replaces only those that are biases, so set a seed.
    torch.manual_seed(0)
    model, processor, marker = FAMILIES[name]()
    model = model.eval()
    # No token ends an answer.
    for part in (model, getattr(model, "language_model", model), getattr(model, "llm", model)):
        if part.generation_config is not None:
            part.generation_config.eos_token_id = None
    original, exported, compressed = (directory / f"{name}{suffix}" for suffix in ("-torch", "", "-int8"))
    for path in (original, exported, compressed):
        shutil.rmtree(path, ignore_errors=True)
    if type(model).__module__ == remote_models.__name__:
        export_remote(model, processor, exported)
    else:
        export(model, processor, exported, original)
    compress_encoder(exported, compressed)
    reference = exported / "reference"
    reference.mkdir()
    recorded = cases(model, processor, marker, reference)
    (reference / "cases.json").write_text(json.dumps(recorded, indent=1))


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    for family in sys.argv[2:] or [name for name in FAMILIES if name != "phi4_multimodal"]:
        print(family)
        make(family, directory)
