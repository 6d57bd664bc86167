//! Compares the projection kernels with a plain computation in f64: every instruction set of this processor, every form of weights,
//! any number of rows.

use std::ffi::c_int;
use std::ops::Range;

use super::{FloatType, Random, assert_agrees_with_plan};
use crate::cpu::Isa;
use crate::kernels::PROJECTION_ISAS;

/// The same as `ovfleet_projection_test` in `shim/shim.h`.
#[repr(C)]
struct RawProjectionTest {
    isa: usize,
    m: usize,
    k: usize,
    n: usize,
    bits: usize,
    group: usize,
    terms: usize,
    is_signed: c_int,
    epilogue: c_int,
    is_bf16: c_int,
    quants: *const u8,
    zeros: *const f32,
    scales: *const f32,
    norm: *const f32,
    epsilon: f32,
    src: *const u8,
    residual: *const f32,
    dst: *mut u8,
    loras: *const RawLoraTest,
    lora_count: usize,
    adapters: *const i32,
}

/// The same as `ovfleet_lora_test` in `shim/shim.h`.
#[repr(C)]
struct RawLoraTest {
    adapter: i32,
    first: usize,
    rows: usize,
    ranks: usize,
    down: *const f32,
    up: *const f32,
}

unsafe extern "C" {
    fn ovfleet_test_projection(test: *const RawProjectionTest) -> c_int;
}

/// Numbers of the source that share a scale.
const SRC_GROUP: usize = 32;

/// The operation behind the multiplication, with its number in the shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Epilogue {
    None = 0,
    Residual = 1,
    SwiGlu = 2,
}

/// An integer from -127 to 127.
fn whole(random: &mut Random) -> f32 {
    random.below(255) as f32 - 127.0
}

/// The matrices of an adapter for some of the weight's rows.
struct Lora {
    adapter: i32,
    rows: Range<usize>,
    ranks: usize,
    down: Vec<f32>,
    up: Vec<f32>,
}

impl Lora {
    fn random(random: &mut Random, adapter: i32, rows: Range<usize>, k: usize) -> Self {
        let ranks = random.pick(&[1, 4, 5, 16, 21]);
        let down = (0..ranks * k).map(|_| whole(random) / 1024.0).collect();
        let up = (0..rows.len() * ranks).map(|_| whole(random) / 64.0).collect();
        Self { adapter, rows, ranks, down, up }
    }

    /// Up to three adapters. The rows are divided into one to three parts, and each adapter changes two thirds of the parts.
    fn all(random: &mut Random, k: usize, n: usize) -> Vec<Self> {
        let parts = random.pick(&[1, 2, 3]).min(n);
        let ends: Vec<usize> = (1..=parts).map(|part| n * part / parts).collect();
        let mut all = Vec::new();
        for adapter in 1..=random.below(4) as i32 {
            let mut first = 0;
            for &end in &ends {
                if random.below(3) > 0 {
                    all.push(Self::random(random, adapter, first..end, k));
                }
                first = end;
            }
        }
        all
    }

    fn raw(&self) -> RawLoraTest {
        let Self { adapter, rows, ranks, down, up } = self;
        let (first, count) = (rows.start, rows.len());
        RawLoraTest {
            adapter: *adapter,
            first,
            rows: count,
            ranks: *ranks,
            down: down.as_ptr(),
            up: up.as_ptr(),
        }
    }

    /// The product for one column of the destination.
    fn product(&self, column: usize, numbers: &[f64]) -> LoraProduct {
        let mut product = LoraProduct { sum: 0.0, magnitude: 0.0 };
        if !self.rows.contains(&column) {
            return product;
        }
        for rank in 0..self.ranks {
            let up = f64::from(self.up[(column - self.rows.start) * self.ranks + rank]);
            for (down, number) in self.down[rank * numbers.len()..].iter().zip(numbers) {
                let term = up * f64::from(*down) * number;
                product.sum += term;
                product.magnitude += term.abs();
            }
        }
        product
    }
}

struct LoraProduct {
    sum: f64,
    /// The sum of the absolute values of the terms, which bounds the rounding error.
    magnitude: f64,
}

/// An expected value, and how much the kernels may differ from it.
#[derive(Clone, Copy)]
struct ExpectedValue {
    value: f64,
    tolerance: f64,
}

struct Projection {
    k: usize,
    n: usize,
    bits: usize,
    group: usize,
    /// The number of 8-bit terms in which the source is multiplied.
    terms: usize,
    is_signed: bool,
    epilogue: Epilogue,
    activations: FloatType,
    quants: Vec<u8>,
    zeros: Vec<f32>,
    scales: Vec<f32>,
    norm: Option<Vec<f32>>,
    loras: Vec<Lora>,
}

