//! Reads the images of a conversation, and assigns positions of the prompt to them.
//!
//! The sizes of all images are known before the prompt is rendered, and the prompt is tokenized and checked before any
//! image is decoded. The size of the preprocessed images follows from the sizes of the images, so their memory is
//! reserved before any image is decoded. A request that is too long, or whose images do not fit into memory, is
//! therefore rejected at little cost. Memory for the files of images in `data:` URLs is reserved before they are
//! decoded from base64.

use std::collections::HashMap;
use std::sync::Arc;

use axum::body::Bytes;
use base64::Engine as _;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{alphabet, decoded_len_estimate};
use server_engine::{
    ImageDigest, ImageInput, ImageSpan, PromptImages, PromptPositions, RequestImages, SpanAttention, TokenId,
};
use server_images::{
    DecodeLimits, Detail, ImageError, ImageLayout, ModelFamily, MropePositions, decode, expand_prompt,
    image_spans, mrope_positions,
};
use server_openai::{Content, ContentPart, ImageUrl, Message};
use tokio_util::sync::CancellationToken;

use super::media::{Media, is_data};
use crate::error::Error;
use crate::image_reader::ImageReader;
use crate::limits::{BudgetExhausted, ByteReservation};

/// Number of images of a request.
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const IMAGES_MAX: usize = 32;
/// Number of pixels of all images of a request, according to their headers. The limit allows 32 photos of 12
/// million pixels each.
///
/// If exceeded: 400, `array_above_max_length`.
const IMAGE_PIXELS_TOTAL_MAX: u64 = 400_000_000;

/// An image of a conversation before it is decoded.
pub(super) struct ConversationImage {
    /// The parameter with the image, for errors.
    param: String,
    bytes: Bytes,
    detail: Detail,
    /// The number of pixels, according to the header.
    num_pixels: u64,
    layout: ImageLayout,
}

/// The images of a request, and their memory.
pub(super) struct AssignedImages {
    pub(super) images: Arc<RequestImages>,
    /// The reserved memory of the preprocessed images.
    pub(super) memory: ByteReservation,
}

/// Whether preparing a request with this body may decode images.
pub(crate) fn may_decode_images(body: &[u8]) -> bool {
    // This search does not find a key or a type that contains escape sequences. The caller also checks `may_compile`,
    // which is true for such a body.
    const SIGNS: [&[u8]; 2] = [b"image_url", b"input_image"];
    SIGNS.iter().any(|sign| memchr::memmem::find(body, sign).is_some())
}

/// Whether a part of a message is an image.
pub(super) fn is_image(part: &ContentPart) -> bool {
    part.r#type == "image_url"
}

/// Reads the images of all messages, in order. `param` is the parameter with the messages.
///
/// # Errors
/// An image is not allowed in its message, cannot be read, or exceeds a limit. The error is [`Error::MediaNeeded`] if
/// images have to be fetched first.
pub(super) fn read(
    messages: &[Message],
    param: &str,
    reader: &ImageReader,
    media: &Media,
) -> Result<Vec<ConversationImage>, Error> {
    let references = references(messages, param).take(IMAGES_MAX + 1).collect::<Result<Vec<_>, Error>>()?;
    if references.len() > IMAGES_MAX {
        let problem = format!("has more than {IMAGES_MAX} images");
        return Err(Error::coded("array_above_max_length", param, problem));
    }
    media.require(references.iter().map(|(image, param)| (image.url.as_str(), param.as_str())))?;
    check_bytes(&references, media)?;
    let mut num_pixels = 0;
    let read = |(image, param): (&ImageUrl, String)| {
        let image = read_image(image, param, reader, media)?;
        num_pixels += image.num_pixels;
        if num_pixels > IMAGE_PIXELS_TOTAL_MAX {
            let problem = format!(
                "this image and the images before it have {num_pixels} pixels in total (limit: \
                 {IMAGE_PIXELS_TOTAL_MAX} pixels in all images of a request)"
            );
            return Err(Error::coded("array_above_max_length", image.param, problem));
        }
        Ok(image)
    };
    references.into_iter().map(read).collect()
}

