"""Models of families that are not part of transformers. Their authors publish the code next to the weights.

The modules here have the structure of the published models and the attributes that optimum-intel reads, but contain no
code of the authors.
"""

from __future__ import annotations

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import remote


class VisionAttention(nn.Module):
    """Attention in which each patch attends to all patches."""

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
        # A token covers a block of 2 x 2 patches: the upper row, then the lower row.
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


class MiniCPMVConfig(transformers.Qwen2Config):
    model_type = "minicpmv"
    sub_configs = {"vision_config": transformers.SiglipVisionConfig}

    def __init__(self, vision_config=None, **kwargs) -> None:
        self.vision_config = vision_config or transformers.SiglipVisionConfig(vision_use_head=False)
        super().__init__(**kwargs)
        self.query_num, self.max_slice_nums, self.scale_resolution, self.patch_size = 8, 9, 112, 14
        self.slice_mode, self.use_image_id, self.version = True, True, 2.6


class SliceAttention(nn.Module):
    """Attention in which each patch of a slice attends to all patches of the slice."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = width, heads, width // heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden_states: torch.Tensor, attention_mask=None):
        def heads(projection: nn.Linear) -> torch.Tensor:
            return projection(hidden_states).unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)

        values = heads(self.q_proj), heads(self.k_proj), heads(self.v_proj)
        output = nn.functional.scaled_dot_product_attention(*values, attention_mask)
        return self.out_proj(output.transpose(1, 2).flatten(2)), None


class SliceLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = SliceAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, states: torch.Tensor, attention_mask) -> torch.Tensor:
        states = states + self.self_attn(self.layer_norm1(states), attention_mask)[0]
        return states + self.mlp(self.layer_norm2(states))


class SliceEncoder(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SliceLayer(width, heads) for _ in range(layers))

    def forward(self, inputs_embeds: torch.Tensor, attention_mask=None, **_) -> BaseModelOutput:
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds, attention_mask)
        return BaseModelOutput(last_hidden_state=inputs_embeds)


class SliceEmbeddings(nn.Module):
    def __init__(self, config: transformers.SiglipVisionConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.position_embedding = nn.Embedding((config.image_size // config.patch_size) ** 2, config.hidden_size)


class MiniCPMVVision(nn.Module):
    def __init__(self, config: transformers.SiglipVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = SliceEmbeddings(config)
        self.encoder = SliceEncoder(config.hidden_size, config.num_attention_heads, config.num_hidden_layers)
        self.post_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, pixel_values: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        states = self.embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        states = self.encoder(inputs_embeds=states + self.embeddings.position_embedding(position_ids))
        return self.post_layernorm(states.last_hidden_state)


class MiniCPMVResampler(nn.Module):
    """Resamples the patches of a slice to a fixed number of features."""

    def __init__(self, queries: int, width: int, heads: int, vision_width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, width))
        self.kv_proj = nn.Linear(vision_width, width, bias=False)
        self.attn = nn.MultiheadAttention(width, heads)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.randn(width, width))

    def forward(self, patches: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        values = self.ln_kv(self.kv_proj(patches)).permute(1, 0, 2)
        queries = self.ln_q(self.query)[:, None]
        output = self.attn(queries, values + positions, values)[0]
        return self.ln_post(output.permute(1, 0, 2)) @ self.proj


class MiniCPMV(transformers.PreTrainedModel):
    config_class = MiniCPMVConfig

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__(config)
        self.llm = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config.text_options))
        self.vpm = MiniCPMVVision(config.vision_config)
        self.resampler = MiniCPMVResampler(config.query_num, config.hidden_size, 2, config.vision_config.hidden_size)

    def get_input_embeddings(self):
        return self.llm.get_input_embeddings()

    def forward(self, **inputs):
        return self.llm(**inputs)

    def encode_slice(self, pixel_values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Encodes a slice alone, so that nothing is padded or masked."""
        side = self.config.vision_config.image_size // self.config.vision_config.patch_size
        ids = torch.from_numpy(remote.position_ids(rows, columns, side))
        positions = torch.from_numpy(remote.pos_embed(self.config.hidden_size, rows, columns)).flatten(0, 1)[:, None]
        return self.resampler(self.vpm(pixel_values, ids[None]), positions)[0]

    def generate(self, input_ids, attention_mask, slices=(), **options):
        embeddings = self.get_input_embeddings()(input_ids)
        if slices:
            features = torch.cat([self.encode_slice(*slice) for slice in slices])
            embeddings[input_ids == self.config.image_token_id] = features
        return self.llm.generate(inputs_embeds=embeddings, attention_mask=attention_mask, **options)


class MiniCPMVProcessor:
    """Expands prompts and prepares images."""

    image_token = "<unk>"

    def __init__(self, tokenizer, config: MiniCPMVConfig) -> None:
        self.tokenizer, self.config = tokenizer, config

    def __call__(self, text: str, images, return_tensors: str) -> dict:
        scale, slices_max = self.config.scale_resolution, self.config.max_slice_nums
        slices = []
        for number, image in enumerate(images or []):
            expanded = remote.minicpmv_text(image.size, scale, slices_max, self.config.query_num)
            expanded = expanded.replace("<image_id>0<", f"<image_id>{number}<")
            text = text.replace("(<image>./</image>)", expanded, 1)
            for values, (rows, columns) in remote.minicpmv(image, scale, slices_max):
                slices.append((torch.from_numpy(values)[None], rows, columns))
        return dict(self.tokenizer(text, return_tensors=return_tensors)) | {"slices": slices}

    def image_processor_config(self) -> dict:
        return {"max_slice_nums": self.config.max_slice_nums, "scale_resolution": self.config.scale_resolution,
                "patch_size": self.config.patch_size, "use_image_id": True, "slice_mode": True,
                "norm_mean": [0.5] * 3, "norm_std": [0.5] * 3}
