"""Reference values for each family: the output of its processor in transformers for pictures of awkward sizes.

InternVL and MiniCPM-V are not part of transformers; `remote.py` implements their published processing.
"""

from __future__ import annotations

import hashlib
import re
import types
from collections.abc import Callable, Iterator

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models
from transformers.models.gemma3 import image_processing_gemma3, processing_gemma3
from transformers.models.idefics3 import image_processing_idefics3, modeling_idefics3, processing_idefics3
from transformers.models.llava import processing_llava
from transformers.models.llava_next import (
    image_processing_llava_next, modeling_llava_next, processing_llava_next,
)
from transformers.models.phi4_multimodal import (
    image_processing_phi4_multimodal_fast, modeling_phi4_multimodal, processing_phi4_multimodal,
)
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import image_processing_qwen2_vl, modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.smolvlm import image_processing_smolvlm, processing_smolvlm

import remote
from pictures import draw

SIZES = [
    (1, 1), (3, 200), (200, 3), (3, 2000), (300, 200), (182, 126), (126, 182), (4000, 28), (640, 480), (801, 333),
    (4000, 3000),
]
SAMPLES = 48


class RecordingTokenizer(transformers.PreTrainedTokenizerFast):
    """Records the text that a processor would tokenize."""

    def __init__(self, special: dict[str, str]) -> None:
        super().__init__(tokenizer_object=Tokenizer(models.BPE()), unk_token="<unk>")
        self.add_special_tokens({"additional_special_tokens": sorted(set(special.values()))})
        for name, token in special.items():
            setattr(self, name, token)
            setattr(self, f"{name}_id", self.convert_tokens_to_ids(token))
        self.texts: list[str] = []

    def __call__(self, text, *args, **kwargs):
        self.texts = [text] if isinstance(text, str) else list(text)
        return {"input_ids": [[0] for _ in self.texts], "attention_mask": [[1] for _ in self.texts]}


# Disable this check, because the processors would accept only the tokenizer classes of their models.
transformers.ProcessorMixin.check_argument_for_proper_class = lambda self, name, value: type(value)
# The recorded text is not tokenized, so there are no tokens to count.
transformers.ProcessorMixin._check_special_mm_tokens = lambda self, text, text_inputs, modalities: None
# Without this option, a picture with three rows is mistaken for one with three channels.
LAST = {"input_data_format": "channels_last"}


def compact(text: str, token: str) -> str:
    """Replaces runs of the image token with their length."""
    return re.sub(f"(?:{re.escape(token)})+", lambda run: f"[{len(run[0]) // len(token)}]", text)


