//! Compares the projection kernels with a plain computation in f64, with every instruction set of this processor, every
//! weight format and various numbers of rows. The AMX kernels also run on the C++ model of the tile registers, on any
//! processor.

use std::f64::consts::PI;
use std::ffi::c_int;
use std::io::Write as _;
use std::ops::Range;

use rustix::thread::{CpuSet, sched_getaffinity};

use super::{FloatType, KernelVariant, Random, THREADS, Threads, has_real_tiles, on_processors, on_threads};
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
    tile_model: c_int,
    is_signed: c_int,
    epilogue: c_int,
    is_bf16: c_int,
    quants: *const u8,
    zeros: *const f32,
    scales: *const f32,
    bias: *const f32,
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

impl KernelVariant {
    /// Whether the kernels round the source and the weights to bf16, instead of quantizing the source to integers.
    fn rounds_to_bf16(self) -> bool {
        !matches!(self, Self::Kernels(isa) if isa != Isa::Amx)
    }
}

/// Number of consecutive numbers of the source that share a scale.
const SRC_GROUP: usize = 32;

/// The operation after the multiplication, with its number in the shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Epilogue {
    None = 0,
    Residual = 1,
    SwiGlu = 2,
    ClampedSwiGlu = 3,
    Gelu = 4,
    GeluTanh = 5,
    Silu = 6,
    QuickGelu = 7,
}

impl Epilogue {
    /// Whether the first half of the columns, after an activation function, is multiplied by the second half.
    fn is_gated(self) -> bool {
        matches!(self, Self::SwiGlu | Self::ClampedSwiGlu)
    }

    /// Returns the activation of a number, or `None` if the epilogue does not apply an activation to each number
    /// separately.
    fn activation(self, x: f64) -> Option<f64> {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        Some(match self {
            Self::None | Self::Residual | Self::SwiGlu | Self::ClampedSwiGlu => return None,
            Self::Gelu => 0.5 * x * (1.0 + error_function(x / 2.0_f64.sqrt())),
            Self::GeluTanh => x * sigmoid((8.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))),
            Self::Silu => x * sigmoid(x),
            Self::QuickGelu => x * sigmoid(1.702 * x),
        })
    }
}

/// The integral of `2 / sqrt(pi) * exp(-t^2)` from 0 to `x`, by Simpson's rule.
fn error_function(x: f64) -> f64 {
    const STEPS: u32 = 200;
    let end = x.clamp(-6.0, 6.0);
    let width = end / f64::from(STEPS);
    let weight = |step: u32| match step {
        0 | STEPS => 1.0,
        step if step % 2 == 1 => 4.0,
        _ => 2.0,
    };
    let terms = (0..=STEPS).map(|step| weight(step) * (-(width * f64::from(step)).powi(2)).exp());
    2.0 / PI.sqrt() * width / 3.0 * terms.sum::<f64>()
}

/// The value of `bits` that denotes MXFP4 weights, whose quants are codes of E2M1.
const E2M1_BITS: usize = 5;

/// The value of `bits` that denotes weights whose quants are passed as bytes and stored by the kernels in 6 bits.
const SIX_BITS: usize = 6;

/// The magnitudes of the codes of E2M1 from 0 to 7. Bit 3 of a code is the sign.
const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The largest relative error of rounding to bf16, which has 8 significant bits.
const BF16_ROUNDING: f64 = 1.0 / 256.0;

/// The magnitude above which a number of a row is certainly an outlier.
fn outlier_limit(row: &[f64]) -> f64 {
    let squares: f64 = row.iter().map(|number| number * number).sum();
    4.0 * (squares / row.len() as f64).sqrt() * (1.0 + 1e-5)
}

/// An integer from -127 to 127.
fn whole(random: &mut Random) -> f32 {
    random.below(255) as f32 - 127.0
}

