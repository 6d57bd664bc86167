//! Tests of the attention kernels with every instruction set of this processor. The AMX kernels also run on the C++
//! model of the tile registers, on any processor. This module contains the shared helpers: a layer with its cache, and
//! a plain computation in f64.

mod sinks;
mod sparse;
mod steps;
mod tiles;
mod u4;

use std::ffi::c_int;

use super::{FloatType, KernelVariant, Random, element};
use crate::cpu::Isa;
use crate::kernels::{ATTENTION_ISAS, Precision};

/// The same as `ovfleet_sequence` in `shim/shim.h`.
#[repr(C)]
struct RawSequence {
    begin: usize,
    count: usize,
    past: usize,
    blocks: *const i32,
    first_block: usize,
}

/// The same as `ovfleet_attention_test` in `shim/shim.h`.
#[repr(C)]
struct RawAttentionTest {
    isa: usize,
    heads: usize,
    kv_heads: usize,
    key_size: usize,
    value_size: usize,
    window: usize,
    sequence_count: usize,
    stride: usize,
    scale: f32,
    attention_mass: f32,
    kv_cache: c_int,
    is_bf16: c_int,
    tile_model: c_int,
    sequences: *const RawSequence,
    queries: *const u8,
    keys: *const u8,
    values: *const u8,
    cos: *const f32,
    sin: *const f32,
    output: *mut u8,
    key_cache: *mut u8,
    value_cache: *mut u8,
    block_scores: *mut f32,
    step_blocks: usize,
    sinks: *const f32,
}

unsafe extern "C" {
    fn ovfleet_test_attention(test: *const RawAttentionTest) -> c_int;
}

const BLOCK_TOKENS: usize = 32;

/// A number from -2 to 2 that bf16 can represent.
fn number(random: &mut Random) -> f32 {
    random.below(257) as f32 / 64.0 - 2.0
}

impl KernelVariant {
    fn multiplies_in_bf16(self) -> bool {
        self.is_tile_model() || matches!(self.isa(), Isa::Avx512Bf16 | Isa::Amx)
    }
}

/// An attention layer with its cache.
struct Layer {
    heads: usize,
    kv_heads: usize,
    size: usize,
    window: usize,
    kv_cache: Precision,
    activations: FloatType,
    /// The fraction of the attention mass that the selected keys of prompts must cover, or 0 if prompts attend to all
    /// keys.
    attention_mass: f32,
    /// Whether decodes report the attention to each block.
    block_scores: bool,
    /// Whether queries, keys and values are parts of one tensor, and the kernels apply a rotary embedding.
    fuses_rope: bool,
    /// The sink of each query head; empty without sinks.
    sinks: Vec<f32>,
    key_cache: Vec<u8>,
    value_cache: Vec<u8>,
    sequences: Vec<CachedSequence>,
}

/// A sequence: its blocks, and all of its keys and values.
struct CachedSequence {
    blocks: Vec<i32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// The tensors of the new tokens of a step.
#[derive(Clone, Copy)]
struct Activations<'a> {
    queries: &'a [f32],
    keys: &'a [f32],
    values: &'a [f32],
}

