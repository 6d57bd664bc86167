use serde_json::json;

use super::*;

#[test]
fn decoders_that_work_token_by_token_are_supported() {
    let decoder = Decoder::parse(&json!({"type": "ByteLevel", "add_prefix_space": true})).unwrap();
    assert_eq!(decoder.bytes("ĠÃ"), [b' ', 0xc3]);
    assert!(!decoder.strip_start);
    let llama = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    let decoder = Decoder::parse(&llama).unwrap();
    assert_eq!(decoder.bytes("▁a▁b"), b" a b");
    assert_eq!(decoder.bytes("<0xE2>"), [0xe2]);
    assert!(decoder.strip_start);
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme});
    assert!(Decoder::parse(&metaspace("always")).unwrap().strip_start);
    assert!(!Decoder::parse(&metaspace("never")).unwrap().strip_start);
}

#[test]
fn other_decoders_are_rejected() {
    for decoder in [
        json!(null),
        json!({"type": "WordPiece"}),
        json!({"type": "Strip", "content": " ", "start": 0, "stop": 1}),
        json!({"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}),
        json!({"type": "Sequence"}),
    ] {
        assert!(Decoder::parse(&decoder).unwrap_err().contains("is not supported"), "{decoder}");
    }
}
