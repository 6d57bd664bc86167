//! Maps the names of projections in GGUF files, IRs and adapters to common module names. Adapters and IRs use the
//! module names of the original model's code, with prefixes and, in IRs, suffixes. GGUF files use other names.
//!
//! This crate identifies a module by the part of its name that begins with the layers, such as
//! `layers.3.self_attn.q_proj`.

use std::collections::BTreeSet;

/// The prefixes that can precede `layers.` in the names of a language model's modules.
const PREFIXES: [&str; 6] = [
    "",
    "model.",
    "model.model.",
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
];

/// The names of a layer's projections in GGUF files and in the model's code.
const PROJECTIONS: [(&str, &str); 7] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Returns the module whose weight is a given tensor of a GGUF file. `tensors` are the names of the weights of all
/// projections.
pub(super) fn of_tensor(tensor: &str, tensors: &BTreeSet<&str>) -> Option<String> {
    let (layer, part) = tensor.strip_prefix("blk.")?.strip_suffix(".weight")?.split_once('.')?;
    let (_, module) = PROJECTIONS.iter().find(|(known, _)| *known == part)?;
    // If the layer has no gate matrix, `ffn_up` contains the gate and up projections, in this order.
    let is_fused = part == "ffn_up" && !tensors.contains(format!("blk.{layer}.ffn_gate.weight").as_str());
    let module = if is_fused { "mlp.gate_up_proj" } else { module };
    Some(format!("layers.{layer}.{module}"))
}

/// Returns the module that a node of an IR computes, given a name such as
/// `__module.model.layers.3.self_attn.q_proj/aten::linear/MatMul`.
pub(super) fn of_node(node: &str) -> Option<String> {
    let (path, _) = node.split_once('/')?;
    from_layers(path.strip_prefix("__module.")?)
}

/// Returns the module that tensors of an adapter change, given a path such as
/// `base_model.model.model.layers.3.self_attn.q_proj`.
pub(super) fn of_adapter(path: &str) -> Option<String> {
    from_layers(path.strip_prefix("base_model.model.").unwrap_or(path))
}

fn from_layers(path: &str) -> Option<String> {
    let at = path.find("layers.")?;
    let (before, module) = path.split_at(at);
    let (layer, rest) = module.strip_prefix("layers.")?.split_once('.')?;
    let is_layer = !layer.is_empty() && layer.bytes().all(|digit| digit.is_ascii_digit());
    (is_layer && !rest.is_empty() && PREFIXES.contains(&before)).then(|| module.to_owned())
}

/// Returns the projections that a fused projection of q, k and v consists of, in the order of its rows.
pub(super) fn parts_of_fused(module: &str) -> Option<[String; 3]> {
    let layer = module.strip_suffix("self_attn.qkv_proj")?;
    Some(["q", "k", "v"].map(|part| format!("{layer}self_attn.{part}_proj")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tensors_nodes_and_adapters_map_to_the_same_module() {
        let q = Some("layers.12.self_attn.q_proj".to_owned());
        let all = BTreeSet::from(["blk.12.ffn_gate.weight"]);
        assert_eq!(of_tensor("blk.12.attn_q.weight", &all), q);
        assert_eq!(of_node("__module.model.layers.12.self_attn.q_proj/ov_ext::linear/MatMul"), q);
        assert_eq!(of_node("__module.model.model.layers.12.self_attn.q_proj/aten::linear/MatMul"), q);
        assert_eq!(of_adapter("base_model.model.model.layers.12.self_attn.q_proj"), q);
        assert_eq!(of_adapter("base_model.model.model.language_model.layers.12.self_attn.q_proj"), q);
        assert_eq!(of_tensor("blk.12.ffn_up.weight", &all).as_deref(), Some("layers.12.mlp.up_proj"));
        let fused = of_tensor("blk.3.ffn_up.weight", &all);
        assert_eq!(fused.as_deref(), Some("layers.3.mlp.gate_up_proj"));
    }

    #[test]
    fn names_outside_the_projections_of_the_language_part_have_no_module() {
        let none = BTreeSet::new();
        for tensor in ["output.weight", "blk.0.ffn_gate_inp.weight", "blk.0.attn_q.bias", "blk.attn_q.weight"]
        {
            assert_eq!(of_tensor(tensor, &none), None, "{tensor}");
        }
        for path in [
            "base_model.model.lm_head",
            "base_model.model.model.vision_tower.layers.0.self_attn.q_proj",
            "base_model.model.model.layers.x.self_attn.q_proj",
            "base_model.model.model.layers.3",
            "base_model.model.model.layers.",
        ] {
            assert_eq!(of_adapter(path), None, "{path}");
        }
        assert_eq!(of_node("__module.lm_head/aten::linear/MatMul"), None);
        assert_eq!(of_node("aten::linear/MatMul"), None);
    }
}
