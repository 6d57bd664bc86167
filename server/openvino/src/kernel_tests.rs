//! What the tests of kernels share.

/// Numbers that depend on nothing but the seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// Numbers as they are in memory: f32, or the upper halves of them.
pub(crate) fn bytes_of(numbers: &[f32], is_bf16: bool) -> Vec<u8> {
    let bytes = |number: &f32| number.to_le_bytes()[if is_bf16 { 2.. } else { 0.. }].to_vec();
    numbers.iter().flat_map(bytes).collect()
}

/// The numbers that are so in memory.
pub(crate) fn floats_of(bytes: &[u8], is_bf16: bool) -> Vec<f32> {
    let float = |bytes: &[u8]| {
        let mut whole = [0; 4];
        whole[4 - bytes.len()..].copy_from_slice(bytes);
        f32::from_le_bytes(whole)
    };
    bytes.chunks_exact(if is_bf16 { 2 } else { 4 }).map(float).collect()
}
