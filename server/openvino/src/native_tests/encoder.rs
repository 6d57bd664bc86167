//! Compares the native projections, the native attention and the replaced convolutions of an image encoder with the
//! plugin's operations.

use std::path::Path;
use std::sync::Arc;

use super::Random;
use super::ir::{Ir, Operation, operation};
use crate::compiled_graph::CompiledGraph;
use crate::cpu::{CpuFeatures, Isa};
use crate::kernels::{
    ATTENTION_ISAS, BF16_ATTENTION_ISAS, NativeProjections, PROJECTION_ISAS, Precision, ProductPrecision,
};
use crate::runtime::{Core, Model};
use crate::shim;

/// Number of columns of the source, of the first destination, and of the second destination.
const SIZES: [usize; 3] = [64, 96, 32];

/// The largest allowed difference with kernels that round activations to 15 bits, relative to the largest expected
/// value.
const TOLERANCE: f32 = 1e-4;

fn floats(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(f32::to_le_bytes).collect()
}

/// An IR with two projections: one with a bias and with 8-bit weights, in the format to which `optimum-intel`
/// compresses weights, and one in f32.
fn encoder(random: &mut Random) -> Ir {
    let [columns, middle, last] = SIZES;
    let mut ir = Ir::default();
    let source = ir.input("source", "f32", "?,64");
    let mut number = |deviation: f32| (random.below(2001) as f32 / 1000.0 - 1.0) * deviation;
    let quants: Vec<u8> = (0..middle * columns).map(|_| (128.0 + number(127.0)) as u8).collect();
    let zeros: Vec<u8> = (0..middle).map(|_| (128.0 + number(8.0)) as u8).collect();
    // Like exported scales, these are numbers that f16 represents exactly, so packing does not round them.
    let scales = floats((0..middle).map(|_| (1500.0 + number(500.0)).round() / 1_048_576.0));
    let quants = ir.constants("u8", "96,64", &quants);
    let zeros = ir.constants("u8", "96,1", &zeros);
    let scales = ir.constants("f32", "96,1", &scales);
    let to_f32 = operation("Convert", "destination_type=\"f32\"");
    let broadcast = "auto_broadcast=\"numpy\"";
    let quants = ir.operation(&to_f32, &[quants]);
    let zeros = ir.operation(&to_f32, &[zeros]);
    let weights = ir.operation(&operation("Subtract", broadcast), &[quants, zeros]);
    let weights = ir.operation(&operation("Multiply", broadcast), &[weights, scales]);
    let product = operation("MatMul", "transpose_a=\"false\" transpose_b=\"true\"");
    let projected = ir.operation(&product, &[source, weights]);
    let bias = ir.constants("f32", "1,96", &floats((0..middle).map(|_| number(0.5))));
    let projected = ir.operation(&operation("Add", broadcast), &[projected, bias]);
    let weights = ir.constants("f32", "32,96", &floats((0..last * middle).map(|_| number(0.2))));
    let projected = ir.operation(&product, &[projected, weights]);
    ir.operation(&operation("Result", ""), &[projected]);
    ir
}

/// Compiles the encoder and returns it with the number of its native projections.
fn compiled(path: &Path, projections: Option<NativeProjections>) -> (CompiledGraph, usize) {
    let core = Arc::new(Core::new().unwrap());
    let mut model = shim::read_ir(&core, path).unwrap();
    let replaced = projections
        .map_or(0, |projections| shim::replace_encoder_projections(&mut model, projections).unwrap());
    (compiled_in_f32(core, &model), replaced)
}

fn compiled_in_f32(core: Arc<Core>, model: &Model) -> CompiledGraph {
    // Without the second property, the plugin rounds activations to 8 bits on some processors.
    let properties = [("INFERENCE_PRECISION_HINT", "f32"), ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()));
    let compiled = Arc::new(core.compile(model, "CPU", &properties).unwrap());
    CompiledGraph::new(core, compiled).unwrap()
}

fn run(graph: &mut CompiledGraph, source: &[f32]) -> Vec<f32> {
    graph.set_values("source", &[source.len() / SIZES[0], SIZES[0]], source).unwrap();
    graph.request.infer().unwrap();
    graph.request.output_at(0).unwrap().values::<f32>().unwrap().to_vec()
}

#[test]
fn native_projections_of_an_image_encoder_have_the_results_of_the_plugin() {
    let directory = tempfile::tempdir().unwrap();
    let mut random = Random(1);
    encoder(&mut random).write(directory.path());
    let path = directory.path().join("openvino_model.xml");
    let (mut plugin, _) = compiled(&path, None);
    let cpu = CpuFeatures::detect();
    for isa in PROJECTION_ISAS.into_iter().filter(|isa| cpu.has(*isa)) {
        let (products, tolerance) = match isa {
            Isa::Amx => (ProductPrecision::Bf16, 1e-2),
            _ => (ProductPrecision::Int16, TOLERANCE),
        };
        let native = NativeProjections { isa, products, activations: Precision::F32 };
        let (mut native, replaced) = compiled(&path, Some(native));
        assert_eq!(replaced, 1, "only integer weights are multiplied by native kernels");
        for rows in [1, 7, 40] {
            let source: Vec<f32> =
                (0..rows * SIZES[0]).map(|_| random.below(2001) as f32 / 1000.0 - 1.0).collect();
            let expected = run(&mut plugin, &source);
            let largest = expected.iter().map(|value| value.abs()).fold(0.0, f32::max);
            let found = run(&mut native, &source);
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                let difference = (found - expected).abs() / largest;
                assert!(difference < tolerance, "{isa}, {rows} rows: {found} instead of {expected}");
            }
        }
    }
}