/// A quant in the format of `ovfleet_projection_test`.
fn random_quant(random: &mut Random, bits: usize, is_signed: bool) -> u8 {
    match bits {
        8 => random.below(256) as u8,
        SIX_BITS => (random.below(64) as u8).wrapping_sub(if is_signed { 32 } else { 0 }),
        _ => random.below(16) as u8,
    }
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

    /// Returns up to three adapters. The rows are divided into one to three parts, and each adapter changes each part
    /// with a probability of two thirds.
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

    /// Returns the product for one column of the destination.
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
    /// The sum of the absolute values of the terms, a small fraction of which is an upper bound for the rounding error.
    magnitude: f64,
}

/// An expected value, and the largest allowed difference of the kernels' value from it.
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
    /// The number of 8-bit terms in which the source is multiplied. With one term, outliers are multiplied separately.
    terms: usize,
    is_signed: bool,
    epilogue: Epilogue,
    activations: FloatType,
    quants: Vec<u8>,
    zeros: Vec<f32>,
    scales: Vec<f32>,
    bias: Option<Vec<f32>>,
    norm: Option<Vec<f32>>,
    loras: Vec<Lora>,
}

impl Projection {
    fn random(random: &mut Random) -> Self {
        let k = 32 * random.pick(&[1, 2, 5, 8, 18, 48]);
        // Each block has 32 columns, except the last one, which may have fewer.
        let n = random.pick(&[2, 32, 50, 96, 200]);
        Self::of_size(random, k, n)
    }

    fn of_size(random: &mut Random, k: usize, n: usize) -> Self {
        let epilogue = random.pick(&[
            Epilogue::None,
            Epilogue::Residual,
            Epilogue::SwiGlu,
            Epilogue::ClampedSwiGlu,
            Epilogue::Gelu,
            Epilogue::GeluTanh,
            Epilogue::Silu,
            Epilogue::QuickGelu,
        ]);
        let may_be_bf16 = epilogue != Epilogue::Residual && epilogue.activation(0.0).is_none();
        if k.is_multiple_of(256) && random.below(3) == 0 {
            return Self::with_super_scales(random, k, n);
        }
        let bits = random.pick(&[4, E2M1_BITS, SIX_BITS, 8]);
        let group = random.pick(&[16, 32, 64, 128, k]);
        let is_possible = k.is_multiple_of(group) && (group != 16 || bits == 4 || bits == 8);
        let group = if is_possible { group } else { 32 };
        let is_signed = random.below(2) == 0;
        let groups = n * (k / group);
        // Per-channel zero points may be integers in the range of the quants.
        let has_whole_zeros = group == k && random.below(2) == 0;
        let zeros_count = match bits {
            4 => 16,
            8 => 256,
            _ => 64,
        };
        let first_zero = if is_signed { -(zeros_count as f32) / 2.0 } else { 0.0 };
        let mut zero = || match has_whole_zeros {
            true => first_zero + random.below(zeros_count) as f32,
            false => random.below(64) as f32 / 4.0,
        };
        let zeros = (0..groups).map(|_| zero()).collect();
        // The smallest of these steps produces scales that f16 cannot represent without the scale factor.
        let step = random.pick(&[1.0, 0.001_953_125, 1.0 / 1_073_741_824.0]);
        Self {
            k,
            n,
            bits,
            group,
            terms: random.pick(&[1, 2]),
            is_signed,
            epilogue,
            activations: FloatType::of(may_be_bf16 && random.below(2) == 0),
            quants: (0..n * k).map(|_| random_quant(random, bits, is_signed)).collect(),
            zeros,
            scales: (0..groups).map(|_| (random.below(15) + 1) as f32 / 16.0 * step).collect(),
            bias: (random.below(3) == 0).then(|| (0..n).map(|_| whole(random)).collect()),
            norm: (random.below(2) == 0).then(|| (0..k).map(|_| random.below(9) as f32 / 4.0).collect()),
            loras: Lora::all(random, k, n),
        }
    }

