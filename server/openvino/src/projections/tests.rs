//! The kernels against a plain computation in f64: every instruction set of this processor, every form of weights, any
//! number of rows.

use std::ffi::c_int;

use crate::kernel_tests::{Random, bytes_of, floats_of};

#[repr(C)]
struct Asked {
    kernels: usize,
    count: usize,
    inputs: usize,
    outputs: usize,
    bits: usize,
    group: usize,
    is_signed: c_int,
    then: c_int,
    is_bf16: c_int,
    quants: *const u8,
    zeros: *const f32,
    scales: *const f32,
    norm: *const f32,
    epsilon: f32,
    rows: *const u8,
    base: *const f32,
    to: *mut u8,
    low_ranks: *const AskedLowRank,
    low_rank_count: usize,
    adapters: *const i32,
}

#[repr(C)]
struct AskedLowRank {
    adapter: i32,
    first: usize,
    rows: usize,
    ranks: usize,
    down: *const f32,
    up: *const f32,
}

unsafe extern "C" {
    fn ovfleet_try_projection(asked: *const Asked) -> c_int;
}

const KERNEL_SETS: usize = 4;
const ROUNDED: usize = 32;
const ADDED: c_int = 1;
const GATED: c_int = 2;

/// From -127 to 127.
fn whole(random: &mut Random) -> f32 {
    random.below(255) as f32 - 127.0
}

/// What an adapter adds to some of the outputs.
struct LowRank {
    adapter: i32,
    first: usize,
    rows: usize,
    ranks: usize,
    down: Vec<f32>,
    up: Vec<f32>,
}

impl LowRank {
    fn random(random: &mut Random, adapter: i32, (first, rows): (usize, usize), inputs: usize) -> Self {
        let ranks = random.pick(&[1, 4, 5, 16, 21]);
        let down = (0..ranks * inputs).map(|_| whole(random) / 1024.0).collect();
        let up = (0..rows * ranks).map(|_| whole(random) / 64.0).collect();
        Self { adapter, first, rows, ranks, down, up }
    }

    /// Of one to three parts of the outputs, in two of three of which anything is changed: by one, by some adapters.
    fn all(random: &mut Random, inputs: usize, outputs: usize) -> Vec<Self> {
        let parts = random.pick(&[1, 2, 3]).min(outputs);
        let ends: Vec<usize> = (1..=parts).map(|part| outputs * part / parts).collect();
        let mut all = Vec::new();
        for adapter in 1..=random.below(4) as i32 {
            let mut first = 0;
            for &end in &ends {
                if random.below(3) > 0 {
                    all.push(Self::random(random, adapter, (first, end - first), inputs));
                }
                first = end;
            }
        }
        all
    }

    fn asked(&self) -> AskedLowRank {
        let Self { adapter, first, rows, ranks, ref down, ref up } = *self;
        AskedLowRank { adapter, first, rows, ranks, down: down.as_ptr(), up: up.as_ptr() }
    }

    /// What it adds to an output, and the size of what was added up.
    fn change(&self, output: usize, numbers: &[f64]) -> (f64, f64) {
        let Some(row) = output.checked_sub(self.first).filter(|row| *row < self.rows) else {
            return (0.0, 0.0);
        };
        let (mut sum, mut size) = (0.0, 0.0);
        for rank in 0..self.ranks {
            let up = f64::from(self.up[row * self.ranks + rank]);
            for (down, number) in self.down[rank * numbers.len()..].iter().zip(numbers) {
                let product = up * f64::from(*down) * number;
                sum += product;
                size += product.abs();
            }
        }
        (sum, size)
    }
}

struct Projection {
    inputs: usize,
    outputs: usize,
    bits: usize,
    group: usize,
    is_signed: bool,
    then: c_int,
    is_bf16: bool,
    quants: Vec<u8>,
    zeros: Vec<f32>,
    scales: Vec<f32>,
    norm: Option<Vec<f32>>,
    low_ranks: Vec<LowRank>,
}

