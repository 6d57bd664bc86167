//! The kernels against a plain computation in f64: every instruction set of this processor, every precision, in steps of
//! random composition.

use std::ffi::c_int;

use super::{CachePrecision, Compute};
use crate::kernel_tests::{Random, bytes_of, floats_of};

#[repr(C)]
struct Sequence {
    begin: usize,
    count: usize,
    past: usize,
    blocks: *const i32,
    place: usize,
}

#[repr(C)]
struct Asked {
    kernels: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    value_size: usize,
    window: usize,
    count: usize,
    row: usize,
    scale: f32,
    share: f32,
    precision: c_int,
    is_bf16: c_int,
    in_bf16: c_int,
    sequences: *const Sequence,
    queries: *const u8,
    keys: *const u8,
    values: *const u8,
    cos: *const f32,
    sin: *const f32,
    output: *mut u8,
    key_cache: *mut u8,
    value_cache: *mut u8,
    weights: *mut f32,
    step_blocks: usize,
}

unsafe extern "C" {
    fn ovfleet_try_attention(asked: *const Asked) -> c_int;
}

const KERNEL_SETS: usize = 4;
const BLOCK_TOKENS: usize = 32;

/// From -2 to 2, with few bits, so that bf16 holds it.
fn number(random: &mut Random) -> f32 {
    random.below(257) as f32 / 64.0 - 2.0
}

/// A layer and what its cache was given so far.
struct Layer {
    heads: usize,
    kv_heads: usize,
    size: usize,
    window: usize,
    precision: CachePrecision,
    compute: Compute,
    /// What share of the weight keys are to have that are looked at; 0: all are.
    share: f32,
    /// Whether the weights of blocks are told.
    weighs: bool,
    /// Whether queries, keys and values are parts of rows, and rotary embeddings are to be applied.
    turns: bool,
    key_cache: Vec<u8>,
    value_cache: Vec<u8>,
    sequences: Vec<Known>,
}