    /// A projection with weights in the format Q6_K.
    fn with_super_scales(random: &mut Random, k: usize, n: usize) -> Self {
        assert!(k.is_multiple_of(256));
        let scales = (0..n * k / 256).flat_map(|_| {
            // Each scale is the product of an integer and an f16 super-scale, which 16 scales share. The super-scale
            // may be subnormal or zero.
            let step = random.pick(&[1.0 / 1024.0, 1.0 / 524_288.0, 1.0 / 16_777_216.0]);
            let factor = (random.below(2048) as f32 - 100.0) * step;
            (0..16).map(|_| (random.below(256) as f32 - 128.0) * factor).collect::<Vec<f32>>()
        });
        let scales = scales.collect();
        let plain = Self::of_size(random, 32, n);
        Self {
            k,
            bits: SIX_BITS,
            group: 16,
            is_signed: true,
            quants: (0..n * k).map(|_| random_quant(random, SIX_BITS, true)).collect(),
            zeros: vec![0.0; n * k / 16],
            scales,
            norm: plain.norm.map(|_| (0..k).map(|_| random.below(9) as f32 / 4.0).collect()),
            loras: Lora::all(random, k, n),
            ..plain
        }
    }

    /// Reduces the projection to the multiplication by integers: removes the norm, the adapters, the bias, the
    /// epilogue, signs, codes of E2M1 and bf16 activations.
    fn set_plain(&mut self) {
        (self.norm, self.epilogue, self.activations, self.is_signed) =
            (None, Epilogue::None, FloatType::F32, false);
        self.bias = None;
        self.bits = if self.bits >= SIX_BITS { 8 } else { 4 };
        self.zeros.iter_mut().for_each(|zero| *zero = zero.abs() % 16.0);
        self.loras.clear();
    }

    /// Number of columns of the destination.
    fn columns(&self) -> usize {
        if self.epilogue.is_gated() { self.n / 2 } else { self.n }
    }

    /// The largest magnitude of a quant of the source.
    fn quant_max(&self) -> f32 {
        if self.terms == 1 { 127.0 } else { 127.0 * 128.0 }
    }

