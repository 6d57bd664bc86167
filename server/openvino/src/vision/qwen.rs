//! The masks of the encoders of Qwen2-VL and Qwen2.5-VL.

use server_images::WindowLayout;

/// The value that excludes a patch from the attention.
const EXCLUDED: f32 = f32::NEG_INFINITY;

/// Writes the mask with which patches attend only to patches of their own window: `[patches, patches]`, 0 within a window
/// and -∞ elsewhere. Returns false if the windows do not have as many patches as the mask.
pub(super) fn write_window_mask(windows: &WindowLayout, patches: usize, mask: &mut [f32]) -> bool {
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
