//! The encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one model embeds patches, and one merges them into features. In
//! Qwen3-VL, a third model returns position embeddings.

use server_images::{PositionInterpolation, QwenPatches, WindowLayout};

use crate::Error;
use crate::compiled_graph::CompiledGraph;
use crate::runtime::{Element, Tensor};

/// The models of a Qwen encoder.
pub(super) struct QwenModels {
    pub(super) patches: CompiledGraph,
    /// The model that returns the learned position embeddings of Qwen3-VL.
    pub(super) positions: Option<CompiledGraph>,
    pub(super) merger: CompiledGraph,
    /// Number of vectors that follow each feature in its row (DeepStack), one for each of the first layers of
    /// Qwen3-VL's language model.
    pub(super) deepstack_layers: usize,
    pub(super) attention: MergerAttention,
}

/// How the merger computes the attention among the patches of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MergerAttention {
    /// In layers with window attention, the graph computes each window separately. All other layers compute the
    /// attention without a mask.
    Windows,
    /// The graph reads masks with an element for each pair of patches, because its structure is unknown.
    Masks,
}

impl QwenModels {
    /// Returns the number of values in a row of the output, or `None` if it is not static.
    pub(super) fn width(&self) -> Result<Option<usize>, Error> {
        Ok(self.merger.row_values()?.map(|width| width * (1 + self.deepstack_layers)))
    }

    /// Returns the rows of the output for an image. With DeepStack, a row contains the feature, followed by one vector
    /// for each of the `deepstack_layers` layers.
    pub(super) fn encode(&mut self, input: &QwenPatches) -> Result<Vec<f32>, Error> {
        let Self { patches, positions, merger, deepstack_layers, attention } = self;
        let count = input.hidden_states.shape()[0];
        patches.set_values("hidden_states", input.hidden_states.shape(), input.hidden_states.values())?;
        patches.request.infer()?;
        // The merger reads this output without a copy.
        let mut embedded = patches.request.output_at(0)?;
        match (positions, &input.position_embeddings) {
            (None, None) => {}
            (Some(positions), Some(interpolation)) => {
                add_positions(positions, interpolation, embedded.values_mut::<f32>()?)?;
            }
            _ => {
                return Err(Error::runtime(
                    "run the image encoder",
                    "the image was prepared for another version of Qwen",
                ));
            }
        }
        merger.request.set("hidden_states", &embedded)?;
        merger.set_values("rotary_pos_emb", input.rotary_pos_emb.shape(), input.rotary_pos_emb.values())?;
        if *attention == MergerAttention::Masks {
            // All patches of an image attend to each other.
            let mut mask = Tensor::new(f32::TYPE, &[1, count as i64, count as i64])?;
            mask.values_mut::<f32>()?.fill(0.0);
            merger.request.set("attention_mask", &mask)?;
        }
        if let Some(windows) = &input.windows {
            merger.set_values("window_index", &[windows.window_index.len()], &windows.window_index)?;
            match attention {
                MergerAttention::Windows => set_window_slots(merger, windows, count)?,
                MergerAttention::Masks => set_window_mask(merger, windows, count)?,
            }
        }
        merger.request.infer()?;
        let features = merger.request.output_at(0)?;
        if *deepstack_layers == 0 {
            return Ok(features.values::<f32>()?.to_vec());
        }
        let deepstack = merger.request.output_at(1)?;
        let width = merger.row_values()?.unwrap_or(1);
        interleave(features.values::<f32>()?, deepstack.values::<f32>()?, width, *deepstack_layers)
            .ok_or_else(|| {
                Error::runtime(
                    "run the image encoder",
                    "the merger returned a wrong number of deepstack layers",
                )
            })
    }
}

/// Adds the interpolated position embeddings to the embeddings of the patches.
fn add_positions(
    positions: &mut CompiledGraph,
    interpolation: &PositionInterpolation,
    embedded: &mut [f32],
) -> Result<(), Error> {
    let PositionInterpolation { indices, weights } = interpolation;
    positions.set_values("input", indices.shape(), indices.values())?;
    positions.request.infer()?;
    let corners = positions.request.output_at(0)?;
    let corners = corners.values::<f32>()?;
    let count = weights.values().len() / 4;
    let width = embedded.len() / count.max(1);
    if corners.len() != 4 * embedded.len() || width == 0 {
        let message = "the size of the position embeddings does not match the patches";
        return Err(Error::runtime("run the image encoder", message));
    }
    for (patch, row) in embedded.chunks_exact_mut(width).enumerate() {
        for corner in 0..4 {
            let index = corner * count + patch;
            let weight = weights.values()[index];
            for (value, position) in row.iter_mut().zip(&corners[index * width..][..width]) {
                *value += weight * position;
            }
        }
    }
    Ok(())
}

/// Appends the corresponding row of each layer of `deepstack` [layers, rows, width] to each row of `features`. Returns
/// `None` if the sizes do not match.
fn interleave(features: &[f32], deepstack: &[f32], width: usize, layers: usize) -> Option<Vec<f32>> {
    if deepstack.len() != features.len() * layers || !features.len().is_multiple_of(width) {
        return None;
    }
    let mut rows = Vec::with_capacity(features.len() + deepstack.len());
    for start in (0..features.len()).step_by(width) {
        rows.extend_from_slice(&features[start..start + width]);
        for layer in 0..layers {
            rows.extend_from_slice(&deepstack[layer * features.len() + start..][..width]);
        }
    }
    Some(rows)
}

