//! Checks, for different forms of weights, that projections are merged and replaced only if their results do not
//! change.

use std::path::Path;
use std::sync::Arc;

use super::Random;
use super::ir::{Ir, Operation, operation};
use crate::compiled_graph::CompiledGraph;
use crate::cpu::{CpuFeatures, Isa};
use crate::kernels::{NativeProjections, PROJECTION_ISAS, Precision, ProductPrecision};
use crate::runtime::{Core, Model};
use crate::shim;

/// Number of columns of each weight, and of its rows unless a test specifies them.
const SIZE: usize = 64;

const TO_F32: Operation<'_> = operation("Convert", "destination_type=\"f32\"");
const ADD: Operation<'_> = operation("Add", "auto_broadcast=\"numpy\"");
const SUBTRACT: Operation<'_> = operation("Subtract", "auto_broadcast=\"numpy\"");
const MULTIPLY: Operation<'_> = operation("Multiply", "auto_broadcast=\"numpy\"");
const MATMUL: Operation<'_> = operation("MatMul", "transpose_a=\"false\" transpose_b=\"true\"");

/// The scales of a weight: their shape, and the largest of them.
type Scales<'a> = (&'a str, f32);

/// An IR whose projections multiply the same source by integer weights with these scales.
fn model(scales: &[Scales<'_>]) -> Ir {
    let (mut ir, mut random) = (Ir::default(), Random(1));
    let source = ir.input("source", "f32", "?,64");
    for (shape, largest) in scales {
        let quants: Vec<u8> = (0..SIZE * SIZE).map(|_| random.below(255) as u8).collect();
        let quants = ir.constants("i8", "64,64", &quants);
        let quants = ir.operation(&TO_F32, &[quants]);
        let count: usize = shape.split(',').map(|size| size.parse::<usize>().unwrap()).product();
        // These numbers are exact in f16, so packing does not round them.
        let scale = |index: usize| largest * (1.0 - (index % 32) as f32 / 64.0);
        let scales: Vec<u8> = (0..count).flat_map(|index| scale(index).to_le_bytes()).collect();
        let scales = ir.constants("f32", shape, &scales);
        let weights = ir.operation(&MULTIPLY, &[quants, scales]);
        let projected = ir.operation(&MATMUL, &[source, weights]);
        ir.operation(&operation("Result", ""), &[projected]);
    }
    ir
}

/// An IR whose projections multiply the same source by 4-bit weights. `rows` are the numbers of rows of the weights;
/// each row has a zero point.
fn model_with_zero_points(rows: &[usize]) -> Ir {
    let (mut ir, mut random) = (Ir::default(), Random(2));
    let source = ir.input("source", "f32", "?,64");
    for &rows in rows {
        let mut quants = |shape: &str, count: usize| {
            let bytes: Vec<u8> = (0..count.div_ceil(2)).map(|_| random.below(256) as u8).collect();
            let quants = ir.constants("u4", shape, &bytes);
            ir.operation(&TO_F32, &[quants])
        };
        let weights = quants(&format!("{rows},64"), rows * SIZE);
        let zeros = quants(&format!("{rows},1"), rows);
        let scales: Vec<u8> = (0..rows).flat_map(|row| (0.5 + row as f32).to_le_bytes()).collect();
        let scales = ir.constants("f32", &format!("{rows},1"), &scales);
        let weights = ir.operation(&SUBTRACT, &[weights, zeros]);
        let weights = ir.operation(&MULTIPLY, &[weights, scales]);
        let projected = ir.operation(&MATMUL, &[source, weights]);
        ir.operation(&operation("Result", ""), &[projected]);
    }
    ir
}

/// The outputs of a model for some rows, after a rewrite.
fn outputs(path: &Path, count: usize, rewrite: impl FnOnce(&mut Model)) -> Vec<Vec<f32>> {
    let core = Arc::new(Core::new().unwrap());
    let mut model = shim::read_ir(&core, path).unwrap();
    rewrite(&mut model);
    let properties = [("INFERENCE_PRECISION_HINT", "f32"), ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()));
    let compiled = Arc::new(core.compile(&model, "CPU", &properties).unwrap());
    let mut graph = CompiledGraph::new(core, compiled).unwrap();
    let source: Vec<f32> = (0..3 * SIZE).map(|index| (index % 17) as f32 - 8.0).collect();
    graph.set_values("source", &[3, SIZE], &source).unwrap();
    graph.request.infer().unwrap();
    (0..count)
        .map(|index| graph.request.output_at(index).unwrap().values::<f32>().unwrap().to_vec())
        .collect()
}

