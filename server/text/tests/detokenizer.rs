//! Tests that decoding tokens one at a time produces the same text as decoding all of them together.

#![expect(clippy::unwrap_used, reason = "a failed precondition fails the test")]

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use server_gguf::{GgufFile, write::GgufWriter};
use server_text::{DetokenizeOptions, Detokenizer, ModelText, Tokenizer};
use tempfile::TempDir;

/// A SentencePiece tokenizer with every byte, some pieces and three special tokens.
fn tokenizer(add_space_prefix: bool) -> Arc<Tokenizer> {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let mut kinds = vec![2i32, 3, 3];
    tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
    kinds.extend([6; 256]);
    let pieces = ["▁", "a", "▁b", "é", "▁日", "😀", ""];
    tokens.extend(pieces.map(str::to_owned));
    kinds.extend([1; 7]);
    let mut writer = GgufWriter::new("llama");
    writer
        .metadata("tokenizer.ggml.model", "llama")
        .metadata("tokenizer.ggml.scores", vec![0f32; tokens.len()])
        .metadata("tokenizer.ggml.token_type", kinds)
        .metadata("tokenizer.ggml.tokens", tokens)
        .metadata("tokenizer.ggml.add_space_prefix", add_space_prefix);
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("model.gguf");
    writer.write(&path).unwrap();
    ModelText::from_gguf(&GgufFile::open(&path).unwrap()).unwrap().tokenizer
}

fn options(skip_special: bool) -> DetokenizeOptions {
    DetokenizeOptions { skip_special, continues_text: false }
}

fn byte(byte: u8) -> u32 {
    u32::from(byte) + 3
}

#[test]
fn joined_pieces_equal_the_whole_text_for_any_tokens() {
    let mut rng = StdRng::seed_from_u64(8);
    let mut below = |limit: usize| rng.random_range(0..limit);
    // ASCII bytes, first bytes and continuation bytes of longer characters, and an invalid byte.
    let bytes =
        [0x20, 0x61, 0x80, 0xbf, 0xc3, 0xa9, 0xe2, 0x96, 0x81, 0xed, 0xa0, 0xf0, 0x9f, 0x98, 0xf4, 0xff];
    for prefix in [true, false] {
        let tokenizer = tokenizer(prefix);
        for _ in 0..20_000 {
            let tokens: Vec<u32> = (0..below(12))
                .map(|_| match below(3) {
                    0 => below(tokenizer.vocabulary_size() as usize + 3) as u32,
                    _ => byte(bytes[below(bytes.len())]),
                })
                .collect();
            let skip = below(2) == 1;
            let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), options(skip));
            let mut text: String = tokens.iter().map(|token| detokenizer.push(*token)).collect();
            text.push_str(&detokenizer.finish());
            assert_eq!(text, tokenizer.decode(&tokens, skip), "{tokens:?}");
        }
    }
}

#[test]
fn no_partial_character_is_returned() {
    let mut detokenizer = Detokenizer::new(tokenizer(false), options(true));
    assert_eq!([0xf0, 0x9f, 0x98].map(|b| detokenizer.push(byte(b))), ["", "", ""]);
    assert_eq!(detokenizer.push(byte(0x80)), "😀");
    assert_eq!(detokenizer.push(byte(0xe2)), "");
    assert_eq!(detokenizer.push(byte(b'x')), "\u{fffd}x");
    assert_eq!(detokenizer.push(byte(0xff)), "\u{fffd}");
    assert_eq!(detokenizer.push(byte(0xe2)), "");
    assert_eq!(detokenizer.finish(), "\u{fffd}");
}

#[test]
fn a_leading_space_is_preserved_if_the_text_continues() {
    let tokenizer = tokenizer(true);
    let b = tokenizer.token_id("▁b").unwrap();
    let first = |continues_text| {
        let options = DetokenizeOptions { skip_special: true, continues_text };
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), options);
        detokenizer.push(1) + &detokenizer.push(b) + &detokenizer.push(b)
    };
    assert_eq!(first(false), "b b");
    assert_eq!(first(true), " b b");
}

#[test]
fn special_tokens_are_skipped_on_request() {
    let tokenizer = tokenizer(false);
    let text = |skip| {
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), options(skip));
        [1, byte(b'a'), 2].map(|token| detokenizer.push(token)).concat()
    };
    assert_eq!((text(true).as_str(), text(false).as_str()), ("a", "<s>a</s>"));
}

#[test]
fn special_tokens_that_are_kept_are_text() {
    let tokenizer = tokenizer(false);
    let mut detokenizer = Detokenizer::new(tokenizer, options(true)).with_visible_special([2].into());
    assert_eq!([1, byte(b'a'), 2].map(|token| detokenizer.push(token)).concat(), "a</s>");
}