/// The inputs of all tokens of a sequence.
struct Tensors {
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Whether each step also computes another sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OtherSequences {
    Absent,
    Present,
}

/// The tables of a rotary embedding.
#[derive(Clone, Copy)]
struct RopeTables<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Layer {
    fn random(random: &mut Random, kv_cache: Precision, activations: FloatType) -> Self {
        const BLOCKS: usize = 192;
        let kv_heads = random.pick(&[1, 2, 3]);
        let size: usize = random.pick(&[32, 64, 96, 128]);
        // The sizes of a key and of a value in bytes, including their scales.
        let (of_key, of_value) = match kv_cache {
            Precision::F32 => (4 * size, 4 * size),
            Precision::Bf16 | Precision::F16 => (2 * size, 2 * size),
            Precision::U8 => (size + size / 32 * 8, size + 8),
            Precision::U4 => {
                let words = size.div_ceil(6);
                (4 * words + 2 * words.div_ceil(4) + size / 16, size / 2 + size / 16 * 2)
            }
        };
        // The initial content of the cache is NaN, so that reading keys or values that were not written changes the
        // output.
        let cache = |bytes: usize| vec![0xff; BLOCKS * kv_heads * BLOCK_TOKENS * bytes];
        // Each sequence has blocks in random order, and the longest one has enough blocks to be divided into parts.
        let mut free: Vec<i32> = (0..BLOCKS as i32).collect();
        let mut take = |count: usize| -> Vec<i32> {
            (0..count).map(|_| free.swap_remove(random.below(free.len()))).collect()
        };
        let sequences = [100, 40, 20, 4];
        let sequences =
            sequences.map(|count| CachedSequence { blocks: take(count), keys: vec![], values: vec![] });
        let heads = kv_heads * random.pick(&[1, 3, 4, 7]);
        // The sinks range from values below the largest scores to values above them.
        let sinks = if random.below(2) == 0 { 0 } else { heads };
        let sinks = (0..sinks).map(|_| 8.0 * number(random)).collect();
        Self {
            heads,
            kv_heads,
            size,
            window: random.pick(&[0, 0, 40, 700]),
            kv_cache,
            activations,
            attention_mass: 0.0,
            block_scores: random.below(2) == 0,
            fuses_rope: activations == FloatType::F32 && random.below(2) == 0,
            sinks,
            key_cache: cache(of_key),
            value_cache: cache(of_value),
            sequences: sequences.into(),
        }
    }

    /// The number of cached tokens of a sequence.
    fn past(&self, sequence: usize) -> usize {
        self.sequences[sequence].keys.len() / (self.kv_heads * self.size)
    }

