//! The inputs of the vision models of an OpenVINO IR directory, with the names and shapes that these models expect.

use crate::raster::Size;

/// A dense tensor in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<T> {
    shape: Vec<usize>,
    values: Vec<T>,
}

impl<T> Tensor<T> {
    /// Creates a tensor from its values.
    ///
    /// # Panics
    ///
    /// Panics if the number of values is not the product of the dimensions.
    #[must_use]
    pub fn new(shape: Vec<usize>, values: Vec<T>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "the number of values matches the shape");
        Self { shape, values }
    }

    /// The dimensions, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// All values, the innermost dimension varying fastest.
    #[must_use]
    pub fn values(&self) -> &[T] {
        &self.values
    }
}

/// The inputs of the vision encoder for one image.
#[derive(Clone, Debug, PartialEq)]
pub enum EncoderInputs {
    /// Qwen2-VL, Qwen2.5-VL and Qwen3-VL take a sequence of patches.
    Qwen(QwenPatches),
    /// Gemma 3, LLaVA, LLaVA-NeXT and InternVL take only `pixel_values` [tiles, 3, height, width], and the encoder
    /// returns [tiles, T, hidden], with T rows for each tile.
    Tiles(Tensor<f32>),
    /// Idefics3, SmolVLM and Phi-4-multimodal take tiles whose patches can be masked.
    MaskedTiles(MaskedTiles),
    /// MiniCPM-V takes slices of different sizes, which are encoded one by one: without padding, the exported resampler
    /// needs no mask, and its results are exact. The features of the slices follow each other in the order of this
    /// list.
    Slices(Vec<ResamplerSlice>),
}

impl EncoderInputs {
    /// The memory that the values of the inputs take, in bytes. [`ImageLayout::input_bytes`] contains this number
    /// before the inputs are computed.
    ///
    /// [`ImageLayout::input_bytes`]: crate::ImageLayout::input_bytes
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        fn tensor<T>(tensor: &Tensor<T>) -> usize {
            size_of_val(tensor.values())
        }
        match self {
            Self::Qwen(QwenPatches { hidden_states, rotary_pos_emb, windows, position_embeddings }) => {
                let windows = windows.as_ref().map_or(0, |windows| {
                    size_of_val(&windows.window_index[..]) + size_of_val(&windows.window_patches[..])
                });
                let embeddings = position_embeddings.as_ref();
                let embeddings =
                    embeddings.map_or(0, |positions| tensor(&positions.indices) + tensor(&positions.weights));
                tensor(hidden_states) + tensor(rotary_pos_emb) + windows + embeddings
            }
            Self::Tiles(pixel_values) => tensor(pixel_values),
            Self::MaskedTiles(MaskedTiles { pixel_values, patch_attention_mask, patch_position_ids }) => {
                tensor(pixel_values) + tensor(patch_attention_mask) + tensor(patch_position_ids)
            }
            Self::Slices(slices) => slices
                .iter()
                .map(|slice| {
                    tensor(&slice.pixel_values)
                        + tensor(&slice.patch_attention_mask)
                        + tensor(&slice.position_ids)
                        + tensor(&slice.pos_embed)
                        + tensor(&slice.key_padding_mask)
                })
                .sum(),
        }
    }
}

/// The inputs of Qwen's encoder for one image. The patches are in block order: merge blocks row by row, and the patches of
/// a block row by row. One merged token stands for each block of `spatial_merge_size`² patches.
///
/// The attention mask of the model `vision_embeddings_merger` is not materialized: every patch of an image attends to
/// all patches of the same image, except in the layers of Qwen2.5-VL that attend within the windows.
#[derive(Clone, Debug, PartialEq)]
pub struct QwenPatches {
    /// The input `hidden_states` of `vision_embeddings`: [patches, channels · frames · patch size²], in the order
    /// channel, frame, row, column.
    pub hidden_states: Tensor<f32>,
    /// The angles of the rotary embedding, `rotary_pos_emb`: [patches, head size / 2], first the angles for the row and
    /// then those for the column of the patch.
    pub rotary_pos_emb: Tensor<f32>,
    /// The windows of Qwen2.5-VL.
    pub windows: Option<WindowLayout>,
    /// The interpolation of the learned position embeddings of Qwen3-VL.
    pub position_embeddings: Option<PositionInterpolation>,
}

/// The attention windows of Qwen2.5-VL for one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowLayout {
    /// The input `window_index`: the indices of the merged tokens, window by window. For several images in one run, add
    /// to each index the number of merged tokens of all previous images.
    pub window_index: Vec<i64>,
    /// The number of patches of each window, in the order of `window_index`. `window_attention_mask` is block-diagonal
    /// with blocks of these sizes.
    pub window_patches: Vec<usize>,
}

/// The bilinear interpolation of the position embeddings of Qwen3-VL, for patches in block order. The position embedding
/// of a patch is the sum over the corners of weight · embedding, and is added to the output of `vision_embeddings`.
#[derive(Clone, Debug, PartialEq)]
pub struct PositionInterpolation {
    /// The input of `vision_embeddings_pos`: [4, patches], the indices of the embeddings of the four corners.
    pub indices: Tensor<i64>,
    /// The weights of the corners: [4, patches].
    pub weights: Tensor<f32>,
}

/// Tiles of equal size with a mask of their patches.
#[derive(Clone, Debug, PartialEq)]
pub struct MaskedTiles {
    /// The input `pixel_values`: [tiles, 3, height, width].
    pub pixel_values: Tensor<f32>,
    /// The input `patch_attention_mask`: [tiles, rows, columns], true for patches that belong to the image.
    pub patch_attention_mask: Tensor<bool>,
    /// The input `patch_position_ids`: [tiles, rows · columns].
    pub patch_position_ids: Tensor<i64>,
}

impl MaskedTiles {
    /// The memory that the inputs for square tiles take, in bytes. `edge_patches` is the number of patches along an
    /// edge of a tile.
    pub(crate) const fn bytes(num_tiles: u32, tile: Size, edge_patches: u32) -> usize {
        let patches = num_tiles as usize * (edge_patches as usize).pow(2);
        pixel_bytes(num_tiles, tile) + bytes_of::<bool>(patches) + bytes_of::<i64>(patches)
    }
}

/// The inputs of MiniCPM-V's encoder and resampler for one slice of N patches.
#[derive(Clone, Debug, PartialEq)]
pub struct ResamplerSlice {
    /// The input `pixel_values`: [1, 3, patch size, patch size · N], the patches side by side.
    pub pixel_values: Tensor<f32>,
    /// The input `patch_attention_mask`: [1, 1, N], all of whose elements are true.
    pub patch_attention_mask: Tensor<bool>,
    /// The input `position_ids`: [1, N].
    pub position_ids: Tensor<i64>,
    /// The input `pos_embed` of the resampler: [N, 1, hidden].
    pub pos_embed: Tensor<f32>,
    /// The input `key_padding_mask` of the resampler: [1, N], all of whose elements are 0, because nothing is padded.
    pub key_padding_mask: Tensor<f32>,
}

/// Returns the memory that `count` values of the type `T` take, in bytes.
pub(crate) const fn bytes_of<T>(count: usize) -> usize {
    count * size_of::<T>()
}

/// Returns the memory that `pixel_values` [tiles, 3, height, width] takes, in bytes.
pub(crate) const fn pixel_bytes(num_tiles: u32, tile: Size) -> usize {
    bytes_of::<f32>(num_tiles as usize * 3 * tile.pixels() as usize)
}
