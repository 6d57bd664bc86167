//! Checks that an arbitrary template with an arbitrary conversation is either rendered or rejected, within the limits,
//! and with the same result each time. `main.rs` runs this check for seconds, and `make fuzz` runs it for a
//! configurable time.

use std::time::UNIX_EPOCH;

use serde_json::{Map, Value, json};
use server_text::{ChatTemplate, RenderError, RenderInput, template_limits};

/// Separates the parts of an input: the template, and the messages, tools and variables as JSON, each of which is
/// optional.
pub(crate) const SEPARATOR: char = '\u{1e}';

/// Renders one input twice, and panics if a guarantee is violated.
pub(crate) fn check(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let mut parts = text.split(SEPARATOR);
    let Ok(template) = ChatTemplate::parse(parts.next().unwrap_or_default()) else { return };
    let mut list = || parts.next().and_then(|part| serde_json::from_str::<Vec<Value>>(part).ok());
    let messages = list().unwrap_or_else(conversation);
    let tools = list();
    let variables = parts.next().and_then(|part| serde_json::from_str::<Map<String, Value>>(part).ok());
    let input = RenderInput {
        messages: &messages,
        tools: tools.as_deref(),
        add_generation_prompt: true,
        extra: variables.as_ref(),
        now: Some(UNIX_EPOCH),
        ..RenderInput::default()
    };
    let rendered = template.render(&input);
    match &rendered {
        Ok(text) => assert!(text.len() <= template_limits::OUTPUT_BYTES_MAX),
        // The message of an exception that the template itself raises may be empty.
        Err(error) => assert!(matches!(error, RenderError::Refused(_)) || !error.to_string().is_empty()),
    }
    let with_message = |rendered: Result<String, RenderError>| rendered.map_err(|error| error.to_string());
    assert_eq!(with_message(template.render(&input)), with_message(rendered), "the second rendering differs");
    template.features();
}

/// Returns a conversation with features that many templates use, such as calls, reasoning and content in parts.
fn conversation() -> Vec<Value> {
    let call = json!({"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "x"]}}});
    vec![
        json!({"role": "system", "content": "s"}),
        json!({"role": "user", "content": [{"type": "text", "text": "q"}]}),
        json!({"role": "assistant", "content": null, "reasoning_content": "t", "tool_calls": [call]}),
        json!({"role": "tool", "tool_call_id": "abcdefghi", "content": "{\"r\": 1.5}"}),
        json!({"role": "assistant", "content": "<think>t</think>é"}),
        json!({"role": "user", "content": "q"}),
    ]
}