/// A sequence: its blocks, and all keys and values.
struct Known {
    blocks: Vec<i32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Layer {
    fn random(random: &mut Random, precision: CachePrecision, compute: Compute) -> Self {
        const BLOCKS: usize = 192;
        let kv_heads = random.pick(&[1, 2, 3]);
        let size = random.pick(&[32, 64, 96, 128]);
        let bytes = match precision {
            CachePrecision::F32 => 4 * size,
            CachePrecision::Bf16 | CachePrecision::F16 => 2 * size,
            CachePrecision::U8 => size,
        };
        let (of_keys, of_values) = if precision == CachePrecision::U8 { (size / 32 * 8, 8) } else { (0, 0) };
        // What was never written is not a number.
        let cache = |bytes: usize| vec![0xff; BLOCKS * kv_heads * BLOCK_TOKENS * bytes];
        // Blocks in no order, so many for each sequence that the longest has parts.
        let mut free: Vec<i32> = (0..BLOCKS as i32).collect();
        let mut take = |count: usize| -> Vec<i32> {
            (0..count).map(|_| free.swap_remove(random.below(free.len()))).collect()
        };
        let sequences = [100, 40, 20, 4];
        let sequences = sequences.map(|count| Known { blocks: take(count), keys: vec![], values: vec![] });
        Self {
            heads: kv_heads * random.pick(&[1, 3, 4, 7]),
            kv_heads,
            size,
            window: random.pick(&[0, 0, 40, 700]),
            precision,
            compute,
            share: 0.0,
            weighs: random.below(2) == 0,
            turns: compute != Compute::Bf16 && random.below(2) == 0,
            key_cache: cache(bytes + of_keys),
            value_cache: cache(bytes + of_values),
            sequences: sequences.into(),
        }
    }

    /// Tokens of a sequence that are cached.
    fn past(&self, sequence: usize) -> usize {
        self.sequences[sequence].keys.len() / (self.kv_heads * self.size)
    }

    /// A step of so many new tokens of each sequence; answers its output, and how far that is from the plain computation's,
    /// or nothing if the processor does not have the kernels.
    fn step(&mut self, random: &mut Random, kernels: usize, counts: &[usize]) -> Option<(Vec<f32>, f64)> {
        let tokens: usize = counts.iter().sum();
        let Self { heads, kv_heads, size, .. } = *self;
        // Each by itself: those of the first tokens do not depend on how many there are.
        let mut numbers = |per_token: usize| {
            let mut own = Random(random.below(1 << 30) as u64);
            (0..tokens * per_token).map(|_| number(&mut own)).collect::<Vec<f32>>()
        };
        let (mut queries, mut keys, values) =
            (numbers(heads * size), numbers(kv_heads * size), numbers(kv_heads * size));
        // What is turned has few bits, too.
        let [cos, sin] = [(); 2]
            .map(|()| numbers(size).iter().map(|it| it.trunc().clamp(-1.0, 1.0)).collect::<Vec<f32>>());
        let given = self.given([&queries, &keys, &values]);
        if self.turns {
            turn(&mut queries, (heads, size), (&cos, &sin));
            turn(&mut keys, (kv_heads, size), (&cos, &sin));
        }
        let mut begin = 0;
        let (mut sequences, mut place) = (Vec::new(), 0);
        for (index, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let past = self.past(index);
            let known = &mut self.sequences[index];
            let new = begin * kv_heads * size..(begin + count) * kv_heads * size;
            known.keys.extend(&keys[new.clone()]);
            known.values.extend(&values[new]);
            sequences.push((index, Sequence { begin, count, past, blocks: known.blocks.as_ptr(), place }));
            begin += count;
            place += (past + count).div_ceil(BLOCK_TOKENS);
        }
        let bytes = given.map(|numbers| bytes_of(&numbers, self.compute == Compute::Bf16));
        let mut output = bytes_of(&queries, self.compute == Compute::Bf16);
        output.fill(0);
        let part = |index: usize, before: usize| match self.turns {
            true => bytes[0][before * size_of::<f32>()..].as_ptr(),
            false => bytes[index].as_ptr(),
        };
        let table = |table: &[f32]| if self.turns { table.as_ptr() } else { std::ptr::null() };
        let (indices, rows): (Vec<usize>, Vec<Sequence>) = sequences.into_iter().unzip();
        let mut weights = vec![0.0_f32; kv_heads * place];
        let asked = Asked {
            row: if self.turns { (heads + 2 * kv_heads) * size } else { 0 },
            queries: part(0, 0),
            keys: part(1, heads * size),
            values: part(2, (heads + kv_heads) * size),
            cos: table(&cos),
            sin: table(&sin),
            output: output.as_mut_ptr(),
            weights: if self.weighs { weights.as_mut_ptr() } else { std::ptr::null_mut() },
            step_blocks: place,
            ..self.asked(kernels, &rows)
        };
        // SAFETY: all is as large as the sizes say and lives until the call returns.
        let done = unsafe { ovfleet_try_attention(&raw const asked) } != 0;
        let output = floats_of(&output, self.compute == Compute::Bf16);
        let mut worst: f64 = 0.0;
        for (index, row) in indices.into_iter().zip(&rows) {
            // Of long prompts some: the plain computation takes its time.
            for token in (0..row.count).filter(|token| row.count - token < 4 || token % 41 == 0) {
                for head in 0..heads {
                    let at = ((row.begin + token) * heads + head) * size;
                    let (expected, shares) =
                        self.plain(index, row.past + token, head, &queries[at..at + size]);
                    if self.weighs && row.count == 1 {
                        let told = &mut weights[head / (heads / kv_heads) * place + row.place..];
                        told.iter_mut().zip(shares).for_each(|(told, share)| *told -= share as f32);
                    }
                    for (found, expected) in output[at..at + size].iter().zip(expected) {
                        let difference = (f64::from(*found) - expected).abs();
                        worst = if difference.is_nan() { f64::INFINITY } else { worst.max(difference) };
                    }
                }
            }
        }
        // What is told is all of it, and nothing is told of others.
        let left = weights.iter().fold(0.0, |worst: f32, left| worst.max(left.abs()));
        done.then_some((output, worst.max(f64::from(left) / (heads / kv_heads) as f64)))
    }

    /// What is asked of the kernels, but for what is multiplied.
    fn asked(&mut self, kernels: usize, rows: &[Sequence]) -> Asked {
        Asked {
            kernels,
            heads: self.heads,
            kv_heads: self.kv_heads,
            size: self.size,
            value_size: self.size,
            window: self.window,
            count: rows.len(),
            row: 0,
            scale: self.scale(),
            share: self.share,
            precision: self.precision as c_int,
            is_bf16: c_int::from(self.compute == Compute::Bf16),
            in_bf16: c_int::from(self.compute != Compute::F32),
            sequences: rows.as_ptr(),
            queries: std::ptr::null(),
            keys: std::ptr::null(),
            values: std::ptr::null(),
            cos: std::ptr::null(),
            sin: std::ptr::null(),
            output: std::ptr::null_mut(),
            key_cache: self.key_cache.as_mut_ptr(),
            value_cache: self.value_cache.as_mut_ptr(),
            weights: std::ptr::null_mut(),
            step_blocks: 0,
        }
    }

    /// The output of a prompt of the first sequence, by these queries, keys and values; nothing if the processor does not have
    /// the kernels.
    fn prompt(&mut self, kernels: usize, given: (&[f32], &[f32], &[f32])) -> Option<Vec<f32>> {
        let count = given.0.len() / (self.heads * self.size);
        let rows =
            [Sequence { begin: 0, count, past: 0, blocks: self.sequences[0].blocks.as_ptr(), place: 0 }];
        let [queries, keys, values] = [given.0, given.1, given.2].map(|it| bytes_of(it, false));
        let mut output = vec![0; queries.len()];
        let asked = Asked {
            queries: queries.as_ptr(),
            keys: keys.as_ptr(),
            values: values.as_ptr(),
            output: output.as_mut_ptr(),
            ..self.asked(kernels, &rows)
        };
        // SAFETY: all is as large as the sizes say and lives until the call returns.
        let done = unsafe { ovfleet_try_attention(&raw const asked) } != 0;
        done.then(|| floats_of(&output, false))
    }

    /// Queries, keys and values as they are given: each by itself, or as parts of rows.
    fn given(&self, [queries, keys, values]: [&[f32]; 3]) -> [Vec<f32>; 3] {
        if !self.turns {
            return [queries, keys, values].map(<[f32]>::to_vec);
        }
        let kv_row = self.kv_heads * self.size;
        let tokens =
            queries.chunks(self.heads * self.size).zip(keys.chunks(kv_row)).zip(values.chunks(kv_row));
        let rows = tokens.flat_map(|((query, key), value)| [query, key, value].concat()).collect();
        [rows, vec![], vec![]]
    }

    /// What a query of the token at `at` gets, and the weights that it gives to the blocks.
    fn plain(&self, sequence: usize, at: usize, head: usize, query: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let known = &self.sequences[sequence];
        let kv_head = head / (self.heads / self.kv_heads);
        let first = if self.window == 0 { 0 } else { (at + 1).saturating_sub(self.window) };
        let row = |token: usize| {
            let begin = (token * self.kv_heads + kv_head) * self.size;
            begin..begin + self.size
        };
        let product =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let scores: Vec<f64> = (first..=at)
            .map(|token| product(query, &known.keys[row(token)]) * f64::from(self.scale()))
            .collect();
        let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - maximum).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut sums = vec![0.0; self.size];
        let mut shares = vec![0.0; at / BLOCK_TOKENS + 1];
        for (weight, token) in weights.iter().zip(first..) {
            shares[token / BLOCK_TOKENS] += weight / total;
            for (sum, value) in sums.iter_mut().zip(&known.values[row(token)]) {
                *sum += weight / total * f64::from(*value);
            }
        }
        (sums, shares)
    }