    /// Runs a step with as many new tokens of each sequence as `counts` specifies, and returns the largest difference
    /// from the plain computation, or `None` if the processor does not have the kernels.
    fn step(&mut self, random: &mut Random, variant: KernelVariant, counts: &[usize]) -> Option<f64> {
        let tokens: usize = counts.iter().sum();
        let Self { heads, kv_heads, size, .. } = *self;
        // Each tensor has a separate generator, so that the values of the first tokens do not depend on the number of
        // tokens.
        let mut numbers = |per_token: usize| {
            let mut generator = Random(random.below(1 << 30) as u64);
            (0..tokens * per_token).map(|_| number(&mut generator)).collect::<Vec<f32>>()
        };
        let (mut queries, mut keys, values) =
            (numbers(heads * size), numbers(kv_heads * size), numbers(kv_heads * size));
        // The cosines and sines are -1, 0 or 1, so that bf16 can also represent the rotated numbers.
        let [cos, sin] = [(); 2]
            .map(|()| numbers(size).iter().map(|it| it.trunc().clamp(-1.0, 1.0)).collect::<Vec<f32>>());
        let inputs = self.inputs(Activations { queries: &queries, keys: &keys, values: &values });
        if self.fuses_rope {
            let tables = RopeTables { cos: &cos, sin: &sin };
            rotate(&mut queries, heads, size, tables);
            rotate(&mut keys, kv_heads, size, tables);
        }
        let mut begin = 0;
        let (mut sequences, mut step_blocks) = (Vec::new(), 0);
        for (index, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let past = self.past(index);
            let cached = &mut self.sequences[index];
            let new = begin * kv_heads * size..(begin + count) * kv_heads * size;
            cached.keys.extend(&keys[new.clone()]);
            cached.values.extend(&values[new]);
            let blocks = cached.blocks.as_ptr();
            sequences.push((index, RawSequence { begin, count, past, blocks, first_block: step_blocks }));
            begin += count;
            step_blocks += (past + count).div_ceil(BLOCK_TOKENS);
        }
        let activations = self.activations;
        let bytes = inputs.map(|numbers| activations.encode(&numbers));
        let mut output = activations.encode(&queries);
        output.fill(0);
        let input = |index: usize, before: usize| match self.fuses_rope {
            true => bytes[0][before * size_of::<f32>()..].as_ptr(),
            false => bytes[index].as_ptr(),
        };
        let table = |table: &[f32]| if self.fuses_rope { table.as_ptr() } else { std::ptr::null() };
        let (indices, raw_sequences): (Vec<usize>, Vec<RawSequence>) = sequences.into_iter().unzip();
        let mut scores = vec![0.0_f32; kv_heads * step_blocks];
        let test = RawAttentionTest {
            stride: if self.fuses_rope { (heads + 2 * kv_heads) * size } else { 0 },
            queries: input(0, 0),
            keys: input(1, heads * size),
            values: input(2, (heads + kv_heads) * size),
            cos: table(&cos),
            sin: table(&sin),
            output: output.as_mut_ptr(),
            block_scores: if self.block_scores { scores.as_mut_ptr() } else { std::ptr::null_mut() },
            step_blocks,
            ..self.test(variant, &raw_sequences)
        };
        // SAFETY: all tensors have the sizes in the struct, and live until the call returns.
        let was_run = unsafe { ovfleet_test_attention(&raw const test) } != 0;
        variant.assert_agrees_with_plan(&ATTENTION_ISAS, was_run);
        if !was_run {
            return None;
        }
        let output = activations.decode(&output);
        let mut worst: f64 = 0.0;
        for (index, sequence) in indices.into_iter().zip(&raw_sequences) {
            // Check only some of the tokens of a prompt, because the plain computation is slow.
            for token in (0..sequence.count).filter(|token| sequence.count - token < 4 || token % 41 == 0) {
                for head in 0..heads {
                    let at = ((sequence.begin + token) * heads + head) * size;
                    let plain = self.plain(index, sequence.past + token, head, &queries[at..at + size]);
                    if self.block_scores && sequence.count == 1 {
                        let reported =
                            &mut scores[head / (heads / kv_heads) * step_blocks + sequence.first_block..];
                        reported
                            .iter_mut()
                            .zip(plain.block_masses)
                            .for_each(|(score, mass)| *score -= mass as f32);
                    }
                    for (found, expected) in output[at..at + size].iter().zip(plain.output) {
                        let difference = (f64::from(*found) - expected).abs();
                        worst = if difference.is_nan() { f64::INFINITY } else { worst.max(difference) };
                    }
                }
            }
        }
        // Only decodes report scores. The expected scores were subtracted above, so only the errors remain.
        let left = scores.iter().fold(0.0, |worst: f32, left| worst.max(left.abs()));
        let worst = worst.max(f64::from(left) / (heads / kv_heads) as f64);
        Some(worst)
    }

    /// Random inputs of a sequence.
    fn tensors(&self, random: &mut Random, tokens: usize) -> Tensors {
        let mut numbers = |per_token: usize| (0..tokens * per_token).map(|_| number(random)).collect();
        Tensors {
            queries: numbers(self.heads * self.size),
            keys: numbers(self.kv_heads * self.size),
            values: numbers(self.kv_heads * self.size),
            cos: numbers(self.size),
            sin: numbers(self.size),
        }
    }

