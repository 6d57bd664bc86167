//! Continues the last message instead of answering it (`continue_final_message`): the prompt ends with the text of the
//! message, as in Hugging Face's transformers.

use server_openai::{Content, Message};

use crate::error::Error;
use crate::prepare::conversation::Conversation;

/// Marks the end of the text of the last message in the second rendering. No known template changes private-use
/// characters.
const END_OF_TEXT: &str = "\u{10fffd}\u{f8ff}\u{10fffd}";

/// Renders the prompt up to the end of the text of the last message. Whitespace at the ends of the text is removed if
/// the template removes it.
///
/// The text itself may also occur in the markers of the template, so a second rendering with a longer text determines
/// the part of the prompt that follows the text.
///
/// # Errors
/// The conversation cannot be rendered, the last message has no text, or the template changes that text.
pub(super) fn render(
    conversation: &Conversation,
    render: impl Fn(&Conversation) -> Result<String, Error>,
) -> Result<String, Error> {
    let prompt = render(conversation)?;
    let at = format!("{}[{}]", conversation.param, conversation.messages.len().saturating_sub(1));
    let invalid = |problem| Error::invalid("continue_final_message", format!("{at} {problem}"));
    let mut longer = conversation.clone();
    let last = longer.messages.last_mut().and_then(text).ok_or_else(|| invalid("has no text to continue"))?;
    let said = last.trim().to_owned();
    last.push_str(END_OF_TEXT);
    let longer = render(&longer)?;
    let continued = longer
        .rfind(END_OF_TEXT)
        .and_then(|end| prompt.strip_suffix(&longer[end + END_OF_TEXT.len()..]))
        .filter(|continued| continued.trim_end().ends_with(&said));
    continued
        .map(str::to_owned)
        .ok_or_else(|| invalid("cannot be continued: the chat template changes its text"))
}

/// Returns the last text of a message, unless it is only whitespace or a call follows it.
fn text(message: &mut Message) -> Option<&mut String> {
    let text = match message.content.as_mut()? {
        Content::Text(text) => text,
        Content::Parts(parts) => parts.last_mut()?.text.as_mut()?,
    };
    let calls = message.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
    (!calls && !text.trim().is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A template, as a function that renders the text of a message.
    type Template = fn(&str) -> String;

    /// Continues `message` with a template that renders the last text of a message.
    fn continued(template: Template, message: Value) -> Result<String, Error> {
        let messages = vec![serde_json::from_value(message).unwrap()];
        let conversation = Conversation { param: "messages", messages, ..Conversation::default() };
        render(&conversation, |conversation| {
            let mut last = conversation.messages.last().unwrap().clone();
            Ok(template(text(&mut last).map_or("", |text| text)))
        })
    }

    fn said(text: &str) -> Value {
        json!({"role": "assistant", "content": text})
    }

    #[test]
    fn the_prompt_ends_with_the_text_and_the_whitespace_of_the_template() {
        let verbatim = |text: &str| format!("<a>{text}<end>\n");
        let trimmed = |text: &str| format!("<a>{}<end>\n", text.trim());
        let trimmed_at_the_start = |text: &str| format!("<a>{}<end>\n", text.trim_start());
        let cases: [(Template, &str, &str); 7] = [
            (verbatim, "Once upon", "<a>Once upon"),
            (trimmed_at_the_start, " Once upon ", "<a>Once upon "),
            (verbatim, " Once upon ", "<a> Once upon "),
            (trimmed, "Once upon ", "<a>Once upon"),
            (|text| format!("<u>é<end><a>{text}<end>"), "é", "<u>é<end><a>é"),
            (|text| format!("<a> {text} <end>"), "a", "<a> a"),
            (|text| format!("<a>{text}<end>{text}<end>"), "a", "<a>a<end>a"),
        ];
        for (template, text, expected) in cases {
            assert_eq!(continued(template, said(text)).unwrap(), expected, "{text:?}");
        }
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let message = json!({"role": "user", "content": parts});
        assert_eq!(continued(|text| format!("a\n{text}<end>"), message).unwrap(), "a\nb");
    }

    #[test]
    fn a_text_may_be_a_part_of_the_marker_after_it() {
        for text in ["<", ">", "|", "end", "im", "<|im_end|>", "<|im_end|>\n<"] {
            let prompt = continued(|text| format!("<|im_start|>{text}<|im_end|>\n"), said(text)).unwrap();
            assert_eq!(prompt, format!("<|im_start|>{text}"));
        }
    }

    #[test]
    fn messages_that_cannot_be_continued_are_rejected() {
        let verbatim = |text: &str| format!("{text}<end>");
        let cases: [(Template, Value); 6] = [
            (verbatim, said(" ")),
            (verbatim, json!({"role": "assistant"})),
            (
                verbatim,
                json!({"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}),
            ),
            (|_| "x<end>".to_owned(), said("not there")),
            (|text| format!("{}<end>", text.to_uppercase()), said("changed")),
            (|text| format!("{text}<end {}>", text.len()), said("counted")),
        ];
        for (template, message) in cases {
            let error = continued(template, message).unwrap_err().to_string();
            assert!(error.starts_with("continue_final_message: messages[0] "), "{error}");
        }
    }
}
