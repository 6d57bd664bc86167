//! The place of an image in the prompt (its tokens, its text, and the sources of the tokens' embeddings), and the
//! memory of the encoder's inputs.

use std::ops::Range;

/// The grid of the merged tokens of an image, for position IDs with a row and a column (M-RoPE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenGrid {
    /// The number of rows of merged tokens.
    pub rows: u32,
    /// The number of merged tokens in each row.
    pub columns: u32,
}

/// The source of the embedding of one image token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureRow {
    /// A row of the encoder's output, counted over all tiles of the image (row `tile · T + t` of [tiles, T, hidden]).
    Encoder(u32),
    /// The learned vector after a row of the picture: `image_newline` of LLaVA-NeXT, `sub_GN` of Phi-4-multimodal.
    RowEnd,
    /// The learned vector between the tiles and the global view: `glb_GN` of Phi-4-multimodal.
    GlobalSeparator,
}

/// The tokens and the text of an image in the prompt, and the memory of its inputs. For a given model and level of
/// detail, the layout depends only on the size of the image, not on its pixels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageLayout {
    /// The number of image tokens: positions of the prompt whose embeddings are rows of the encoder's output or learned
    /// vectors. Text around them (start and end tokens, row numbers of tiles) is not included.
    pub num_tokens: usize,
    /// The source of the embedding of each image token in the order of the prompt; `None` if the embedding of image
    /// token i is row i of the encoder's output, for every i.
    pub feature_rows: Option<Vec<FeatureRow>>,
    /// The grid of the tokens, for models with M-RoPE.
    pub grid: Option<TokenGrid>,
    /// The memory that the inputs of the encoder take, in bytes: [`EncoderInputs::size_bytes`] of the inputs that
    /// [`ImageProcessor::preprocess`] computes for an image of this size.
    ///
    /// [`EncoderInputs::size_bytes`]: crate::EncoderInputs::size_bytes
    /// [`ImageProcessor::preprocess`]: crate::ImageProcessor::preprocess
    pub input_bytes: usize,
    /// The text that replaces the marker of the image in the prompt, as a function of the image's number.
    pub(crate) text: PromptText,
}

/// The text of an image in the prompt: a template whose only variable is the number of the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PromptText {
    /// The text before the number of the image, if the text contains the number.
    pub(crate) before_number: Option<String>,
    /// The rest of the text.
    pub(crate) rest: String,
}

impl PromptText {
    /// Creates a text that does not contain the number of the image.
    pub(crate) fn plain(text: String) -> Self {
        Self { before_number: None, rest: text }
    }
}

impl ImageLayout {
    /// The text that replaces the marker of the image in the prompt. `number` counts the images of the request from 0.
    #[must_use]
    pub fn prompt_text(&self, number: usize) -> String {
        match &self.text.before_number {
            Some(before) => format!("{before}{number}{}", self.text.rest),
            None => self.text.rest.clone(),
        }
    }
}

/// A text that stands for an image in a rendered prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageMarker {
    /// The text is the same for all images.
    Text(&'static str),
    /// The text contains the number of the image, counted from 1.
    Numbered {
        /// The text before the number.
        start: &'static str,
        /// The text after the number.
        end: &'static str,
    },
}

impl ImageMarker {
    /// Returns the marker of the image `number`, counted from 0.
    #[must_use]
    pub fn text(self, number: usize) -> String {
        match self {
            Self::Text(text) => text.to_owned(),
            Self::Numbered { start, end } => format!("{start}{}{end}", number + 1),
        }
    }

    /// The byte range of the first marker in a text.
    pub(crate) fn find(self, text: &str) -> Option<Range<usize>> {
        match self {
            Self::Text(marker) => text.find(marker).map(|start| start..start + marker.len()),
            Self::Numbered { start, end } => text.match_indices(start).find_map(|(at, _)| {
                let rest = &text[at + start.len()..];
                let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
                let is_marker = digits > 0 && rest[digits..].starts_with(end);
                is_marker.then(|| at..at + start.len() + digits + end.len())
            }),
        }
    }
}

/// The image tokens of one image in a tokenized prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpan {
    /// The positions of the image tokens, in order. If the prompt contains text between the tiles of an image, there
    /// are several ranges.
    pub ranges: Vec<Range<usize>>,
    /// The grid of the tokens, for models with M-RoPE.
    pub grid: Option<TokenGrid>,
}
