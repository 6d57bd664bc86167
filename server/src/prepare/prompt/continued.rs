//! Continues the last message instead of answering it (`continue_final_message`): the prompt ends with the text of the
//! message, as in Hugging Face's transformers.

use server_openai::{Content, Message};

use crate::error::Error;
use crate::prepare::conversation::Conversation;

/// Returns the prompt up to the end of the text of the last message.
///
/// # Errors
/// The message has no text, or the template changes it.
pub(super) fn cut(mut prompt: String, conversation: &Conversation) -> Result<String, Error> {
    let at = format!("{}[{}]", conversation.param, conversation.messages.len().saturating_sub(1));
    let invalid = |problem| Error::invalid("continue_final_message", format!("{at} {problem}"));
    let last =
        conversation.messages.last().and_then(text).ok_or_else(|| invalid("has no text to continue"))?;
    let begin = prompt.rfind(last.trim()).ok_or_else(|| invalid("is changed by the chat template"))?;
    // Some templates remove whitespace at the ends of the text, and some do not.
    let untrimmed = last.trim_start();
    let length = if prompt[begin..].starts_with(untrimmed) { untrimmed.len() } else { last.trim().len() };
    prompt.truncate(begin + length);
    Ok(prompt)
}

/// Returns the last text of a message, unless it is only whitespace or a call follows it.
fn text(message: &Message) -> Option<&str> {
    let text = match message.content.as_ref()? {
        Content::Text(text) => text,
        Content::Parts(parts) => parts.last()?.text.as_ref()?,
    };
    let calls = message.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
    (!calls && !text.trim().is_empty()).then_some(text.as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn cut_after(prompt: &str, message: Value) -> Result<String, Error> {
        let messages = vec![serde_json::from_value(message).unwrap()];
        cut(prompt.to_owned(), &Conversation { param: "messages", messages, ..Conversation::default() })
    }

    #[test]
    fn the_prompt_ends_with_the_text_and_the_whitespace_of_the_template() {
        let said = |text: &str| json!({"role": "assistant", "content": text});
        for (prompt, text, cut) in [
            ("<a>Once upon<end>\n", "Once upon", "<a>Once upon"),
            ("<a>Once upon <end>\n", " Once upon ", "<a>Once upon "),
            ("<a> Once upon <end>\n", " Once upon ", "<a> Once upon "),
            ("<a>Once upon<end>\n", "Once upon ", "<a>Once upon"),
            ("<u>é<end><a>é<end>", "é", "<u>é<end><a>é"),
        ] {
            assert_eq!(cut_after(prompt, said(text)).unwrap(), cut, "{text:?} in {prompt:?}");
        }
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        assert_eq!(cut_after("a\nb<end>", json!({"role": "user", "content": parts})).unwrap(), "a\nb");
    }

    #[test]
    fn messages_that_cannot_be_continued_are_rejected() {
        for message in [
            json!({"role": "assistant", "content": " "}),
            json!({"role": "assistant"}),
            json!({"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}),
            json!({"role": "assistant", "content": "not there"}),
        ] {
            let error = cut_after("x<end>", message).unwrap_err().to_string();
            assert!(error.starts_with("continue_final_message: messages[0] "), "{error}");
        }
    }
}
