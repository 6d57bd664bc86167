//! Replaces images in prompts for routing. An image in a `data:` URL has many more bytes than a text with as many
//! tokens, so its length says nothing about the work that it causes.
//!
//! The replacement is a text of about as many tokens as the image has, and equal images have equal replacements. The
//! router can therefore estimate the length of a prompt and compare its prefix in the same way, whether or not it has
//! images. A replacement is never longer than the URL that it replaces, because a client can declare a large image in a
//! few bytes.

use std::borrow::Cow;
use std::ops::Range;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use memchr::memmem;
use server_images::ImageHeader;
use xxhash_rust::xxh3::xxh3_64;

/// Number of bytes at the beginning of an image in which the router searches for the dimensions of the image.
///
/// If exceeded: the image counts as one of average size.
const HEADER_BYTES_MAX: usize = 64 << 10;

/// The number of pixels for each token of an image, as in Qwen2-VL and Qwen2.5-VL. Other model families derive the
/// number of tokens in other ways, which the router does not know.
const PIXELS_PER_TOKEN: u64 = 28 * 28;
/// The smallest and the largest number of tokens that an image is assumed to have.
const TOKENS_RANGE: [u64; 2] = [64, 1280];
/// The number of bytes that replace a token of an image: the typical length of a token of text.
const TOKEN_BYTES: usize = 4;
/// The number of tokens of an image whose size is unknown.
const TOKENS_UNKNOWN: u32 = 256;

/// A prompt without the bytes of its images.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RoutingPrompt<'a> {
    /// The prompt, in which each image is replaced with a text of about as many tokens. This text is not longer than
    /// the original prompt.
    pub(super) text: Cow<'a, [u8]>,
    /// The estimated number of tokens of the images.
    pub(super) image_tokens: u32,
    /// The byte range of `text` from the first image to the last. Empty without images.
    pub(super) images: Range<usize>,
}

/// Replaces the base64 `data:` URLs in the raw JSON of a prompt. Each counts as an image, whatever its media type is.
pub(super) fn without_images(prompt: &[u8]) -> RoutingPrompt<'_> {
    const START: &[u8] = b"\"data:";
    const CONTENT: &[u8] = b";base64,";
    let mut text = Vec::new();
    let (mut copied, mut image_tokens, mut images) = (0, 0_u32, 0..0);
    for start in memmem::find_iter(prompt, START) {
        let url = start + 1;
        let length = memchr::memchr(b'"', &prompt[url..]).unwrap_or(prompt.len() - url);
        let Some(content) = memmem::find(&prompt[url..url + length], CONTENT) else { continue };
        let content = without_escapes(&prompt[url + content + CONTENT.len()..url + length]);
        let tokens = tokens(&content);
        image_tokens = image_tokens.saturating_add(tokens);
        text.extend_from_slice(&prompt[copied..url]);
        if copied == 0 {
            images.start = text.len();
        }
        let digest = xxh3_64(&content).to_le_bytes();
        text.extend(digest.iter().cycle().take((tokens as usize * TOKEN_BYTES).min(length)));
        images.end = text.len();
        copied = url + length;
    }
    if copied == 0 {
        return RoutingPrompt { text: Cow::Borrowed(prompt), image_tokens, images };
    }
    text.extend_from_slice(&prompt[copied..]);
    RoutingPrompt { text: Cow::Owned(text), image_tokens, images }
}

/// Removes the backslashes from base64 in a JSON string, in which each slash may be escaped.
fn without_escapes(content: &[u8]) -> Cow<'_, [u8]> {
    if memchr::memchr(b'\\', content).is_none() {
        return Cow::Borrowed(content);
    }
    content.iter().copied().filter(|&byte| byte != b'\\').collect()
}

