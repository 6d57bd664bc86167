//! The simulator backend.

use std::sync::Arc;

use anyhow::Context as _;
use serde_json::json;
use server_engine::sim::{SimConfig, SimCosts, SimEncoder, SimFault, SimFaultKind, SimRunner, SimScript};
use server_engine::{Clock, EncoderConfig, ModelRunner, SpillIdentity};
use server_images::ImageProcessor;
use server_text::{ModelText, RenderInput};

use super::built_in_text::{TEMPLATE, built_in_text_with};
use super::config::BackendConfig;
use super::runners::{ImageBackend, Runners};
use crate::args::SimArgs;
use crate::image_reader::ImageReader;
use crate::model::Model;

/// Creates a simulated model and, if the configuration has a draft model, a simulated draft model whose steps take a
/// tenth of the time.
pub(super) fn load(config: &BackendConfig, text: &ModelText) -> anyhow::Result<Runners> {
    let model = runner(&config.sim, config.adapters.len(), text)?;
    let draft = config.draft_model.as_ref().map(|_| {
        let sim = SimArgs {
            sim_step_time: config.sim.sim_step_time / 10,
            sim_prefill_token_time: config.sim.sim_prefill_token_time / 10,
            sim_decode_token_time: config.sim.sim_decode_token_time / 10,
            sim_fatal_step: None,
            ..config.sim.clone()
        };
        runner(&sim, config.adapters.len(), text)
    });
    let adapters = (1..=config.adapters.len() as u64).collect();
    let identity = SpillIdentity { description: "sim".to_owned(), files: Vec::new(), adapters };
    let images = config.sim.sim_images.then(image_backend).transpose()?;
    Ok(Runners { model, draft: draft.transpose()?, description: "sim".to_owned(), identity, images })
}

/// Returns the built-in model with these names, and the configuration of its image encoder. As with `--sim-images`, the
/// model accepts images. The memory for images and the encoder's cache are limited to `memory_bytes` bytes each.
///
/// # Errors
/// The built-in tokenizer or image processor cannot be created.
pub fn built_in_model_with_images(
    names: Vec<String>,
    memory_bytes: usize,
) -> anyhow::Result<(Model, EncoderConfig)> {
    let text = text_with_images()?;
    let ImageBackend { processor, encoder, content } = image_backend()?;
    let reader = ImageReader::new(processor, &text, content, memory_bytes)?;
    let model = Model::new(names, text, "sim").with_images(Some(reader));
    Ok((model, EncoderConfig { encoder, cache_bytes: memory_bytes as u64 }))
}

/// Returns the image processor and the encoder of a simulated model of the LLaVA family, which divides each image into
/// 16 patches.
fn image_backend() -> anyhow::Result<ImageBackend> {
    let config = json!({
        "model_type": "llava", "vision_feature_select_strategy": "default",
        "vision_config": {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 56}
    });
    let preprocessor = json!({"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}});
    let processor =
        ImageProcessor::from_values(config, preprocessor).context("failed to create the image processor")?;
    Ok(ImageBackend {
        processor,
        encoder: Box::new(SimEncoder::default()),
        content: |inputs, _| Arc::new(inputs),
    })
}

/// Returns the built-in tokenizer with the additional token `<image>`, the placeholder at the positions of images.
pub(super) fn text_with_images() -> anyhow::Result<ModelText> {
    built_in_text_with(TEMPLATE, &["<image>"])
}

fn runner(sim: &SimArgs, adapters: usize, text: &ModelText) -> anyhow::Result<Box<dyn ModelRunner>> {
    let SimArgs {
        sim_step_time,
        sim_prefill_token_time,
        sim_decode_token_time,
        sim_blocks,
        sim_block_tokens,
        sim_fatal_step,
        sim_images: _,
        sim_model_len: _,
        ref sim_answers,
    } = *sim;
    let costs = SimCosts {
        step: sim_step_time,
        prefill_token: sim_prefill_token_time,
        decode_token: sim_decode_token_time,
    };
    let fatal = sim_fatal_step.map(|step| SimFault { step: step - 1, kind: SimFaultKind::Fatal });
    let config = SimConfig {
        block_tokens: sim_block_tokens,
        blocks_total: sim_blocks,
        vocabulary: text.vocabulary_size,
        costs,
        faults: fatal.into_iter().collect(),
    };
    let runner = SimRunner::new(config, Clock::real()).with_adapters(adapters as u32);
    Ok(Box::new(if sim_answers.is_empty() { runner } else { runner.with_script(script(sim_answers, text)?) }))
}

/// Returns a script that makes the simulated model generate these answers in successive turns of a conversation.
///
/// # Errors
/// The model has no chat template, the template cannot be rendered or does not open the model's turn, the model has no
/// token that ends a turn, or an answer cannot be tokenized.
pub fn script(answers: &[String], text: &ModelText) -> anyhow::Result<SimScript> {
    let template =
        text.chat_template.as_ref().context("the model has no chat template, which --sim-answer requires")?;
    let messages = [json!({"role": "user", "content": "x"})];
    let render = |add_generation_prompt| {
        let input = RenderInput { messages: &messages, add_generation_prompt, ..RenderInput::default() };
        template.render(&input).context("failed to render the chat template")
    };
    let (with, without) = (render(true)?, render(false)?);
    let opening = with.strip_prefix(&without).filter(|opening| !opening.is_empty());
    let opening =
        opening.context("the chat template does not open the model's turn, which --sim-answer requires")?;
    let end = text.defaults.eos.first();
    let end = *end.context("the model has no token that ends a turn, which --sim-answer requires")?;
    let encode = |answer: &str| {
        let problem = "failed to tokenize an answer or the opening of the model's turn";
        text.tokenizer.encode(answer, false, true).context(problem)
    };
    let answer = |answer: &String| {
        let mut tokens = encode(answer)?;
        tokens.push(end);
        Ok(tokens)
    };
    Ok(SimScript {
        opening: encode(opening)?,
        answers: answers.iter().map(answer).collect::<anyhow::Result<_>>()?,
    })
}
