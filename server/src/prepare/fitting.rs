//! Finds the longest suffix of a conversation that fits into the context length. The search makes few attempts, because
//! each attempt renders and tokenizes a conversation.

use std::borrow::Cow;

use server_openai::{Content, Message};

use super::encode::{Encoder, SpecialTokens};
use super::images;
use super::media::Media;
use crate::model::Model;

/// Guesses the index of the first of `cuts` that leaves at most `tokens_max` tokens. A cut is the index of a message at
/// which the shortened conversation may begin. For the guess, the messages are tokenized as JSON, starting with the
/// last one, until they exceed the limit.
pub(super) fn guess_cut(
    messages: &[Message],
    cuts: &[usize],
    model: &Model,
    media: &Media,
    tokens_max: u32,
) -> usize {
    let encoder = Encoder { model, param: "input", tokens_max: Some(tokens_max), image_tokens: 0 };
    let mut tokens = 0;
    for (at, message) in messages.iter().enumerate().rev() {
        let images = model.images.as_ref().map_or(0, |reader| images::num_tokens_of(message, reader, media));
        let text = serde_json::to_string(&without_images(message)).unwrap_or_default();
        let Ok(more) = encoder.text(&text, SpecialTokens::Absent) else { return after(cuts, at) };
        tokens += images + more.len();
        if tokens > tokens_max as usize {
            return after(cuts, at);
        }
    }
    0
}

/// Returns the message without its images, because the tokenizer does not receive their URLs.
fn without_images(message: &Message) -> Cow<'_, Message> {
    let Some(Content::Parts(parts)) = &message.content else { return Cow::Borrowed(message) };
    if !parts.iter().any(images::is_image) {
        return Cow::Borrowed(message);
    }
    let parts = parts.iter().filter(|part| !images::is_image(part)).cloned().collect();
    Cow::Owned(Message { content: Some(Content::Parts(parts)), ..message.clone() })
}

/// Returns the index of the first of `cuts` that excludes the message at `at`.
fn after(cuts: &[usize], at: usize) -> usize {
    cuts.partition_point(|&cut| cut <= at)
}

/// Returns the first of `count` candidates that fits, with the result of its attempt. If a candidate fits, all later
/// ones must fit too. The search begins at `guess`. It needs at most two attempts if the guess is right, and otherwise
/// about twice the binary logarithm of the distance between the guess and the result.
///
/// # Errors
/// An attempt failed.
pub(super) fn first_fitting<T, E>(
    count: usize,
    guess: usize,
    mut attempt: impl FnMut(usize) -> Result<Option<T>, E>,
) -> Result<Option<(usize, T)>, E> {
    // The candidates before `low` do not fit, and those at or after `high` fit.
    let (mut low, mut high) = (0, count);
    let (mut found, mut has_failed, mut step) = (None, false, 1);
    let mut at = guess;
    while low < high {
        at = at.clamp(low, high - 1);
        match attempt(at)? {
            Some(fitting) => {
                found = Some((at, fitting));
                high = at;
                at = if has_failed { low + (high - low) / 2 } else { at.saturating_sub(step) };
            }
            None => {
                has_failed = true;
                low = at + 1;
                at = if found.is_some() { low + (high - low) / 2 } else { at + step };
            }
        }
        step *= 2;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the candidate that the search finds, and the number of attempts.
    fn search(count: usize, guess: usize, first: usize) -> (Option<usize>, usize) {
        let mut attempts = 0;
        let found = first_fitting(count, guess, |at| {
            attempts += 1;
            assert!(at < count);
            Ok::<_, ()>((at >= first).then_some(at))
        });
        let found = found.unwrap().map(|(at, fitting)| {
            assert_eq!(at, fitting);
            at
        });
        (found, attempts)
    }

    #[test]
    fn the_first_candidate_that_fits_is_found_from_every_guess() {
        for count in 0..20 {
            for first in 0..=count {
                for guess in 0..count + 2 {
                    let (found, attempts) = search(count, guess, first);
                    assert_eq!(found, (first < count).then_some(first), "{count} {guess} {first}");
                    let distance = guess.abs_diff(first).max(1);
                    let most = 2 + 2 * (distance.ilog2() as usize + 1);
                    assert!(attempts <= most, "{count} {guess} {first}: {attempts} attempts");
                }
            }
        }
        assert_eq!(search(4096, 2000, 2000), (Some(2000), 2));
        assert_eq!(search(4096, 1999, 2000), (Some(2000), 2));
    }

    #[test]
    fn the_guess_leaves_the_messages_that_fit() {
        let model = Model::new(vec!["m".to_owned()], crate::backend::built_in_text().unwrap(), "test");
        let message = |at: usize| {
            let content = json!({"role": "user", "content": "x".repeat(at % 7 * 20)});
            serde_json::from_value::<Message>(content).unwrap()
        };
        let messages: Vec<Message> = (0..100).map(message).collect();
        let cuts: Vec<usize> = (1..100).collect();
        // In this vocabulary, each byte is a token.
        let tokens = |from: usize| -> usize {
            messages[from..].iter().map(|message| serde_json::to_string(message).unwrap().len()).sum()
        };
        for tokens_max in [0, 50, 1000, 3000] {
            let guess = guess_cut(&messages, &cuts, &model, &Media::default(), tokens_max);
            let fits = |guess: usize| cuts.get(guess).is_none_or(|&cut| tokens(cut) <= tokens_max as usize);
            assert!(fits(guess) && !fits(guess - 1), "{tokens_max}: {guess}");
        }
        assert_eq!(guess_cut(&messages, &cuts, &model, &Media::default(), 1 << 20), 0);
    }

    #[test]
    fn a_failure_ends_the_search() {
        let failed = first_fitting(9, 4, |at| if at == 4 { Err("broken") } else { Ok(Some(at)) });
        assert_eq!(failed, Err("broken"));
    }
}