/// The estimated number of tokens of an image in base64. Only the beginning of the image is decoded.
fn tokens(content: &[u8]) -> u32 {
    let digits = &content[..content.len().min(HEADER_BYTES_MAX / 3 * 4)];
    // A prefix of a base64 string can be decoded only in whole groups of four digits.
    let header = STANDARD_NO_PAD.decode(&digits[..digits.len() / 4 * 4]).ok();
    let size = header.and_then(|bytes| ImageHeader::read(&bytes).ok()).map(|header| header.size());
    size.map_or(TOKENS_UNKNOWN, |size| {
        let [tokens_min, tokens_max] = TOKENS_RANGE;
        (size.pixels() / PIXELS_PER_TOKEN).clamp(tokens_min, tokens_max) as u32
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The `data:` URL of a PNG file of 6,000 bytes with a valid header.
    fn png(width: u32, height: u32) -> String {
        let mut bytes = png_header(width, height);
        bytes.resize(6000, 0);
        data_url(&bytes)
    }

    /// The beginning of a PNG file, which contains the dimensions.
    fn png_header(width: u32, height: u32) -> Vec<u8> {
        let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
        bytes.extend(width.to_be_bytes().into_iter().chain(height.to_be_bytes()));
        bytes.extend([8, 2, 0, 0, 0, 1, 2]);
        bytes
    }

    fn data_url(bytes: &[u8]) -> String {
        format!("data:image/png;base64,{}", STANDARD_NO_PAD.encode(bytes))
    }

    fn prompt(url: &str) -> String {
        format!(r#"[{{"content":[{{"image_url":{{"url":"{url}"}}}},{{"text":"a"}}]}}]"#)
    }

    #[test]
    fn an_image_counts_by_its_size() {
        let tokens = |url: &str| {
            let prompt = prompt(url);
            let routing = without_images(prompt.as_bytes());
            let text_bytes = prompt.len() - url.len();
            assert_eq!(routing.text.len(), text_bytes + TOKEN_BYTES * routing.image_tokens as usize);
            routing.image_tokens
        };
        assert_eq!(tokens(&png(28 * 10, 28 * 20)), 200);
        assert_eq!(tokens(&png(1, 1)), 64);
        assert_eq!(tokens(&png(8000, 8000)), 1280);
        assert_eq!(tokens(&format!("data:image/png;base64,{}", "A".repeat(2000))), TOKENS_UNKNOWN);
        assert_eq!(tokens(&format!("data:image/png;base64,{}", "%".repeat(2000))), TOKENS_UNKNOWN);
    }

    #[test]
    fn slashes_may_be_escaped_and_the_media_type_does_not_matter() {
        let plain = without_images_of(&png(1000, 1000));
        let bytes = png(1000, 1000).replace("/png", "/jpeg");
        for url in [bytes.replace("image/jpeg", "application/octet-stream"), bytes.replace('/', "\\/")] {
            let routing = without_images_of(&url);
            assert_eq!(routing.image_tokens, plain.image_tokens);
            let replacement =
                |routing: &RoutingPrompt<'_>| routing.text[31..routing.text.len() - 20].to_vec();
            assert_eq!(replacement(&routing), replacement(&plain));
        }
    }

    fn without_images_of(url: &str) -> RoutingPrompt<'static> {
        let prompt = prompt(url);
        let RoutingPrompt { text, image_tokens, images } = without_images(prompt.as_bytes());
        RoutingPrompt { text: text.into_owned().into(), image_tokens, images }
    }

    #[test]
    fn a_replacement_is_not_longer_than_the_image() {
        let prompt = prompt(&data_url(&png_header(8000, 8000))).repeat(1000);
        let routing = without_images(prompt.as_bytes());
        assert_eq!(routing.text.len(), prompt.len());
        assert_eq!(routing.image_tokens, 1280 * 1000);
    }

    #[test]
    fn equal_images_have_equal_replacements() {
        let replaced = |url: &str| without_images(prompt(url).as_bytes()).text.into_owned();
        assert_eq!(replaced(&png(100, 100)), replaced(&png(100, 100)));
        assert_ne!(replaced(&png(100, 100)), replaced(&png(100, 101)));
        // The text before and after the image remains.
        assert!(replaced(&png(100, 100)).starts_with(b"[{\"content\":[{\"image_url\":{\"url\":\""));
        assert!(replaced(&png(100, 100)).ends_with(b"\"}},{\"text\":\"a\"}]}]"));
    }

    #[test]
    fn the_range_of_the_images_begins_with_the_first_and_ends_with_the_last() {
        let empty = prompt("");
        let before = empty.find("\"\"").unwrap() + 1;
        let after = empty.len() - before;
        let one = prompt(&png(28 * 10, 28 * 20));
        assert_eq!(without_images(one.as_bytes()).images, before..before + 200 * TOKEN_BYTES);
        let two = format!("{one}{}", prompt(&png(28 * 10, 28 * 10)));
        let routing = without_images(two.as_bytes());
        assert_eq!(routing.images, before..routing.text.len() - after);
    }

    #[test]
    fn prompts_without_images_and_truncated_urls_remain() {
        for text in ["", "data:image/png;base64,AAAA", "\"data:image/png", "\"data:text/plain,AAAA\""] {
            let routing = without_images(text.as_bytes());
            let text = Cow::Borrowed(text.as_bytes());
            assert_eq!(routing, RoutingPrompt { text, image_tokens: 0, images: 0..0 });
        }
        let open = without_images(b"\"data:image/png;base64,AAAA");
        assert_eq!((open.text.len(), open.image_tokens), (27, TOKENS_UNKNOWN));
    }
}