    /// A source of `m` rows. Quantization changes its values only slightly, and not at all if the
    /// projection has no norm.
    fn source(&self, random: &mut Random, m: usize) -> Vec<f32> {
        let max = self.quant_max();
        // With bf16, use only multiples of 1/127 of the largest number, because bf16 represents these multiples
        // exactly.
        let step = if self.activations == FloatType::Bf16 { max / 127.0 } else { 1.0 };
        let values = (2.0 * max / step) as usize + 1;
        let mut src: Vec<f32> = (0..m * self.k).map(|_| random.below(values) as f32 * step - max).collect();
        for group in src.chunks_mut(SRC_GROUP) {
            // Each group contains `max`, which determines the scale of the group. A group may also contain an outlier.
            let at = random.below(SRC_GROUP);
            group[at] = max;
            if self.terms == 1 && random.below(2) == 0 {
                let outlier = &mut group[(at + 1) % SRC_GROUP];
                *outlier = (127.0_f32 * 128.0).copysign(*outlier);
            }
        }
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

    /// Returns the destination, or `None` if the processor does not have the kernels.
    fn compute(
        &self,
        variant: KernelVariant,
        src: &[f32],
        adapters: &[i32],
        residual: &[f32],
    ) -> Option<Vec<f32>> {
        assert_eq!(src.len(), adapters.len() * self.k);
        let loras: Vec<RawLoraTest> = self.loras.iter().map(Lora::raw).collect();
        let bytes = self.activations.encode(src);
        let m = src.len() / self.k;
        let mut dst = vec![0xff; m * self.columns() * self.activations.bytes()];
        let test = RawProjectionTest {
            isa: variant.isa() as usize,
            m,
            k: self.k,
            n: self.n,
            bits: self.bits,
            group: self.group,
            terms: self.terms,
            tile_model: c_int::from(variant.is_tile_model()),
            is_signed: c_int::from(self.is_signed),
            epilogue: self.epilogue as c_int,
            is_bf16: c_int::from(self.activations == FloatType::Bf16),
            quants: self.quants.as_ptr(),
            zeros: self.zeros.as_ptr(),
            scales: self.scales.as_ptr(),
            bias: self.bias.as_ref().map_or(std::ptr::null(), Vec::as_ptr),
            norm: self.norm.as_ref().map_or(std::ptr::null(), Vec::as_ptr),
            epsilon: 1e-5,
            src: bytes.as_ptr(),
            residual: residual.as_ptr(),
            dst: dst.as_mut_ptr(),
            loras: loras.as_ptr(),
            lora_count: loras.len(),
            adapters: adapters.as_ptr(),
        };
        // SAFETY: all tensors have the sizes in the struct, and live until the call returns.
        let was_run = unsafe { ovfleet_test_projection(&raw const test) } != 0;
        // The planner never chooses the portable kernels.
        if variant != KernelVariant::Kernels(Isa::Portable) {
            variant.assert_agrees_with_plan(&PROJECTION_ISAS, was_run);
        }
        was_run.then(|| self.activations.decode(&dst))
    }

    /// Whether bf16 exactly represents the rows that are multiplied by the weights.
    fn is_exact_in_bf16(&self) -> bool {
        self.norm.is_none() && (self.terms == 1 || self.activations == FloatType::Bf16)
    }

    fn weight(&self, row: usize, column: usize) -> f64 {
        let at = row * self.k + column;
        let scale = f64::from(self.scales[at / self.group]);
        if self.bits == E2M1_BITS {
            let code = usize::from(self.quants[at]);
            return scale * if code & 8 == 0 { E2M1[code & 7] } else { -E2M1[code & 7] };
        }
        // 6-bit quants are stored as bytes, and signed ones are sign-extended.
        let half = if self.bits == 4 { 8 } else { 128 };
        let quant = i32::from(self.quants[at]);
        let quant = if self.is_signed && quant >= half { quant - 2 * half } else { quant };
        (f64::from(quant) - f64::from(self.zeros[at / self.group])) * scale
    }

    /// The destination of one row, computed in f64.
    fn expected(
        &self,
        variant: KernelVariant,
        row: &[f32],
        adapter: i32,
        residual: &[f32],
    ) -> Vec<ExpectedValue> {
        let squares: f64 = row.iter().map(|&number| f64::from(number).powi(2)).sum();
        let rms = (squares / self.k as f64 + 1e-5).sqrt();
        let number = |at: usize| match &self.norm {
            Some(norm) => f64::from(row[at]) / rms * f64::from(norm[at]),
            None => f64::from(row[at]),
        };
        let numbers: Vec<f64> = (0..self.k).map(number).collect();
        // Outliers are not quantized. Other numbers are off by at most half a step. The step of a group of 32 is the
        // largest magnitude of these other numbers, divided by `quant_max`. Without a norm, quantization is exact.
        let steps = 2.0 * f64::from(self.quant_max());
        let is_quantized = |number: f64| self.terms > 1 || number.abs() <= outlier_limit(&numbers);
        let rounding_of = |group: &[f64]| {
            let magnitudes = group.iter().map(|number| number.abs());
            let step = magnitudes.filter(|number| is_quantized(*number)).fold(0.0, f64::max) / steps;
            group.iter().map(|number| if is_quantized(*number) { step } else { 0.0 }).collect::<Vec<_>>()
        };
        let rounding: Vec<f64> = match &self.norm {
            Some(_) => numbers.chunks(SRC_GROUP).flat_map(rounding_of).collect(),
            None => vec![0.0; self.k],
        };
        let product = |column: usize| {
            let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[column]));
            let (mut value, mut tolerance) = (bias, bias.abs() * 1e-5);
            for (at, (number, rounding)) in numbers.iter().zip(&rounding).enumerate() {
                let weight = self.weight(column, at);
                value += weight * number;
                let magnitude = (weight * number).abs();
                tolerance += magnitude * 1e-5;
                tolerance += if !variant.rounds_to_bf16() {
                    weight.abs() * rounding
                } else if self.is_exact_in_bf16() {
                    magnitude * BF16_ROUNDING
                } else {
                    magnitude * 2.01 * BF16_ROUNDING
                };
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
                Epilogue::Gelu | Epilogue::GeluTanh | Epilogue::Silu | Epilogue::QuickGelu => {
                    let activated = self.epilogue.activation(value).unwrap_or(value);
                    // The slopes of these activations are below 1.2, and the error of the kernels' erf is below 1.5e-7.
                    ExpectedValue { value: activated, tolerance: tolerance * 1.2 + value.abs() * 1e-6 }
                }
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
                Epilogue::ClampedSwiGlu => {
                    let up = product(column + self.columns());
                    let gate = value.min(7.0);
                    let gated = gate / (1.0 + (-1.702 * gate).exp());
                    let shifted = up.value.clamp(-7.0, 7.0) + 1.0;
                    // The clamps limit the effect of large errors. The slope of the gate's activation is below 1.2.
                    let tolerance = tolerance.min(14.0) * 1.2 * (shifted.abs() + up.tolerance.min(14.0))
                        + gated.abs() * up.tolerance.min(14.0);
                    ExpectedValue {
                        value: gated * shifted,
                        tolerance: tolerance + (gated * shifted).abs() * 1e-5,
                    }
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

/// Fails unless the kernels compute a step of `m` rows within the error that their rounding allows. Returns whether the
/// processor has the kernels.
fn check(variant: KernelVariant, projection: &Projection, random: &mut Random, m: usize) -> bool {
    let src = projection.source(random, m);
    let columns = projection.columns();
    let residual: Vec<f32> = (0..m * columns).map(|_| whole(random)).collect();
    let adapters = Projection::adapters(random, m);
    let Some(dst) = projection.compute(variant, &src, &adapters, &residual) else { return false };
    // All rows of small steps are checked. In other steps, only the rows around the ends of tiles and parts are
    // checked.
    let is_checked = |row: usize| m <= 150 || [0, 1, 15, 16, 31].contains(&(row % 64)) || row + 2 > m;
    for (row, found) in dst.chunks(columns).enumerate().filter(|(row, _)| is_checked(*row)) {
        let src = &src[row * projection.k..][..projection.k];
        let expected = projection.expected(variant, src, adapters[row], &residual[row * columns..]);
        for (column, (found, ExpectedValue { value, tolerance })) in found.iter().zip(expected).enumerate() {
            let Projection { k, n, bits, group, epilogue, .. } = projection;
            assert!(
                (f64::from(*found) - value).abs() <= tolerance,
                "{variant:?}, K {k}, N {n}, {bits} bits in groups of {group}, {epilogue:?}, row {row} of {m}, column {column}: \
                 {found}, not {value}, off by more than {tolerance}",
            );
        }
    }
    true
}

#[test]
fn kernels_compute_the_same_as_a_plain_computation() {
    let mut tried = 0;
    for variant in KernelVariant::all() {
        for seed in 0..120 {
            let mut random = Random(seed * 1000);
            let projection = Projection::random(&mut random);
            let m = random.pick(&[1, 2, 3, 4, 5, 6, 7, 13, 64, 150]);
            tried += usize::from(check(variant, &projection, &mut random, m));
        }
    }
    // The portable kernels and the portable model run on every processor.
    assert!(tried >= 2 * 120, "{tried}");
}

/// 6-bit weights produce bitwise the same results as the same weights in 8 bits, if f16 represents the scales of all
/// groups.
#[test]
fn six_bits_compute_the_same_bits_as_eight() {
    let mut tried = 0;
    for variant in KernelVariant::all() {
        for seed in 0..60 {
            let mut random = Random(seed);
            let (k, n) = (random.pick(&[256, 768, 2048]), random.pick(&[2, 34, 96]));
            let m = random.pick(&[1, 2, 3, 6, 7, 20, 64]);
            let mut projection = Projection::with_super_scales(&mut random, k, n);
            for scales in projection.scales.chunks_mut(16) {
                // The scales are products of 8-bit and 3-bit integers, divided by 64, so f16 represents them exactly.
                let factor = (random.below(7) + 1) as f32 / 64.0;
                scales.fill_with(|| (random.below(256) as f32 - 128.0) * factor);
            }
            if seed % 2 == 0 {
                // Without super-scales, each group has 32 weights and a zero point.
                projection.group = 32;
                projection.scales.truncate(n * k / 32);
                projection.zeros = (0..n * k / 32).map(|_| random.below(16) as f32).collect();
                projection.is_signed = seed % 4 == 0;
                let is_signed = projection.is_signed;
                projection.quants.fill_with(|| random_quant(&mut random, SIX_BITS, is_signed));
            }
            // Make most numbers small, so that the sums of their products with 8-bit quants are exact in f32.
            let mut src = projection.source(&mut random, m);
            let max = projection.quant_max();
            for number in src.iter_mut().filter(|number| number.abs() != max) {
                *number = (*number / 16.0).trunc();
            }
            let adapters = Projection::adapters(&mut random, m);
            let residual: Vec<f32> = (0..m * projection.columns()).map(|_| whole(&mut random)).collect();
            let bits = |projection: &Projection| {
                let dst = projection.compute(variant, &src, &adapters, &residual)?;
                Some(dst.into_iter().map(f32::to_bits).collect::<Vec<u32>>())
            };
            let Some(six) = bits(&projection) else { continue };
            projection.bits = 8;
            assert!(Some(six) == bits(&projection), "{variant:?}, {seed}");
            tried += 1;
        }
    }
    assert!(tried >= 2 * 60, "{tried}");
}

#[test]
fn kernels_for_amx_compute_every_number_of_rows() {
    let is_amx = |variant: &KernelVariant| variant.rounds_to_bf16();
    for variant in KernelVariant::all().filter(is_amx) {
        for m in (1..=70).chain([255, 256, 257, 512]) {
            let mut random = Random(m as u64);
            let (mut k, mut n) = (32 * random.pick(&[1, 2, 9]), random.pick(&[2, 34, 50]));
            if m > 70 {
                // The weights have more columns than the kernels dequantize at a time.
                (k, n) = (2048 + 32 * (m % 3), 34);
            }
            let projection = Projection::of_size(&mut random, k, n);
            let was_run = check(variant, &projection, &mut random, m);
            if !was_run {
                assert!(variant != KernelVariant::TileModel(Isa::Portable));
                break;
            }
        }
    }
}

/// The tiles of the processor and the C++ model produce the same bits.
#[test]
fn tiles_of_the_processor_and_their_model_agree() {
    if !has_real_tiles() {
        return;
    }
    for seed in 0..40 {
        let mut random = Random(seed);
        let projection = Projection::random(&mut random);
        let m = random.pick(&[1, 5, 16, 17, 33, 100, 300]);
        let src = projection.source(&mut random, m);
        let adapters = Projection::adapters(&mut random, m);
        let residual = vec![1.0; m * projection.columns()];
        let bits = |variant| {
            let dst = projection.compute(variant, &src, &adapters, &residual).unwrap();
            dst.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        // Compare with the model whose vectors have the same width, because the width determines the order in which the
        // terms of norms and adapters are added.
        assert!(
            bits(KernelVariant::Kernels(Isa::Amx)) == bits(KernelVariant::TileModel(Isa::Avx512)),
            "{seed}"
        );
    }
}

/// A destination in bf16 contains the rounded numbers of a destination in f32, so that the next projection reads the
/// same numbers from either.
#[test]
fn amx_rounds_activations_to_nearest_for_a_destination_in_bf16() {
    const ROWS: usize = 37;
    let rounded = |number: f32| {
        let bits = number.to_bits();
        f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
    };
    for variant in KernelVariant::all().filter(|variant| variant.rounds_to_bf16()) {
        for epilogue in [Epilogue::Gelu, Epilogue::GeluTanh, Epilogue::Silu, Epilogue::QuickGelu] {
            let mut random = Random(epilogue as u64);
            let plain = Projection::of_size(&mut random, 64, 50);
            let mut projection = Projection { epilogue, loras: Vec::new(), ..plain };
            // bf16 represents small integers exactly.
            let src: Vec<f32> = (0..ROWS * 64).map(|_| random.below(17) as f32 - 8.0).collect();
            let mut output = |activations| {
                projection.activations = activations;
                projection.compute(variant, &src, &[0; ROWS], &[])
            };
            let Some(exact) = output(FloatType::F32) else { continue };
            let expected: Vec<f32> = exact.into_iter().map(rounded).collect();
            assert!(output(FloatType::Bf16) == Some(expected), "{variant:?}, {epilogue:?}");
        }
    }
}

#[test]
fn the_noise_of_amx_is_that_of_bf16() {
    let mut random = Random(7);
    let (k, n, m) = (576, 64, 40);
    let mut projection = Projection::of_size(&mut random, k, n);
    projection.set_plain();
    // Approximately normally distributed numbers that use all bits of f32.
    let number = |random: &mut Random| {
        (0..8).map(|_| random.below(1 << 20) as f32 / (1 << 20) as f32 - 0.5).sum::<f32>()
    };
    let src: Vec<f32> = (0..m * k).map(|_| number(&mut random)).collect();
    // The kernels store scales in f16, whose 11 significant bits represent these scales exactly.
    for scale in &mut projection.scales {
        *scale = (256 + random.below(768)) as f32 / 1024.0;
    }
    for zero in &mut projection.zeros {
        *zero = random.below(1024) as f32 / 64.0;
    }
    for variant in KernelVariant::all().filter(|variant| variant.rounds_to_bf16()) {
        let Some(dst) = projection.compute(variant, &src, &vec![0; m], &[]) else { continue };
        let (mut errors, mut values) = (0.0, 0.0);
        for (row, found) in dst.chunks(n).enumerate() {
            for (column, found) in found.iter().enumerate() {
                let product = |at: usize| {
                    let group = (column * k + at) / projection.group;
                    let quant = f64::from(projection.quants[column * k + at]);
                    let weight =
                        (quant - f64::from(projection.zeros[group])) * f64::from(projection.scales[group]);
                    weight * f64::from(src[row * k + at])
                };
                let expected: f64 = (0..k).map(product).sum();
                errors += (f64::from(*found) - expected).powi(2);
                values += expected.powi(2);
            }
        }
        let noise = (errors / values).sqrt();
        assert!((0.0015..0.0026).contains(&noise), "{variant:?}: {noise}");
    }
}

#[test]
fn a_number_that_is_nan_changes_only_its_row() {
    let mut random = Random(3);
    let mut projection = Projection::of_size(&mut random, 96, 50);
    projection.set_plain();
    let m = 37;
    let src = projection.source(&mut random, m);
    let (mut with_nan, row) = (src.clone(), 20);
    // Discarding the lower half of the first NaN would turn it into infinity. Rounding the second one would turn it
    // into zero.
    with_nan[row * 96 + 7] = f32::from_bits(0x7f80_0001);
    with_nan[row * 96 + 50] = f32::from_bits(0x7fff_ffff);
    for variant in KernelVariant::all().filter(|variant| variant.rounds_to_bf16()) {
        let Some(expected) = projection.compute(variant, &src, &vec![0; m], &[]) else { continue };
        let found = projection.compute(variant, &with_nan, &vec![0; m], &[]).unwrap();
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let is_same = found.to_bits() == expected.to_bits();
            assert!(if at / 50 == row { found.is_nan() } else { is_same }, "{variant:?}, {at}: {found}");
        }
    }
}

#[test]
fn a_row_does_not_depend_on_other_rows() {
    for seed in 0..20 {
        let mut random = Random(seed);
        let mut projection = Projection::random(&mut random);
        let mut m = random.pick(&[50, 16, 31, 33]);
        if seed == 0 {
            // With this many rows, each thread usually multiplies a part of the rows.
            (projection, m) = (Projection::of_size(&mut random, 288, 50), 300);
        }
        let k = projection.k;
        let src = projection.source(&mut random, m);
        let adapters = Projection::adapters(&mut random, m);
        let columns = projection.columns();
        let residual = vec![1.0; m * columns];
        for variant in KernelVariant::all() {
            let Some(together) = projection.compute(variant, &src, &adapters, &residual) else { continue };
            // Compute single rows, and parts that do not end at tile boundaries.
            for part in [1, 40] {
                let parts = src.chunks(part * k).zip(adapters.chunks(part));
                let apart: Vec<f32> = parts
                    .flat_map(|(rows, adapters)| {
                        projection.compute(variant, rows, adapters, &residual).unwrap()
                    })
                    .collect();
                let is_same = together.iter().zip(&apart).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(is_same && together.len() == apart.len(), "{variant:?}, {seed}, {part}");
            }
        }
    }
}

/// Threads divide steps of many rows by rows, steps of few rows by columns of the destination, and a single row also by
/// columns of the source.
#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    // With one row, the columns of the source are divided into parts for the first size with 2, 3 or 4 threads, for the
    // second size with 16 threads, and for the third size with 2 threads. In the third size, the second part is shorter
    // than the first. The columns are not divided if the threads outnumber the blocks of destination columns.
    const DIVIDED: [(usize, usize); 3] = [(4096, 160), (2048, 600), (2080, 96)];
    const UNDIVIDED: [(usize, usize); 2] = [(1024, 50), (4160, 32)];
    let one_row = DIVIDED.into_iter().map(|size| (size, 1)).cycle().take(75);
    let rows = DIVIDED.into_iter().chain(UNDIVIDED).flat_map(|size| [1, 3, 8, 40, 140].map(|m| (size, m)));
    let mut tried = 0;
    for (seed, ((k, n), m)) in one_row.chain(rows).enumerate() {
        if m * k * n > 20 << 20 {
            continue;
        }
        let mut random = Random(seed as u64);
        let projection = Projection::of_size(&mut random, k, n);
        let src = projection.source(&mut random, m);
        let adapters = Projection::adapters(&mut random, m);
        let residual = vec![1.0; m * projection.columns()];
        for variant in KernelVariant::all() {
            let bits = |threads| {
                let dst = on_threads(threads, || projection.compute(variant, &src, &adapters, &residual));
                dst.map(|dst| dst.into_iter().map(f32::to_bits).collect::<Vec<u32>>())
            };
            let Some(expected) = bits(Threads::ONE) else { continue };
            tried += 1;
            for threads in THREADS {
                assert!(
                    bits(threads).as_ref() == Some(&expected),
                    "{variant:?}, K {k}, N {n}, {m} rows, {threads:?}"
                );
            }
        }
    }
    assert!(tried >= 80, "{tried}");
}

/// The thread that loads a model starts other threads, which inherit its binding to processors, so packing the weights
/// must not change this binding.
#[test]
fn packing_does_not_bind_the_calling_thread() {
    let allowed = sched_getaffinity(None).unwrap();
    let is_allowed = |number: &u32| allowed.is_set(*number as usize);
    let processors: Vec<u32> = (0..CpuSet::MAX_CPU as u32).filter(is_allowed).collect();
    if processors.len() < 2 {
        // libtest hides what `println` prints in a test that passes.
        let _ = writeln!(std::io::stderr(), "SKIPPED: a test of bound threads, which needs two processors");
        return;
    }
    let (first, second) = processors.split_at(processors.len() / 2);
    let projection = Projection::of_size(&mut Random(1), 64, 200);
    let affinity = on_processors(2, &[first, second], || {
        // Without rows, the weights are packed but not multiplied.
        assert!(projection.compute(KernelVariant::Kernels(Isa::Portable), &[], &[], &[]).is_some());
        sched_getaffinity(None).unwrap()
    });
    assert_eq!(affinity, allowed);
}
