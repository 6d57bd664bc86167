//! Checks that an arbitrary `tokenizer.json`, with or without a `tokenizer_config.json`, or GGUF file is either
//! rejected with a reason, or loads and then either rejects a text or encodes it to tokens that can be decoded.
//! `main.rs` runs this check for seconds, and `make fuzz` runs it for a configurable time.

use std::cell::OnceCell;
use std::fs;

use server_text::ModelText;
use tempfile::TempDir;

/// Separates the parts of an input that is not a GGUF file: `tokenizer.json`, `tokenizer_config.json` and a text.
pub(crate) const SEPARATOR: u8 = 0x1e;

const TEXTS: [&str; 4] =
    ["", "a b  c\n\u{301}é 12345 <s></s>", "\u{feff}日本語🙂\0", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"];

thread_local! {
    static DIRECTORY: OnceCell<TempDir> = const { OnceCell::new() };
}

/// Runs one input, and panics if a guarantee is violated.
pub(crate) fn check(input: &[u8]) {
    DIRECTORY.with(|directory| {
        let directory = directory.get_or_init(|| TempDir::new().expect("a temporary directory")).path();
        let write =
            |name: &str, bytes: &[u8]| fs::write(directory.join(name), bytes).expect("room for a small file");
        let (path, text) = if input.starts_with(b"GGUF") {
            write("model.gguf", input);
            (directory.join("model.gguf"), None)
        } else {
            let mut parts = input.split(|byte| *byte == SEPARATOR);
            write("tokenizer.json", parts.next().unwrap_or_default());
            write("tokenizer_config.json", parts.next().unwrap_or(b"{}"));
            (directory.to_owned(), parts.next())
        };
        match ModelText::load(&path) {
            Ok(model) => use_all(&model, &text.map(String::from_utf8_lossy).unwrap_or_default()),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    });
}

fn use_all(model: &ModelText, own: &str) {
    let tokenizer = &model.tokenizer;
    let size = tokenizer.vocabulary_size();
    for text in TEXTS.into_iter().chain([own]) {
        for (add_special, parse_special) in [(false, false), (true, true)] {
            let encoded = tokenizer.encode(text, add_special, parse_special);
            let again = tokenizer.encode(text, add_special, parse_special);
            assert_eq!(format!("{encoded:?}"), format!("{again:?}"), "encoding again gives the same result");
            if let Ok(tokens) = encoded {
                assert!(tokens.iter().all(|token| *token < size), "each token is in the vocabulary");
                let _ = (tokenizer.decode(&tokens, false), tokenizer.decode(&tokens, true));
            }
        }
    }
    for token in [0, 1, size.saturating_sub(1), size, u32::MAX] {
        let text = tokenizer.token_text(token);
        let _ = (tokenizer.token_id(&text), tokenizer.is_special(token), tokenizer.token_bytes(token));
    }
}
