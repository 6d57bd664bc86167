//! Tests conversations with images, for a model of the LLaVA family.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use base64::prelude::BASE64_STANDARD;
use base64::{Engine as _, decoded_len_estimate};
use expect_test::{Expect, expect};
use serde_json::{Value, json};
use server_engine::{ImageSpan, SpanAttention};
use server_images::ImageProcessor;
use server_images::limits::IMAGE_PIXELS_MAX;
use server_openai::{ChatRequest, Message};
use tokio_util::sync::CancellationToken;

use crate::backend::built_in_text_with;
use crate::error::Error;
use crate::image_reader::ImageReader;
use crate::limits::{ByteBudget, WaitingBudget};
use crate::model::Model;
use crate::prepare::Media;
use crate::prepare::conversation::Conversation;
use crate::prepare::images::{self, AssignedImages};
use crate::prepare::prompt::{RenderedPrompt, render};

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n\
    {% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
    {% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n\
    {% endfor %}";

/// A template that renders only text.
const TEXT_TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n\
    {{ message.content }}<|im_end|>\n{% endfor %}";

/// Two different images of one pixel each.
const IMAGES: [&str; 2] = [
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5Erk\
     Jggg==",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5Erk\
     Jggg==",
];

/// Number of tokens of an image.
const TOKENS: usize = 16;

/// The memory for images in bytes, which suffices for two preprocessed images.
const MEMORY: usize = 2 * 3 * 56 * 56 * 4;

fn model(template: &str) -> Model {
    let config = json!({
        "model_type": "llava", "vision_feature_select_strategy": "default",
        "vision_config": {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 56}
    });
    let preprocessor = json!({"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}});
    let processor = ImageProcessor::from_values(config, preprocessor).unwrap();
    let text = built_in_text_with(template, &["<image>"]).unwrap();
    let mut reader = ImageReader::new(processor, &text, |inputs, _| Arc::new(inputs), MEMORY).unwrap();
    reader.decoding = WaitingBudget::new(IMAGE_PIXELS_MAX as usize);
    Model::new(vec!["m".to_owned()], text, "test").with_images(Some(reader))
}

fn rendered(template: &str, messages: &Value) -> Result<RenderedPrompt, Error> {
    let request = ChatRequest::read(&json!({"messages": messages})).unwrap();
    render(&Conversation::of_chat(request)?, &model(template), &Media::default(), None)
}

/// Assigns the images of a prompt to its tokens.
fn assigned(prompt: RenderedPrompt, model: &Model) -> Result<Option<AssignedImages>, Error> {
    let (reader, canceled) = (model.images.as_ref().unwrap(), CancellationToken::new());
    images::assign(prompt.images, &prompt.tokens, "messages", reader, &canceled)
}

fn image(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn text_of(prompt: &RenderedPrompt, template: &str) -> String {
    model(template).text.tokenizer.decode(&prompt.tokens, false)
}

#[test]
fn images_are_spans_of_the_prompt_in_their_order() {
    let messages = json!([
        {"role": "user", "content": [text("a"), image(IMAGES[0]), text("b"), image(IMAGES[1])]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [image(IMAGES[0]), text("d")]},
    ]);
    let prompt = rendered(TEMPLATE, &messages).unwrap();
    let placeholders = "<image>".repeat(TOKENS);
    let expected = format!(
        "<|im_start|>user\na{placeholders}\nb{placeholders}\n<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n\
         <|im_start|>user\n{placeholders}\nd<|im_end|>\n"
    );
    assert_eq!(text_of(&prompt, TEMPLATE), expected);
    let tokens = prompt.tokens.clone();
    let images = assigned(prompt, &model(TEMPLATE)).unwrap().unwrap().images;
    assert_eq!((images.inputs.len(), images.prompt.attention), (2, SpanAttention::Causal));
    assert!(images.positions.is_none() && images.prompt.is_valid(tokens.len() as u32));
    let [first, second, third] = images.prompt.spans[..] else { panic!("expected three spans") };
    assert_eq!(
        third,
        ImageSpan { start: third.start, ..first },
        "the first and the third image are the same"
    );
    assert_ne!(first.digest, second.digest);
    let image_token = tokens[first.start as usize];
    for ImageSpan { start, num_tokens, first_row, .. } in [first, second, third] {
        assert_eq!((num_tokens as usize, first_row), (TOKENS, 0));
        assert!(tokens[start as usize..][..TOKENS].iter().all(|token| *token == image_token));
    }
}

#[test]
fn a_template_without_parts_gets_tags() {
    let messages = json!([{"role": "user", "content": [image(IMAGES[0]), text("b")]}]);
    let prompt = rendered(TEXT_TEMPLATE, &messages).unwrap();
    assert_eq!(prompt.images.len(), 1);
    assert!(text_of(&prompt, TEXT_TEMPLATE).contains(&"<image>".repeat(TOKENS)));
}

#[test]
fn a_conversation_without_images_is_rendered_as_text() {
    let messages = json!([{"role": "user", "content": [text("a"), text("b")]}]);
    let prompt = rendered(TEMPLATE, &messages).unwrap();
    assert!(prompt.images.is_empty());
    assert_eq!(text_of(&prompt, TEMPLATE), "<|im_start|>user\na\nb<|im_end|>\n");
}

#[test]
fn errors_name_the_part() {
    let check = |part: Value, expected: &Expect| {
        let messages =
            json!([{"role": "user", "content": "x"}, {"role": "user", "content": [text("a"), part]}]);
        let result = rendered(TEMPLATE, &messages).and_then(|prompt| assigned(prompt, &model(TEMPLATE)));
        expected.assert_eq(&result.err().unwrap().to_string());
    };
    check(json!({"type": "image_url"}), &expect!["messages[1].content[1].image_url: is missing"]);
    check(
        image("data:image/png,abc"),
        &expect![
            "messages[1].content[1].image_url: is not a data: URL in base64: it must begin with data:image/…;base64,"
        ],
    );
    check(
        image("data:image/png;base64,a*b"),
        &expect!["messages[1].content[1].image_url: the content of the data: URL is not valid base64"],
    );
    check(
        image("data:image/png;base64,AAAA"),
        &expect![
            "messages[1].content[1].image_url: the format of the image is not supported; supported: PNG, JPEG, WebP, GIF and BMP"
        ],
    );
    check(
        image(&IMAGES[0][..70]),
        &expect!["messages[1].content[1].image_url: the PNG image cannot be decoded: unexpected end of file"],
    );
    check(
        json!({"type": "image_url", "image_url": {"url": IMAGES[0], "detail": "huge"}}),
        &expect![[r#"messages[1].content[1].image_url.detail: "huge" is not one of auto, low, high"#]],
    );
    check(
        text("a <image>"),
        &expect![[r#"messages[1].content[1].text: contains "<image>", which this model reads as an image"#]],
    );
    check(
        json!({"type": "input_audio"}),
        &expect![[
            r#"messages[1].content[1].type: parts of type "input_audio" are not supported; use text, refusal or, if the model supports images, image_url"#
        ]],
    );
    let system = json!([{"role": "system", "content": [image(IMAGES[0])]}]);
    expect![[r#"messages[0].content[0].type: messages with the role "system" cannot contain images; only messages with the role "user" can"#]]
        .assert_eq(&rendered(TEMPLATE, &system).err().unwrap().to_string());
    let many = json!([{"role": "user", "content": vec![image(IMAGES[0]); 33]}]);
    expect!["messages: has more than 32 images"]
        .assert_eq(&rendered(TEMPLATE, &many).err().unwrap().to_string());
}

#[test]
fn the_location_of_an_image_in_a_part_of_another_type_is_ignored() {
    let part = json!({"type": "text", "text": "a", "image_url": {"url": IMAGES[0]}});
    let message = json!({"role": "user", "content": [part, image(IMAGES[1])]});
    assert_eq!(rendered(TEMPLATE, &json!([message])).unwrap().images.len(), 1);
    let message: Message = serde_json::from_value(message).unwrap();
    let model = model(TEMPLATE);
    let reader = model.images.as_ref().unwrap();
    assert_eq!(images::num_tokens_of(&message, reader, &Media::default()), TOKENS);
}

#[test]
fn images_outside_of_the_request_are_fetched_once_each() {
    let urls = ["https://example.org/a.png", "/b.png", "https://example.org/a.png"];
    let parts: Vec<Value> = urls.into_iter().map(image).collect();
    let messages = json!([{"role": "user", "content": parts}]);
    let Err(Error::MediaNeeded(needed)) = rendered(TEMPLATE, &messages) else {
        panic!("rendered without the images")
    };
    let needed: Vec<String> =
        needed.iter().map(|medium| format!("{} {}", medium.param, medium.url)).collect();
    expect![[r#"
        messages[0].content[0].image_url https://example.org/a.png
        messages[0].content[1].image_url /b.png"#]]
    .assert_eq(&needed.join("\n"));
}

/// Renders a message with these images.
fn prompt_with(images: &[&str]) -> RenderedPrompt {
    let parts: Vec<Value> = images.iter().copied().map(image).collect();
    rendered(TEMPLATE, &json!([{"role": "user", "content": parts}])).unwrap()
}

#[test]
fn the_memory_for_images_is_limited() {
    let model = model(TEMPLATE);
    let both = assigned(prompt_with(&IMAGES), &model).unwrap().unwrap();
    assert_eq!(assigned(prompt_with(&IMAGES[..1]), &model).err(), Some(Error::ImageMemoryFull(MEMORY)));
    drop(both);
    assigned(prompt_with(&[IMAGES[0], IMAGES[0], IMAGES[0]]), &model).unwrap();
}

#[test]
fn the_memory_for_images_is_reserved_before_they_are_decoded() {
    let model = model(TEMPLATE);
    // Decoding these files would fail.
    let truncated = [70_usize, 74, 78].map(|length| &IMAGES[0][..length]);
    let error = assigned(prompt_with(&truncated), &model).err().unwrap();
    expect![
        "messages[0].content[2].image_url: this image and the images before it take 112896 bytes in total after preprocessing (limit: 75264 bytes, --max-image-memory)"
    ]
    .assert_eq(&error.to_string());
    let both = assigned(prompt_with(&IMAGES), &model).unwrap().unwrap();
    assert_eq!(assigned(prompt_with(&truncated[..1]), &model).err(), Some(Error::ImageMemoryFull(MEMORY)));
    drop(both);
    let error = assigned(prompt_with(&truncated[..2]), &model).err().unwrap();
    assert!(error.to_string().contains("cannot be decoded"), "{error}");
    // The failed request has returned its memory.
    assigned(prompt_with(&IMAGES), &model).unwrap();
}

#[test]
fn an_image_waits_while_others_are_decoded() {
    let (busy, idle) = (model(TEMPLATE), model(TEMPLATE));
    let all = busy.images.as_ref().unwrap().decoding.reserve(IMAGE_PIXELS_MAX as usize).unwrap();
    let has_returned = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (started, starts) = mpsc::channel();
        let (busy, has_returned) = (&busy, &has_returned);
        scope.spawn(move || {
            started.send(()).unwrap();
            assigned(prompt_with(&IMAGES[..1]), busy).unwrap();
            assert!(has_returned.load(Ordering::SeqCst), "the image did not wait");
        });
        starts.recv().unwrap();
        // If the thread did not wait, it would finish during this loop.
        for _ in 0..3 {
            assigned(prompt_with(&IMAGES[..1]), &idle).unwrap();
        }
        has_returned.store(true, Ordering::SeqCst);
        drop(all);
    });
}

/// Returns a `data:` URL with the header of a PNG file.
fn png_header(width: u32, height: u32) -> String {
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
    file.extend(width.to_be_bytes().into_iter().chain(height.to_be_bytes()));
    file.extend([8, 2, 0, 0, 0]);
    format!("data:image/png;base64,{}", BASE64_STANDARD.encode(file))
}

#[test]
fn the_pixels_of_all_images_of_a_request_are_limited() {
    let large = png_header(7000, 7000);
    assert_eq!(prompt_with(&[large.as_str(); 8]).images.len(), 8);
    let messages = json!([{"role": "user", "content": vec![image(&large); 9]}]);
    expect![
        "messages[0].content[8].image_url: this image and the images before it have 441000000 pixels in total (limit: 400000000 pixels in all images of a request)"
    ]
    .assert_eq(&rendered(TEMPLATE, &messages).err().unwrap().to_string());
}

#[test]
fn the_files_of_images_reserve_their_memory_before_they_are_decoded_from_base64() {
    let bytes = IMAGES.map(|url| decoded_len_estimate(url.split_once(',').unwrap().1.len()));
    let bytes_max = bytes[0] + bytes[1];
    let budget = ByteBudget::new(bytes_max, bytes_max);
    let read = |images: &[&str]| {
        let parts: Vec<Value> = images.iter().copied().map(image).collect();
        let request = json!({"messages": [{"role": "user", "content": parts}]});
        let conversation = Conversation::of_chat(ChatRequest::read(&request).unwrap())?;
        render(&conversation, &model(TEMPLATE), &Media::new(Arc::clone(&budget)), None)
    };
    let both = read(&IMAGES).unwrap();
    let full = Some(Error::body_buffer_full(bytes_max));
    assert_eq!(read(&IMAGES[..1]).err(), full);
    // Decoding this text would fail.
    let malformed = IMAGES[0].replace("iVBOR", "*****");
    let malformed = malformed.as_str();
    assert_eq!(read(&[malformed]).err(), full);
    drop(both);
    assert_eq!(read(&IMAGES).unwrap().images.len(), 2);
    assert!(read(&[malformed]).err().unwrap().to_string().contains("is not valid base64"));
    // These three images exceed the whole budget.
    let error = read(&[IMAGES[0], IMAGES[1], malformed]).err().unwrap();
    let Error::Invalid { code, param, message } = error else { panic!("{error}") };
    assert_eq!((code, param.as_str()), ("array_above_max_length", "messages[0].content[2].image_url"));
    assert!(message.contains("--max-buffered-body-bytes"), "{message}");
    // The failed requests have returned their memory.
    assert_eq!(read(&IMAGES).unwrap().images.len(), 2);
}

#[test]
fn images_are_not_decoded_for_a_client_that_has_disconnected() {
    let (model, prompt) = (model(TEMPLATE), prompt_with(&IMAGES));
    let canceled = CancellationToken::new();
    canceled.cancel();
    let reader = model.images.as_ref().unwrap();
    let result = images::assign(prompt.images, &prompt.tokens, "messages", reader, &canceled);
    assert!(matches!(result, Err(Error::Internal(_))));
}

#[test]
fn a_prompt_whose_images_do_not_fit_is_rejected_before_they_are_decoded() {
    let truncated = &IMAGES[0][..70];
    let messages = json!([{"role": "user", "content": [image(truncated), image(truncated)]}]);
    let request = ChatRequest::read(&json!({"messages": messages})).unwrap();
    let conversation = Conversation::of_chat(request).unwrap();
    let error = render(&conversation, &model(TEMPLATE), &Media::default(), Some(32)).err().unwrap();
    expect![
        "messages: the images take 32 tokens, which leaves no room for text in the context length of 32 tokens"
    ]
    .assert_eq(&error.to_string());
}

#[test]
fn an_error_about_the_length_of_a_prompt_says_how_many_tokens_are_for_images() {
    let messages = json!([{"role": "user", "content": [image(IMAGES[0]), text(&"z".repeat(100))]}]);
    let request = ChatRequest::read(&json!({"messages": messages})).unwrap();
    let conversation = Conversation::of_chat(request).unwrap();
    let error = render(&conversation, &model(TEMPLATE), &Media::default(), Some(64)).err().unwrap();
    let Error::ContextLength { param, message } = error else { panic!("{error}") };
    assert_eq!(param, "messages");
    assert!(message.contains(" tokens (16 of them for images), which leaves no room"), "{message}");
}

#[test]
fn a_model_that_does_not_support_images_rejects_an_image_with_its_path() {
    let messages = json!([{"role": "user", "content": [text("a"), image(IMAGES[0])]}]);
    let request = ChatRequest::read(&json!({"messages": messages})).unwrap();
    let conversation = Conversation::of_chat(request).unwrap();
    let text = built_in_text_with(TEMPLATE, &[]).unwrap();
    let model = Model::new(vec!["m".to_owned()], text, "test");
    let error = render(&conversation, &model, &Media::default(), None).err().unwrap();
    expect!["messages[0].content[1].image_url: this model does not support images"]
        .assert_eq(&error.to_string());
}