    /// Returns the bytes of the output of the first sequence, computed in chunks from an empty cache. `chunk` returns
    /// the size of the next chunk for a number of past tokens. The result is `None` if the processor does not have the
    /// kernels.
    fn output_in_chunks(
        &mut self,
        variant: KernelVariant,
        tensors: &Tensors,
        others: OtherSequences,
        mut chunk: impl FnMut(usize) -> usize,
    ) -> Option<Vec<u8>> {
        let Self { heads, kv_heads, size, .. } = *self;
        let tokens = tensors.cos.len() / size;
        self.key_cache.fill(0xff);
        self.value_cache.fill(0xff);
        let (mut found, mut past, mut steps) = (Vec::new(), 0, 0);
        while past < tokens {
            let count = chunk(past).min(tokens - past);
            // The other sequence, if present, has one new token in each step. This token precedes the new tokens of the
            // first sequence.
            let other = usize::from(others == OtherSequences::Present);
            let of_step = |all: &[f32], per_token: usize| -> Vec<f32> {
                let range = |begin: usize, count: usize| &all[begin * per_token..][..count * per_token];
                [range(steps % tokens, other), range(past, count)].concat()
            };
            let cos = of_step(&tensors.cos, size);
            let sin = of_step(&tensors.sin, size);
            let inputs = self.inputs(Activations {
                queries: &of_step(&tensors.queries, heads * size),
                keys: &of_step(&tensors.keys, kv_heads * size),
                values: &of_step(&tensors.values, kv_heads * size),
            });
            let bytes = inputs.map(|numbers| self.activations.encode(&numbers));
            let blocks = |sequence: usize| self.sequences[sequence].blocks.as_ptr();
            let mut sequences =
                vec![RawSequence { begin: 0, count: 1, past: steps, blocks: blocks(1), first_block: 0 }];
            sequences.truncate(other);
            sequences.push(RawSequence { begin: other, count, past, blocks: blocks(0), first_block: 0 });
            let per_token = heads * size * self.activations.bytes();
            let mut output = vec![0; (other + count) * per_token];
            let input = |index: usize, before: usize| match self.fuses_rope {
                true => bytes[0][before * size_of::<f32>()..].as_ptr(),
                false => bytes[index].as_ptr(),
            };
            let table = |table: &[f32]| if self.fuses_rope { table.as_ptr() } else { std::ptr::null() };
            let test = RawAttentionTest {
                stride: if self.fuses_rope { (heads + 2 * kv_heads) * size } else { 0 },
                queries: input(0, 0),
                keys: input(1, heads * size),
                values: input(2, (heads + kv_heads) * size),
                cos: table(&cos),
                sin: table(&sin),
                output: output.as_mut_ptr(),
                ..self.test(variant, &sequences)
            };
            // SAFETY: all tensors have the sizes in the struct, and live until the call returns.
            if unsafe { ovfleet_test_attention(&raw const test) } == 0 {
                return None;
            }
            found.extend_from_slice(&output[other * per_token..]);
            past += count;
            steps += 1;
        }
        Some(found)
    }

    /// The parameters of a test. The caller sets the tensors of the step.
    fn test(&mut self, variant: KernelVariant, sequences: &[RawSequence]) -> RawAttentionTest {
        RawAttentionTest {
            isa: variant.isa() as usize,
            heads: self.heads,
            kv_heads: self.kv_heads,
            key_size: self.size,
            value_size: self.size,
            window: self.window,
            sequence_count: sequences.len(),
            stride: 0,
            scale: self.scale(),
            attention_mass: self.attention_mass,
            kv_cache: element(self.kv_cache),
            is_bf16: c_int::from(self.activations == FloatType::Bf16),
            tile_model: c_int::from(variant.is_tile_model()),
            sequences: sequences.as_ptr(),
            queries: std::ptr::null(),
            keys: std::ptr::null(),
            values: std::ptr::null(),
            cos: std::ptr::null(),
            sin: std::ptr::null(),
            output: std::ptr::null_mut(),
            key_cache: self.key_cache.as_mut_ptr(),
            value_cache: self.value_cache.as_mut_ptr(),
            block_scores: std::ptr::null_mut(),
            step_blocks: 0,
            sinks: if self.sinks.is_empty() { std::ptr::null() } else { self.sinks.as_ptr() },
        }
    }

    /// Returns the output of a prompt of the first sequence, or `None` if the processor does not have the kernels.
    fn prompt(&mut self, variant: KernelVariant, activations: Activations<'_>) -> Option<Vec<f32>> {
        let count = activations.queries.len() / (self.heads * self.size);
        let blocks = self.sequences[0].blocks.as_ptr();
        let sequences = [RawSequence { begin: 0, count, past: 0, blocks, first_block: 0 }];
        let Activations { queries, keys, values } = activations;
        let [queries, keys, values] = [queries, keys, values].map(|it| FloatType::F32.encode(it));
        let mut output = vec![0; queries.len()];
        let test = RawAttentionTest {
            queries: queries.as_ptr(),
            keys: keys.as_ptr(),
            values: values.as_ptr(),
            output: output.as_mut_ptr(),
            ..self.test(variant, &sequences)
        };
        // SAFETY: all tensors have the sizes in the struct, and live until the call returns.
        let was_run = unsafe { ovfleet_test_attention(&raw const test) } != 0;
        was_run.then(|| FloatType::F32.decode(&output))
    }