impl Projection {
    fn random(random: &mut Random) -> Self {
        let inputs: usize = 32 * random.pick(&[1, 2, 5, 18, 48]);
        let then = random.pick(&[0, ADDED, GATED]);
        // Panels have 32 outputs, and the last may have fewer.
        let outputs = random.pick(&[2, 32, 50, 96, 200]);
        let group = random.pick(&[16, 32, 64, inputs]);
        let group = if inputs.is_multiple_of(group) { group } else { 32 };
        let groups = outputs * (inputs / group);
        let bits = random.pick(&[4, 8]);
        // Of a scale that f16 holds, as files have them, however small.
        let step = random.pick(&[1.0, 0.001_953_125, 1.0 / 1_073_741_824.0]);
        Self {
            inputs,
            outputs,
            bits,
            group,
            is_signed: random.below(2) == 0,
            then,
            is_bf16: then != ADDED && random.below(2) == 0,
            quants: (0..outputs * inputs).map(|_| random.below(1 << bits) as u8).collect(),
            zeros: (0..groups).map(|_| random.below(64) as f32 / 4.0).collect(),
            scales: (0..groups).map(|_| (random.below(15) + 1) as f32 / 16.0 * step).collect(),
            norm: (random.below(2) == 0).then(|| (0..inputs).map(|_| random.below(9) as f32 / 4.0).collect()),
            low_ranks: LowRank::all(random, inputs, outputs),
        }
    }

    fn results(&self) -> usize {
        if self.then == GATED { self.outputs / 2 } else { self.outputs }
    }

    /// Rows that rounding to 8 bits changes little: not at all where they are not normalised.
    fn rows(&self, random: &mut Random, count: usize) -> Vec<f32> {
        let mut rows: Vec<f32> = (0..count * self.inputs).map(|_| whole(random)).collect();
        rows.chunks_mut(ROUNDED).for_each(|group| group[random.below(ROUNDED)] = 127.0);
        rows
    }

    /// The adapters of rows: none of any, one of all, others in turn, or of any row.
    fn adapters(random: &mut Random, count: usize) -> Vec<i32> {
        let kind = random.below(4);
        let of_row = |row: usize| match kind {
            0 => 0,
            1 => 2,
            2 => row as i32 % 4,
            _ => random.below(5) as i32,
        };
        (0..count).map(of_row).collect()
    }

    /// What the kernels answer; nothing if the processor does not have them.
    fn compute(&self, kernels: usize, rows: &[f32], adapters: &[i32], base: &[f32]) -> Option<Vec<f32>> {
        assert_eq!(rows.len(), adapters.len() * self.inputs);
        let low_ranks: Vec<AskedLowRank> = self.low_ranks.iter().map(LowRank::asked).collect();
        let bytes = bytes_of(rows, self.is_bf16);
        let count = rows.len() / self.inputs;
        let size = if self.is_bf16 { 2 } else { 4 };
        let mut to = vec![0xff; count * self.results() * size];
        let asked = Asked {
            kernels,
            count,
            inputs: self.inputs,
            outputs: self.outputs,
            bits: self.bits,
            group: self.group,
            is_signed: c_int::from(self.is_signed),
            then: self.then,
            is_bf16: c_int::from(self.is_bf16),
            quants: self.quants.as_ptr(),
            zeros: self.zeros.as_ptr(),
            scales: self.scales.as_ptr(),
            norm: self.norm.as_ref().map_or(std::ptr::null(), Vec::as_ptr),
            epsilon: 1e-5,
            rows: bytes.as_ptr(),
            base: base.as_ptr(),
            to: to.as_mut_ptr(),
            low_ranks: low_ranks.as_ptr(),
            low_rank_count: low_ranks.len(),
            adapters: adapters.as_ptr(),
        };
        // SAFETY: all is as large as the sizes say and lives until the call returns.
        let done = unsafe { ovfleet_try_projection(&raw const asked) } != 0;
        done.then(|| floats_of(&to, self.is_bf16))
    }

    fn weight(&self, output: usize, input: usize) -> f64 {
        let at = output * self.inputs + input;
        let half = 1 << (self.bits - 1);
        let quant = i32::from(self.quants[at]);
        let quant = if self.is_signed && quant >= half { quant - 2 * half } else { quant };
        (f64::from(quant) - f64::from(self.zeros[at / self.group])) * f64::from(self.scales[at / self.group])
    }