impl Projection {
    fn random(random: &mut Random) -> Self {
        let k: usize = 32 * random.pick(&[1, 2, 5, 18, 48]);
        let epilogue = random.pick(&[Epilogue::None, Epilogue::Residual, Epilogue::SwiGlu]);
        // Blocks have 32 columns, and the last one may have fewer.
        let n = random.pick(&[2, 32, 50, 96, 200]);
        let group = random.pick(&[16, 32, 64, k]);
        let group = if k.is_multiple_of(group) { group } else { 32 };
        let groups = n * (k / group);
        let bits = random.pick(&[4, 8]);
        // Scales are f16 in files, and may be very small.
        let step = random.pick(&[1.0, 0.001_953_125, 1.0 / 1_073_741_824.0]);
        Self {
            k,
            n,
            bits,
            group,
            terms: random.pick(&[1, 2]),
            is_signed: random.below(2) == 0,
            epilogue,
            activations: FloatType::of(epilogue != Epilogue::Residual && random.below(2) == 0),
            quants: (0..n * k).map(|_| random.below(1 << bits) as u8).collect(),
            zeros: (0..groups).map(|_| random.below(64) as f32 / 4.0).collect(),
            scales: (0..groups).map(|_| (random.below(15) + 1) as f32 / 16.0 * step).collect(),
            norm: (random.below(2) == 0).then(|| (0..k).map(|_| random.below(9) as f32 / 4.0).collect()),
            loras: Lora::all(random, k, n),
        }
    }

    /// Number of columns of the destination.
    fn columns(&self) -> usize {
        if self.epilogue == Epilogue::SwiGlu { self.n / 2 } else { self.n }
    }

    /// The largest magnitude of a quant of the source.
    fn quant_max(&self) -> f32 {
        if self.terms == 1 { 127.0 } else { 127.0 * 128.0 }
    }

    /// A source of `m` rows. Quantizing it changes it little, and not at all without a norm.
    fn source(&self, random: &mut Random, m: usize) -> Vec<f32> {
        let max = self.quant_max();
        // bf16 represents the integers of the first term only.
        let step = if self.activations == FloatType::Bf16 { max / 127.0 } else { 1.0 };
        let values = (2.0 * max / step) as usize + 1;
        let mut src: Vec<f32> = (0..m * self.k).map(|_| random.below(values) as f32 * step - max).collect();
        src.chunks_mut(SRC_GROUP).for_each(|group| group[random.below(SRC_GROUP)] = max);
        src
    }

    /// The adapters of `m` rows: no adapter, the same for all rows, different ones in turn, or random ones.
    fn adapters(random: &mut Random, m: usize) -> Vec<i32> {
        let kind = random.below(4);
        let of_row = |row: usize| match kind {
            0 => 0,
            1 => 2,
            2 => row as i32 % 4,
            _ => random.below(5) as i32,
        };
        (0..m).map(of_row).collect()
    }

    /// The destination. `None` if the processor does not have the kernels.
    fn compute(&self, isa: Isa, src: &[f32], adapters: &[i32], residual: &[f32]) -> Option<Vec<f32>> {
        assert_eq!(src.len(), adapters.len() * self.k);
        let loras: Vec<RawLoraTest> = self.loras.iter().map(Lora::raw).collect();
        let bytes = self.activations.encode(src);
        let m = src.len() / self.k;
        let mut dst = vec![0xff; m * self.columns() * self.activations.bytes()];
        let test = RawProjectionTest {
            isa: isa as usize,
            m,
            k: self.k,
            n: self.n,
            bits: self.bits,
            group: self.group,
            terms: self.terms,
            is_signed: c_int::from(self.is_signed),
            epilogue: self.epilogue as c_int,
            is_bf16: c_int::from(self.activations == FloatType::Bf16),
            quants: self.quants.as_ptr(),
            zeros: self.zeros.as_ptr(),
            scales: self.scales.as_ptr(),
            norm: self.norm.as_ref().map_or(std::ptr::null(), Vec::as_ptr),
            epsilon: 1e-5,
            src: bytes.as_ptr(),
            residual: residual.as_ptr(),
            dst: dst.as_mut_ptr(),
            loras: loras.as_ptr(),
            lora_count: loras.len(),
            adapters: adapters.as_ptr(),
        };
        // SAFETY: all tensors have the sizes that the struct gives, and live until the call returns.
        let was_run = unsafe { ovfleet_test_projection(&raw const test) } != 0;
        if isa != Isa::Portable {
            assert_agrees_with_plan(isa, &PROJECTION_ISAS, was_run);
        }
        was_run.then(|| self.activations.decode(&dst))
    }

    fn weight(&self, row: usize, column: usize) -> f64 {
        let at = row * self.k + column;
        let half = 1 << (self.bits - 1);
        let quant = i32::from(self.quants[at]);
        let quant = if self.is_signed && quant >= half { quant - 2 * half } else { quant };
        (f64::from(quant) - f64::from(self.zeros[at / self.group])) * f64::from(self.scales[at / self.group])
    }