/// Checks that the fetched images and the images in `data:` URLs fit into memory together, before any `data:` URL is
/// decoded.
///
/// # Errors
/// The images together are larger than the part of the buffer for request bodies that is not reserved for small bodies.
fn check_bytes(references: &[(&ImageUrl, String)], media: &Media) -> Result<(), Error> {
    let bytes_max = media.bytes_max();
    let mut bytes = media.bytes();
    for (image, param) in references {
        let text = base64_text(&image.url).filter(|_| is_data(&image.url));
        bytes += text.map_or(0, |text| decoded_len_estimate(text.len()));
        if bytes > bytes_max {
            let problem = format!(
                "the images in data: URLs up to this one and all fetched images have {bytes} bytes in total (limit: \
                 {bytes_max} bytes, the part of --max-buffered-body-bytes that is not reserved for small bodies)"
            );
            return Err(Error::coded("array_above_max_length", param, problem));
        }
    }
    Ok(())
}

/// Returns an empty list, for a model that does not support images.
///
/// # Errors
/// A message contains an image.
pub(super) fn reject(messages: &[Message], param: &str) -> Result<Vec<ConversationImage>, Error> {
    match references(messages, param).next() {
        None => Ok(Vec::new()),
        Some(Err(error)) => Err(error),
        Some(Ok((_, param))) => Err(Error::invalid(param, "this model does not support images")),
    }
}

/// Returns the locations of the images of all messages, and the parameters that contain them.
fn references<'a>(
    messages: &'a [Message],
    param: &'a str,
) -> impl Iterator<Item = Result<(&'a ImageUrl, String), Error>> {
    messages.iter().enumerate().flat_map(move |(index, message)| {
        let parts = match &message.content {
            Some(Content::Parts(parts)) => &parts[..],
            _ => &[],
        };
        let images = parts.iter().enumerate().filter(|(_, part)| is_image(part));
        images.map(move |(part_index, part)| {
            reference(message, part, &format!("{param}[{index}].content[{part_index}]"))
        })
    })
}

/// Returns the location of the image of a part, and the parameter that contains it.
fn reference<'a>(
    message: &Message,
    part: &'a ContentPart,
    at: &str,
) -> Result<(&'a ImageUrl, String), Error> {
    let image = part.image_url.as_ref().ok_or_else(|| Error::missing(format!("{at}.image_url")))?;
    if message.role != "user" {
        let problem = format!(
            "messages with the role {:?} cannot contain images; only messages with the role \"user\" can",
            message.role
        );
        return Err(Error::invalid(image.param.clone().unwrap_or(format!("{at}.type")), problem));
    }
    let param = image.param.clone().unwrap_or_else(|| format!("{at}.image_url"));
    Ok((image, param))
}

fn read_image(
    image: &ImageUrl,
    param: String,
    reader: &ImageReader,
    media: &Media,
) -> Result<ConversationImage, Error> {
    let detail = read_detail(image.detail.as_deref(), &param)?;
    let bytes = match media.get(&image.url) {
        Some(bytes) => bytes.clone(),
        None => read_data_url(&image.url, &param, media)?,
    };
    let refused = |error: ImageError| Error::invalid(param.clone(), error);
    let header = DecodeLimits::default().check(&bytes).map_err(refused)?;
    let layout = reader.processor.layout(header.size(), detail).map_err(refused)?;
    Ok(ConversationImage { bytes, detail, num_pixels: header.stored_size.pixels(), layout, param })
}

/// Reads the level of detail of an image. `at` is the parameter with the object that contains the level.
///
/// # Errors
/// The level is unknown.
pub(super) fn read_detail(detail: Option<&str>, at: &str) -> Result<Detail, Error> {
    match detail {
        None | Some("auto") => Ok(Detail::Auto),
        Some("low") => Ok(Detail::Low),
        Some("high") => Ok(Detail::High),
        Some(other) => {
            let problem = format!("{other:?} is not one of auto, low, high");
            Err(Error::invalid(format!("{at}.detail"), problem))
        }
    }
}

/// Returns the base64 text of a URL, if the content of the URL is in base64.
fn base64_text(url: &str) -> Option<&str> {
    url.split_once(',').filter(|(media_type, _)| media_type.ends_with(";base64")).map(|(_, text)| text)
}

