//! Forms of weights whose projections must not be merged or replaced, because their results would change.

use std::path::Path;
use std::sync::Arc;

use super::Random;
use super::ir::{Ir, Operation, operation};
use crate::compiled_graph::CompiledGraph;
use crate::cpu::{CpuFeatures, Isa};
use crate::kernels::{NativeProjections, PROJECTION_ISAS, Precision, ProductPrecision};
use crate::runtime::{Core, Model};
use crate::shim;

/// Number of columns and of rows of each weight.
const SIZE: usize = 64;

const TO_F32: Operation<'_> = operation("Convert", "destination_type=\"f32\"");
const MULTIPLY: Operation<'_> = operation("Multiply", "auto_broadcast=\"numpy\"");
const MATMUL: Operation<'_> = operation("MatMul", "transpose_a=\"false\" transpose_b=\"true\"");

/// The scales of a weight: their shape, and the largest of them.
type Scales<'a> = (&'a str, f32);

/// An IR with projections of the same source by integer weights with these scales.
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

/// The outputs of a model for some rows, after a rewrite.
fn outputs(path: &Path, count: usize, rewrite: impl FnOnce(&mut Model)) -> Vec<Vec<f32>> {
    let core = Arc::new(Core::new().unwrap());
    let mut model = core.read_model(path).unwrap();
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

/// Asserts that the rewrite does not change the outputs of a model whose projections have these scales. `rewrite` returns
/// the number of projections that it changed, which must be `changed`.
fn assert_unchanged(scales: &[Scales<'_>], changed: usize, rewrite: impl Fn(&mut Model) -> usize) {
    let folder = tempfile::tempdir().unwrap();
    model(scales).write(folder.path());
    let path = folder.path().join("openvino_model.xml");
    let expected = outputs(&path, scales.len(), |_| {});
    let found = outputs(&path, scales.len(), |model| assert_eq!(rewrite(model), changed, "{scales:?}"));
    for (found, expected) in found.iter().zip(&expected) {
        let largest = expected.iter().map(|value| value.abs()).fold(0.0, f32::max);
        let difference = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert_eq!(found.len(), expected.len());
        assert!(difference < 1e-4 * largest, "{scales:?}: {difference} of {largest}");
    }
}

#[test]
fn merged_projections_have_the_results_of_separate_ones() {
    let folder = tempfile::tempdir().unwrap();
    let merge = |model: &mut Model| {
        let merged = shim::merge_projections(model).unwrap();
        // Computes the content of the merged constants.
        shim::save(model, &folder.path().join("merged.xml"), &folder.path().join("merged.bin")).unwrap();
        merged
    };
    // A scale for each row, and one for the whole weight.
    assert_unchanged(&[("64,1", 0.5), ("64,1", 0.25), ("64,1", 0.125)], 3, merge);
    assert_unchanged(&[("1,1", 0.5), ("1,1", 0.5)], 2, merge);
    assert_unchanged(&[("1,1", 0.5), ("1,1", 0.25), ("1,1", 0.5)], 2, merge);
    // A scale for each column, and different forms.
    assert_unchanged(&[("1,64", 0.5), ("1,64", 0.25)], 0, merge);
    assert_unchanged(&[("1,1", 0.5), ("64,1", 0.25), ("1,64", 0.5), ("64,1", 0.5)], 2, merge);
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

#[test]
fn a_chain_of_operations_that_read_their_input_twice_takes_no_time() {
    let folder = tempfile::tempdir().unwrap();
    let mut ir = Ir::default();
    let source = ir.input("source", "f32", "?,64");
    let mut weight = ir.constants("f32", "64,64", &vec![0; SIZE * SIZE * 4]);
    for _ in 0..100 {
        weight = ir.operation(&MULTIPLY, &[weight, weight]);
    }
    let projected = ir.operation(&MATMUL, &[source, weight]);
    ir.operation(&operation("Result", ""), &[projected]);
    ir.write(folder.path());
    let mut model = Core::new().unwrap().read_model(&folder.path().join("openvino_model.xml")).unwrap();
    assert_eq!(shim::merge_projections(&mut model).unwrap(), 0);
}
