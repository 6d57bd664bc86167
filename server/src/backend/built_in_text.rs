//! The tokenizer and the chat template of a server without a model.

use anyhow::Context as _;
use serde_json::{Map, Value, json};
use server_text::ModelText;

/// The built-in chat template.
pub(super) const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n\
    {{ message.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Returns a simple chat template and a tokenizer that has a token for each byte.
///
/// # Errors
/// The temporary files from which the tokenizer is loaded cannot be written.
pub fn built_in_text() -> anyhow::Result<ModelText> {
    built_in_text_with(TEMPLATE, &[])
}

/// Returns the built-in tokenizer with the chat template `template`. `special_tokens` are added after the three
/// built-in special tokens.
///
/// # Errors
/// The temporary files from which the tokenizer is loaded cannot be written, or the template is invalid.
pub fn built_in_text_with(template: &str, special_tokens: &[&str]) -> anyhow::Result<ModelText> {
    let special =
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].into_iter().chain(special_tokens.iter().copied());
    let mut vocabulary: Map<String, Value> =
        (0..=255).zip(0u32..).map(|(byte, id)| (byte_letter(byte).to_string(), json!(id))).collect();
    let mut added = Vec::new();
    for (id, text) in (256u32..).zip(special) {
        vocabulary.insert(text.to_owned(), json!(id));
        added.push(json!({
            "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }));
    }
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocabulary, "merges": []
        }
    });
    let settings = json!({"eos_token": "<|im_end|>", "chat_template": template});
    let directory = tempfile::tempdir().context("failed to create a temporary directory")?;
    for (name, content) in [("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)] {
        std::fs::write(directory.path().join(name), content.to_string())
            .with_context(|| format!("failed to write a temporary {name}"))?;
    }
    ModelText::load(directory.path()).context("failed to load the built-in tokenizer")
}

/// Returns the character that represents a byte in byte-level vocabularies.
fn byte_letter(byte: u8) -> char {
    let plain = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if plain(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !plain(other)).count() as u32;
    char::from_u32(0x100 + before).expect("invariant: every code point from U+0100 to U+0143 is a character")
}
