use server_gguf::f16_to_f32;

use super::*;

/// The values that the shim's graph computes from a matrix.
fn values(matrix: &Matrix) -> Vec<f32> {
    let nibble = |bytes: &[u8], i: usize| bytes[i / 2] >> (4 * (i % 2)) & 15;
    (0..matrix.rows * matrix.columns)
        .map(|i| {
            let quant = match &matrix.quants {
                Quants::U4(bytes) => f32::from(nibble(bytes, i)),
                Quants::U8(bytes) => f32::from(bytes[i]),
                Quants::I8(bytes) => f32::from(bytes[i].cast_signed()),
                Quants::F4E2M1(bytes) => {
                    let code = usize::from(nibble(bytes, i));
                    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code % 8];
                    if code < 8 { magnitude } else { -magnitude }
                }
                other => panic!("not quantized: {other:?}"),
            };
            let group = i / matrix.group;
            let zero = match &matrix.zeros {
                Zeros::None => 0.0,
                Zeros::U4(bytes) => f32::from(nibble(bytes, group)),
                Zeros::F16(values) => f16_to_f32(values[group]),
            };
            (quant - zero) * matrix.scales[group]
        })
        .collect()
}

/// Returns one group of each kind: ordinary, all positive, all negative, constant, nearly constant, zero, and with a
/// negative scale. Most of these groups have difficult zero points.
fn affine(bits: u32) -> Affine {
    let scale = vec![0.01, 0.01, 0.01, 0.0, 1e-7, 0.0, -0.02];
    let min = vec![0.0733, -0.5, 0.4, 0.25, -3.0, 0.0, 0.011];
    let quants = (0..scale.len() * 32).map(|i| (i * 7 % (1 << bits)) as u8).collect();
    Affine { bits, group: 32, zero: 0, quants, scale, min }
}

fn worst(affine: &Affine) -> Vec<f32> {
    let (quants, scales, zeros) = asymmetric(affine.clone());
    let columns = affine.quants.len();
    let (fits_six_bits, has_super_scales) = (true, false);
    let matrix =
        Matrix { rows: 1, columns, group: 32, quants, scales, zeros, fits_six_bits, has_super_scales };
    matrix.assert_lengths();
    let written = values(&matrix);
    (0..affine.scale.len())
        .map(|group| {
            (group * 32..(group + 1) * 32).map(|i| (written[i] - affine.value(i)).abs()).fold(0.0, f32::max)
        })
        .collect()
}

#[test]
fn zero_points_that_are_not_integers_are_exact_up_to_the_rounding_of_f16() {
    for bits in [4, 5] {
        let affine = affine(bits);
        for (group, error) in worst(&affine).into_iter().enumerate() {
            let bound = affine.min[group].abs() / 2048.0 + 1e-7;
            assert!(error <= bound, "{bits} bits, group {group}: {error} > {bound}");
        }
    }
}

#[test]
fn zero_points_that_are_integers_stay_exact() {
    for (bits, zero) in [(4, 8), (5, 16), (6, 32), (8, 128)] {
        let quants: Vec<u8> = (0..64).map(|i| (i * 37 % (1 << bits)) as u8).collect();
        let affine = Affine { bits, group: 32, zero, quants, scale: vec![0.5, -0.25], min: Vec::new() };
        let (quants, scales, zeros) = symmetric(affine.clone());
        let (fits_six_bits, has_super_scales) = (bits <= 6, false);
        let matrix = Matrix {
            rows: 2,
            columns: 32,
            group: 32,
            quants,
            scales,
            zeros,
            fits_six_bits,
            has_super_scales,
        };
        matrix.assert_lengths();
        let expected: Vec<f32> = (0..64).map(|i| affine.value(i)).collect();
        assert_eq!(values(&matrix), expected, "{bits} bits");
    }
}

#[test]
fn mxfp4_stays_exact() {
    let blocks: Vec<u8> = (0..4u8)
        .flat_map(|row| std::iter::once(120 + 3 * row).chain((0..16).map(move |i| (i * 17) ^ row)))
        .collect();
    let matrix = Matrix::new(TensorType::Mxfp4, MatrixShape { rows: 2, columns: 64 }, &blocks).unwrap();
    matrix.assert_lengths();
    let mut expected = vec![0.0; 128];
    server_gguf::dequantize(TensorType::Mxfp4, &blocks, &mut expected).unwrap();
    assert_eq!(values(&matrix), expected);
}

#[test]
fn rows_are_permuted_evens_first_within_each_head() {
    let mut rows: Vec<u8> = (0..8).flat_map(|row| [row, row + 100]).collect();
    permute_rows(&mut rows, 2, 4);
    assert_eq!(rows, [0, 100, 2, 102, 1, 101, 3, 103, 4, 104, 6, 106, 5, 105, 7, 107]);
}
