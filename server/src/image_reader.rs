//! The image reader of a vision-language model: the model's image processor, and the forms of message content that the
//! model's chat template renders.

use std::any::Any;
use std::sync::Arc;

use serde_json::json;
use server_engine::TokenId;
use server_images::limits::IMAGE_PIXELS_MAX;
use server_images::{EncoderInputs, FeatureRow, ImageProcessor};
use server_text::{ModelText, RenderInput};

use crate::limits::{ByteBudget, WaitingBudget, preparation_slots};

/// Number of image pixels that are decoded and preprocessed at the same time, for each request that can be prepared at
/// the same time (in total at least 50,000,000 pixels, so that an image of the largest size always fits). Decoding
/// takes up to 11 bytes of memory for each pixel.
///
/// If exceeded: further images wait.
const DECODING_PIXELS_PER_SLOT: usize = 12_500_000;

/// Converts the encoder inputs of an image to the type that the backend's image encoder expects.
pub(crate) type EncoderContent = fn(EncoderInputs, Option<Vec<FeatureRow>>) -> Arc<dyn Any + Send + Sync>;

/// Reads images for a model.
#[derive(Debug)]
pub(crate) struct ImageReader {
    pub(crate) processor: ImageProcessor,
    /// The placeholder token at the positions of images in a prompt.
    pub(crate) image_token: TokenId,
    pub(crate) content: EncoderContent,
    pub(crate) template: TemplateContent,
    /// The budget, shared by all requests, for the memory of preprocessed images.
    pub(crate) memory: Arc<ByteBudget>,
    /// The budget for the pixels of images that are being decoded.
    pub(crate) decoding: WaitingBudget,
}

/// The forms of a message's content that the chat template renders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TemplateContent {
    /// The template renders only text. The text of a message contains a tag for each image.
    Text,
    /// The template renders both lists of parts and text. Messages without images are rendered as text.
    PartsAndText,
    /// The template renders only lists of parts.
    Parts,
}

/// A text that no chat template contains.
const PROBE: &str = "ovfleet probe";

impl ImageReader {
    /// Creates the reader of a model.
    ///
    /// # Errors
    /// The tokenizer does not have the image token of the model's family.
    pub(crate) fn new(
        processor: ImageProcessor,
        text: &ModelText,
        content: EncoderContent,
        memory_bytes: usize,
    ) -> anyhow::Result<Self> {
        let name = processor.image_token();
        let image_token = text.tokenizer.token_id(name);
        let image_token = image_token
            .ok_or_else(|| anyhow::anyhow!("the tokenizer has no token {name:?}, which images require"))?;
        let template = TemplateContent::of(text);
        let memory = ByteBudget::new(memory_bytes, memory_bytes);
        let pixels = DECODING_PIXELS_PER_SLOT * preparation_slots();
        let decoding = WaitingBudget::new(pixels.max(IMAGE_PIXELS_MAX as usize));
        Ok(Self { processor, image_token, content, template, memory, decoding })
    }
}

impl TemplateContent {
    /// Renders a list of parts and a text to determine which of them the template supports.
    fn of(text: &ModelText) -> Self {
        let Some(template) = &text.chat_template else { return Self::Text };
        let renders = |content| {
            let messages = [json!({"role": "user", "content": content})];
            let rendered = template.render(&RenderInput { messages: &messages, ..RenderInput::default() });
            rendered.is_ok_and(|text| text.contains(PROBE) && !text.contains("type"))
        };
        let parts = json!([{"type": "image"}, {"type": "text", "text": PROBE}]);
        match (renders(parts), renders(json!(PROBE))) {
            (false, _) => Self::Text,
            (true, true) => Self::PartsAndText,
            (true, false) => Self::Parts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::built_in_text_with;

    #[test]
    fn the_form_of_messages_is_found_by_rendering() {
        let form = |template: &str| TemplateContent::of(&built_in_text_with(template, &[]).unwrap());
        let parts = "{% for part in message.content %}{% if part.type == 'image' %}<image>\
                     {% else %}{{ part.text }}{% endif %}{% endfor %}";
        let each = |body: &str| format!("{{% for message in messages %}}{body}{{% endfor %}}");
        assert_eq!(form(&each("{{ message.content }}")), TemplateContent::Text);
        assert_eq!(form(&each(parts)), TemplateContent::Parts);
        let both = format!(
            "{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{parts}{{% endif %}}"
        );
        assert_eq!(form(&each(&both)), TemplateContent::PartsAndText);
    }
}
