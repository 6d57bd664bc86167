//! Images, and chat requests that contain them.

use serde_json::{Value, json};

/// Returns a BMP file of `side` x `side` pixels, with a pattern of colors that `seed` selects.
#[must_use]
pub fn bitmap(side: u16, seed: u8) -> Vec<u8> {
    const HEADER_BYTES: usize = 54;
    let side = usize::from(side);
    let row_bytes = (side * 3).next_multiple_of(4);
    let mut file = Vec::with_capacity(HEADER_BYTES + row_bytes * side);
    file.extend(b"BM");
    let words = [HEADER_BYTES + row_bytes * side, 0, HEADER_BYTES, 40, side, side, 1 | (24 << 16), 0];
    file.extend(words.iter().flat_map(|word| (*word as u32).to_le_bytes()));
    file.resize(HEADER_BYTES, 0);
    for y in 0..side {
        let row = file.len();
        for x in 0..side {
            // The image is a grid of 4 × 4 areas with different colors, so its patches differ.
            let area = (4 * x / side + 4 * (4 * y / side)) as u8;
            let color = area.wrapping_add(seed).wrapping_mul(101);
            file.extend([color, color.wrapping_mul(7), color.wrapping_mul(31)]);
        }
        file.resize(row + row_bytes, 0);
    }
    file
}

/// Returns a user message with the image at `url` and a text.
#[must_use]
pub fn question(url: &str, text: &str) -> Value {
    let content =
        [json!({"type": "image_url", "image_url": {"url": url}}), json!({"type": "text", "text": text})];
    json!({"role": "user", "content": content})
}

/// Returns the body of a chat completion request with `messages` and greedy sampling.
#[must_use]
pub fn chat(model: &str, messages: &[Value]) -> Value {
    json!({"model": model, "messages": messages, "max_tokens": 16, "temperature": 0})
}