def integers(array) -> dict:
    array = np.ascontiguousarray(np.asarray(array).astype("<i8"))
    return {"shape": list(array.shape), "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            "first": array.reshape(-1)[:8].tolist()}


def floats(array) -> dict:
    """Returns the shape, the sum of magnitudes, and samples at the indices that the Rust tests also use."""
    array = np.asarray(array).astype(np.float32)
    flat = array.reshape(-1)
    indices = np.arange(SAMPLES, dtype=np.int64) * 7919 % max(flat.size, 1)
    return {"shape": list(array.shape), "sum": float(np.abs(flat.astype(np.float64)).sum()),
            "samples": [round(float(value), 7) for value in flat[indices]]}


def pixels(array, plane: int, mean: list[float], std: list[float]) -> dict:
    """Returns the result of `floats`, and a digest of the 8-bit pixels. Value i belongs to color i // plane % 3."""
    array = np.asarray(array).astype(np.float32)
    flat = array.reshape(-1).astype(np.float64)
    color = np.arange(flat.size) // plane % 3
    levels = np.rint((flat * np.asarray(std)[color] + np.asarray(mean)[color]) * 255)
    assert levels.min() >= 0 and levels.max() <= 255
    return floats(array) | {"plane": plane, "sha256": hashlib.sha256(levels.astype(np.uint8).tobytes()).hexdigest()}


def each(sizes, of: Callable[[Image.Image], dict]) -> list[dict]:
    values = []
    for size in sizes:
        value = {"width": size[0], "height": size[1]}
        try:
            value |= of(draw(*size))
        except ValueError:
            value["error"] = True
        values.append(value)
    return values


def reference(model_type: str, config: dict, processor, preprocessor_config: dict, values: list[dict]) -> dict:
    config = {"model_type": model_type} | config
    return {"transformers": transformers.__version__, "config": config, "preprocessor_config": preprocessor_config,
            "mean": list(processor.image_mean), "std": list(processor.image_std), "images": values}


def qwen(model_type: str) -> dict:
    patch = 16 if model_type == "qwen3_vl" else 14
    hidden, heads, grid = 64, 4, 256
    # The processor that uses Pillow ignores the field `size` and uses `min_pixels` and `max_pixels`.
    options = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2,
               "min_pixels": 4 * (2 * patch) ** 2, "max_pixels": 300 * (2 * patch) ** 2}
    if model_type == "qwen3_vl":
        options |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    vision = {"num_heads": heads, "spatial_merge_size": 2, "patch_size": patch}
    vision["embed_dim" if model_type == "qwen2_vl" else "hidden_size"] = hidden
    if model_type == "qwen2_5_vl":
        vision["window_size"] = 112
    if model_type == "qwen3_vl":
        vision["num_position_embeddings"] = grid
    processor = image_processing_qwen2_vl.Qwen2VLImageProcessor(**options)
    special = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
               "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    tokenizer = RecordingTokenizer(special)
    text_processor = transformers.Qwen2VLProcessor(processor, tokenizer, _video_processor())

    def of(picture: Image.Image) -> dict:
        output = processor(images=[picture], return_tensors="np", **LAST)
        text_processor(text=["a<|vision_start|><|image_pad|><|vision_end|>b"], images=[picture], **LAST)
        thw = torch.tensor(output["image_grid_thw"])
        num_tokens = int(thw[0].prod()) // 4
        value = {
            "num_tokens": num_tokens, "text": compact(tokenizer.texts[0], "<|image_pad|>"),
            "grid": [int(thw[0, 1]) // 2, int(thw[0, 2]) // 2],
            "hidden_states": pixels(output["pixel_values"], 2 * patch * patch, processor.image_mean,
                                    processor.image_std),
            "rotary_pos_emb": floats(rotary(thw, hidden // heads)),
        }
        if model_type == "qwen2_5_vl":
            self = types.SimpleNamespace(window_size=112, spatial_merge_size=2, patch_size=patch, spatial_merge_unit=4)
            index, cumulative = modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel.get_window_index(self, thw)
            cumulative = torch.unique_consecutive(torch.tensor(cumulative))
            value |= {"window_index": integers(index), "window_patches": integers(cumulative.diff())}
        if model_type == "qwen3_vl":
            value |= interpolation(thw, grid)
        value["positions"] = rope_index(model_type, thw, num_tokens)
        return value

    values = each(SIZES, of)
    return reference(model_type, {"vision_config": vision}, processor, options, values)


def _video_processor():
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    return Qwen2VLVideoProcessor()


def rotary(thw: torch.Tensor, head: int) -> torch.Tensor:
    self = types.SimpleNamespace(spatial_merge_size=2, rotary_pos_emb=modeling_qwen2_vl.VisionRotaryEmbedding(head // 2))
    return modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel.rot_pos_emb(self, thw)


def interpolation(thw: torch.Tensor, grid: int) -> dict:
    """For each patch in block order, sums up weight * index over its four position embeddings. Returns samples of these
    sums."""
    calls = []

    class Embedding:
        weight = torch.zeros(grid, 1)

        def __call__(self, indices):
            calls.append(indices)
            # transformers then adds up weight * (1, index) over the four corners.
            return torch.stack([torch.ones_like(indices, dtype=torch.float32), indices.float()], dim=-1)

    self = types.SimpleNamespace(num_grid_per_side=int(grid**0.5), pos_embed=Embedding(),
                                 config=types.SimpleNamespace(spatial_merge_size=2))
    sums = modeling_qwen3_vl.Qwen3VLVisionModel.fast_pos_embed_interpolate(self, thw)
    # The second component is the sum of weight * index, which determines the coordinates of a patch.
    return {"position_sums": floats(sums[:, 1])}


def rope_index(model_type: str, thw: torch.Tensor, num_tokens: int) -> dict:
    """Returns the positions of a prompt that consists of text, the image twice, and text."""
    image, video, start = 7, 8, 9
    config = types.SimpleNamespace(
        image_token_id=image, video_token_id=video, vision_start_token_id=start,
        vision_config=types.SimpleNamespace(spatial_merge_size=2, tokens_per_second=2),
    )
    span = [start] + [image] * num_tokens + [10]
    tokens = torch.tensor([[1, 2, 3] + span + span + [4, 5]])
    model = {"qwen2_vl": modeling_qwen2_vl.Qwen2VLModel, "qwen2_5_vl": modeling_qwen2_5_vl.Qwen2_5_VLModel,
             "qwen3_vl": modeling_qwen3_vl.Qwen3VLModel}[model_type]
    positions, delta = model.get_rope_index(types.SimpleNamespace(config=config), tokens, thw.repeat(2, 1), None,
                                            attention_mask=torch.ones_like(tokens))
    return {"ids": integers(positions[:, 0]), "delta": int(delta.item())}


def tiles(value: np.ndarray, processor) -> dict:
    return pixels(value, value.shape[-1] * value.shape[-2], processor.image_mean, processor.image_std)


def gemma3() -> dict:
    options = {"size": {"height": 112, "width": 112}}
    processor = image_processing_gemma3.Gemma3ImageProcessor(**options)
    special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = RecordingTokenizer(special)
    text_processor = processing_gemma3.Gemma3Processor(processor, tokenizer, image_seq_length=16)

    def of(picture: Image.Image) -> dict:
        values = processor(images=[[picture]], return_tensors="np", **LAST)["pixel_values"]
        text_processor(text=["a<start_of_image>b"], images=[[picture]], **LAST)
        text = compact(tokenizer.texts[0], "<image_soft_token>")
        return {"num_tokens": 16, "text": text, "pixel_values": tiles(values, processor)}

    return reference("gemma3", {"mm_tokens_per_image": 16}, processor, options, each(SIZES, of))


def llava() -> dict:
    options = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    processor = transformers.CLIPImageProcessor(**options)
    tokenizer = RecordingTokenizer({"image_token": "<image>"})
    text_processor = processing_llava.LlavaProcessor(
        processor, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )

    def of(picture: Image.Image) -> dict:
        values = processor(images=[picture], return_tensors="np", **LAST)["pixel_values"]
        text_processor(text=["a<image>b"], images=[picture], **LAST)
        return {"num_tokens": 16, "text": compact(tokenizer.texts[0], "<image>"),
                "pixel_values": tiles(values, processor)}

    config = {"vision_feature_select_strategy": "default",
              "vision_config": {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 56}}
    return reference("llava", config, processor, options, each(SIZES, of))


def llava_next() -> dict:
    pinpoints = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
    options = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56},
               "image_grid_pinpoints": pinpoints}
    processor = image_processing_llava_next.LlavaNextImageProcessor(**options)
    tokenizer = RecordingTokenizer({"image_token": "<image>"})
    text_processor = processing_llava_next.LlavaNextProcessor(
        processor, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )
    self = types.SimpleNamespace(config=types.SimpleNamespace(
        image_grid_pinpoints=pinpoints, vision_config=types.SimpleNamespace(image_size=56, patch_size=14)))

    def of(picture: Image.Image) -> dict:
        values = processor(images=[picture], return_tensors="np", **LAST)["pixel_values"][0]
        text_processor(text=["a<image>b"], images=[picture], **LAST)
        features = torch.arange(values.shape[0] * 16, dtype=torch.float32).reshape(values.shape[0], 16, 1)
        packed, _ = modeling_llava_next.LlavaNextModel.pack_image_features(
            self, [features], torch.tensor([[picture.height, picture.width]]), "default",
            image_newline=torch.tensor([-1.0]))
        rows = packed[0].reshape(-1)
        return {"num_tokens": rows.numel(), "text": compact(tokenizer.texts[0], "<image>"),
                "pixel_values": tiles(values, processor), "feature_rows": integers(rows)}

    # 200 x 5 replaces 200 x 3, which the processor would resize to three rows and then mistake for a picture with three
    # channels.
    sizes = [(200, 5) if size == (200, 3) else size for size in SIZES]
    config = {"vision_feature_select_strategy": "default", "image_grid_pinpoints": pinpoints,
              "vision_config": {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 56}}
    return reference("llava_next", config, processor, options, each(sizes, of))


class PositionNumbers(torch.nn.Module):
    """Stands in for a table of position embeddings, and returns the indices that are looked up."""

    weight = torch.zeros(1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.float()[..., None]


def patch_positions(embeddings, image: int, patch: int, mask: np.ndarray) -> np.ndarray:
    """Returns the position IDs that the vision embeddings of a model look up for a mask [tiles, rows, columns]."""
    config = types.SimpleNamespace(hidden_size=1, image_size=image, patch_size=patch, num_channels=3)
    module = embeddings(config)
    torch.nn.init.zeros_(module.patch_embedding.weight)
    torch.nn.init.zeros_(module.patch_embedding.bias)
    module.position_embedding = PositionNumbers()
    mask = torch.tensor(mask, dtype=torch.bool)
    values = torch.zeros(mask.shape[0], 3, mask.shape[1] * patch, mask.shape[2] * patch)
    return module(values, mask).squeeze(-1).long().detach().numpy()


def idefics3(model_type: str) -> dict:
    edge, patch = (56, 14) if model_type == "idefics3" else (64, 16)
    options = {"size": {"longest_edge": 2 * edge}, "max_image_size": {"longest_edge": edge}}
    special = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>",
               "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    tokenizer = RecordingTokenizer(special)
    if model_type == "idefics3":
        processor = image_processing_idefics3.Idefics3ImageProcessor(**options)
        text_processor = processing_idefics3.Idefics3Processor(processor, tokenizer, image_seq_len=4)
    else:
        from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

        processor = image_processing_smolvlm.SmolVLMImageProcessor(**options)
        text_processor = processing_smolvlm.SmolVLMProcessor(processor, tokenizer, SmolVLMVideoProcessor(),
                                                             image_seq_len=4)

    def of(picture: Image.Image) -> dict:
        values = processor(images=[[picture]], return_tensors="np", **LAST)["pixel_values"][0]
        text_processor(text=["a<image>b"], images=[[picture]], **LAST)
        mask = np.ones((values.shape[0], edge // patch, edge // patch))
        ids = patch_positions(modeling_idefics3.Idefics3VisionEmbeddings, edge, patch, mask)
        return {"num_tokens": 4 * values.shape[0], "text": compact(tokenizer.texts[0], "<image>"),
                "pixel_values": tiles(values, processor), "patch_position_ids": integers(ids)}

    config = {"scale_factor": 2, "vision_config": {"image_size": edge, "patch_size": patch}}
    return reference(model_type, config, processor, options, each(SIZES, of))


def phi4() -> dict:
    options = {"size": {"height": 448, "width": 448}, "patch_size": 14, "dynamic_hd": 36}
    processor = image_processing_phi4_multimodal_fast.Phi4MultimodalImageProcessorFast(**options)

    def of(picture: Image.Image) -> dict:
        output = processor([picture], return_tensors="pt")
        values, mask = output["image_pixel_values"][0].numpy(), output["image_attention_mask"][0].numpy()
        ids = patch_positions(modeling_phi4_multimodal.Phi4MultimodalVisionEmbeddings, 448, 14, mask)
        num_tokens = int(output["num_img_tokens"][0])
        return {"num_tokens": num_tokens, "text": f"a[{num_tokens}]b",
                "global_view": floats(values[:1]), "tiles": tiles(values[1:], processor),
                "patch_attention_mask": integers(mask), "patch_position_ids": integers(ids)}

    return reference("phi4_multimodal", {"vision_config": {"image_size": 448}}, processor, options,
                     each([*SIZES, (3000, 2000)], of))


def internvl() -> dict:
    def of(picture: Image.Image) -> dict:
        values = remote.internvl(picture, size=56, tiles_max=12)
        num_tokens = values.shape[0] * 4
        return {"num_tokens": num_tokens, "text": f"a<img>[{num_tokens}]</img>b",
                "pixel_values": pixels(values, 56 * 56, remote.IMAGENET_MEAN, remote.IMAGENET_STD)}

    config = {"force_image_size": 56, "downsample_ratio": 0.5, "use_thumbnail": True, "max_dynamic_patch": 12,
              "vision_config": {"patch_size": 14}}
    processor = types.SimpleNamespace(image_mean=remote.IMAGENET_MEAN, image_std=remote.IMAGENET_STD)
    options = {"image_mean": remote.IMAGENET_MEAN, "image_std": remote.IMAGENET_STD}
    return reference("internvl_chat", config, processor, options, each(SIZES, of))


def minicpmv() -> dict:
    def of(picture: Image.Image) -> dict:
        values = remote.minicpmv(picture, scale=112, slices_max=9)
        text = compact(remote.minicpmv_text(picture.size, scale=112, slices_max=9, queries=8), "<unk>")
        slices = []
        for slice_pixels, (rows, columns) in values:
            slices.append({
                "pixel_values": pixels(slice_pixels[None], slice_pixels.shape[1] * slice_pixels.shape[2], [0.5] * 3,
                                       [0.5] * 3),
                "position_ids": integers(remote.position_ids(rows, columns, 70)[None]),
                "pos_embed": floats(remote.pos_embed(64, rows, columns).reshape(-1, 1, 64)),
            })
        return {"num_tokens": 8 * len(values), "text": f"a{text}b", "slices": slices}

    config = {"hidden_size": 64, "query_num": 8, "vision_config": {"image_size": 980, "patch_size": 14}}
    options = {"max_slice_nums": 9, "scale_resolution": 112, "patch_size": 14, "use_image_id": True,
               "norm_mean": [0.5] * 3, "norm_std": [0.5] * 3}
    processor = types.SimpleNamespace(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return reference("minicpmv", config, processor, options, each(SIZES, of))


def references() -> Iterator[tuple[str, dict]]:
    for model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        yield model_type, qwen(model_type)
    yield "gemma3", gemma3()
    yield "llava", llava()
    yield "llava_next", llava_next()
    yield "internvl_chat", internvl()
    yield "idefics3", idefics3("idefics3")
    yield "smolvlm", idefics3("smolvlm")
    yield "minicpmv", minicpmv()
    yield "phi4_multimodal", phi4()
