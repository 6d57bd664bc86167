//! The parts of `adapter_config.json` that determine how an adapter is computed. Known options that are not supported
//! are rejected, and unknown options are ignored.

use serde::Deserialize;
use serde_json::{Map, Value};

/// The configuration of an adapter, without the members that describe its training.
#[derive(Debug, Deserialize)]
pub(super) struct PeftConfig {
    peft_type: String,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    use_qalora: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    bias: Option<String>,
    #[serde(default)]
    lora_bias: bool,
    #[serde(default)]
    init_lora_weights: Value,
    #[serde(default)]
    modules_to_save: Value,
    #[serde(default)]
    layer_replication: Value,
    #[serde(default)]
    trainable_token_indices: Value,
    #[serde(default)]
    target_parameters: Value,
    #[serde(default)]
    rank_pattern: Option<Map<String, Value>>,
    #[serde(default)]
    alpha_pattern: Option<Map<String, Value>>,
    #[serde(default)]
    base_model_name_or_path: Option<String>,
}

impl PeftConfig {
    /// Parses and checks a configuration.
    ///
    /// # Errors
    /// Returns a message that describes the invalid or unsupported part of the configuration.
    pub(super) fn read(text: &[u8]) -> Result<Self, String> {
        let config: Self =
            serde_json::from_slice(text).map_err(|error| format!("adapter_config.json: {error}"))?;
        match config.unsupported() {
            Some(what) => Err(format!("adapter_config.json: {what} is not supported")),
            None => Ok(config),
        }
    }

    /// The name of the model for which the adapter was trained.
    pub(super) fn base_model(&self) -> &str {
        self.base_model_name_or_path.as_deref().unwrap_or_default()
    }

    /// Returns the factor by which the product of a module's matrices is multiplied, and the rank of these matrices.
    /// `module` is the full name of the module.
    pub(super) fn scale_and_rank(&self, module: &str) -> (f64, usize) {
        let rank = matching(self.rank_pattern.as_ref(), module).and_then(Value::as_u64);
        let rank = rank.map_or(self.r, |rank| rank as usize);
        let alpha = matching(self.alpha_pattern.as_ref(), module).and_then(Value::as_f64);
        let alpha = alpha.unwrap_or(self.lora_alpha);
        let divisor = if self.use_rslora { (rank as f64).sqrt() } else { rank as f64 };
        (alpha / divisor, rank)
    }

    fn unsupported(&self) -> Option<String> {
        let is_set = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(values) => !values.is_empty(),
            Value::Object(values) => !values.is_empty(),
            _ => true,
        };
        // These methods change the base model before training, in a way that `adapter_config.json` does not describe.
        let init = self.init_lora_weights.as_str().unwrap_or_default().to_ascii_lowercase();
        let changes_base = ["pissa", "olora", "corda", "loftq"].iter().any(|kind| init.starts_with(kind));
        let bias = self.bias.as_deref().unwrap_or("none");
        let ranks = self.rank_pattern.iter().flatten();
        let alphas = self.alpha_pattern.iter().flatten();
        let has_rank = |rank: u64| rank > 0;
        let are_ranks_valid =
            self.r > 0 && ranks.clone().all(|(_, rank)| rank.as_u64().is_some_and(has_rank));
        let are_alphas_valid = alphas.clone().all(|(_, alpha)| alpha.is_number());
        let unsupported = [
            (self.peft_type != "LORA", format!("peft_type {:?}", self.peft_type)),
            (self.use_dora, "use_dora (DoRA)".to_owned()),
            (self.use_qalora, "use_qalora (QALoRA)".to_owned()),
            (self.fan_in_fan_out, "fan_in_fan_out".to_owned()),
            (bias != "none", format!("bias {bias:?}")),
            (self.lora_bias, "lora_bias".to_owned()),
            (changes_base, format!("init_lora_weights {init:?}, which changes the base model,")),
            (is_set(&self.modules_to_save), "modules_to_save".to_owned()),
            (is_set(&self.layer_replication), "layer_replication".to_owned()),
            (is_set(&self.trainable_token_indices), "trainable_token_indices".to_owned()),
            (is_set(&self.target_parameters), "target_parameters".to_owned()),
            (!are_ranks_valid, "a rank that is not a positive integer".to_owned()),
            (!are_alphas_valid, "an alpha that is not a number".to_owned()),
        ];
        let unsupported = unsupported.into_iter().find(|(is_used, _)| *is_used).map(|(_, what)| what);
        unsupported.or_else(|| {
            let pattern =
                ranks.chain(alphas).map(|(pattern, _)| pattern).find(|pattern| !is_plain(pattern))?;
            Some(format!("the regular expression {pattern:?} in rank_pattern or alpha_pattern"))
        })
    }
}

