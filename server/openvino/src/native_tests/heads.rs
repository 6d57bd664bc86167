//! Checks that a user's model whose attention has no heads or heads of size 0 is rejected, because the kernels divide
//! other sizes by these numbers.

use super::ir::{Ir, Operation, config};
use crate::load::load;

/// The number of KV heads of an attention layer, and the sizes of their keys and values.
struct Heads {
    number: usize,
    key_size: usize,
    value_size: usize,
}

/// A model with one attention layer, whose queries, keys and values are inputs of the model.
fn ir(heads: &Heads) -> Ir {
    let Heads { number, key_size, value_size } = heads;
    let mut ir = Ir::default();
    ir.input("input_ids", "i64", "?,?");
    let beams = ir.input("beam_idx", "i32", "?");
    let axis = ir.constant("i64", &0_i64.to_le_bytes());
    let queries = ir.input("queries", "f32", &format!("?,?,?,{key_size}"));
    let [keys, values] = [("keys", key_size), ("values", value_size)].map(|(name, size)| {
        let shape = format!("?,{number},?,{size}");
        let variable = format!("variable_id=\"{name}\" variable_type=\"f32\" variable_shape=\"{shape}\"");
        let state = |name| Operation { name, opset: "opset6", attributes: &variable };
        let gather = Operation { name: "Gather", opset: "opset8", attributes: "batch_dims=\"0\"" };
        let concat = Operation { name: "Concat", opset: "opset1", attributes: "axis=\"2\"" };
        let initial = ir.input(&format!("initial_{name}"), "f32", &shape);
        let past = ir.operation(&state("ReadValue"), &[initial]);
        let past = ir.operation(&gather, &[past, beams, axis]);
        let new = ir.input(name, "f32", &shape);
        let all = ir.operation(&concat, &[past, new]);
        ir.operation(&state("Assign"), &[all]);
        all
    });
    let mask = ir.input("mask", "f32", "?,1,?,?");
    let scale = ir.constant("f32", &1_f32.to_le_bytes());
    let attention =
        Operation { name: "ScaledDotProductAttention", opset: "opset13", attributes: "causal=\"false\"" };
    let output = ir.operation(&attention, &[queries, keys, values, mask, scale]);
    ir.operation(&Operation { name: "Result", opset: "opset1", attributes: "" }, &[output]);
    ir
}

/// Returns the message of the error with which a model is rejected.
fn rejection(heads: &Heads) -> String {
    let directory = tempfile::tempdir().unwrap();
    ir(heads).write(directory.path());
    load(&config(directory.path()), &mut |_| {}).err().unwrap().chain()
}

#[test]
fn an_attention_without_heads_or_with_heads_of_size_0_is_rejected() {
    let valid = || Heads { number: 2, key_size: 64, value_size: 64 };
    for (heads, attribute) in
        [(Heads { number: 0, ..valid() }, "num_k_heads"), (Heads { key_size: 0, ..valid() }, "k_head_size")]
    {
        let error = rejection(&heads);
        assert!(error.contains(&format!("has {attribute} = 0; it must be from 1 to 65536")), "{error}");
    }
    // OpenVINO itself rejects heads whose values have size 0.
    let error = rejection(&Heads { value_size: 0, ..valid() });
    assert!(error.starts_with("failed to convert the model to paged attention: "), "{error}");
    // The same model with valid heads is rejected later, because it has no output for logits.
    let error = rejection(&valid());
    assert!(error.contains("'logits' is not found"), "{error}");
}