#[test]
fn convolutions_of_patches_become_products_of_matrices() {
    // The kernel of the first convolution covers the whole input, that of the second one is applied at two positions,
    // the third convolution pads its input, and the last one has no output channels.
    let cases = [("2,5,4,4", "0,0", 1), ("2,5,2,4", "0,0", 0), ("2,5,4,4", "1,1", 0), ("0,5,4,4", "0,0", 0)];
    for (kernel, padding, expected) in cases {
        let directory = tempfile::tempdir().unwrap();
        let mut random = Random(1);
        let mut ir = Ir::default();
        let source = ir.input("source", "f32", "?,5,4,4");
        let size: usize = kernel.split(',').map(|size| size.parse::<usize>().unwrap()).product();
        let weights = floats((0..size).map(|_| random.below(2001) as f32 / 1000.0 - 1.0));
        let weights = ir.constants("f32", kernel, &weights);
        let attributes = format!(
            "strides=\"2,2\" dilations=\"1,1\" pads_begin=\"{padding}\" pads_end=\"{padding}\" auto_pad=\"explicit\""
        );
        let output = ir.operation(&operation("Convolution", &attributes), &[source, weights]);
        ir.operation(&operation("Result", ""), &[output]);
        ir.write(directory.path());
        let path = directory.path().join("openvino_model.xml");
        let core = Arc::new(Core::new().unwrap());
        let mut model = shim::read_ir(&core, &path).unwrap();
        let unchanged = (size > 0).then(|| compiled_in_f32(Arc::clone(&core), &model));
        assert_eq!(shim::replace_patch_convolutions(&mut model).unwrap(), expected, "{kernel}, {padding}");
        let Some(mut unchanged) = unchanged else { continue };
        let mut replaced = compiled_in_f32(core, &model);
        for patches in [1, 3] {
            let source: Vec<f32> =
                (0..patches * 5 * 4 * 4).map(|_| random.below(2001) as f32 / 1000.0 - 1.0).collect();
            let [expected, found] = [&mut unchanged, &mut replaced].map(|graph| {
                graph.set_values("source", &[patches, 5, 4, 4], &source).unwrap();
                graph.request.infer().unwrap();
                graph.request.output_at(0).unwrap().values::<f32>().unwrap().to_vec()
            });
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-4, "{found} instead of {expected}");
            }
        }
    }
}

/// The inputs of an attention operation.
const INPUTS: [&str; 3] = ["query", "key", "value"];

/// Compiles an attention operation with `heads` heads of `size` numbers for the kernels of `isa`, or for those of the
/// plugin. With `has_tiles`, the tokens belong to tiles of an image, and only tokens of the same tile attend to each
/// other.
fn attention(
    directory: &Path,
    isa: Option<Isa>,
    heads: usize,
    size: usize,
    has_tiles: bool,
) -> CompiledGraph {
    let mut ir = Ir::default();
    let tiles = if has_tiles { "?," } else { "" };
    let inputs = INPUTS.map(|name| ir.input(name, "f32", &format!("{tiles}{heads},?,{size}")));
    let attention =
        Operation { name: "ScaledDotProductAttention", opset: "opset13", attributes: "causal=\"false\"" };
    let output = ir.operation(&attention, &inputs);
    ir.operation(&operation("Result", ""), &[output]);
    ir.write(directory);
    let core = Arc::new(Core::new().unwrap());
    let mut model = shim::read_ir(&core, &directory.join("openvino_model.xml")).unwrap();
    let replaced = shim::replace_encoder_attention(&mut model, isa).unwrap();
    assert_eq!(replaced, usize::from(isa.is_some()));
    compiled_in_f32(core, &model)
}

#[test]
fn the_native_attention_of_an_image_encoder_has_the_results_of_the_plugin() {
    let directory = tempfile::tempdir().unwrap();
    let mut random = Random(1);
    let cpu = CpuFeatures::detect();
    // Kernels pad heads whose size is not a multiple of 32.
    for (heads, size, has_tiles) in [(2, 64, true), (3, 72, false), (1, 80, true), (4, 80, false)] {
        let mut plugin = attention(directory.path(), None, heads, size, has_tiles);
        for isa in ATTENTION_ISAS.into_iter().filter(|isa| cpu.has(*isa)) {
            let mut native = attention(directory.path(), Some(isa), heads, size, has_tiles);
            let tolerance = if BF16_ATTENTION_ISAS.contains(&isa) { 1e-2 } else { 1e-5 };
            // If the first inference had a single token, the plugin's attention would return wrong results in later
            // inferences with more tokens.
            for tokens in [33, 1, 150] {
                let shape = if has_tiles { vec![3, heads, tokens, size] } else { vec![heads, tokens, size] };
                let count = shape.iter().product();
                for name in INPUTS {
                    let values: Vec<f32> =
                        (0..count).map(|_| random.below(2001) as f32 / 1000.0 - 1.0).collect();
                    plugin.set_values(name, &shape, &values).unwrap();
                    native.set_values(name, &shape, &values).unwrap();
                }
                let [expected, found] = [&mut plugin, &mut native].map(|graph| {
                    graph.request.infer().unwrap();
                    graph.request.output_at(0).unwrap().values::<f32>().unwrap().to_vec()
                });
                let far = expected.iter().zip(&found).find(|(one, other)| (*one - *other).abs() > tolerance);
                assert_eq!(far, None, "{isa}, {heads} heads of {size}, {tokens} tokens");
            }
        }
    }
}