    fn scale(&self) -> f32 {
        1.0 / (self.size as f32).sqrt()
    }
}

/// Turns the heads of each token's numbers by its rows of the tables.
fn turn(numbers: &mut [f32], (heads, size): (usize, usize), (cos, sin): (&[f32], &[f32])) {
    for (head, numbers) in numbers.chunks_mut(size).enumerate() {
        let [cos, sin] = [cos, sin].map(|table| &table[head / heads * size..][..size]);
        let (first, second) = numbers.split_at(size / 2);
        let turned: Vec<f32> = second.iter().map(|it| -it).chain(first.iter().copied()).collect();
        for (i, turned) in turned.into_iter().enumerate() {
            numbers[i] = numbers[i] * cos[i] + turned * sin[i];
        }
    }
}

/// How far results of these precisions may be off: roundings of values up to 2, and of their scores.
fn tolerance(precision: CachePrecision, compute: Compute) -> f64 {
    let of_cache = match precision {
        CachePrecision::F32 => 2e-5,
        // What the test gives it has few bits.
        CachePrecision::Bf16 | CachePrecision::F16 => 2e-5,
        CachePrecision::U8 => 0.05,
    };
    if compute == Compute::F32 { of_cache } else { of_cache + 0.02 }
}

#[test]
fn kernels_compute_what_a_plain_computation_does() {
    use CachePrecision::{Bf16, F16, F32, U8};
    let mut tried = 0;
    for kernels in 0..KERNEL_SETS {
        let computes = [Compute::F32, Compute::Bf16, Compute::Bf16AroundF32];
        for (precision, compute) in [F32, Bf16, F16, U8]
            .into_iter()
            .flat_map(|precision| computes.map(|compute| (precision, compute)))
        {
            for seed in 0..3 {
                let mut random = Random(seed * 1000 + kernels as u64);
                let mut layer = Layer::random(&mut random, precision, compute);
                // Prompts in chunks beside each other, one token each, a few (guesses), and a mixture.
                let steps: [[usize; 4]; 6] = [
                    [1500, 0, 3, 1],
                    [70, 33, 29, 0],
                    [1, 1, 1, 1],
                    [1, 1, 0, 40],
                    [5, 2, 3, 1],
                    [1, 200, 1, 17],
                ];
                for counts in steps {
                    let Some((_, worst)) = layer.step(&mut random, kernels, &counts) else { continue };
                    tried += 1;
                    assert!(
                        worst < tolerance(precision, compute),
                        "kernels {kernels}, {precision:?}, {compute:?}, seed {seed}, {counts:?}, {} heads of {} \
                         over {}, window {}: off by {worst}",
                        layer.heads,
                        layer.size,
                        layer.kv_heads,
                        layer.window
                    );
                }
            }
        }
    }
    // The plain ones run anywhere.
    assert!(tried >= 4 * 3 * 3 * 6, "{tried}");
}

