//! Going on with the last message in place of answering it: its prompt ends where its text does, as Hugging Face's
//! templates are cut (`continue_final_message`).

use server_openai::{Content, Message};

use crate::error::Error;
use crate::prepare::conversation::Conversation;

/// The prompt up to the end of what the last message says.
///
/// # Errors
/// It says nothing, or the template does not show it.
pub(super) fn cut(mut prompt: String, conversation: &Conversation) -> Result<String, Error> {
    let at = format!("{}[{}]", conversation.param, conversation.messages.len().saturating_sub(1));
    let refused = |problem| Error::invalid("continue_final_message", format!("{at} {problem}"));
    let said =
        conversation.messages.last().and_then(text).ok_or_else(|| refused("has no text to go on with"))?;
    let begin = prompt.rfind(said.trim()).ok_or_else(|| refused("is not in the prompt as it was said"))?;
    // Some templates take spaces away at its ends, and some do not.
    let whole = said.trim_start();
    let length = if prompt[begin..].starts_with(whole) { whole.len() } else { said.trim().len() };
    prompt.truncate(begin + length);
    Ok(prompt)
}

/// What a message says last, if it is more than space and no call follows it.
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
    fn the_prompt_ends_where_the_text_does_with_the_space_that_the_template_left() {
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
    fn what_cannot_be_gone_on_with_is_refused() {
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