/// Whether a pattern is not empty and consists only of letters, digits, `.`, `_` and `-`, all of which [`matching`]
/// compares literally.
fn is_plain(pattern: &str) -> bool {
    !pattern.is_empty()
        && pattern.chars().all(|letter| letter.is_alphanumeric() || matches!(letter, '.' | '_' | '-'))
}

/// Returns the value of the first pattern that equals a module's name or the part of this name after one of its dots.
fn matching<'a>(patterns: Option<&'a Map<String, Value>>, module: &str) -> Option<&'a Value> {
    let is_end = |pattern: &str| {
        module.strip_suffix(pattern).is_some_and(|before| before.is_empty() || before.ends_with('.'))
    };
    patterns?.iter().find(|(pattern, _)| is_end(pattern)).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(more: Value) -> Result<PeftConfig, String> {
        let mut config = json!({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]});
        if let (Value::Object(config), Value::Object(more)) = (&mut config, more) {
            config.extend(more);
        }
        PeftConfig::read(config.to_string().as_bytes())
    }

    #[test]
    fn the_scale_depends_on_alpha_rank_and_their_patterns() {
        let q = "layers.0.self_attn.q_proj";
        assert_eq!(read(json!({})).unwrap().scale_and_rank(q), (2.0, 8));
        assert_eq!(read(json!({"use_rslora": true, "r": 16})).unwrap().scale_and_rank(q), (4.0, 16));
        let patterns = json!({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"0.self_attn.q_proj": 2.0}});
        let patterns = read(patterns).unwrap();
        assert_eq!(patterns.scale_and_rank(q), (0.5, 4));
        assert_eq!(patterns.scale_and_rank("layers.10.self_attn.q_proj"), (4.0, 4));
        assert_eq!(patterns.scale_and_rank("layers.0.self_attn.k_proj"), (2.0, 8));
        assert_eq!(patterns.scale_and_rank("layers.0.self_attn.xq_proj"), (2.0, 8));
    }

    #[test]
    fn unsupported_options_are_rejected_by_name() {
        for (config, named) in [
            (json!({"peft_type": "IA3"}), "IA3"),
            (json!({"use_dora": true}), "DoRA"),
            (json!({"modules_to_save": ["lm_head"]}), "modules_to_save"),
            (json!({"bias": "all"}), "bias"),
            (json!({"fan_in_fan_out": true}), "fan_in_fan_out"),
            (json!({"init_lora_weights": "pissa_niter_4"}), "pissa"),
            (json!({"layer_replication": [[0, 2]]}), "layer_replication"),
            (json!({"trainable_token_indices": [1]}), "trainable_token_indices"),
            (json!({"rank_pattern": {"layers\\.[01]": 2}}), "layers"),
            (json!({"r": 0}), "a rank"),
            (json!({"rank_pattern": {"q_proj": 0}}), "a rank"),
            (json!({"alpha_pattern": {"q_proj": "x"}}), "an alpha"),
            (json!({"lora_alpha": "x"}), "expected f64"),
        ] {
            let error = read(config).err().unwrap();
            assert!(error.contains(named), "{error}");
        }
        let harmless = json!({
            "bias": "none", "use_dora": false, "modules_to_save": null, "init_lora_weights": true,
            "rank_pattern": {}, "alpha_pattern": {}, "layer_replication": null, "lora_dropout": 0.1
        });
        assert!(read(harmless).is_ok());
        assert!(PeftConfig::read(b"{}").is_err());
    }
}