    /// The same in f64, for a row; and the size of what was added up, by which results may be off.
    fn expected(&self, row: &[f32], adapter: i32, base: &[f32]) -> Vec<(f64, f64)> {
        let squares: f64 = row.iter().map(|&number| f64::from(number).powi(2)).sum();
        let root = (squares / self.inputs as f64 + 1e-5).sqrt();
        let number = |input: usize| match &self.norm {
            Some(norm) => f64::from(row[input]) / root * f64::from(norm[input]),
            None => f64::from(row[input]),
        };
        let numbers: Vec<f64> = (0..self.inputs).map(number).collect();
        // Rounding is off by half of a 127th of the largest number of 32, and not at all where rows are as they were made.
        let off_by =
            |group: &[f64]| group.iter().fold(0.0, |most: f64, number| most.max(number.abs())) / 254.0;
        let rounding: Vec<f64> = match &self.norm {
            Some(_) => numbers.chunks(ROUNDED).flat_map(|group| [off_by(group); ROUNDED]).collect(),
            None => vec![0.0; self.inputs],
        };
        let product = |output: usize| {
            let (mut sum, mut off) = (0.0, 0.0);
            for (input, (number, rounding)) in numbers.iter().zip(&rounding).enumerate() {
                let weight = self.weight(output, input);
                sum += weight * number;
                off += (weight * number).abs() * 1e-5 + weight.abs() * rounding;
            }
            for low_rank in self.low_ranks.iter().filter(|low_rank| low_rank.adapter == adapter) {
                let (change, size) = low_rank.change(output, &numbers);
                sum += change;
                off += size * 1e-5;
            }
            (sum, off)
        };
        let swish = |gate: f64| gate / (1.0 + (-gate).exp());
        (0..self.results())
            .map(|result| match (self.then, product(result)) {
                (ADDED, (sum, off)) => {
                    (sum + f64::from(base[result]), off + f64::from(base[result]).abs() * 1e-6)
                }
                (GATED, (gate, off)) => {
                    let (up, off_up) = product(result + self.results());
                    // The slope of swish is below 1.1.
                    (swish(gate) * up, off * 1.1 * (up.abs() + off_up) + swish(gate).abs() * off_up)
                }
                (_, found) => found,
            })
            .map(|(value, off)| {
                (value, off + if self.is_bf16 { value.abs() / 128.0 } else { value.abs() * 1e-5 } + 1e-30)
            })
            .collect()
    }
}

#[test]
fn kernels_compute_what_a_plain_computation_does() {
    let mut tried = 0;
    for kernels in 0..KERNEL_SETS {
        for seed in 0..120 {
            let mut random = Random(seed * 1000);
            let projection = Projection::random(&mut random);
            let count = random.pick(&[1, 2, 3, 4, 5, 6, 7, 13, 64, 150]);
            let rows = projection.rows(&mut random, count);
            let base: Vec<f32> = (0..count * projection.results()).map(|_| whole(&mut random)).collect();
            let adapters = Projection::adapters(&mut random, count);
            let Some(found) = projection.compute(kernels, &rows, &adapters, &base) else { continue };
            tried += 1;
            for (row, found) in found.chunks(projection.results()).enumerate() {
                let base = &base[row * projection.results()..];
                let numbers = &rows[row * projection.inputs..][..projection.inputs];
                let expected = projection.expected(numbers, adapters[row], base);
                for (result, (found, (expected, off))) in found.iter().zip(expected).enumerate() {
                    let Projection { inputs, outputs, bits, group, then, .. } = projection;
                    assert!(
                        (f64::from(*found) - expected).abs() <= off,
                        "kernels {kernels}, seed {seed}, {inputs} to {outputs} of {bits} bits by {group}, then {then}, \
                         row {row} of {count}, result {result}: {found}, not {expected}, off by more than {off}",
                    );
                }
            }
        }
    }
    // The plain ones run anywhere.
    assert!(tried >= 120, "{tried}");
}

#[test]
fn a_row_gives_the_same_to_the_bit_whatever_is_beside_it() {
    for seed in 0..20 {
        let mut random = Random(seed);
        let projection = Projection::random(&mut random);
        let rows = projection.rows(&mut random, 50);
        let adapters = Projection::adapters(&mut random, 50);
        let base = vec![1.0; 50 * projection.results()];
        for kernels in 0..KERNEL_SETS {
            let Some(together) = projection.compute(kernels, &rows, &adapters, &base) else { continue };
            let alone = rows
                .chunks(projection.inputs)
                .zip(&adapters)
                .flat_map(|(row, adapter)| projection.compute(kernels, row, &[*adapter], &base).unwrap())
                .collect::<Vec<f32>>();
            assert!(
                together.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{kernels}, {seed}"
            );
        }
    }
}
