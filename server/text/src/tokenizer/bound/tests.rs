use std::collections::HashMap;

use serde_json::json;
use tokenizers::{NormalizedString, Normalizer as _, normalizers::unicode::NFD};

use super::*;

fn bound(entries: &[&str], composes: bool) -> TokenBound {
    let mut built = Entries::default();
    entries.iter().for_each(|entry| built.add(&[entry.as_bytes()]));
    built.bound(composes)
}

#[test]
fn each_byte_counts_for_its_part_of_the_longest_entry_that_contains_it() {
    let bound = bound(&["a", "b", "ab", "    ", "7"], false);
    assert_eq!(bound.min_tokens("7777777"), 6, "7 minus a margin for rounding");
    assert_eq!(bound.min_tokens(&"7".repeat(7_000_000)), 6_999_999);
    assert_eq!(bound.min_tokens(&"ab".repeat(1000)), 999);
    assert_eq!(bound.min_tokens(&" ".repeat(4004)), 1000);
    assert_eq!(bound.min_tokens("zzzzzzzz"), 0, "unknown bytes may be dropped");
    assert_eq!(bound.min_tokens(""), 0);
}

#[test]
fn text_that_composition_may_shorten_counts_for_less() {
    let entries = (0..=255_u8).map(|byte| vec![byte]);
    let mut built = Entries::default();
    entries.for_each(|entry| built.add(&[&entry]));
    let bound = built.bound(true);
    assert_eq!(bound.min_tokens(&"\u{212a}".repeat(1000)), 749);
    assert_eq!(bound.min_tokens(&"x".repeat(1000)), 999);
}

/// Checks that the longest text that composes to a character is at most `NFC_SHRINKAGE` times as long as the character.
#[test]
fn composition_shortens_no_character_more_than_assumed() {
    let decomposed = |character: char| {
        let mut text = NormalizedString::from(character.to_string());
        NFD.normalize(&mut text).unwrap();
        text.get().to_owned()
    };
    let characters = || (0..=0x10_ffff).filter_map(char::from_u32).filter(|character| !character.is_ascii());
    let mut longest: HashMap<String, usize> = HashMap::new();
    for character in characters() {
        let known = longest.entry(decomposed(character)).or_default();
        *known = (*known).max(character.len_utf8());
    }
    for character in characters() {
        let whole = decomposed(character);
        let spelled = |part: char| {
            let part = part.to_string();
            longest.get(&part).copied().unwrap_or(0).max(part.len())
        };
        let length: usize = whole.chars().map(spelled).sum();
        assert!(length as f64 <= NFC_SHRINKAGE * character.len_utf8() as f64, "{character:?}");
    }
    // The loop above skips ASCII characters, but composition replaces some longer characters with ASCII characters,
    // such as the Kelvin sign with `K`.
    for (decomposed, length) in &longest {
        assert!(*length as f64 <= NFC_SHRINKAGE * decomposed.len() as f64, "{decomposed:?}");
    }
}

#[test]
fn steps_that_may_drop_text_give_no_bound() {
    let known = |step: serde_json::Value| Steps::default().add(&step);
    for step in [
        json!(null),
        json!({"type": "NFC"}),
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]}),
        json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
        ]}),
    ] {
        assert!(known(step.clone()), "{step}");
    }
    for step in [
        json!({"type": "NFKC"}),
        json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        json!({"type": "WhitespaceSplit"}),
        json!({"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Removed", "invert": false}),
        json!({"type": "Replace", "pattern": {"Regex": "x+"}, "content": ""}),
        json!({"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}),
    ] {
        assert!(!known(step.clone()), "{step}");
    }
}