    /// The input tensors: queries, keys and values, or a single tensor with all of them.
    fn inputs(&self, activations: Activations<'_>) -> [Vec<f32>; 3] {
        let Activations { queries, keys, values } = activations;
        if !self.fuses_rope {
            return [queries, keys, values].map(<[f32]>::to_vec);
        }
        let kv_columns = self.kv_heads * self.size;
        let tokens = queries
            .chunks(self.heads * self.size)
            .zip(keys.chunks(kv_columns))
            .zip(values.chunks(kv_columns));
        let qkv = tokens.flat_map(|((query, key), value)| [query, key, value].concat()).collect();
        [qkv, vec![], vec![]]
    }

    /// Computes the attention of one query at a position, in f64.
    fn plain(&self, sequence: usize, position: usize, head: usize, query: &[f32]) -> PlainResult {
        let cached = &self.sequences[sequence];
        let kv_head = head / (self.heads / self.kv_heads);
        let first = if self.window == 0 { 0 } else { (position + 1).saturating_sub(self.window) };
        let range = |token: usize| {
            let begin = (token * self.kv_heads + kv_head) * self.size;
            begin..begin + self.size
        };
        let product =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let scores: Vec<f64> = (first..=position)
            .map(|token| product(query, &cached.keys[range(token)]) * f64::from(self.scale()))
            .collect();
        let sink = self.sinks.get(head).map(|sink| f64::from(*sink));
        let maximum = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - maximum).exp()).collect();
        let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - maximum).exp());
        let mut output = vec![0.0; self.size];
        let mut block_masses = vec![0.0; position / BLOCK_TOKENS + 1];
        for (weight, token) in weights.iter().zip(first..) {
            block_masses[token / BLOCK_TOKENS] += weight / total;
            for (sum, value) in output.iter_mut().zip(&cached.values[range(token)]) {
                *sum += weight / total * f64::from(*value);
            }
        }
        PlainResult { output, block_masses }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.size as f32).sqrt()
    }
}

/// The result of the plain computation for one query.
struct PlainResult {
    output: Vec<f64>,
    /// The attention to each block.
    block_masses: Vec<f64>,
}

/// Applies a rotary embedding to all heads of each token.
fn rotate(numbers: &mut [f32], heads: usize, size: usize, tables: RopeTables<'_>) {
    for (head, numbers) in numbers.chunks_mut(size).enumerate() {
        let [cos, sin] = [tables.cos, tables.sin].map(|table| &table[head / heads * size..][..size]);
        let (first, second) = numbers.split_at(size / 2);
        let rotated: Vec<f32> = second.iter().map(|it| -it).chain(first.iter().copied()).collect();
        for (i, rotated) in rotated.into_iter().enumerate() {
            numbers[i] = numbers[i] * cos[i] + rotated * sin[i];
        }
    }
}

/// The largest allowed difference, which covers the rounding of values up to 2 and of scores.
fn tolerance(variant: KernelVariant, kv_cache: Precision, activations: FloatType) -> f64 {
    let of_cache = match kv_cache {
        // The values of the test have few bits, so these types store them without rounding.
        Precision::F32 | Precision::Bf16 | Precision::F16 => 2e-5,
        Precision::U8 => 0.05,
        // In each dimension of a rotated value, the rounding error can be half of the scale.
        Precision::U4 => 0.8,
    };
    let is_bf16 = variant.multiplies_in_bf16() || activations == FloatType::Bf16;
    if is_bf16 { of_cache + 0.02 } else { of_cache }
}