/// Asserts that the rewrite does not change the outputs of a model whose projections have these scales. `rewrite`
/// returns the number of projections that it changed, which must be `changed`.
fn assert_unchanged(scales: &[Scales<'_>], changed: usize, rewrite: impl Fn(&mut Model) -> usize) {
    assert_same_outputs(&model(scales), scales.len(), |model| {
        assert_eq!(rewrite(model), changed, "{scales:?}")
    });
}

/// Asserts that the rewrite does not change the `count` outputs of a model.
fn assert_same_outputs(model: &Ir, count: usize, rewrite: impl FnOnce(&mut Model)) {
    let directory = tempfile::tempdir().unwrap();
    model.write(directory.path());
    let path = directory.path().join("openvino_model.xml");
    let expected = outputs(&path, count, |_| {});
    let found = outputs(&path, count, rewrite);
    for (found, expected) in found.iter().zip(&expected) {
        let largest = expected.iter().map(|value| value.abs()).fold(0.0, f32::max);
        let difference = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert_eq!(found.len(), expected.len());
        assert!(
            difference < 1e-4 * largest,
            "the outputs differ by {difference} (largest output: {largest})"
        );
    }
}

#[test]
fn merged_projections_have_the_results_of_separate_ones() {
    let directory = tempfile::tempdir().unwrap();
    let merge = |model: &mut Model| {
        let merged = shim::merge_projections(model).unwrap();
        // Saving the model computes the content of the merged constants.
        shim::save(model, &directory.path().join("merged.xml"), &directory.path().join("merged.bin"))
            .unwrap();
        merged
    };
    // Weights with a scale for each row are merged, as are weights with the same single scale.
    assert_unchanged(&[("64,1", 0.5), ("64,1", 0.25), ("64,1", 0.125)], 3, merge);
    assert_unchanged(&[("1,1", 0.5), ("1,1", 0.5)], 2, merge);
    assert_unchanged(&[("1,1", 0.5), ("1,1", 0.25), ("1,1", 0.5)], 2, merge);
    // Weights with a scale for each column are not merged, and neither are weights of different forms.
    assert_unchanged(&[("1,64", 0.5), ("1,64", 0.25)], 0, merge);
    assert_unchanged(&[("1,1", 0.5), ("64,1", 0.25), ("1,64", 0.5), ("64,1", 0.5)], 2, merge);
    // The second matrix is not merged, because its three 4-bit zero points do not fill whole bytes.
    assert_same_outputs(&model_with_zero_points(&[2, 3, 2]), 3, |model| assert_eq!(merge(model), 2));
}

#[test]
fn native_projections_have_scales_of_rows_only() {
    let cpu = CpuFeatures::detect();
    for isa in PROJECTION_ISAS.into_iter().filter(|isa| *isa != Isa::Amx && cpu.has(*isa)) {
        let native =
            NativeProjections { isa, products: ProductPrecision::Int16, activations: Precision::F32 };
        let replace = |model: &mut Model| shim::replace_encoder_projections(model, native).unwrap();
        assert_unchanged(&[("64,1", 0.5), ("1,1", 0.25)], 2, replace);
        assert_unchanged(&[("1,64", 0.5)], 0, replace);
    }
}

/// An IR with two projections, like those in the blocks of image encoders: with biases, an activation between them, and
/// the source added to the result.
fn model_of_block(activation: &Operation<'_>, parameter: Option<f32>) -> Ir {
    let (mut ir, mut random) = (Ir::default(), Random(3));
    let source = ir.input("source", "f32", "?,64");
    let mut project = |ir: &mut Ir, source| {
        let quants: Vec<u8> = (0..SIZE * SIZE).map(|_| random.below(255) as u8).collect();
        let quants = ir.constants("i8", "64,64", &quants);
        let quants = ir.operation(&TO_F32, &[quants]);
        let scales: Vec<u8> = (0..SIZE).flat_map(|_| (1.0_f32 / 2048.0).to_le_bytes()).collect();
        let scales = ir.constants("f32", "64,1", &scales);
        let weights = ir.operation(&MULTIPLY, &[quants, scales]);
        let product = ir.operation(&MATMUL, &[source, weights]);
        let bias: Vec<u8> = (0..SIZE).flat_map(|index| (index as f32 / 8.0 - 4.0).to_le_bytes()).collect();
        let bias = ir.constants("f32", "1,64", &bias);
        ir.operation(&ADD, &[product, bias])
    };
    let inner = project(&mut ir, source);
    let mut inputs = vec![inner];
    inputs.extend(parameter.map(|number| ir.constant("f32", &number.to_le_bytes())));
    let inner = ir.operation(activation, &inputs);
    let outer = project(&mut ir, inner);
    let sum = ir.operation(&ADD, &[source, outer]);
    ir.operation(&operation("Result", ""), &[sum]);
    ir
}

#[test]
fn native_projections_compute_the_biases_activations_and_residuals_around_them() {
    let directory = tempfile::tempdir().unwrap();
    let [xml, bin] = ["xml", "bin"].map(|ending| directory.path().join("replaced").with_extension(ending));
    let gelu = |mode| Operation { name: "Gelu", opset: "opset7", attributes: mode };
    let swish = Operation { name: "Swish", opset: "opset4", attributes: "" };
    let cpu = CpuFeatures::detect();
    for isa in PROJECTION_ISAS.into_iter().filter(|isa| *isa != Isa::Amx && cpu.has(*isa)) {
        let native =
            NativeProjections { isa, products: ProductPrecision::Int16, activations: Precision::F32 };
        for (activation, parameter) in [
            (&gelu("approximation_mode=\"ERF\""), None),
            (&gelu("approximation_mode=\"TANH\""), None),
            (&swish, None),
            (&swish, Some(1.702)),
        ] {
            assert_same_outputs(&model_of_block(activation, parameter), 1, |model| {
                assert_eq!(shim::replace_encoder_projections(model, native).unwrap(), 2);
                shim::save(model, &xml, &bin).unwrap();
                let graph = std::fs::read_to_string(&xml).unwrap();
                let has = |name: &str| graph.contains(&format!("type=\"{name}\""));
                assert!(!has("Add") && !has(activation.name), "{graph}");
            });
        }
    }
}

#[test]
fn a_chain_of_operations_that_read_their_input_twice_takes_no_time() {
    let directory = tempfile::tempdir().unwrap();
    let mut ir = Ir::default();
    let source = ir.input("source", "f32", "?,64");
    let mut weight = ir.constants("f32", "64,64", &vec![0; SIZE * SIZE * 4]);
    for _ in 0..100 {
        weight = ir.operation(&MULTIPLY, &[weight, weight]);
    }
    let projected = ir.operation(&MATMUL, &[source, weight]);
    ir.operation(&operation("Result", ""), &[projected]);
    ir.write(directory.path());
    let mut model =
        shim::read_ir(&Core::new().unwrap(), &directory.path().join("openvino_model.xml")).unwrap();
    assert_eq!(shim::merge_projections(&mut model).unwrap(), 0);
}
