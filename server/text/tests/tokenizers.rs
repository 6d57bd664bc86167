//! Checks that tokenizers built from GGUF metadata return the same tokens as other implementations.
//!
//! `golden/byte_level.json` contains a byte-level BPE vocabulary and, for each pre-tokenizer, the tokens of difficult
//! texts, computed with another regular expression engine and a naive merge. Each `golden/sentencepiece*.json` contains
//! a SentencePiece model, and texts with their tokens according to the SentencePiece library.

#![expect(clippy::unwrap_used, reason = "a failed precondition fails the test")]

use std::{fs, path::PathBuf};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value as Json;
use server_gguf::{GgufFile, write::GgufWriter};
use server_text::{LoadError, ModelText, TEXT_BYTES_MAX, Tokenizer};
use tempfile::TempDir;

fn golden(name: &str) -> Json {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn strings(value: &Json) -> Vec<String> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

fn ids(text: &str) -> Vec<u32> {
    text.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

fn load(writer: &GgufWriter) -> Result<ModelText, LoadError> {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("model.gguf");
    writer.write(&path).unwrap();
    ModelText::from_gguf(&GgufFile::open(&path).unwrap())
}

fn byte_level(golden: &Json, pre: &str) -> GgufWriter {
    let tokens = strings(&golden["tokens"]);
    let (special, user) = (strings(&golden["special"]), strings(&golden["user_defined"]));
    let kind = |token| {
        if special.contains(token) {
            3
        } else if user.contains(token) {
            4
        } else {
            1
        }
    };
    let kinds: Vec<i32> = tokens.iter().map(kind).collect();
    let mut writer = GgufWriter::new("llama");
    writer
        .metadata("tokenizer.ggml.model", "gpt2")
        .metadata("tokenizer.ggml.pre", pre)
        .metadata("tokenizer.ggml.token_type", kinds)
        .metadata("tokenizer.ggml.merges", strings(&golden["merges"]))
        .metadata(
            "tokenizer.ggml.bos_token_id",
            tokens.iter().position(|t| t == "<|im_start|>").unwrap() as u32,
        )
        .metadata(
            "tokenizer.ggml.eos_token_id",
            tokens.iter().position(|t| t == "<|im_end|>").unwrap() as u32,
        )
        .metadata("tokenizer.ggml.tokens", tokens);
    writer
}

fn compare(golden: &Json, kind: &str, parse_special: bool) {
    let texts = strings(&golden["texts"]);
    let lists = strings(&golden["lists"]);
    for (pre, expected) in golden[kind].as_object().unwrap() {
        let model = load(&byte_level(golden, pre)).unwrap();
        let mut wrong = Vec::new();
        for (text, list) in texts.iter().zip(expected.as_array().unwrap()) {
            let expected = ids(&lists[list.as_u64().unwrap() as usize]);
            let tokens = model.tokenizer.encode(text, false, parse_special).unwrap();
            if tokens != expected {
                let show = |tokens: &[u32]| -> Vec<String> {
                    tokens.iter().map(|token| model.tokenizer.token_text(*token)).collect()
                };
                wrong.push(format!("{text:?}\n  {:?}\n  {:?}", show(&tokens), show(&expected)));
            }
        }
        assert!(wrong.is_empty(), "{pre}: the tokens of {} texts differ\n{}", wrong.len(), wrong.join("\n"));
    }
}

#[test]
fn every_named_pre_tokenizer_splits_text_as_expected() {
    compare(&golden("byte_level.json"), "plain", false);
}

#[test]
fn special_tokens_are_parsed_on_request() {
    compare(&golden("byte_level.json"), "parsed", true);
}

/// Checks that decoding returns the original text, with pre-tokenizers that do not compose characters.
#[test]
fn byte_level_text_survives_a_round_trip_through_tokens() {
    let golden = golden("byte_level.json");
    for pre in ["smollm", "llama-bpe", "deepseek-llm", "viking"] {
        let model = load(&byte_level(&golden, pre)).unwrap();
        for text in strings(&golden["texts"]) {
            let tokens = model.tokenizer.encode(&text, false, false).unwrap();
            assert_eq!(model.tokenizer.decode(&tokens, false), text, "{pre}");
        }
    }
}

fn sentencepiece(golden: &Json) -> GgufWriter {
    let numbers = |key: &str| golden[key].as_array().unwrap().clone();
    let scores: Vec<f32> = numbers("scores").iter().map(|v| v.as_f64().unwrap() as f32).collect();
    let kinds: Vec<i32> = numbers("kinds").iter().map(|v| v.as_i64().unwrap() as i32).collect();
    let mut writer = GgufWriter::new("llama");
    writer
        .metadata("tokenizer.ggml.model", "llama")
        .metadata("tokenizer.ggml.tokens", strings(&golden["tokens"]))
        .metadata("tokenizer.ggml.scores", scores)
        .metadata("tokenizer.ggml.token_type", kinds)
        .metadata("tokenizer.ggml.add_space_prefix", golden["add_space_prefix"].as_bool().unwrap());
    writer
}

#[test]
fn sentencepiece_models_give_the_librarys_tokens_and_text() {
    for name in ["sentencepiece.json", "sentencepiece_prefix.json"] {
        let golden = golden(name);
        let model = load(&sentencepiece(&golden)).unwrap();
        let (texts, lists) = (strings(&golden["texts"]), strings(&golden["ids"]));
        for ((text, list), decoded) in texts.iter().zip(&lists).zip(strings(&golden["decoded"])) {
            let expected = ids(list);
            let tokens = model.tokenizer.encode(text, false, false).unwrap();
            // After a user-defined token such as `<think>`, tokenizers of GGUF files add the space prefix again; the
            // SentencePiece library does not.
            if !(golden["add_space_prefix"] == true && text.contains("<think>")) {
                assert_eq!(tokens, expected, "{name} {text:?}");
            }
            assert_eq!(model.tokenizer.decode(&expected, false), decoded, "{name} {text:?}");
        }
    }
}

#[test]
fn beginning_and_end_are_added_as_the_file_says() {
    let golden = golden("byte_level.json");
    let encode = |pre: &str, set: &dyn Fn(&mut GgufWriter)| {
        let mut writer = byte_level(&golden, pre);
        set(&mut writer);
        load(&writer).map(|model| {
            let tokenizer = model.tokenizer;
            let tokens = tokenizer.encode("a", true, true).unwrap();
            let text = |token: &u32| tokenizer.token_text(*token);
            (
                tokens.iter().map(text).collect::<Vec<_>>().concat(),
                tokenizer.encode("a", false, true).unwrap().len(),
            )
        })
    };
    let added = |key: &'static str, value: bool| {
        move |writer: &mut GgufWriter| {
            writer.metadata(&format!("tokenizer.ggml.{key}"), value);
        }
    };
    assert_eq!(encode("smollm", &|_| ()).unwrap(), ("a".to_owned(), 1));
    assert_eq!(encode("smollm", &added("add_bos_token", true)).unwrap().0, "<|im_start|>a");
    assert_eq!(encode("smollm", &added("add_eos_token", true)).unwrap().0, "a<|im_end|>");
    assert_eq!(encode("llama-bpe", &|_| ()).unwrap(), ("<|im_start|>a".to_owned(), 1));
    assert_eq!(encode("llama-bpe", &added("add_bos_token", false)).unwrap().0, "a");
    let error = encode("smollm", &|writer| {
        writer
            .metadata("tokenizer.ggml.add_bos_token", true)
            .metadata("tokenizer.ggml.bos_token_id", u32::MAX);
    });
    assert!(error.unwrap_err().to_string().contains("tokenizer.ggml.add_bos_token is true, but"));
}

#[test]
fn an_unknown_pre_tokenizer_is_refused_by_name() {
    let golden = golden("byte_level.json");
    let writer = byte_level(&golden, "frobnicate");
    let error = load(&writer).unwrap_err().to_string();
    assert!(error.contains("tokenizer.ggml.pre is \"frobnicate\""), "{error}");
}

#[test]
fn faulty_metadata_is_refused_with_the_name_of_the_key() {
    let golden = golden("byte_level.json");
    let refused = |set: &dyn Fn(&mut GgufWriter), part: &str| {
        let mut writer = byte_level(&golden, "smollm");
        set(&mut writer);
        let error = load(&writer).unwrap_err().to_string();
        assert!(error.contains(part), "{error} lacks {part}");
    };
    refused(
        &|w| {
            w.metadata("tokenizer.ggml.model", "rwkv");
        },
        "tokenizer.ggml.model is \"rwkv\"",
    );
    refused(
        &|w| {
            w.metadata("tokenizer.ggml.tokens", 3u32);
        },
        "tokenizer.ggml.tokens is not an array of strings",
    );
    refused(
        &|w| {
            w.metadata("tokenizer.ggml.merges", vec!["ab".to_owned()]);
        },
        "not a pair of tokens",
    );
    refused(
        &|w| {
            w.metadata("tokenizer.ggml.merges", vec!["a 日本".to_owned()]);
        },
        "tokenizer.ggml.merges cannot be used",
    );
    refused(
        &|w| {
            w.metadata("tokenizer.ggml.token_type", vec![1i32]);
        },
        "fewer elements",
    );
    refused(
        &|w| {
            w.metadata("tokenizer.ggml.eos_token_id", 1u32 << 20);
        },
        "tokenizer.ggml.eos_token_id is 1048576",
    );
    refused(
        &|w| {
            w.metadata("tokenizer.chat_template", "{% if %}");
        },
        "tokenizer.chat_template cannot be parsed",
    );
    refused(
        &|w| {
            w.metadata("tokenizer.ggml.model", "llama");
        },
        "tokenizer.ggml.scores is missing",
    );
}

/// Returns a text with characters that tokenizers treat specially; the same `seed` always generates the same text.
fn random_text(seed: u64) -> String {
    const PIECES: [&str; 24] = [
        "a",
        "the",
        "e",
        "\u{301}",
        "\u{212a}",
        "\u{1100}\u{1161}\u{11a8}",
        "7",
        "1234567",
        " ",
        "    ",
        "\n",
        "\t",
        "\u{2581}",
        "\u{3000}",
        "\u{a0}",
        "日本",
        "é",
        "<|im_end|>",
        "<think>",
        "İ",
        "🦀",
        "\u{0}",
        "'s",
        "\u{fb01}",
    ];
    let mut rng = StdRng::seed_from_u64(seed);
    let pieces = rng.random_range(0..40);
    (0..pieces).map(|_| PIECES[rng.random_range(0..PIECES.len())].repeat(rng.random_range(1..10))).collect()
}

#[test]
fn no_text_has_fewer_tokens_than_its_lower_bound() {
    let golden_bytes = golden("byte_level.json");
    let named = golden_bytes["plain"].as_object().unwrap().keys();
    let byte_level = named.map(|pre| (pre.clone(), byte_level(&golden_bytes, pre)));
    let mut models: Vec<(String, GgufWriter)> = byte_level.collect();
    for name in ["sentencepiece.json", "sentencepiece_prefix.json"] {
        for option in ["remove_extra_whitespaces", "add_space_prefix"] {
            let mut writer = sentencepiece(&golden(name));
            writer.metadata(&format!("tokenizer.ggml.{option}"), true);
            models.push((format!("{name} {option}"), writer));
        }
    }
    let texts: Vec<String> =
        strings(&golden_bytes["texts"]).into_iter().chain((0..200).map(random_text)).collect();
    for (name, writer) in models {
        let tokenizer = load(&writer).unwrap().tokenizer;
        for text in &texts {
            for parse_special in [false, true] {
                let tokens = tokenizer.encode(text, false, parse_special).unwrap().len();
                let bound = tokenizer.min_tokens(text);
                assert!(bound <= tokens, "{name}: {bound} > {tokens} {text:?}");
            }
        }
        let letters = "the quick brown fox ".repeat(50_000);
        assert!(tokenizer.min_tokens(&letters) > 10_000, "{name}: {}", tokenizer.min_tokens(&letters));
    }
}

/// If the time were quadratic in the length of a run, this test would not finish.
#[test]
fn long_runs_of_one_character_take_linear_time() {
    let golden_bytes = golden("byte_level.json");
    let tokenizer = |pre: &str| load(&byte_level(&golden_bytes, pre)).unwrap().tokenizer;
    let spm = load(&sentencepiece(&golden("sentencepiece_prefix.json"))).unwrap();
    let pipelines = ["smollm", "llama-bpe", "gpt-4o", "deepseek-llm", "jais-2", "exaone-moe"];
    for tokenizer in pipelines.map(tokenizer).into_iter().chain([spm.tokenizer]) {
        for unit in [" ", "A", "\n "] {
            let text = unit.repeat(300_000 / unit.len()) + "x";
            let tokens = tokenizer.encode(&text, false, true).unwrap();
            assert_eq!(tokenizer.decode(&tokens, false), text);
        }
    }
    let too_long = "x".repeat(TEXT_BYTES_MAX + 1);
    assert!(tokenizer("smollm").encode(&too_long, false, true).is_err());
}

#[test]
fn tokens_have_the_bytes_that_they_represent() {
    let golden = golden("byte_level.json");
    let model = load(&byte_level(&golden, "smollm")).unwrap();
    let tokenizer = &model.tokenizer;
    let token = |text: &str| tokenizer.token_id(text).unwrap();
    assert_eq!(tokenizer.token_bytes(token("Ċ")), b"\n");
    assert_eq!(tokenizer.token_bytes(token("Ã")), [0xc3]);
    assert_eq!(tokenizer.token_text(token("Ã")), "\u{fffd}");
    assert_eq!(tokenizer.token_bytes(token("<think>")), b"<think>");
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
    assert!(tokenizer.is_special(token("<|im_end|>")) && !tokenizer.is_special(token("<think>")));
    assert_eq!(tokenizer.decode(&[token("a"), token("<|im_end|>")], true), "a");
    assert_eq!(tokenizer.decode(&[token("a"), token("<|im_end|>")], false), "a<|im_end|>");
    assert_eq!(model.defaults.eos, {
        let mut eos = vec![token("<|im_end|>"), token("<|endoftext|>")];
        eos.sort_unstable();
        eos
    });
}

#[test]
fn a_tokenizer_can_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Tokenizer>();
    shared::<ModelText>();
}