#[test]
fn a_decode_is_the_same_to_the_bit_whatever_is_beside_it() {
    for precision in [CachePrecision::Bf16, CachePrecision::U8] {
        let output_beside = |others: [usize; 3]| {
            let mut layer = Layer::random(&mut Random(7), precision, Compute::F32);
            layer.step(&mut Random(8), 0, &[1500, 300, 60, 9]).unwrap();
            let (output, _) = layer.step(&mut Random(9), 0, &[1, others[0], others[1], others[2]]).unwrap();
            output[..layer.heads * layer.size].to_vec()
        };
        let alone = output_beside([0, 0, 0]);
        assert_eq!(output_beside([90, 1, 0]), alone, "{precision:?}");
        assert_eq!(output_beside([1, 1, 1]), alone, "{precision:?}");
    }
}

/// A prompt whose tokens attend to two places far before, but for their own: keys there are theirs, all others' are the
/// opposite, and have values that nothing can be added to.
#[test]
fn a_sparse_prompt_looks_only_at_keys_that_weigh() {
    const TOKENS: usize = 3000;
    const HEAVY: [std::ops::Range<usize>; 2] = [700..720, 1900..1960];
    let mut tried = 0;
    for kernels in 0..KERNEL_SETS {
        for (precision, compute) in [
            (CachePrecision::F32, Compute::F32),
            (CachePrecision::U8, Compute::F32),
            (CachePrecision::U8, Compute::Bf16AroundF32),
        ] {
            for share in [0.0, 0.9] {
                let mut layer = Layer {
                    window: 0,
                    turns: false,
                    share,
                    ..Layer::random(&mut Random(3), precision, compute)
                };
                let Layer { heads, kv_heads, size, .. } = layer;
                let is_heavy = |token: usize| HEAVY.iter().any(|range| range.contains(&token));
                // In a middle part nothing is a number, if anybody looks.
                let is_spoilt = |token: usize| (1024..1536).contains(&token);
                let rows = |per_token: usize, of: &dyn Fn(usize) -> f32| -> Vec<f32> {
                    (0..TOKENS).flat_map(|token| vec![of(token); per_token]).collect()
                };
                let sign = |token: usize| if is_heavy(token) { 2.0 } else { -2.0 };
                let queries = rows(heads * size, &|_| 2.0);
                let keys = rows(kv_heads * size, &sign);
                let values = rows(kv_heads * size, &|token| match token {
                    _ if is_spoilt(token) => f32::INFINITY,
                    _ if is_heavy(token) => 1.0,
                    _ => -1.0,
                });
                let Some(output) = layer.prompt(kernels, (&queries, &keys, &values)) else { continue };
                tried += 1;
                // Tiles that begin behind both, and behind what is spoilt, whose own keys are light.
                let late = &output[2560 * heads * size..];
                if share > 0.0 {
                    let worst = late.iter().map(|it| (it - 1.0).abs()).fold(0.0, f32::max);
                    assert!(worst < 0.02, "kernels {kernels}, {precision:?}, {compute:?}: off by {worst}");
                } else {
                    assert!(late.iter().all(|it| !it.is_finite()), "what is spoilt was looked at");
                }
            }
        }
    }
    assert!(tried >= 2 * 3, "{tried}");
}

