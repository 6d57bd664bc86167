"""Models of families that are not part of transformers, and whose authors publish them as code beside the weights.

The modules here have the same structure and the attributes that optimum-intel reads, but contain no code of the authors.
"""

from __future__ import annotations

import torch
import transformers
from torch import nn

import remote


class VisionAttention(nn.Module):
    """Attention of all patches to all patches."""

    use_flash_attn = False

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        batch, length, width = states.shape
        qkv = self.qkv(states).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        output = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return self.proj(output.transpose(1, 2).reshape(batch, length, width))


class VisionLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = VisionAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.attn(self.norm1(states))
        return states + self.mlp(self.norm2(states))


class VisionEncoder(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(width, heads) for _ in range(layers))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = layer(states)
        return states


class InternVLVisionConfig(transformers.PretrainedConfig):
    model_type = "intern_vit_6b"

    def __init__(self, image_size=56, patch_size=14, hidden_size=64, heads=4, layers=3, **kwargs) -> None:
        super().__init__(**kwargs)
        self.image_size, self.patch_size, self.num_channels = image_size, patch_size, 3
        self.hidden_size, self.num_attention_heads, self.num_hidden_layers = hidden_size, heads, layers


class InternVLVision(nn.Module):
    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.patch_embedding = nn.Conv2d(3, width, patch, patch)
        self.class_embedding = nn.Parameter(torch.randn(1, 1, width))
        self.position_embedding = nn.Parameter(torch.randn(1, (config.image_size // patch) ** 2 + 1, width))
        self.encoder = VisionEncoder(width, config.num_attention_heads, config.num_hidden_layers)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        states = torch.cat([self.class_embedding.expand(patches.shape[0], -1, -1), patches], dim=1)
        return self.encoder(states + self.position_embedding)


class InternVLChatConfig(transformers.PretrainedConfig):
    model_type = "internvl_chat"
    sub_configs = {"vision_config": InternVLVisionConfig, "llm_config": transformers.Qwen2Config}

    def __init__(self, vision_config=None, llm_config=None, **kwargs) -> None:
        self.vision_config = vision_config or InternVLVisionConfig()
        self.llm_config = llm_config or transformers.Qwen2Config()
        super().__init__(**kwargs)
        self.force_image_size = self.vision_config.image_size
        self.downsample_ratio = 0.5
        self.dynamic_image_size, self.use_thumbnail = True, True
        self.min_dynamic_patch, self.max_dynamic_patch = 1, 12


class InternVLChatModel(transformers.PreTrainedModel):
    config_class = InternVLChatConfig

    def __init__(self, config: InternVLChatConfig) -> None:
        super().__init__(config)
        width = 4 * config.vision_config.hidden_size
        self.vision_model = InternVLVision(config.vision_config)
        self.language_model = transformers.Qwen2ForCausalLM(config.llm_config)
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, config.llm_config.hidden_size),
            nn.GELU(),
            nn.Linear(config.llm_config.hidden_size, config.llm_config.hidden_size),
        )

    def extract_feature(self, pixel_values: torch.Tensor) -> torch.Tensor:
        states = self.vision_model(pixel_values)[:, 1:]
        edge = int(states.shape[1] ** 0.5)
        # A token has a block of four patches: its upper row, then its lower one.
        blocks = states.reshape(states.shape[0], edge // 2, 2, edge // 2, 2 * states.shape[2])
        return self.mlp1(blocks.transpose(2, 3).reshape(states.shape[0], edge * edge // 4, -1))

    def forward(self, **inputs):
        return self.language_model(**inputs)

    def generate(self, input_ids, attention_mask, pixel_values=None, **options):
        embeddings = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            features = self.extract_feature(pixel_values)
            embeddings[input_ids == self.config.img_context_token_id] = features.flatten(0, 1)
        return self.language_model.generate(inputs_embeds=embeddings, attention_mask=attention_mask, **options)


class InternVLProcessor:
    """Expands prompts and prepares images."""

    image_token = "<IMG_CONTEXT>"

    def __init__(self, tokenizer, config: InternVLChatConfig) -> None:
        self.tokenizer, self.config = tokenizer, config

    def __call__(self, text: str, images, return_tensors: str) -> dict:
        tiles = [remote.internvl(image, self.config.force_image_size, self.config.max_dynamic_patch)
                 for image in images or []]
        tile_tokens = (self.config.force_image_size // self.config.vision_config.patch_size) ** 2 // 4
        for tile in tiles:
            text = text.replace("<image>", f"<img>{self.image_token * (len(tile) * tile_tokens)}</img>", 1)
        inputs = dict(self.tokenizer(text, return_tensors=return_tensors))
        if tiles:
            inputs["pixel_values"] = torch.cat([torch.from_numpy(tile) for tile in tiles])
        return inputs

    def image_processor_config(self) -> dict:
        return {"image_mean": remote.IMAGENET_MEAN, "image_std": remote.IMAGENET_STD,
                "size": self.config.force_image_size}