/// Returns the content of a `data:` URL. The memory of the content is reserved until the content is dropped.
fn read_data_url(url: &str, param: &str, media: &Media) -> Result<Bytes, Error> {
    /// Some clients omit the padding.
    const BASE64: GeneralPurpose = GeneralPurpose::new(
        &alphabet::STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    let Some(text) = base64_text(url) else {
        let problem = "is not a data: URL in base64: it must begin with data:image/…;base64,";
        return Err(Error::invalid(param, problem));
    };
    // The decoder allocates exactly this number of bytes.
    let reservation = media.reserve(decoded_len_estimate(text.len()))?;
    let bytes = BASE64.decode(text);
    let bytes =
        bytes.map_err(|_| Error::invalid(param, "the content of the data: URL is not valid base64"))?;
    Ok(reservation.hold(bytes))
}

/// Replaces the markers of images in a rendered prompt with the text of the image tokens.
///
/// # Errors
/// The prompt does not have a marker for each image, or the images alone take at least `tokens_max` tokens.
pub(super) fn expand(
    prompt: &str,
    images: &[ConversationImage],
    param: &str,
    reader: &ImageReader,
    tokens_max: Option<u32>,
) -> Result<String, Error> {
    let tokens = num_tokens(images);
    if let Some(length) = tokens_max.filter(|length| tokens >= *length as usize) {
        let message = format!(
            "{param}: the images take {tokens} tokens, which leaves no room for text in the context length of {length} \
             tokens"
        );
        return Err(Error::ContextLength { param: param.to_owned(), message });
    }
    let layouts: Vec<ImageLayout> = images.iter().map(|image| image.layout.clone()).collect();
    expand_prompt(prompt, reader.processor.markers(), &layouts).map_err(|error| Error::invalid(param, error))
}

/// Returns the number of tokens that the images take.
pub(super) fn num_tokens(images: &[ConversationImage]) -> usize {
    images.iter().map(|image| image.layout.num_tokens).sum()
}

/// Returns the part of an error message that states how many tokens of the prompt belong to images. Without images, the
/// part is empty.
pub(super) fn image_tokens_note(num_tokens: usize) -> String {
    if num_tokens == 0 { String::new() } else { format!(" ({num_tokens} of them for images)") }
}

/// Returns the number of tokens that the images of a message would take. Images that cannot be read count as 0 tokens.
pub(super) fn num_tokens_of(message: &Message, reader: &ImageReader, media: &Media) -> usize {
    let Some(Content::Parts(parts)) = &message.content else { return 0 };
    let images = parts.iter().filter(|part| is_image(part)).filter_map(|part| part.image_url.as_ref());
    // Each image is dropped before the next one is read, so that only one file is in memory at a time.
    let num_tokens = |image: &ImageUrl| {
        read_image(image, String::new(), reader, media).map_or(0, |image| image.layout.num_tokens)
    };
    images.map(num_tokens).sum()
}

/// Decodes the images and assigns positions of the prompt to them. `None` if there are no images. `param` is the
/// parameter with the prompt.
///
/// # Errors
/// An image cannot be decoded, the prompt does not have the number of image tokens that the images need, the memory for
/// images is exhausted, or the client has disconnected.
pub(super) fn assign(
    images: Vec<ConversationImage>,
    tokens: &[TokenId],
    param: &str,
    reader: &ImageReader,
    canceled: &CancellationToken,
) -> Result<Option<AssignedImages>, Error> {
    let layouts: Vec<ImageLayout> = images.iter().map(|image| image.layout.clone()).collect();
    let spans = image_spans(tokens, reader.image_token, &layouts);
    let spans = spans.map_err(|error| Error::invalid(param, error))?;
    if images.is_empty() {
        return Ok(None);
    }
    let is_mrope = layouts.iter().all(|layout| layout.grid.is_some());
    let positions = is_mrope.then(|| Arc::new(positions(&mrope_positions(tokens.len(), &spans))));
    let UniqueImages { images, indices } = UniqueImages::of(images);
    let memory = reserve_memory(&images, reader)?;
    let mut inputs: Vec<Arc<ImageInput>> = Vec::new();
    let mut digests = Vec::with_capacity(images.len());
    for ConversationImage { param, bytes, detail, num_pixels, layout } in images {
        let refused = |error: ImageError| Error::invalid(param.clone(), error);
        let decoding = reader.decoding.reserve(num_pixels as usize);
        let decoding = decoding.expect("invariant: an image has no more pixels than the budget");
        if canceled.is_cancelled() {
            // No client receives this error.
            return Err(Error::Internal("the client has disconnected".to_owned()));
        }
        let pixels = decode(&bytes, &DecodeLimits::default()).map_err(refused)?;
        let digest = ImageDigest(reader.processor.digest(&pixels, detail).0);
        // Different files may have the same pixels, which need preprocessing only once.
        if inputs.iter().all(|input| input.digest != digest) {
            let encoder_inputs = reader.processor.preprocess(&pixels, detail).map_err(refused)?;
            drop((pixels, decoding));
            debug_assert_eq!(encoder_inputs.size_bytes(), layout.input_bytes, "the reservation is exact");
            let content = (reader.content)(encoder_inputs, layout.feature_rows);
            inputs.push(Arc::new(ImageInput { digest, rows: layout.num_tokens as u32, content }));
        }
        digests.push(digest);
    }
    let mut prompt = PromptImages { spans: Vec::new(), attention: attention(reader.processor.family()) };
    for (index, span) in indices.into_iter().zip(&spans) {
        let digest = digests[index];
        let mut first_row = 0;
        for range in &span.ranges {
            let num_tokens = range.len() as u32;
            prompt.spans.push(ImageSpan { digest, start: range.start as u32, num_tokens, first_row });
            first_row += num_tokens;
        }
    }
    Ok(Some(AssignedImages { images: Arc::new(RequestImages { inputs, prompt, positions }), memory }))
}

/// The images of a request, without duplicates.
struct UniqueImages {
    images: Vec<ConversationImage>,
    /// For each image of the request, its index in `images`.
    indices: Vec<usize>,
}

impl UniqueImages {
    fn of(all: Vec<ConversationImage>) -> Self {
        let mut known: HashMap<(Bytes, Detail), usize> = HashMap::new();
        let mut unique = Self { images: Vec::new(), indices: Vec::with_capacity(all.len()) };
        for image in all {
            let next = unique.images.len();
            let index = *known.entry((image.bytes.clone(), image.detail)).or_insert(next);
            if index == next {
                unique.images.push(image);
            }
            unique.indices.push(index);
        }
        unique
    }
}

/// Reserves the memory that the images of a request take after preprocessing. The amount follows from their sizes, so
/// the memory is reserved before any of them is decoded. Different files with the same pixels count separately.
///
/// # Errors
/// The images need more than the whole memory for images, or other requests use too much of it.
fn reserve_memory(images: &[ConversationImage], reader: &ImageReader) -> Result<ByteReservation, Error> {
    let mut memory = reader.memory.empty_reservation();
    let bytes_max = memory.bytes_max();
    let mut bytes = 0;
    for ConversationImage { param, layout, .. } in images {
        bytes += layout.input_bytes;
        if bytes > bytes_max {
            let problem = format!(
                "this image and the images before it take {bytes} bytes in total after preprocessing (limit: \
                 {bytes_max} bytes, --max-image-memory)"
            );
            return Err(Error::coded("array_above_max_length", param, problem));
        }
    }
    memory.grow_to(bytes).map_err(|BudgetExhausted| Error::ImageMemoryFull(bytes_max))?;
    Ok(memory)
}

fn attention(family: ModelFamily) -> SpanAttention {
    match family {
        ModelFamily::Gemma3 => SpanAttention::Bidirectional,
        _ => SpanAttention::Causal,
    }
}

fn positions(positions: &MropePositions) -> PromptPositions {
    let MropePositions { temporal, height, width, delta } = positions;
    let streams = temporal.iter().zip(height).zip(width);
    let prompt = streams.map(|((t, h), w)| [*t as i32, *h as i32, *w as i32]).collect();
    PromptPositions { prompt, delta: *delta as i32 }
}