    /// The destination of one row, computed in f64.
    fn expected(&self, row: &[f32], adapter: i32, residual: &[f32]) -> Vec<ExpectedValue> {
        let squares: f64 = row.iter().map(|&number| f64::from(number).powi(2)).sum();
        let rms = (squares / self.k as f64 + 1e-5).sqrt();
        let number = |at: usize| match &self.norm {
            Some(norm) => f64::from(row[at]) / rms * f64::from(norm[at]),
            None => f64::from(row[at]),
        };
        let numbers: Vec<f64> = (0..self.k).map(number).collect();
        // Quantization is off by half of a step, of which the largest number of 32 has `quant_max`, and exact without a norm.
        let steps = 2.0 * f64::from(self.quant_max());
        let rounding_of =
            |group: &[f64]| group.iter().fold(0.0, |most: f64, number| most.max(number.abs())) / steps;
        let rounding: Vec<f64> = match &self.norm {
            Some(_) => numbers.chunks(SRC_GROUP).flat_map(|group| [rounding_of(group); SRC_GROUP]).collect(),
            None => vec![0.0; self.k],
        };
        let product = |column: usize| {
            let (mut value, mut tolerance) = (0.0, 0.0);
            for (at, (number, rounding)) in numbers.iter().zip(&rounding).enumerate() {
                let weight = self.weight(column, at);
                value += weight * number;
                tolerance += (weight * number).abs() * 1e-5 + weight.abs() * rounding;
            }
            for lora in self.loras.iter().filter(|lora| lora.adapter == adapter) {
                let LoraProduct { sum, magnitude } = lora.product(column, &numbers);
                value += sum;
                tolerance += magnitude * 1e-5;
            }
            ExpectedValue { value, tolerance }
        };
        let swish = |gate: f64| gate / (1.0 + (-gate).exp());
        let epilogue = |column: usize| {
            let ExpectedValue { value, tolerance } = product(column);
            match self.epilogue {
                Epilogue::None => ExpectedValue { value, tolerance },
                Epilogue::Residual => {
                    let residual = f64::from(residual[column]);
                    ExpectedValue { value: value + residual, tolerance: tolerance + residual.abs() * 1e-6 }
                }
                Epilogue::SwiGlu => {
                    let up = product(column + self.columns());
                    // The slope of swish is below 1.1.
                    let tolerance =
                        tolerance * 1.1 * (up.value.abs() + up.tolerance) + swish(value).abs() * up.tolerance;
                    ExpectedValue { value: swish(value) * up.value, tolerance }
                }
            }
        };
        let output_rounding = if self.activations == FloatType::Bf16 { 1.0 / 128.0 } else { 1e-5 };
        (0..self.columns())
            .map(epilogue)
            .map(|ExpectedValue { value, tolerance }| ExpectedValue {
                value,
                tolerance: tolerance + value.abs() * output_rounding + 1e-30,
            })
            .collect()
    }
}

#[test]
fn kernels_compute_the_same_as_a_plain_computation() {
    let mut tried = 0;
    for isa in Isa::ALL {
        for seed in 0..120 {
            let mut random = Random(seed * 1000);
            let projection = Projection::random(&mut random);
            let m = random.pick(&[1, 2, 3, 4, 5, 6, 7, 13, 64, 150]);
            let src = projection.source(&mut random, m);
            let columns = projection.columns();
            let residual: Vec<f32> = (0..m * columns).map(|_| whole(&mut random)).collect();
            let adapters = Projection::adapters(&mut random, m);
            let Some(dst) = projection.compute(isa, &src, &adapters, &residual) else { continue };
            tried += 1;
            for (row, found) in dst.chunks(columns).enumerate() {
                let src = &src[row * projection.k..][..projection.k];
                let expected = projection.expected(src, adapters[row], &residual[row * columns..]);
                for (column, (found, ExpectedValue { value, tolerance })) in
                    found.iter().zip(expected).enumerate()
                {
                    let Projection { k, n, bits, group, terms, epilogue, .. } = projection;
                    assert!(
                        (f64::from(*found) - value).abs() <= tolerance,
                        "{isa}, seed {seed}, K {k}, N {n}, {terms} terms, {bits} bits in groups of {group}, {epilogue:?}, row {row} of {m}, \
                         column {column}: {found}, not {value}, off by more than {tolerance}",
                    );
                }
            }
        }
    }
    // The portable kernels run on every processor.
    assert!(tried >= 120, "{tried}");
}

#[test]
fn a_row_does_not_depend_on_other_rows() {
    for seed in 0..20 {
        let mut random = Random(seed);
        let projection = Projection::random(&mut random);
        let src = projection.source(&mut random, 50);
        let adapters = Projection::adapters(&mut random, 50);
        let residual = vec![1.0; 50 * projection.columns()];
        for isa in Isa::ALL {
            let Some(together) = projection.compute(isa, &src, &adapters, &residual) else { continue };
            let alone = src
                .chunks(projection.k)
                .zip(&adapters)
                .flat_map(|(row, adapter)| projection.compute(isa, row, &[*adapter], &residual).unwrap())
                .collect::<Vec<f32>>();
            assert!(together.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa}, {seed}");
        }
    }
}