/// Multi-query attention gives one KV head more rows than a vector register file holds: the scratch memory must have room for
/// the block weights of each of them.
#[test]
fn decodes_with_many_query_heads_per_kv_head_report_their_block_weights() {
    let mut tried = 0;
    for kernels in 0..KERNEL_SETS {
        for group in [16, 17, 48] {
            let layer = Layer::random(&mut Random(5), CachePrecision::U8, Compute::F32);
            let heads = layer.kv_heads * group;
            let mut layer = Layer { heads, weighs: true, window: 0, ..layer };
            layer.step(&mut Random(6), kernels, &[200, 40, 0, 0]);
            let step = layer.step(&mut Random(7), kernels, &[1, 1, 0, 0]);
            let Some((_, worst)) = step else { continue };
            tried += 1;
            assert!(
                worst < tolerance(CachePrecision::U8, Compute::F32),
                "kernels {kernels}, group {group}: {worst}"
            );
        }
    }
    assert!(tried >= 3, "{tried}");
}

#[test]
fn numbers_beyond_the_range_of_f16_are_stored_as_its_largest() {
    const LARGEST: f32 = 65504.0;
    let mut tried = 0;
    for kernels in 0..KERNEL_SETS {
        let layer = Layer::random(&mut Random(5), CachePrecision::F16, Compute::F32);
        let mut layer = Layer { window: 0, turns: false, share: 0.0, ..layer };
        let Layer { heads, kv_heads, size, .. } = layer;
        const TOKENS: usize = 40;
        let queries = vec![0.001; TOKENS * heads * size];
        let keys = vec![1e6; TOKENS * kv_heads * size];
        let values: Vec<f32> =
            (0..TOKENS * kv_heads * size).map(|index| if index % 2 == 0 { 1e6 } else { -1e6 }).collect();
        let Some(output) = layer.prompt(kernels, (&queries, &keys, &values)) else { continue };
        tried += 1;
        for (index, found) in output.iter().enumerate() {
            let expected = if index % 2 == 0 { LARGEST } else { -LARGEST };
            assert!((found - expected).abs() < 1.0, "kernels {kernels}, {index}: {found}, not {expected}");
        }
    }
    assert!(tried >= 1, "{tried}");
}