fn set_window_slots(merger: &mut CompiledGraph, windows: &WindowLayout, count: usize) -> Result<(), Error> {
    let WindowSlots { slots, mask, patches, num_windows, window_slots } =
        WindowSlots::new(windows, count).ok_or_else(incomplete_windows)?;
    merger.set_values("window_slots", &[num_windows, window_slots], &slots)?;
    merger.set_values("window_mask", &[num_windows, 1, 1, window_slots], &mask)?;
    merger.set_values("window_patches", &[count], &patches)
}

fn set_window_mask(merger: &mut CompiledGraph, windows: &WindowLayout, count: usize) -> Result<(), Error> {
    let mut mask = Tensor::new(f32::TYPE, &[1, count as i64, count as i64])?;
    if !write_window_mask(windows, count, mask.values_mut::<f32>()?) {
        return Err(incomplete_windows());
    }
    merger.request.set("window_attention_mask", &mask)
}

fn incomplete_windows() -> Error {
    Error::runtime("run the image encoder", "the windows of the image do not cover its patches")
}

/// Windows with the same number of slots. If a window has fewer patches than slots, its remaining slots are masked.
#[derive(Debug, PartialEq)]
struct WindowSlots {
    num_windows: usize,
    /// Number of slots of each window.
    window_slots: usize,
    /// The patch of each slot of each window. Masked slots have the first patch of their window.
    slots: Vec<i64>,
    /// 0 for a slot with a patch of its own, and -∞ for a masked slot.
    mask: Vec<f32>,
    /// The slot of each patch, counted over all windows.
    patches: Vec<i64>,
}

impl WindowSlots {
    /// Assigns the patches to slots. Returns `None` if the windows do not have `count` patches in total, or if a window
    /// has none.
    fn new(windows: &WindowLayout, count: usize) -> Option<Self> {
        let sizes = &windows.window_patches;
        let (num_windows, window_slots) = (sizes.len(), *sizes.iter().max()?);
        if sizes.iter().sum::<usize>() != count || sizes.contains(&0) {
            return None;
        }
        let total = num_windows.checked_mul(window_slots)?;
        let (mut slots, mut mask) = (Vec::with_capacity(total), Vec::with_capacity(total));
        let mut patches = Vec::with_capacity(count);
        let mut first = 0;
        for (window, &size) in sizes.iter().enumerate() {
            for slot in 0..window_slots {
                let is_patch = slot < size;
                slots.push((first + if is_patch { slot } else { 0 }) as i64);
                mask.push(if is_patch { 0.0 } else { EXCLUDED });
            }
            patches.extend((0..size).map(|slot| (window * window_slots + slot) as i64));
            first += size;
        }
        Some(Self { num_windows, window_slots, slots, mask, patches })
    }
}

/// The value that excludes a patch from the attention.
const EXCLUDED: f32 = f32::NEG_INFINITY;

/// Writes the mask with which patches attend only to patches of their own window: `[patches, patches]`, 0 within a
/// window and -∞ elsewhere. Returns false if the windows do not have `patches` patches in total, or if `mask` has
/// another size.
fn write_window_mask(windows: &WindowLayout, patches: usize, mask: &mut [f32]) -> bool {
    let is_complete = windows.window_patches.iter().sum::<usize>() == patches;
    if !is_complete || Some(mask.len()) != patches.checked_mul(patches) {
        return false;
    }
    mask.fill(EXCLUDED);
    let mut start = 0;
    for &count in &windows.window_patches {
        for row in start..start + count {
            mask[row * patches + start..][..count].fill(0.0);
        }
        start += count;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_followed_by_its_rows_for_the_layers() {
        let rows = interleave(&[1.0, 2.0], &[3.0, 4.0, 5.0, 6.0], 1, 2);
        assert_eq!(rows, Some(vec![1.0, 3.0, 5.0, 2.0, 4.0, 6.0]));
        assert_eq!(interleave(&[1.0, 2.0], &[3.0], 1, 1), None);
    }

    #[test]
    fn small_windows_have_masked_slots() {
        let windows = WindowLayout { window_index: vec![0, 1], window_patches: vec![2, 1] };
        let slots = WindowSlots::new(&windows, 3).unwrap();
        assert_eq!((slots.num_windows, slots.window_slots), (2, 2));
        assert_eq!(slots.slots, [0, 1, 2, 2]);
        assert_eq!(slots.mask, [0.0, 0.0, 0.0, EXCLUDED]);
        assert_eq!(slots.patches, [0, 1, 2]);
        assert_eq!(WindowSlots::new(&windows, 4), None);
        let windows = WindowLayout { window_index: vec![], window_patches: vec![0] };
        assert_eq!(WindowSlots::new(&windows, 0), None);
    }

    #[test]
    fn patches_attend_to_their_own_window() {
        let windows = WindowLayout { window_index: vec![0, 1], window_patches: vec![1, 2] };
        let mut mask = [1.0; 9];
        assert!(write_window_mask(&windows, 3, &mut mask));
        let n = EXCLUDED;
        assert_eq!(mask, [0.0, n, n, n, 0.0, 0.0, n, 0.0, 0.0]);
        assert!(
            !write_window_mask(&windows, 4, &mut [0.0; 16]) && !write_window_mask(&windows, 3, &mut [0.0; 8])
        );
    }
}
